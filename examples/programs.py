"""Calls of programs whose output goes to a file, what they have made, and the processes that make them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from lightrlhf.cli.calls import call
from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.processes import end_with_parent
from lightrlhf.storage.writing import write_text


def logged(log: Path, program: ModuleType, **flags: Any) -> Any:
    """`call` with its output appended to a file.

    Raises: RunFailure with the program's error line and the name of the file.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        try:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                return call(program, **flags)
        except SystemExit as stop:
            if not stop.code:
                raise
            file.flush()
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RunFailure(f"{lines[-1].removeprefix('error: ')} ({log})") from None


def made(stored: Path, make: Callable[[], Any]) -> str:
    """The path that `make` returns; called once: the file `stored` has it when it has ended."""
    if not stored.is_file():
        write_text(stored, str(make()))
    return stored.read_text(encoding="utf-8")


@contextlib.contextmanager
def workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes of one thread each, which end with this one; after a failure no further job starts."""
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the processes
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _start)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _start() -> None:
    import torch

    end_with_parent()
    torch.set_num_threads(1)
