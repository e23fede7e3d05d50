"""Locks: a second process is refused and told who holds the lock; the end of the holder releases it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from helpers import ROOT, environment
from helpers.errors import error_naming

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.locks import LOCK, lock_file, lock_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks are flock's")
HOLDER = """
import os, sys, time
from pathlib import Path
from lightrlhf.storage.locks import lock_folder
lock = lock_folder(Path(sys.argv[1]))
if not os.fork():
    print(os.getpid(), flush=True)  # a child that runs has let go of the lock
time.sleep(60)
"""


def test_a_second_process_is_refused_by_name_until_the_first_dies_even_if_its_child_lives(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    child = int(holder.stdout.readline())
    try:
        said = f"is being written by process {holder.pid} on {socket.gethostname()} since .*; wait for it or end it"
        with pytest.raises(UsageError, match=said):
            lock_folder(tmp_path)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    lock_folder(tmp_path).release()
    os.kill(child, 9)
    assert not list(tmp_path.iterdir())


def test_a_file_is_locked_once_and_a_folder_as_often_as_the_process_likes(tmp_path):
    lock = lock_file(tmp_path / "rows.jsonl")
    with pytest.raises(UsageError, match=f"process {os.getpid()}"):
        lock_file(tmp_path / "rows.jsonl")
    lock.release()
    outer, inner = lock_folder(tmp_path / "run"), lock_folder(tmp_path / "run")
    inner.release()
    assert (tmp_path / "run" / LOCK).exists()
    outer.release()
    assert not (tmp_path / "run").exists()  # it was made for the lock alone


@pytest.mark.parametrize("kind", ["link", "link to nothing", "second name", "pipe"])
def test_what_somebody_planted_is_neither_followed_nor_emptied(kind, tmp_path):
    theirs, folder = tmp_path / "theirs.txt", tmp_path / "shared"
    folder.mkdir()
    for path, take in (
        (folder / LOCK, lambda: lock_folder(folder)),
        (folder / ".a.lock", lambda: lock_file(folder / "a")),
    ):
        if kind != "link to nothing":
            theirs.write_text("theirs")
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "second name":
            os.link(theirs, path)
        else:
            path.symlink_to(theirs)
        with error_naming(UsageError, str(path), "remove it"):
            take()
        assert theirs.read_text() == "theirs" if kind != "link to nothing" else not theirs.exists()
        assert os.path.lexists(path)


def test_a_stale_lock_file_locks_nothing(tmp_path):
    (tmp_path / LOCK).write_text("process 1 on elsewhere since 2020-01-01 00:00:00")
    lock_folder(tmp_path).release()
    assert not list(tmp_path.iterdir())
