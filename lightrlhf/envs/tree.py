"""A folder that can be looked at and nothing else: entries are listed, plain files are read, nothing is followed.

Every path is walked from the root one name at a time by `openat` with O_NOFOLLOW, so neither a link, nor `..`, nor a
folder that turns into a link while it is read leads out of the tree. Devices, pipes and sockets are never opened. How
much is read is bounded by the caller, whatever a file says of its own size. Nothing is copied, no shell is started,
the working directory stays where it is.

Left out: links, also those that stay inside (each file has one path); protection from a hard link or a mount that the
tree's owner put there, which look like any other file; Windows, which lacks `openat`.
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
# Not blocking: between the look at its type and the opening a file may be replaced by a pipe without a writer.
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
    """Why a path of the tree cannot be read, in a few words."""


@dataclass(frozen=True)
class Entry:
    """One name in a folder."""

    name: str
    kind: Literal["file", "folder", "other"]  # other: link, device, pipe, socket
    size: int  # bytes, as the file system tells


class Tree:
    """The folder `root`, read-only. It holds no open file, so it can be copied and sent to another process.

    Raises: UsageError when `root` is no folder, or this system cannot open files relative to a folder.
    """

    def __init__(self, root: str, flag: str = "--repo_dir") -> None:
        if os.open not in os.supports_dir_fd or not hasattr(os, "O_NOFOLLOW"):
            raise UsageError(f"{flag} {root} cannot be guarded on this system, which lacks openat; use Linux or macOS")
        self.root = os.path.realpath(root)
        if not os.path.isdir(self.root):
            raise UsageError(f"{flag} {root} is no folder")

    def entries(self, folder: str = "") -> list[Entry]:
        """What a folder holds, by name; `folder` is relative, "" the root. Raises: Refused."""
        found = []
        with self._opened(parts_of(folder) if folder else []) as descriptor, os.scandir(descriptor) as listing:
            for entry in listing:
                try:
                    state = os.stat(entry.name, dir_fd=descriptor, follow_symlinks=False)
                except OSError:  # gone since it was listed
                    continue
                kind = "file" if stat.S_ISREG(state.st_mode) else "folder" if stat.S_ISDIR(state.st_mode) else "other"
                found.append(Entry(entry.name, kind, state.st_size))
        return sorted(found, key=lambda entry: entry.name)

    def read(self, path: str, limit: int, from_end: bool = False) -> bytes:
        """At most the first `limit` bytes of a plain file, or the last ones. Raises: Refused."""
        *folders, name = parts_of(path)
        with self._opened(folders) as descriptor:
            if not stat.S_ISREG(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                raise Refused("it is no plain file")  # opening a device can already do something
            with open(os.open(name, FILE_FLAGS, dir_fd=descriptor), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise Refused("it is no plain file")
                if from_end:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
                return file.read(limit)

    @contextmanager
    def _opened(self, folders: list[str]) -> Iterator[int]:
        """A descriptor of the folder at the end of `folders`; what goes wrong with it becomes Refused."""
        descriptor = None
        try:
            descriptor = os.open(self.root, FOLDER_FLAGS)
            for name in folders:
                inner = os.open(name, FOLDER_FLAGS, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        except OSError as problem:
            raise Refused(REASONS.get(problem.errno, problem.strerror or "it cannot be read")) from None
        finally:
            if descriptor is not None:
                os.close(descriptor)


def parts_of(path: str) -> list[str]:
    """The names along a relative path. Raises: Refused when it is absolute, has an empty part, `.`, `..` or NUL."""
    parts = path.split("/")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise Refused("it leads out of the tree")
    return parts


def is_plain_name(name: str) -> bool:
    """Whether a name can stand in a prompt as it is: one line of printable characters, no spaces at its ends.

    Control, format (such as right-to-left marks) and undecodable characters could pose as other text.
    """
    return name.isprintable() and name == name.strip() and bool(name)


def as_text(content: bytes) -> str:
    """Bytes as text for a prompt: UTF-8, without a BOM; what is no character or moves the cursor becomes �.

    The beginning of a file may end within a character, which is left out.
    """
    text = codecs.getincrementaldecoder("utf-8-sig")("replace").decode(content)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(c if c.isprintable() or c in "\n\t" else UNKNOWN for c in text)
