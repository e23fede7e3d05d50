"""Temporary names: a file or folder is written beside its place, under a hidden name that says which process writes it.

`.args.json.node17-4242-9f86d081.partial` is being written by process 4242 of node17. The token at its end is random, so
nobody can make that name, or a link under it, beforehand. What a killed process left is known by its number, and goes
with the next write of the same name; every other file, whatever its name, is somebody's.

Left out: what was left by processes of other machines, or under another user, except the checkpoints of a locked run;
and containers that share a host name, but not their processes.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path

MARK = r"(\d+)-[0-9a-f]{8}"  # behind the host name: process and token
LONGEST = 120  # bytes of a temporary name that are taken from the name itself, for a file's may have 255
_used: set[str] = set()  # marks of this process, whose number an earlier one may have had


def new_mark() -> str:
    """This host and process with a token, as part of a name that is used once."""
    mark = f"{host()}-{os.getpid()}-{secrets.token_hex(4)}"
    _used.add(mark)
    return mark


def host() -> str:
    """The name of this machine as it stands in file names."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname())[:64]


def temporary_path(path: Path) -> Path:
    """A new name beside `path`, to write and then rename; what killed processes left of writing `path` is removed."""
    remove_left(path.parent, re.escape(_shortened(path.name)))
    return path.with_name(f".{_shortened(path.name)}.{new_mark()}.partial")


def create(path: Path) -> None:
    """Create an empty file that was not there, so through no link. Raises: OSError."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666))


def remove_left(folder: Path, names: str = ".+", of_any_host: bool = False) -> None:
    """Remove what killed processes left of writing files or folders of these names, a regular expression.

    of_any_host: for a caller whose lock says that no other process, wherever it runs, writes them now.
    """
    for path in left(folder, rf"\.(?:{names})\.", r"\.partial", of_any_host):
        remove(path)


def left(folder: Path, before: str, after: str = "", of_any_host: bool = False) -> list[Path]:
    """Entries of a folder named by a process that has ended; before, after: regular expressions around the mark."""
    if os.name == "nt":  # nothing tells there whether a process lives
        return []
    own = re.compile(rf"{before}({re.escape(host())}-{MARK}){after}")
    others = re.compile(rf"{before}.+-{MARK}{after}")
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            mine = own.fullmatch(entry.name)
            ended = _has_ended(mine[1], int(mine[2])) if mine else of_any_host and others.fullmatch(entry.name)
            if ended and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                found.append(Path(entry.path))
    return found


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, as far as that is possible; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def is_temporary(name: str) -> bool:
    """Whether a name is one of `temporary_path`, of any process."""
    return bool(re.fullmatch(rf"\..+-{MARK}\.partial", name))


def _has_ended(mark: str, process: int) -> bool:
    if process == os.getpid():
        return mark not in _used
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # of another user; or no number of a process
        return False
    return False


def _shortened(name: str) -> str:
    return os.fsencode(name)[:LONGEST].decode("utf-8", errors="ignore")
