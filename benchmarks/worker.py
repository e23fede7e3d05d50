"""Protocol of the workers: processes that train or generate on request.

A worker is started with its job as JSON. Between two steps it calls its `Gate`, which waits for a line on standard
input: `{"repetition": 1}` starts a repetition of a fixed number of steps, which is answered with its seconds, its units
of work, the tokens its models read and the process's peak memory so far. End of input ends the process. So two workers
can alternate on one machine, and neither loads anything within its measured time.

Imports the standard library, and torch where it counts: peers run this file in their own environments.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Gate:
    """Called between two steps; blocks until the next repetition is requested."""

    def __init__(
        self,
        steps: int,
        versions: dict[str, str],
        gpu_peak: Callable[[], int] | None = None,
        forgets_loading: bool = False,
    ) -> None:
        """forgets_loading: peak memory is that of the repetitions, without what loading took (Linux)."""
        self.steps, self.gpu_peak, self.forgets_loading = steps, gpu_peak, forgets_loading
        self.left = self.units = self.tokens = 0
        self.started = self.started_busy = 0.0
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # output of libraries goes to the log
        self._first_answer = {"ready": True, "versions": versions}

    def __call__(self, units: float = 0.0) -> None:
        """`units`: work of the step that ends here, if it differs between steps."""
        if self.left:
            self.left -= 1
            self.units += units
            if self.left:
                return
            seconds, busy = time.perf_counter() - self.started, time.process_time() - self.started_busy
            memory = self.gpu_peak() if self.gpu_peak else resident_memory("VmHWM")
            counts = {"units": self.units, "tokens": self.tokens}
            self._answer({"seconds": seconds, "busy": busy, "peak_bytes": memory, **counts})
        else:
            if self.forgets_loading:
                Path("/proc/self/clear_refs").write_text("5")  # the largest resident size is that of now again
            self._answer(self._first_answer | {"resident_bytes": resident_memory("VmRSS")})
        if not sys.stdin.readline():
            sys.stdout.flush()
            os._exit(0)  # within a training run, without saving
        self.left, self.units, self.tokens = self.steps, 0.0, 0
        self.started, self.started_busy = time.perf_counter(), time.process_time()

    def _answer(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def count_tokens(gate: Gate) -> None:
    """Count the tokens of all forward passes from here on, padding included, where they are looked up."""
    from torch.nn import Embedding

    forward = Embedding.forward

    def counted(self: Embedding, ids: Any) -> Any:
        gate.tokens += ids.numel()
        return forward(self, ids)

    Embedding.forward = counted


def resident_memory(name: str) -> int:
    """Resident size of this process in bytes: its largest so far (VmHWM), or now (VmRSS)."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def job() -> dict[str, Any]:
    """The job from the command line."""
    return json.loads(sys.argv[1])


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of packages."""
    from importlib.metadata import version

    return {package: version(package) for package in packages}
