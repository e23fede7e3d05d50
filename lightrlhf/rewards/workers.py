"""Processes that call a reward function and can be killed: a call that hangs or crashes loses only its response.

Each process imports the function by its path, and is asked for one response at a time. One that takes longer than its
limit is killed and replaced; one that dies is replaced. They end with the process that started them, however it ends.

Left out: limits of memory, and isolation of the functions (`datasets_prep.apps.sandbox` has both for programs).
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from lightrlhf.cli.errors import RunFailure, UsageError, first_line
from lightrlhf.cli.functions import import_member
from lightrlhf.cli.processes import START_LIMIT, Process, begin_worker, kill_all, processors_of_rank
from lightrlhf.rewards.functions import Failure, Response, call_function, failure_of


def path_of(function: Callable[..., Any]) -> str:
    """The `package.module:name` another process can import a function by. Raises: UsageError without one."""
    module, attribute = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found = getattr(sys.modules.get(module or ""), attribute or "", None)
    if found is not function or module == "__main__":
        raise UsageError(
            f"reward {attribute or function} cannot be imported by the processes that --reward_timeout calls it in; "
            "define it at the top of a module, or give no --reward_timeout"
        )
    return f"{module}:{attribute}"


class Worker(Process):
    """A process that calls the function of a path."""

    def __init__(self, path: str) -> None:
        super().__init__("lightrlhf.rewards.workers", [path])
        self.index: int | None = None  # of the response it works on

    def ask(self, index: int, response: Response, seconds: float) -> None:
        self.index, self.deadline = index, time.monotonic() + seconds
        self.connection.send_bytes(pickle.dumps(response))


class Workers:
    """As many processes as there are processors for this rank, started when they are first needed."""

    def __init__(self, path: str, seconds: float) -> None:
        self.path, self.seconds = path, seconds
        self.size = processors_of_rank()
        self.workers: list[Worker] = []
        self.close = weakref.finalize(self, kill_all, self.workers)  # when it is not used any more, or at exit

    def run(self, responses: Sequence[Response]) -> list[Any]:
        """The function's value for each response, or a `Failure`. Raises: RunFailure when it cannot be loaded."""
        results: list[Any] = [None] * len(responses)
        waiting = deque(range(len(responses)))
        for worker in [worker for worker in self.workers if worker.has_ended()]:
            self.workers.remove(worker)  # it died between two calls, which no response is to blame for
            worker.kill()
        try:
            while waiting or any(worker.index is not None for worker in self.workers):
                busy = sum(worker.index is not None for worker in self.workers)
                while len(self.workers) < min(self.size, busy + len(waiting)):
                    self.workers.append(Worker(self.path))
                for worker in self.workers:
                    if worker.is_ready and worker.index is None and waiting:
                        index = waiting.popleft()
                        with suppress(OSError):  # it has died, and is found so below
                            worker.ask(index, responses[index], self.seconds)
                active = [worker for worker in self.workers if worker.index is not None or not worker.is_ready]
                pause = min(worker.deadline for worker in active) - time.monotonic()
                heard = wait([worker.connection for worker in active], max(pause, 0.0))
                for worker in active:
                    if worker.connection in heard:
                        self._hear(worker, results)
                    elif time.monotonic() >= worker.deadline:
                        self._give_up(worker, results)
        except BaseException:  # an interrupt, too: the results of pending calls will not be read
            kill_all(self.workers)
            raise
        return results

    def _hear(self, worker: Worker, results: list[Any]) -> None:
        """Take a worker's message: that it is ready, that it could not start, or a result."""
        try:
            kind, value = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            self.workers.remove(worker)
            status = worker.kill()
            if worker.index is None:
                raise RunFailure(f"{self.path}: a process to call it in ended with status {status}") from None
            results[worker.index] = Failure("crashes", f"its process ended with status {status}")
            return
        if kind == "broken":
            raise RunFailure(f"{self.path}: {value}")
        if kind == "ready":
            worker.is_ready = True
            return
        assert worker.index is not None
        results[worker.index] = Failure("errors", value) if kind == "error" else value
        worker.index = None

    def _give_up(self, worker: Worker, results: list[Any]) -> None:
        self.workers.remove(worker)
        worker.kill()
        if worker.index is None:
            raise RunFailure(f"{self.path}: importing it took more than {START_LIMIT:g} seconds")
        results[worker.index] = Failure("timeouts", f"killed after {self.seconds:g} seconds")


# ----------------------------------------------------------------------------------------------- in the other process
def serve(path: str, descriptor: str, parent: str) -> None:
    """Call the function of a path for each response that arrives, until the other end is closed."""
    connection = begin_worker(descriptor, parent)

    def say(kind: str, value: Any = None) -> None:
        connection.send_bytes(json.dumps([kind, value]).encode())

    try:
        function = import_member(path)
        if package := getattr(function, "needs", None):
            importlib.import_module(package)  # now, or it counts as time of the first call
    except (Exception, SystemExit) as problem:
        return say("broken", f"{type(problem).__name__}: {first_line(problem)}")
    say("ready")
    with suppress(EOFError, OSError):
        while True:
            response = pickle.loads(connection.recv_bytes())
            try:
                (result,) = call_function(function, [response])
            except Exception as problem:  # whatever a user's function raises
                result = failure_of(problem)
            say(*(("error", str(result)) if isinstance(result, Failure) else ("value", result)))


if __name__ == "__main__":
    serve(*sys.argv[1:])
