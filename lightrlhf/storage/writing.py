"""Atomic writing: one line for a disk that is full or read-only, and directory entries that survive a power cut.

Left out: retries, since a full disk stays full, and waiting for space.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import RunFailure, UsageError, first_line, write_problem
from lightrlhf.storage.temporary import create, temporary_path


@contextmanager
def writing(
    what: str | Path, kept: Callable[[], str] | None = None, error: type[UsageError] = RunFailure
) -> Iterator[None]:
    """Context manager around a write of `what`: a path, or a flag and a path.

    kept: returns what remains and how to go on, or an empty text; called when the write, or one within it, has failed.
    Raises: `error` with the reason, the remedy and what is kept, in one line; any other exception as it is.
    """
    try:
        yield
    except UsageError as problem:  # of a write within this one
        remains = kept() if kept else ""
        if not remains:
            raise
        raise type(problem)(f"{problem}; {remains}") from problem
    except Exception as problem:
        own = problem.strerror or first_line(problem) if isinstance(problem, OSError) else None
        parts = [write_problem(problem) or own, kept() if kept else ""]
        if parts[0] is None:
            raise
        raise error(f"{what} cannot be written: " + "; ".join(filter(None, parts))) from problem


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, and flush their entries. Raises: OSError."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def remove_empty(folder: Path) -> None:
    """Remove a folder and its subfolders, as far as they hold no files."""
    for place, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(place)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk: which files it has, by which names. Raises: OSError."""
    if os.name == "nt":  # has no handles of folders, and flushes entries by itself
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such flush
            raise
    finally:
        os.close(handle)


def rename(source: Path, target: Path) -> None:
    """Rename a flushed file or a link over `target`, and flush the entry. Raises: OSError."""
    source.replace(target)
    sync_folder(target.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. Raises: RunFailure naming it when it cannot be written; an older one stays."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)


def save_tensors(path: Path, value: Any) -> None:
    """`torch.save` atomically. Raises: RunFailure naming the file when it cannot be written; an older one stays."""
    with replacing(path) as temporary:
        save_pickled(temporary, value)


def save_pickled(path: Path, value: Any) -> None:
    """`torch.save` that raises the operating system's own error, which torch's writer swallows. Raises: OSError."""
    import torch

    raw = _NotedErrors(path, "wb")
    try:
        with io.BufferedWriter(raw, 1 << 20) as file:
            torch.save(value, file)
    except RuntimeError as problem:
        raise raw.problem or problem from None


class _NotedErrors(io.FileIO):
    """A file that keeps the first error of its writes: torch's C++ writer reports `unexpected pos` instead."""

    problem: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as problem:
            self.problem = self.problem or problem
            raise


@contextmanager
def replacing(path: Path, what: str = "") -> Iterator[Path]:
    """Context manager: yield a temporary name to write; then flush, rename to `path`, and flush the entry.

    what: named in errors instead of the path.
    Raises: RunFailure naming the file when any of it fails; the temporary one is removed.
    """
    temporary = temporary_path(path)
    with writing(what or path, kept=lambda: f"{temporary} is left, remove it" if temporary.exists() else ""):
        create(temporary)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            rename(temporary, path)
        except BaseException:  # an interrupt, too
            with suppress(OSError):
                temporary.unlink()
            raise
