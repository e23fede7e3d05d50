"""Temporary names: a file or folder is written next to its target, under a hidden name that contains the process.

`.args.json.node17-4242-9f86d081.partial` is being written by process 4242 of node17. The last token is random, so the
name, or a link under it, cannot be created in advance. Files of a killed process are identified by its number and
removed by the next write of the same name. All other files are left alone, whatever their names.

Left out: files of processes of other machines or users, except the checkpoints of a locked run; and containers that
share a host name, but not their processes.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from contextlib import suppress
from pathlib import Path

MARK = r"(\d+)-[0-9a-f]{8}"  # after the host name: process and token
LONGEST = 120  # bytes of the target's name in a temporary name; file names have at most 255
_used: set[str] = set()  # marks of this process; an earlier process may have had the same number


def new_mark() -> str:
    """This host and process with a token, as part of a name that is used once."""
    mark = f"{host()}-{os.getpid()}-{secrets.token_hex(4)}"
    _used.add(mark)
    return mark


def host() -> str:
    """The name of this machine, as used in file names."""
    return re.sub(r"[^\w.-]", "_", socket.gethostname())[:64]


def temporary_path(path: Path) -> Path:
    """A new name next to `path`, to write and then rename; leftovers of killed processes for `path` are removed."""
    remove_left(path.parent, re.escape(_shorten(path.name)))
    return path.with_name(f".{_shorten(path.name)}.{new_mark()}.partial")


def create(path: Path) -> None:
    """Create a new empty file, never through a link. Raises: OSError, also if it exists."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666))


def remove_left(folder: Path, names: str = ".+", of_any_host: bool = False) -> None:
    """Remove leftovers of killed processes for files or folders whose names match a regular expression.

    of_any_host: for a caller whose lock says that no other process, wherever it runs, writes them now.
    """
    for path in find_left(folder, rf"\.(?:{names})\.", r"\.partial", of_any_host):
        remove(path)


def find_left(folder: Path, before: str, after: str = "", of_any_host: bool = False) -> list[Path]:
    """Entries of a folder named by a process that has ended; before, after: regular expressions around the mark."""
    if os.name == "nt":  # there is no way to see whether a process lives
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
    except (OSError, OverflowError):  # a process of another user; or not a process number
        return False
    return False


def _shorten(name: str) -> str:
    return os.fsencode(name)[:LONGEST].decode("utf-8", errors="ignore")
