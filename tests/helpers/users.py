"""Work done in a forked process, as this user or as an ordinary one.

Left out: becoming another user without being root.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[2]


def forked(work: Callable[[], Iterator[Any]], ordinary: bool = False) -> Iterator[Any]:
    """The JSON values that `work()` yields in a fork, up to its death; as an ordinary user if asked.

    Raises: PermissionError if this process cannot become one; RuntimeError with the traceback of an error in `work`.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        with open(write, "w") as stream:
            try:
                if ordinary:
                    _become_ordinary()
                for value in work():
                    print(json.dumps({"value": value}), file=stream, flush=True)
            except PermissionError as error:
                print(json.dumps({"denied": str(error)}), file=stream, flush=True)
            except BaseException:
                print(json.dumps({"error": traceback.format_exc()}), file=stream, flush=True)
        os._exit(0)
    os.close(write)
    try:
        with open(read) as stream:
            for line in stream:
                answer = json.loads(line)
                if "denied" in answer:
                    raise PermissionError(answer["denied"])
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                yield answer["value"]
    finally:
        os.waitpid(pid, 0)


def _become_ordinary() -> None:
    """Drop root, with Python and this repository still in reach where they lie in root's own folders."""
    if os.geteuid() != 0:
        return
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000) != 0:  # CLONE_NEWNS
        raise PermissionError("no mount namespace: not root enough to become another user")
    needed = sorted({str(Path(path).resolve()) for path in (sys.base_prefix, sys.prefix, ROOT)})
    hidden = sorted({str(top) for path in needed if (top := _hidden(Path(path)))})
    with tempfile.TemporaryDirectory() as stash:
        _mount("--make-rprivate", "/")
        kept = {}
        for number, path in enumerate(path for path in needed if _hidden(Path(path))):
            kept[path] = f"{stash}/{number}"
            os.mkdir(kept[path])
            _mount("--bind", path, kept[path])
        for top in hidden:
            _mount("-t", "tmpfs", "-o", "mode=755", "none", top)
        for path, place in kept.items():
            os.makedirs(path, exist_ok=True)
            _mount("--move", place, path)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.environ["HOME"] = "/tmp"


def _hidden(path: Path) -> Path | None:
    """The uppermost folder on the way to `path` that others may not enter."""
    for folder in [*reversed(path.parents), path]:
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


def _mount(*arguments: str) -> None:
    if subprocess.run(["mount", *arguments], capture_output=True).returncode != 0:
        raise PermissionError(f"mount {' '.join(arguments)} was refused")
