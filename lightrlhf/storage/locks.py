"""Locks: one writing process at a time in a run directory, a folder of prepared data or a file of rows.

A lock is the operating system's (flock) on a small file that says who holds it, so it ends with the process, however
that ends; a file that a killed process left locks nothing. Readers never lock. Of a run's ranks only the first locks,
processes that are forked or started below a holder do not inherit it, and within one process a folder may be locked
again, as a notebook does that resumes its run.

Left out: file systems without flock (some network ones: a note says so, and the run goes on), Windows, and fairness.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.writing import make_folder, writing

LOCK = ".lock"
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_every: weakref.WeakSet[Lock] = weakref.WeakSet()
_folders: weakref.WeakValueDictionary[str, Lock] = weakref.WeakValueDictionary()


def lock_folder(folder: Path, flag: str = "", wait: bool = False) -> Lock:
    """Lock a folder, which is created if it is missing, and removed at the release if it is empty then.

    flag: named in errors; wait: wait for another holder instead of refusing. In a process that has locked the folder,
    the same lock again.
    Raises: UsageError when another process holds it, or the folder cannot be written.
    """
    place, what = os.path.realpath(folder), f"{flag} {folder}".strip()
    held = _folders.get(place)
    if held is not None and held.is_held:
        held.times += 1
    else:
        with writing(what, error=UsageError):
            is_new = not folder.exists()
            make_folder(folder)
        held = _folders[place] = Lock(Path(place) / LOCK, what, wait, is_new)
    return held


def lock_file(path: Path) -> Lock:
    """Lock a file by another one next to it. Raises: UsageError when it is locked, by this process or another."""
    return Lock(path.with_name(f".{path.name}{LOCK}"), str(path))


class Lock:
    """An exclusive lock on `what`, held in `path` until it is released, collected, or the process ends.

    Raises: UsageError when another process holds it, or `path` cannot be written.
    """

    def __init__(self, path: Path, what: str, wait: bool = False, in_new_folder: bool = False) -> None:
        self.path = path
        with writing(what, error=UsageError):
            handle = _acquire(path, what, wait)
            self._end = weakref.finalize(self, _release, handle, path, os.getpid(), in_new_folder)
            if handle is not None:
                holder = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
                os.ftruncate(handle, 0)
                os.pwrite(handle, holder.encode(), 0)
        self.handle, self.times = handle, 1  # how often this process holds it
        _every.add(self)

    @property
    def is_held(self) -> bool:
        return self._end.alive

    def release(self) -> None:
        """Release the lock, once for each time that it was taken."""
        self.times -= 1
        if self.times <= 0:
            self._end()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _acquire(path: Path, what: str, wait: bool) -> int | None:
    """The locked handle of the lock file; None where there are no locks. Raises: OSError, UsageError."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    told = False
    while True:
        handle = _open(path)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(path, handle):
                return handle
            os.close(handle)  # of a holder that has just released it; its name is free
        except BlockingIOError:
            holder = os.pread(handle, 1000, 0).decode("utf-8", errors="replace") or "another process"
            os.close(handle)
            if not wait:
                raise UsageError(f"{what} is being written by {holder}; wait for it or end it") from None
            if not told:
                print(f"waiting for {holder}, which writes {what}", file=sys.stderr)
            told = True
            time.sleep(0.2)
        except OSError as problem:
            os.close(handle)
            if problem.errno not in WITHOUT_LOCKS:
                raise
            path.unlink(missing_ok=True)
            print(f"note: {what} is on a file system without locks; let no other process write there", file=sys.stderr)
            return None


def _open(path: Path) -> int:
    """A handle of the lock file, made if it is missing. Raises: OSError; UsageError for a link and the like."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as problem:
        if problem.errno != errno.ELOOP:
            raise
        raise UsageError(f"{path} is a link, not a lock; remove it") from None
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:  # no links once its holder has removed it
        return handle
    os.close(handle)
    raise UsageError(f"{path} is a file of another name or kind, not a lock; remove it")


def _is_named(path: Path, handle: int) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _release(handle: int | None, path: Path, owner: int, in_new_folder: bool) -> None:
    if os.getpid() != owner:  # a forked child; its handle is closed
        return
    with suppress(OSError):  # a disk that is read-only by now keeps the file, which locks nothing
        if handle is not None:
            path.unlink()
    if handle is not None:
        os.close(handle)
    with suppress(OSError):
        if in_new_folder:
            path.parent.rmdir()  # refused unless it is empty


def _disinherit() -> None:
    """In a forked child: close the handles, which would hold the locks for as long as it lives."""
    for lock in list(_every):
        if lock.is_held and lock.handle is not None:
            os.close(lock.handle)
            lock._end.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disinherit)
