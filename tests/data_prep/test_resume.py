"""A preparation that is killed goes on, and gives what one that was not killed gives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from helpers import ROOT, environment
from helpers.data import chatml_like, write_lines

from datasets_prep import common, spool, stream
from datasets_prep.generic import prepare_data
from datasets_prep.spool import FOLDER
from lightrlhf.cli.errors import RunFailure
from lightrlhf.storage.seals import read_manifest

KILLED = """
import os, signal, sys
from datasets_prep import spool, stream
from datasets_prep.generic.prepare_data import main
left = int(sys.argv[1])
spool.SECONDS, stream.CHUNK = 0, 16
def dies(function):
    def replaced(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return replaced
spool.Spool.append, spool.Spool.note = dies(spool.Spool.append), dies(spool.Spool.note)
spool.Encoded.part = dies(spool.Encoded.part)
main(sys.argv[2:])
"""


def rows() -> list[dict]:
    said = [
        {"messages": [{"role": role, "content": f"{role} says {n % 70}"} for role in ("user", "assistant")], "n": n}
        for n in range(100)
    ]
    return [*said, {"messages": []}, {"prompt": "p", "completion": None}]


@pytest.fixture
def flags(tmp_path):
    chatml_like().save_pretrained(tmp_path / "tokenizer")
    write_lines(tmp_path / "raw.jsonl", rows())
    given = {"dataset_name": tmp_path / "raw.jsonl", "tokenizer_name": tmp_path / "tokenizer", "num_proc": 1}
    given |= {"save_skipped_examples": True, "remove_same_inputs": True}
    return [f"--{name}={value}" for name, value in given.items()]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(stream, "CHUNK", 16)
    monkeypatch.setattr(spool, "SECONDS", 0)


def prepared(folder) -> dict:
    """Hashes of the files and what the report says, but for the destination's name."""
    report = json.loads((folder / "report.json").read_text())
    report["arguments"].pop("destination_dir")
    hashes = read_manifest(folder)
    return {name: hashes[name] for name in hashes if name.endswith((".pt", ".jsonl", ".md"))} | {"report": report}


def test_a_killed_preparation_goes_on(tmp_path, flags, small_chunks, capsys):
    prepare_data.main([*flags, f"--destination_dir={tmp_path / 'whole'}"])
    whole = prepared(tmp_path / "whole")
    assert "goes on" not in capsys.readouterr().out and not (tmp_path / "whole" / FOLDER).exists()
    killed = [f"--destination_dir={tmp_path / 'killed'}"]
    for left in (1, 4, 13, 5):  # while rows are encoded, and while files are written
        command = [sys.executable, "-c", KILLED, str(left), *flags, *killed]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not list((tmp_path / "killed").glob("[!.]*"))
    prepare_data.main([*flags, *killed])
    assert "after the 102 rows" in capsys.readouterr().out
    assert prepared(tmp_path / "killed") == whole and not (tmp_path / "killed" / FOLDER).exists()


@pytest.mark.parametrize("changed", ["flag", "source"])
def test_of_something_else_it_begins_anew(tmp_path, flags, small_chunks, monkeypatch, capsys, changed):
    into = f"--destination_dir={tmp_path / 'data'}"

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(common, "check_kept", interrupted)
        prepare_data.main.__wrapped__([*flags, into])
    if changed == "source":
        write_lines(tmp_path / "raw.jsonl", rows()[:60])
    prepare_data.main.__wrapped__([*flags, into, *(["--max_length=900"] if changed == "flag" else [])])
    assert "begins anew" in capsys.readouterr().out
    prepare_data.main.__wrapped__(
        [*flags, f"--destination_dir={tmp_path / 'other'}", *(["--max_length=900"] if changed == "flag" else [])]
    )
    assert prepared(tmp_path / "data") == prepared(tmp_path / "other")


def test_an_error_leaves_no_work_in_progress(tmp_path, flags, monkeypatch):
    def fails(*args):
        raise RunFailure("no")

    monkeypatch.setattr(common, "check_kept", fails)
    with pytest.raises(RunFailure):
        prepare_data.main.__wrapped__([*flags, f"--destination_dir={tmp_path / 'data'}"])
    assert not (tmp_path / "data").exists()


def test_a_spool_whose_last_note_is_torn_goes_on_from_the_one_before(tmp_path):
    about, nothing = {"of": 1}, spool.pack([], [])
    first = spool.Spool(tmp_path / FOLDER, about)
    for _ in range(2):
        first.append(nothing, 5)
        first.note()
    first.close()
    journal = tmp_path / FOLDER / "journal.jsonl"
    journal.write_text(journal.read_text()[:-9])
    again = spool.Spool(tmp_path / FOLDER, about)
    assert again.rows == 5
    again.remove()
    assert not (tmp_path / FOLDER).exists()


def test_a_full_disk_leaves_no_work_in_progress(tmp_path, flags, monkeypatch):
    def full(self):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool.Spool, "note", full)
    monkeypatch.setattr(spool.Spool, "close", full)
    with pytest.raises(RunFailure, match="--destination_dir"):
        prepare_data.main.__wrapped__([*flags, f"--destination_dir={tmp_path / 'data'}"])
    assert not (tmp_path / "data").exists()
