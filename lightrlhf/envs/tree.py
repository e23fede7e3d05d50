"""A read-only view of a folder: lists entries and reads regular files, follows no links.

Every path is opened from the root one component at a time by `openat` with O_NOFOLLOW, so no symbolic link, `..`, or
folder that is replaced by a link during the read leads out of the tree. Devices, pipes and sockets are never opened.
The caller bounds how much is read, independent of the size that a file reports. Nothing is copied, no shell is
started, the working directory does not change.

Left out: symbolic links, also those that stay inside (each file has one path); protection from hard links and mounts
made by the tree's owner, which look like any other file; Windows, which lacks `openat`.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from lightrlhf.cli.errors import UsageError

FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
# Non-blocking: between stat and open, a file may be replaced by a pipe without a writer.
FILE_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
FILE_FLAGS |= getattr(os, "O_NOCTTY", 0)
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
REASONS = {
    errno.ENOENT: "it is not there",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.ELOOP: "it is a link",
    errno.ENOTDIR: "its folder is a link or no folder",
    errno.ENXIO: "it is no plain file",
}


class Refused(Exception):
    """Raised when a path of the tree cannot be read; the message is the reason in a few words."""


@dataclass(frozen=True)
class Entry:
    """One name in a folder."""

    name: str
    kind: Literal["file", "folder", "other"]  # other: link, device, pipe, socket
    size: int  # bytes, as the file system reports


class Tree:
    """The folder `root`, read-only. It holds no open file, so it can be copied and sent to another process.

    Raises: UsageError when `root` is not a folder, or the system cannot open files relative to a folder.
    """

    def __init__(self, root: str, flag: str = "--repo_dir") -> None:
        if os.open not in os.supports_dir_fd or not hasattr(os, "O_NOFOLLOW"):
            raise UsageError(f"{flag} {root} requires openat, which this system lacks; use Linux or macOS")
        self.root = os.path.realpath(root)
        if not os.path.isdir(self.root):
            raise UsageError(f"{flag} {root} is not a folder")

    def entries(self, folder: str = "") -> list[Entry]:
        """The entries of a folder, sorted by name; `folder` is relative, "" the root. Raises: Refused."""
        entries = []
        with self._open(parts_of(folder) if folder else []) as descriptor, os.scandir(descriptor) as listing:
            for entry in listing:
                try:
                    state = os.stat(entry.name, dir_fd=descriptor, follow_symlinks=False)
                except OSError:  # gone since it was listed
                    continue
                entries.append(Entry(entry.name, _kind(state.st_mode), state.st_size))
        return sorted(entries, key=lambda entry: entry.name)

    def read(self, path: str, limit: int, from_end: bool = False) -> bytes:
        """At most the first `limit` bytes of a regular file, or the last ones. Raises: Refused."""
        *folders, name = parts_of(path)
        with self._open(folders) as descriptor:
            if not stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                raise Refused("it is no plain file")  # opening a device can already have side effects
            with open(os.open(name, FILE_FLAGS, dir_fd=descriptor), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise Refused("it is no plain file")
                if from_end:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
                return file.read(limit)

    @contextmanager
    def _open(self, folders: list[str]) -> Iterator[int]:
        """Context manager: a descriptor of the last of nested `folders`; turns OSError into Refused."""
        descriptor = None
        try:
            descriptor = os.open(self.root, FOLDER_FLAGS)
            for name in folders:
                inner = os.open(name, FOLDER_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        except OSError as problem:
            raise Refused(REASONS.get(problem.errno or 0, problem.strerror or "it cannot be read")) from None
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _kind(mode: int) -> Literal["file", "folder", "other"]:
    """The kind of an entry, from `st_mode`."""
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def parts_of(path: str) -> list[str]:
    """The components of a relative path. Raises: Refused when it is absolute, has an empty part, `.`, `..` or NUL."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise Refused("it leads out of the tree")
    return parts


def is_plain_name(name: str) -> bool:
    """Whether a name can be inserted into a prompt: one line of printable characters without spaces at the ends.

    Control, format (such as right-to-left marks) and undecodable characters could imitate other text.
    """
    return name.isprintable() and name == name.strip() and bool(name)


def as_text(content: bytes) -> str:
    """Decode bytes for a prompt: UTF-8 without BOM; invalid bytes and control characters become �.

    An incomplete character at the end is dropped: a read may cut one.
    """
    text = codecs.getincrementaldecoder("utf-8-sig")("replace").decode(content)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c if c.isprintable() or c in "\n\t" else UNKNOWN for c in text)
