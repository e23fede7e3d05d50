"""The process that runs the rows: names of rows on standard input, a line of JSON for each on standard output.

The first line that it writes describes the machine and lists the rows. It ends after an error of CUDA, which all later
work of the process would meet again.
"""

import contextlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

PACKAGES = ("torch", "transformers", "lightning", "peft", "bitsandbytes", "flash-attn", "trl", "vllm")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of programs goes to the log
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tests")]
    job = json.loads(sys.argv[1])
    with device_of_tests() if job["device"] == "second" else contextlib.nullcontext():
        work(job, answers)


@contextlib.contextmanager
def device_of_tests() -> Iterator[None]:
    """Context manager: the second device, before anything of the library is imported."""
    from helpers import on_second, second_device

    on_second.prepare()
    with second_device.using_device(), on_second.in_threads():
        yield


def work(job: dict[str, Any], answers: IO[str]) -> None:
    """Answer with a line for each row that is asked for."""
    from tests.gpu import correctness, memory, speed
    from tests.gpu.setting import LeftOut, Row, Setting

    at = Setting(job["device"], job["size"], Path(job["folder"]))
    rows: dict[str, Row] = {**correctness.ROWS, **speed.ROWS, **memory.ROWS, **speed.LATE}

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    known = {name: {"section": row.section, "expected": row.seconds} for name, row in rows.items()}
    answer({"machine": machine(at.is_cuda), "rows": known})
    for line in sys.stdin:
        name, started, is_broken = line.strip(), time.perf_counter(), False
        print(f"==== {name}", flush=True)
        try:
            result = {"status": "measured" if rows[name].section != "correctness" else "passed", **rows[name].run(at)}
            at.synchronize()
        except LeftOut as reason:
            result = {"status": "left out", "shown": str(reason)}
        except (Exception, SystemExit) as problem:
            traceback.print_exc()
            first = (str(problem).strip().splitlines() or [""])[0][:300]
            result = {"status": "failed", "shown": f"{type(problem).__name__}: {first}"}
            is_broken = "CUDA error" in str(problem) or "out of memory" in str(problem)
        answer({**result, "seconds": round(time.perf_counter() - started, 1), "is_broken": is_broken})
        if is_broken:
            return


def machine(is_cuda: bool) -> dict[str, Any]:
    """The device, and the versions that its figures belong to."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if is_cuda and torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


if __name__ == "__main__":
    main()
