"""One process per device for a stage of an iterated program, which itself is one process."""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from lightrlhf.cli.errors import TERMINATED, RunFailure, UsageError, one_line_errors
from lightrlhf.training.signals import NAMES, Terminated

Args = TypeVar("Args")
Result = TypeVar("Result")


def run_on_devices(program: Callable[[Args], Result], args: Args, devices: int) -> Result:
    """`program(args)`, in a process per device where there are several; returns rank 0's result.

    Raises: UsageError or RunFailure when a rank fails, which prints its own error.
    """
    if devices == 1:
        return program(args)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks print their own errors
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # seconds: a save may take longer than torch's 30
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=f"lightrlhf-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        start_method="spawn",
    )
    try:
        with _own_signals():
            results: dict[int, Result] = elastic_launch(config, _run_rank)(program, args, devices)
    except ChildFailedError as failed:
        statuses = {failure.exitcode for failure in failed.failures.values()}
        if {TERMINATED, -signal.SIGTERM} & statuses:  # a signal reached only the ranks
            raise Terminated from None
        error = UsageError if UsageError.exit_status in statuses else RunFailure
        rank = failed.get_first_failure()[0]
        raise error(f"{program.__module__} stopped on rank {rank}; see its error above") from None
    return results[0]


def _run_rank(program: Callable[[Args], Result], args: Args, devices: int) -> Result:
    """One rank: prints an error as any program does, and exits with its status."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // devices))
    try:
        result: Result = one_line_errors(program)(args)
    except Exception:
        traceback.print_exc()
        raise SystemExit(RunFailure.exit_status) from None
    return result


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore signal handlers that the launcher replaces; its exception for Ctrl-C becomes KeyboardInterrupt."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if threading.current_thread() is threading.main_thread() else ()
    handlers = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    try:
        yield
    except SignalException as problem:
        if problem.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        if signal.Signals(problem.sigval).name in NAMES:
            raise Terminated from None
        raise SystemExit(128 + problem.sigval) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
