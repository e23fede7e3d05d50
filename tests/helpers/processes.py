"""Processes started by tests: none outlives its test, or a test session that is killed.

Every process started by the session inherits its environment variable `MARK`, by which it is found. As a program this
file is the session's guard: `python processes.py PID` waits until that process has ended and kills all that have its
mark. Left out: programs with an environment of their own (the code sandbox ends its own) and forks of the session
itself, whose environment is read as it was before the mark.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

MARK = "LIGHTRLHF_TEST_SESSION"
PATIENCE = 300  # seconds to wait for another process before a test fails; long, for machines that are busy
GRACE = 20  # seconds for a process to end that was asked to
PYTHONS_OWN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # end with the session
kept: set[int] = set()  # started in a test but for all tests of a module
forkers: set[int] = set()  # the same, whose forks are those of a test


def open_session() -> None:
    """Mark all processes that this one starts from now on, and start the guard."""
    os.environ[MARK] = str(os.getpid())
    command = [sys.executable, __file__, str(os.getpid())]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    kept.add(subprocess.Popen(command, start_new_session=True, **quiet).pid)


def running() -> list[psutil.Process]:
    """Living processes with this session's mark, without this one; those that are older cannot have it."""
    mark, found = os.environ[MARK], []
    begun = psutil.Process(int(mark)).create_time() if psutil.pid_exists(int(mark)) else 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (
                process.create_time() >= begun
                and process.environ().get(MARK) == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def left_by_a_test(before: list[psutil.Process]) -> dict[psutil.Process, str]:
    """Processes that were not running before, with their commands, without children of those that were."""
    known = (kept | {process.pid for process in before}) - forkers

    def found() -> dict[psutil.Process, str]:
        left = {}
        for process in running():
            if process.pid in forkers | known:
                continue
            with contextlib.suppress(psutil.Error):
                ancestry = {process.pid, *(parent.pid for parent in process.parents())} - {os.getpid()}
                command = " ".join(process.cmdline())
                is_pythons = process.ppid() == os.getpid() and any(word in command for word in PYTHONS_OWN)
                if not ancestry & known and not is_pythons:
                    left[process] = command
        return left

    if left := found():
        psutil.wait_procs(list(left), timeout=GRACE)  # some are about to end
        left = found()
    return left


def end(processes: list[psutil.Process]) -> None:
    """Kill processes and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=PATIENCE)


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process in a session of its own; the whole session is killed at the end of the block, also by an exception."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()


def die_when(holds: Callable[[], bool], delay: float = 0.0) -> None:
    """Kill this process by SIGKILL `delay` seconds after `holds` first returns True in a thread that polls it.

    From within, because on a busy machine another process may be scheduled only when this one is done.
    """

    def watch() -> None:
        while True:
            with contextlib.suppress(OSError):  # a folder that is renamed while it is listed
                if holds():
                    break
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def guard(session: int) -> None:
    while os.getppid() == session:
        time.sleep(1.0)
    for _ in range(100):  # a process may have started another before it was killed
        if not (left := running()):
            break
        end(left)


if __name__ == "__main__":
    guard(int(sys.argv[1]))
