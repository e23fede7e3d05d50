"""Checkpoints are atomic, and later damage is detected."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, environment, unmarked
from helpers.errors import error_naming

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.storage import checkpoint, seals
from lightrlhf.storage.checkpoint import checkpoints, newest_checkpoint, save_checkpoint, verify_checkpoint
from lightrlhf.storage.run_dir import choices, experiment_of, iterations
from lightrlhf.storage.writing import write_text


def write(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"w" * 1000)
    (folder / "resume.pt").write_bytes(b"r" * 10)


def test_a_checkpoint_holds_the_written_files_and_a_manifest(tmp_path):
    saved = save_checkpoint(tmp_path, 7, write)
    assert saved == tmp_path / "checkpoint-000007"
    assert json.loads((saved / "manifest.json").read_text()).keys() == {"model/weights", "resume.pt"}
    verify_checkpoint(saved)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000007"]


@pytest.mark.parametrize("damage", ["change", "cut", "remove", "no manifest", "bad manifest"])
def test_every_damage_is_detected_and_the_previous_checkpoint_is_offered(tmp_path, damage):
    save_checkpoint(tmp_path, 1, write)
    saved = save_checkpoint(tmp_path, 2, write)
    weights = saved / "model" / "weights"
    if damage == "change":
        weights.write_bytes(b"w" * 999 + b"x")
    elif damage == "cut":
        weights.write_bytes(b"w" * 999)
    elif damage == "remove":
        weights.unlink()
    elif damage == "no manifest":
        (saved / "manifest.json").unlink()
    else:
        (saved / "manifest.json").write_text("{")
    with error_naming(UsageError, "checkpoint-000002", "damaged", "checkpoint-000001"):
        verify_checkpoint(saved)
    with error_naming(UsageError, "damaged"):
        newest_checkpoint(tmp_path, "--resume_from")


def test_a_failed_write_leaves_the_last_good_checkpoint_and_no_partial_one(tmp_path):
    good = save_checkpoint(tmp_path, 1, write)

    def fails(folder: Path) -> None:
        write(folder)
        raise OSError(28, "No space left on device")

    with error_naming(RunFailure, "No space left", "checkpoint-000001"):
        save_checkpoint(tmp_path, 2, fails)
    assert list(tmp_path.iterdir()) == [good]
    verify_checkpoint(good)


def test_a_failed_first_write_leaves_nothing(tmp_path):
    def fails(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with error_naming(RunFailure, os.strerror(13)):
        save_checkpoint(tmp_path, 1, fails)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_before_its_first_file_is_reported(tmp_path):
    with error_naming(RunFailure, "no earlier checkpoint"):
        save_checkpoint(tmp_path / "missing", 1, lambda folder: None)


def test_a_failed_fsync_is_reported(tmp_path, monkeypatch):
    def fsync(handle):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with error_naming(RunFailure, os.strerror(5)):
        save_checkpoint(tmp_path, 1, write)
    assert not list(tmp_path.iterdir())


def test_everything_is_synced_before_the_rename(tmp_path, monkeypatch):
    synced, renamed = [], []
    fsync, rename = os.fsync, Path.rename

    def note_rename(self, target):
        renamed.append(len(synced))
        return rename(self, target)

    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    monkeypatch.setattr(Path, "rename", note_rename)
    save_checkpoint(tmp_path, 1, write)
    before = {unmarked(Path(name).name).removesuffix(".partial").removeprefix(".") for name in synced[: renamed[-1]]}
    assert before == {"manifest.json", "resume.pt", "weights", "model", "checkpoint-000001"}  # folders' entries, too
    assert synced[-1] == str(tmp_path)  # the rename itself


KILLED = """
import os, signal, sys
from pathlib import Path
from lightrlhf.storage.checkpoint import save_checkpoint
def write(folder):
    (folder / "weights").write_bytes(b"1" * 100)
    if sys.argv[2] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
