"""What this library does on a GPU, in one command of at most 8 minutes: `make gpu`, or `python -m tests.gpu`.

Rows of correctness come first, then speed, then memory. Each is printed and written to one JSON file as soon as it is
known; killed or out of time, the same command goes on with the rows that are missing or failed. `--device cpu --size
tiny` is the dry run: it goes through every row and measures nothing. `--device second` is the test device of
`tests/helpers/second_device.py`, which finds what crosses devices.

Rows run in a worker. One that crashes, hangs or meets an error of CUDA fails alone: the next row gets a new worker.
"""

import datetime
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.fields import Args, positive
from lightrlhf.cli.parser import parse
from lightrlhf.storage.writing import write_text

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = {"full": 120, "tiny": 600}  # after which a worker that has not answered is killed, by size
ROW_SECONDS = {"full": 150, "tiny": 600}  # likewise, by size: a dry run may share its machine


@dataclass(frozen=True, kw_only=True)
class GPUArgs(Args):
    """Check and measure this library on one GPU."""

    device: Literal["cuda", "cpu", "second"] = "cuda"
    """Device of the rows; the CPU is for dry runs, the second device for tests."""
    size: Literal["full", "tiny"] = "full"
    """Models of published shapes, or tiny ones, which measure nothing."""
    minutes: float = positive(8.0)
    """Time after which no row is running; what is missing then is listed."""
    output_file: str | None = None
    """Results, by default `gpu.json`, or `gpu-dry.json` of tiny models; rows that passed or were measured are kept."""
    only: str = ""
    """Run only the rows whose names contain this text."""


class Worker:
    """The process that runs rows; `first` is the message it starts with."""

    def __init__(self, args: GPUArgs, folder: Path, log: Path) -> None:
        job = {"device": args.device, "size": args.size, "folder": str(folder)}
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"OMP_NUM_THREADS": "1"}  # the fastest for tiny models on the CPU, and beside other tests
        environment |= {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}  # images set it; float32 rows are compared within 1e-4
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.worker", json.dumps(job)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("a", encoding="utf-8"),
            text=True,
        )
        self.first = self._answer(START_SECONDS[args.size])
        self.is_usable = "rows" in self.first

    def run(self, name: str, seconds: float) -> dict[str, Any]:
        """The result of a row, which may take so many seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        answer = self._answer(seconds)
        self.is_usable = not answer.pop("is_broken", False) and self.process.poll() is None
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next message; of a worker that ended or is too slow, which is killed, a failed row."""
        assert self.process.stdout is not None
        ready = select.select([self.process.stdout], [], [], seconds)[0]
        if ready and (line := self.process.stdout.readline()):
            answer: dict[str, Any] = json.loads(line)
            return answer
        if not ready:
            self.end()
            return {"status": "failed", "shown": f"not done after {seconds:.0f} s, killed", "seconds": seconds}
        lines = [text.strip() for text in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        last = next((text for text in reversed(lines) if text), "")[:300]
        return {"status": "failed", "shown": f"the process ended with status {self.process.wait()}: {last}"}


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the number of rows that failed."""
    args = parse(GPUArgs, argv)
    began, file = time.monotonic(), Path(args.output_file or ("gpu.json" if args.size == "full" else "gpu-dry.json"))
    log = file.with_suffix(".log")
    if not file.exists():
        log.write_text("", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        worker = Worker(args, Path(folder), log)
        if "rows" not in worker.first:
            raise UsageError(f"--device {args.device}: the worker did not start: {worker.first['shown']}")
        if args.device == "cuda" and "gpu" not in worker.first["machine"]:
            raise UsageError("--device cuda: torch sees no CUDA device; --device cpu --size tiny is the dry run")
        known, results = worker.first["rows"], earlier(file, args, worker.first["machine"])
        if args.only and not any(args.only in name for name in known):
            raise UsageError(f"--only {args.only} is in no row's name; they are: {', '.join(known)}")
        print(f"{json.dumps(results['machine'])}\n{file} has {len(results['rows'])} of {len(known)} rows", flush=True)
        for name, facts in known.items():
            left = 60 * args.minutes - (time.monotonic() - began)
            is_known = results["rows"].get(name, {}).get("status") in ("passed", "measured")
            if is_known or args.only not in name or left < facts["expected"]:
                continue
            if not worker.is_usable:
                worker.end()
                worker = Worker(args, Path(folder), log)
            if not worker.is_usable:
                raise RunFailure(f"no new worker started after a failed row: {worker.first['shown']}; see {log}")
            row = {"section": facts["section"], **worker.run(name, min(left, ROW_SECONDS[args.size]))}
            if not worker.is_usable and time.monotonic() - began >= 60 * args.minutes:
                break  # cut by the end of the time, which says nothing about the row
            print(f"[{row.get('seconds', 0):5.1f} s] {name:32} {row['status']}: {row['shown']}", flush=True)
            results["rows"][name] = row
            write(file, results, known)
        worker.end()
    return summary(results, known, args, file, time.monotonic() - began)


def earlier(file: Path, args: GPUArgs, machine: dict[str, Any]) -> dict[str, Any]:
    """The results of the file if they are of this machine and size, else none."""
    fresh = {"device": args.device, "size": args.size, "machine": machine, "rows": {}}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return fresh
    except (OSError, ValueError) as problem:
        raise UsageError(f"--output_file {file} cannot be read: {problem}; remove it, or give another") from None
    if not isinstance(found, dict) or not isinstance(found.get("rows"), dict):
        raise UsageError(f"--output_file {file} holds no results of this program; give another file")
    same = all(found.get(name) == fresh[name] for name in ("device", "size", "machine"))
    if not same:
        raise UsageError(f"--output_file {file} is of another machine, device or size; give another file")
    return found


def write(file: Path, results: dict[str, Any], known: dict[str, Any]) -> None:
    """Write the results so far, rows in the order of the table."""
    rows = {name: results["rows"][name] for name in known if name in results["rows"]}
    day = datetime.date.today().isoformat()
    write_text(file, json.dumps({**results, "date": day, "rows": rows}, indent=1))


def summary(results: dict[str, Any], known: dict[str, Any], args: GPUArgs, file: Path, seconds: float) -> int:
    """Print what failed and what is missing; returns the number of failed rows."""
    rows = results["rows"]
    by_status = {status: [name for name, row in rows.items() if row["status"] == status] for status in STATUSES}
    counts = ", ".join(f"{len(names)} {status}" for status, names in by_status.items())
    print(f"{len(rows)} of {len(known)} rows in {seconds:.0f} s: {counts}")
    for name in by_status["failed"]:
        print(f"failed: {name}: {rows[name]['shown']}")
    if missing := [name for name in known if name not in rows and args.only in name]:
        print(f"not run for want of time: {', '.join(missing)}\nthe same command goes on with them")
    print(f"attach {file} to an issue, and {file.with_suffix('.log')} where a row failed")
    return len(by_status["failed"])


STATUSES = ("passed", "measured", "left out", "failed")


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
