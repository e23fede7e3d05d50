"""Temporary names: what killed processes left is removed, and nothing else, whatever its name."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.errors import error_naming

from lightrlhf.storage.seals import write_folder
from lightrlhf.storage.temporary import create, host, is_temporary, new_mark, remove_left, temporary_path
from lightrlhf.storage.writing import write_text

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing tells there whether a process lives")


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_a_killed_process_left_goes_with_the_next_write_of_the_same_name(tmp_path, dead):
    (tmp_path / f".args.json.{host()}-{dead}-0123abcd.partial").write_text("half")
    folder = tmp_path / f".args.json.{host()}-{dead}-0123abce.partial"
    folder.mkdir()
    (folder / "weights").write_text("half")
    (tmp_path / f".other.json.{host()}-{dead}-0123abcd.partial").write_text("half")
    write_text(tmp_path / "args.json", "whole")
    assert names(tmp_path) == {"args.json", f".other.json.{host()}-{dead}-0123abcd.partial"}


def test_files_of_others_stay(tmp_path, dead):
    """Of users, of this process, of one that lives, and of other machines, one of whose names begins as this one's."""
    kept = {"args.json.partial", ".args.json.partial", ".args.json.mine.partial", f".args.json.{host()}.partial"}
    kept |= {f".args.json.{host()}-{os.getppid()}-0123abcd.partial", f".args.json.{new_mark()}.partial"}
    kept |= {f".args.json.{host()}-2-{dead}-0123abcd.partial", f".args.json.x{host()}-{dead}-0123abcd.partial"}
    for name in kept:
        (tmp_path / name).write_text("mine")
    write_text(tmp_path / "args.json", "whole")
    remove_left(tmp_path)
    assert names(tmp_path) == kept | {"args.json"}
    remove_left(tmp_path, "args.json", of_any_host=True)  # the caller holds a lock
    assert len(kept - names(tmp_path)) == 2 and all(f"-{dead}-" in name for name in kept - names(tmp_path))


def test_what_another_user_left_stays(tmp_path, dead, monkeypatch):
    left = tmp_path / f".args.json.{host()}-{dead}-0123abcd.partial"
    left.write_text("half")
    monkeypatch.setattr("os.getuid", lambda: left.stat().st_uid + 1)
    remove_left(tmp_path)
    assert left.exists()


def test_a_name_is_new_each_time_and_short_enough_for_any_file(tmp_path):
    for name in ("rows.jsonl", "名" * 85):  # 255 bytes, the longest that there is
        one, other = temporary_path(tmp_path / name), temporary_path(tmp_path / name)
        assert one != other and len(os.fsencode(one.name)) <= 255 and is_temporary(one.name)
        write_text(tmp_path / name, "text")
    assert names(tmp_path) == {"rows.jsonl", "名" * 85}


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    """Even if somebody could foresee the token."""
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    monkeypatch.setattr("secrets.token_hex", lambda _: "0123abcd")
    temporary_path(tmp_path / "args.json").symlink_to(theirs)
    with pytest.raises(FileExistsError):
        create(temporary_path(tmp_path / "args.json"))
    with error_naming(Exception, os.strerror(errno.EEXIST)):
        write_text(tmp_path / "args.json", "mine")
    assert theirs.read_text() == "theirs"


def test_a_link_that_was_left_is_removed_and_not_what_it_leads_to(tmp_path, dead):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("theirs")
    (tmp_path / f".best.{host()}-{dead}-0123abcd.partial").symlink_to("theirs")
    remove_left(tmp_path)
    assert names(tmp_path) == {"theirs"} and (tmp_path / "theirs" / "notes.txt").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_appears_at_the_place_of_a_new_folder_stays(kind, tmp_path):
    target = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()

    def write(folder: Path) -> None:
        (folder / "weights").write_text("w")
        if kind == "folder":
            target.mkdir()
            (target / "notes.txt").write_text("mine")
        elif kind == "file":
            target.write_text("mine")
        else:
            target.symlink_to("elsewhere")

    with error_naming(Exception, target):
        write_folder(target, write)
    mine = target / "notes.txt" if kind == "folder" else target
    assert target.is_symlink() if kind == "link" else mine.read_text() == "mine"
    assert names(tmp_path) == {"out", "elsewhere"}
