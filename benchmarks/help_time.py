"""Compare the time of each program's `--help` with the time of `import torch`.

    python -m benchmarks.help_time --repeats 5
    python -m benchmarks.help_time --programs ppo grpo

Each measurement is a process of its own. The programs run in turn, then all again, so that other work on the machine
slows all of them alike. The table has medians and their ratios to `import torch`. On a busy machine, processor time
varies less than wall-clock time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from lightrlhf.programs import PROGRAMS

LIMIT = 1.6  # largest ratio that is wanted


class Seconds(NamedTuple):
    """What a process takes."""

    clock: float
    processor: float


def measured(words: list[str]) -> Seconds:
    """What a Python process takes. Raises: RuntimeError when it fails."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with status {process.returncode}")
    return Seconds(time.perf_counter() - began, usage.ru_utime + usage.ru_stime)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time the help of programs.")
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    commands = {"import torch": ["-c", "import torch"]}
    commands |= {name: ["-m", "lightrlhf", name, "--help"] for name in args.programs}
    for words in commands.values():  # compiles what has no bytecode yet
        measured(words)
    times: dict[str, list[Seconds]] = {name: [] for name in commands}
    for _ in range(args.repeats):
        for name, words in commands.items():
            times[name].append(measured(words))
    medians = {name: Seconds(*map(statistics.median, zip(*found))) for name, found in times.items()}
    torch = medians["import torch"]
    print("| | seconds | of import torch | of the processor | of import torch |\n|---|---|---|---|---|")
    for name, taken in medians.items():
        ratios = [own / other for own, other in zip(taken, torch)]
        late = " too slow" if min(ratios) > LIMIT else ""
        print(f"| {name} | {taken.clock:.2f} | {ratios[0]:.2f} | {taken.processor:.2f} | {ratios[1]:.2f}{late} |")


if __name__ == "__main__":
    main()