save_checkpoint(Path(sys.argv[1]), int(sys.argv[2]), write)
"""


def test_a_kill_while_saving_leaves_no_checkpoint_of_that_step_and_the_next_save_cleans_up(tmp_path):
    for step, status in (("1", 0), ("2", -signal.SIGKILL)):
        command = [sys.executable, "-c", KILLED, str(tmp_path), step]
        assert subprocess.run(command, cwd=ROOT, env=environment()).returncode == status
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000001"]
    assert ".checkpoint-000002.partial" in {unmarked(path.name) for path in tmp_path.iterdir()}
    verify_checkpoint(newest_checkpoint(tmp_path, "--resume_from"))
    save_checkpoint(tmp_path, 3, write)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000001", "checkpoint-000003"]


def test_keep_last_deletes_older_checkpoints_and_zero_keeps_all(tmp_path):
    for step in range(1, 6):
        save_checkpoint(tmp_path, step, write, keep_last=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000004", "checkpoint-000005"]
    for step in range(6, 9):
        save_checkpoint(tmp_path, step, write, keep_last=0)
    assert len(checkpoints(tmp_path)) == 5


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save_checkpoint(tmp_path, 1, write)
    (tmp_path / "checkpoint-000001" / "resume.pt").write_bytes(b"damaged")
    verify_checkpoint(save_checkpoint(tmp_path, 1, write))


def test_checkpoints_are_in_order_of_their_steps_also_beyond_six_digits(tmp_path):
    for step in (20, 3, 1_500_000, 999_999):
        save_checkpoint(tmp_path, step, write)
    steps = [int(path.name.partition("-")[2]) for path in checkpoints(tmp_path)]
    assert steps == [3, 20, 999_999, 1_500_000]
    assert checkpoint.final_checkpoint(tmp_path) == tmp_path / "checkpoint-1500000"


COPIES = ("000002-backup", "000009 (copy)", "000009_old", "000009.bak", "best", "", "-9", "９")


@pytest.fixture
def copied(tmp_path) -> Path:
    """Two checkpoints of a run, and copies of the first one under other names."""
    (tmp_path / "args.json").write_text("{}")
    for step in (1, 2):
        save_checkpoint(tmp_path, step, write)
    for name in COPIES:
        shutil.copytree(tmp_path / "checkpoint-000001", tmp_path / f"checkpoint-{name}")
    return tmp_path


def test_a_copy_of_a_checkpoint_is_no_checkpoint_and_is_never_removed(copied):
    assert newest_checkpoint(copied, "--resume_from").name == "checkpoint-000002"
    assert list(choices([str(copied)])) == [f"{copied.name} step 1", f"{copied.name} step 2"]
    save_checkpoint(copied, 3, write, keep_last=1)
    assert [path.name for path in checkpoints(copied)] == ["checkpoint-000003"]
    assert all((copied / f"checkpoint-{name}" / "resume.pt").is_file() for name in COPIES)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_user_calls_best_is_kept_under_another_name(kind, tmp_path, capsys):
    best = tmp_path / "best"
    best.touch() if kind == "file" else best.mkdir()
    save_checkpoint(tmp_path, 2, write, best=2)
    assert best.is_symlink() and (tmp_path / "copied-best").exists()
    assert "copied-best" in capsys.readouterr().out


def test_a_copy_that_is_named_is_a_model_of_its_own(copied):
    copy = copied / f"checkpoint-{COPIES[0]}"
    assert experiment_of(str(copy)) == copy and experiment_of(str(copied / "checkpoint-000002")) == copied
    verify_checkpoint(copy)
    (copy / "notes.txt").touch()
    with error_naming(UsageError, "notes.txt", "no earlier checkpoint"):
        verify_checkpoint(copy)


def test_small_files_are_written_atomically(tmp_path, monkeypatch):
    write_text(tmp_path / "a.json", "first")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "full")))
    with error_naming(RunFailure, "a.json", "No space left"):
        write_text(tmp_path / "a.json", "second")
    assert (tmp_path / "a.json").read_text() == "first" and len(list(tmp_path.iterdir())) == 1
    assert seals.MANIFEST == "manifest.json"


def test_iterations_are_in_order_of_their_numbers_and_copies_of_them_are_none(tmp_path):
    for name in ("100", "02", "99", "02-backup", "02 (copy)", ""):
        (tmp_path / f"iteration-{name}").mkdir()
    assert list(iterations(tmp_path)) == [2, 99, 100]
    assert iterations(tmp_path)[2] == tmp_path / "iteration-02"


def test_an_interrupted_save_leaves_nothing(tmp_path):
    def interrupted(folder):
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, interrupted)
    assert not list(tmp_path.iterdir())
