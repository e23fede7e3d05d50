"""Worker processes of a program, which are asked by messages and can be killed.

`concurrent.futures` cannot kill a hung worker. `pebble` can, but its workers start as in `multiprocessing`: as
copies of this process after torch has started threads, or as new ones that run the main module again, which for a
script without `if __name__ == "__main__"` is the training. It also leaves a hung worker behind when this process is
killed.

Left out: other systems than Linux, where a hung process of a killed program stays.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

START_LIMIT = 300.0  # seconds to import a worker's function
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def end_with_parent(parent: int | None = None) -> None:
    """Have this process killed when its parent ends, in whatever way.

    parent: the parent's process id, where `multiprocessing` does not know it.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None:
        has_ended = os.getppid() != parent
    elif (known := multiprocessing.parent_process()) is None:
        return
    elif multiprocessing.get_start_method() == "forkserver":  # which is the parent then
        has_ended = not known.is_alive()
    else:
        has_ended = os.getppid() != known.pid
    if has_ended:  # before the call above
        os._exit(1)


class Process:
    """A process that runs a module, at the other end of a connection; `deadline` is for its present call or its start.

    The module's `main` receives `arguments`, and what `begin_worker` takes.
    """

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
        self.connection, theirs = Pipe()
        entries = [os.getcwd() if entry == "" else entry for entry in sys.path]
        command = [sys.executable, "-m", module, *arguments, str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            env={**environment, "PYTHONPATH": os.pathsep.join(entries)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.deadline = time.monotonic() + START_LIMIT
        self.is_ready = False

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> int:
        """End it and its child processes; returns its exit status."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


def kill_all(processes: list[Any]) -> None:
    """End processes, and forget them."""
    while processes:
        processes.pop().kill()


def processors_of_rank() -> int:
    """Processors of this machine for each of its ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def begin_worker(descriptor: str, parent: str) -> Connection:
    """In the other process: the connection. Output goes to stderr, and the process ends with its parent."""
    end_with_parent(int(parent))
    os.dup2(2, 1)  # the output of a function's `print`
    return Connection(int(descriptor))
