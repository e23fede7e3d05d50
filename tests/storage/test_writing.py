"""A disk that cannot be written is one line, whichever package meets it, and leaves nothing half written."""

import errno
import os
import resource
import signal
import sys

import pytest
import torch
from helpers.errors import error_naming
from safetensors.torch import save_file

from lightrlhf.cli.errors import RunFailure, one_line_errors, write_problem
from lightrlhf.storage.checkpoint import save_checkpoint
from lightrlhf.storage.jsonl import JsonlWriter, append_jsonl, read_jsonl, write_jsonl
from lightrlhf.storage.results import new_figure, save_figure
from lightrlhf.storage.writing import make_folder, save_tensors, writing

TENSORS = {"weights": torch.zeros(4000)}


@pytest.fixture
def small_files():
    """Files of more than 4000 bytes are refused, in Python, Rust and C++ alike."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def picture(path):
    figure, axes = new_figure(4, 3)
    axes[0].plot([1, 2])
    save_figure(figure, path)


WRITERS = {
    "safetensors": lambda path: save_checkpoint(path, 1, lambda folder: save_file(TENSORS, folder / "a.safetensors")),
    "torch": lambda path: save_checkpoint(path, 1, lambda folder: torch.save(TENSORS, folder / "a.pt")),
    "tensors": lambda path: save_tensors(path / "a.pt", TENSORS),
    "rows": lambda path: write_jsonl(path / "a.jsonl", [{"a": "b" * 5000}]),
    "appended rows": lambda path: append_jsonl(path / "a.jsonl", [{"a": "b" * 5000}]),
    "a picture": lambda path: picture(path / "a.png"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_write_that_is_cut_short_is_one_line_and_leaves_no_part(name, tmp_path, small_files):
    with pytest.raises(RunFailure) as raised:
        WRITERS[name](tmp_path)
    line = str(raised.value)
    reason = (
        "torch could not write the file"
        if name == "torch"
        else "File too large; raise the limit on file sizes (ulimit -f)"
    )
    assert str(tmp_path) in line and f"cannot be written: {reason}" in line and "\n" not in line
    assert [path for path in tmp_path.iterdir() if path.stat().st_size] == []


def test_rows_before_one_that_does_not_fit_stay_and_the_file_stays_whole(tmp_path, small_files):
    with JsonlWriter(tmp_path / "rows.jsonl", {"a": 1}) as writer:
        writer.append({"n": 1})
        with error_naming(RunFailure, "rows.jsonl", "File too large", "earlier rows are kept"):
            writer.append({"n": 2}, {"n": "3" * 5000})
    assert read_jsonl(tmp_path / "rows.jsonl") == [{"n": 1}]


class SafetensorError(Exception):
    pass


@pytest.mark.parametrize(
    "problem, reason",
    [
        (OSError(errno.ENOSPC, "full"), "No space left on device; free space there"),
        (OSError(errno.EROFS, ""), "Read-only file system; mount it for writing or name another place"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "No space left on device; free space"),
        (Exception("Disk quota exceeded (os error 122)"), "Disk quota exceeded; free space there or raise the quota"),
        (OSError("[errno 5] Error writing bytes to file"), "Input/output error; check the disk"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
            "torch could not write the file",
        ),
        (
            RuntimeError("PytorchStreamWriter failed writing file data/2: file write failed"),
            "torch could not write the file",
        ),
        (RuntimeError("size mismatch"), None),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), None),
        (ValueError("28"), None),
    ],
)
def test_every_shape_of_a_failed_write_is_known_and_no_other_error_is_taken_for_one(problem, reason):
    found = write_problem(problem)
    assert (found or "").startswith(reason or "") and (found is None) == (reason is None)
    try:
        try:
            raise problem
        except Exception as inner:
            raise ValueError("you tried to log 1.0") from inner  # as Lightning's logger does
    except ValueError as outer:
        assert write_problem(outer) == found
    try:
        try:
            raise problem
        except Exception:
            raise ValueError("hidden") from None
    except ValueError as outer:
        assert write_problem(outer) is None


def test_a_program_ends_with_one_line_where_no_caller_knew_the_write(capsys):
    @one_line_errors
    def main(argv=None):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/data/x")

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: /data/x: Disk quota exceeded; free space there") and said.count("\n") == 1

    @one_line_errors
    def other(argv=None):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        other()


def test_what_is_kept_is_said_once_by_the_outer_write():
    with error_naming(RunFailure, "run", "Input/output error", "the rest is kept"):
        with writing("log", kept=lambda: "the rest is kept"), writing("run"):
            raise OSError(errno.EIO, "")


@pytest.mark.skipif(sys.platform == "win32", reason="has no handles of folders")
def test_the_entry_of_each_new_folder_and_file_is_flushed(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (flushed.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    make_folder(tmp_path / "a" / "b")
    assert flushed == [str(tmp_path / "a"), str(tmp_path)]
    flushed.clear()
    JsonlWriter(tmp_path / "a" / "rows.jsonl", {}).close()
    assert flushed.count(str(tmp_path / "a")) >= 2  # the rows and their settings
    flushed.clear()
    append_jsonl(tmp_path / "metrics.jsonl", [{}])
    append_jsonl(tmp_path / "metrics.jsonl", [{}])
    assert flushed == [str(tmp_path)]
    flushed.clear()
    save_checkpoint(tmp_path, 1, lambda folder: (folder / "w").write_bytes(b"w"), best=1)
    assert flushed[-2:] == [str(tmp_path), str(tmp_path)]  # the checkpoint's entry and `best`
