"""Speed compared with peers: `python -m benchmarks.run --suite cpu` (or gpu).

Each side of a case is a process that loads everything first and then works on request. After a warm-up repetition of
every setting, which selects the fastest one of each side, the two sides alternate (A B A B); the table shows the median
of the turns' ratios with the smallest and the largest. A peer that is not installed or fails leaves a row with the
reason. Results are written after each case, so an interrupted run keeps its finished cases.

`python -m benchmarks.tables` prints the results, and `--insert` writes some rows into howto/speed.md and README.md.
Goals are printed beside each measured row and are not in the tables. Install the peers first:
`python -m benchmarks.peers.install`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.cases import Bench, Case, Side, all_cases
from benchmarks.tables import RESULTS, insert, row, verdict
from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.parser import parse
from lightrlhf.storage.writing import write_text

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS, REPETITION_SECONDS = 300, 600  # timeouts of a worker
LONG_REPETITION = 3  # seconds; the speed of a setting that takes longer is that of its warm-up
TURNS_SECONDS, LEAST_TURNS = 40, 3  # no further turn starts after this time, but there are at least so many


@dataclass(frozen=True, kw_only=True)
class BenchmarkArgs(Args):
    """Measure speed and memory of this library and its peers on the same work."""

    suite: Literal["cpu", "gpu"]
    """Models of 4M to 135M parameters, most in float32, or of 1B in bf16."""
    only: list[str] = flag([])
    """Names of the cases to measure, other results of this machine are kept; all by default."""
    quick: bool = False
    """Tiny models and one turn: tests the benchmark and measures nothing."""
    repetitions: int | None = at_least(1, None)
    """Turns of each side; 5, or 1 with `quick`."""
    threads: int | None = at_least(1, None)
    """Threads of each side; one per core by default."""
    output_dir: str | None = None
    """Folder of the results; by default `benchmarks/results`, or `benchmarks/.quick` with `quick`."""
    insert: bool = False
    """Measure nothing; write rows of the last results into howto/speed.md and README.md."""


class WorkerFailed(Exception):
    """The reason why a side could not be measured."""


class Worker:
    """The process of one side."""

    def __init__(self, side: Side, log: Path, threads: int) -> None:
        self.side, self.log = side, log
        if not Path(side.command[0]).is_file():
            raise WorkerFailed(f"{side.command[0]} does not exist: not installed")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(ROOT),
        }
        self.process = subprocess.Popen(
            [*side.command, json.dumps(side.job)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w", encoding="utf-8"),
            text=True,
            start_new_session=True,  # so that its own processes can be stopped with it
        )

    def ready(self) -> dict[str, Any]:
        """Wait until everything is loaded; returns the `versions` of its packages, and `resident_bytes`."""
        answer = self._answer(START_SECONDS)
        self._send(signal.SIGSTOP)
        return answer

    def repetition(self) -> dict[str, float]:
        """Seconds, units and peak memory of one repetition. Raises: WorkerFailed.

        Between them the worker is stopped: threads of some spin while they wait.
        """
        self._send(signal.SIGCONT)
        try:
            self.process.stdin.write('{"repetition": 1}\n')
            self.process.stdin.flush()
        except OSError:
            raise WorkerFailed(self._failure()) from None
        answer = self._answer(REPETITION_SECONDS)
        self._send(signal.SIGSTOP)
        return answer

    def stop(self) -> None:
        self._send(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the worker and its processes, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _answer(self, limit: float) -> dict[str, Any]:
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            self.process.wait()
            raise WorkerFailed(self._failure())
        return json.loads(line)

    def _failure(self) -> str:
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "no output")
        return f"{self.side.label} ended with status {self.process.poll()}: {last[:200]}"


# ------------------------------------------------------------------------------------------------------ one case
def compare(case: Case, folder: Path, threads: int, repetitions: int) -> dict[str, Any]:
    """Measure one case; returns its row of `results`."""
    result: dict[str, Any] = {"failed": {}, "tried": {}}
    if not case.together:
        case = replace(case, ours=choose(case, case.ours, folder, threads, result))
        case = replace(case, peers=choose(case, case.peers, folder, threads, result))
    with started([*case.ours, *case.peers], folder, threads) as (workers, failures):
        result["failed"] |= failures
        our_workers = [worker for i, worker in workers.items() if i < len(case.ours)]
        peer_workers = [worker for i, worker in workers.items() if i >= len(case.ours)]
        try:
            ours = fastest(case, our_workers, result)
            if ours is None:
                return result | {"not_measured": "; ".join(result["failed"].values())}
            peer = fastest(case, peer_workers, result)
            turns = case.turns if case.turns and repetitions > 1 else repetitions
            runs = take_turns(ours, peer, turns, case.turns or LEAST_TURNS)
        except WorkerFailed as problem:
            return result | {"not_measured": str(problem)}
    result["versions"] = {"ours": ours.versions}
    result["ours"] = side_result(case, runs["ours"]) | {"label": ours.side.label}
    if peer:
        result["versions"]["peer"] = peer.versions
        result["peer"] = side_result(case, runs["peer"]) | {"label": peer.side.label}
        ratios = [
            ((case.units or run["units"]) / run["seconds"]) / ((case.units or other["units"]) / other["seconds"])
            for run, other in zip(runs["ours"], runs["peer"])
        ]
        result["ratio"], result["turns"] = spread(ratios), len(ratios)
    elif result["failed"]:
        result["not_measured"] = "; ".join(result["failed"].values())
    return result


@contextlib.contextmanager
def started(sides: list[Side], folder: Path, threads: int) -> Iterator[tuple[dict[int, Worker], dict[str, str]]]:
    """Context manager: loaded and waiting workers by number, and the failures of the others; stops them at the end."""
    workers, failures = {}, {}
    for number, side in enumerate(sides):
        try:
            workers[number] = Worker(side, folder / f"worker-{number}.log", threads)
        except WorkerFailed as problem:
            failures[side.label] = str(problem)
    try:
        for number, worker in list(workers.items()):
            try:
                worker.versions = worker.ready()["versions"]
            except WorkerFailed as problem:
                failures[worker.side.label] = str(problem)
                workers.pop(number).stop()
        yield workers, failures
    finally:
        for worker in workers.values():
            worker.stop()


def fastest(case: Case, workers: list[Worker], result: dict[str, Any]) -> Worker | None:
    """A side's fastest setting, by its speed after a warm-up (or in it, if that is long); stops the others.

    Adds the speeds to `result["tried"]` and failures to `result["failed"]`.
    """
    speeds: dict[str, float] = {}
    for worker in workers:
        try:
            run = worker.repetition()
            if run["seconds"] < LONG_REPETITION:
                run = worker.repetition()
        except WorkerFailed as problem:
            result["failed"][worker.side.label] = str(problem)
            continue
        speeds[worker.side.label] = (case.units or run["units"]) / run["seconds"]
    result["tried"] = speeds | result["tried"]
    left = [worker for worker in workers if worker.side.label in speeds]
    best = max(left, key=lambda worker: speeds[worker.side.label], default=None)
    for worker in left:
        if worker is not best:
            worker.stop()
    return best


def choose(case: Case, sides: list[Side], folder: Path, threads: int, result: dict[str, Any]) -> list[Side]:
    """The fastest setting of a side, for a device that cannot hold all of them at once."""
    for side in sides:
        with started([side], folder, threads) as (workers, failed):
            result["failed"] |= failed
            fastest(case, list(workers.values()), result)
    known = [side for side in sides if side.label in result["tried"]]
    return [max(known, key=lambda side: result["tried"][side.label])] if known else []


def take_turns(ours: Worker, peer: Worker | None, repetitions: int, least: int) -> dict[str, list[dict[str, float]]]:
    """Alternating repetitions of both sides: at most `repetitions` of each, and of long ones at least `least`."""
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    began = time.perf_counter()
    for turn in range(repetitions):
        if turn >= least and time.perf_counter() - began > TURNS_SECONDS:
            break
        runs["ours"].append(ours.repetition())
        if peer:
            runs["peer"].append(peer.repetition())
    return runs


def side_result(case: Case, runs: list[dict[str, float]]) -> dict[str, Any]:
    tokens = [run["tokens"] for run in runs if run["tokens"]]
    return ({"tokens": statistics.median(tokens)} if tokens else {}) | {
        "per_second": spread([(case.units or run["units"]) / run["seconds"] for run in runs]),
        "seconds": spread([run["seconds"] for run in runs]),
        "busy": spread([run["busy"] for run in runs]),  # CPU seconds: least affected by load on the machine
        "units": statistics.median([case.units or run["units"] for run in runs]),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# ------------------------------------------------------------------------------------------------- other measures
def measure(case: Case, folder: Path, threads: int, repetitions: int) -> dict[str, Any]:
    """The row of a case of any kind."""
    if case.unavailable:
        return {"not_measured": case.unavailable}
    try:
        if case.prepare:
            case.prepare()
        if case.kind == "start":
            return measure_start(case, threads)
    except subprocess.CalledProcessError as problem:
        lines = (problem.stderr or b"").decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return {"not_measured": f"status {problem.returncode}: {last[:200]}"}
    if case.kind == "memory":
        return measure_memory(case, folder, threads)
    return compare(case, folder, threads, repetitions)


def measure_start(case: Case, threads: int, repetitions: int = 5) -> dict[str, Any]:
    """Seconds until a command ends; the first start is a warm-up."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    seconds = []
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        subprocess.run(case.ours[0].command, cwd=ROOT, env=environment, check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    return {"value": spread(seconds[1:])}


def measure_memory(case: Case, folder: Path, threads: int) -> dict[str, Any]:
    """Peak memory of ours over the other side's, each in its own process after one repetition."""
    peaks = []
    for side in (*case.ours, *case.peers):
        with started([side], folder, threads) as (workers, failures):
            if failures:
                return {"not_measured": failures[side.label]}
            try:
                peaks.append(workers[0].repetition()["peak_bytes"])
            except WorkerFailed as problem:
                return {"not_measured": str(problem)}
    ours, other = peaks
    return {"ratio": spread([ours / other]), "memory": {"ours": ours, "peer": other, "label": case.peers[0].label}}


def machine(threads: int, cuda: bool) -> dict[str, Any]:
    """Description of the machine."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file() and (match := re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE)):
        model = match[1]
    described = {"cpu": model, "cores": os.cpu_count(), "threads": threads, "python": platform.python_version()}
    described["instructions"] = instructions()
    if cuda:
        import torch

        described["gpu"] = torch.cuda.get_device_name()
    return described


def instructions() -> str:
    """Instruction set that decides the speed of matrix products: `avx2`, `avx512-bf16-family26`, ...

    With AVX-512 it has the CPU family, since AMD's family 25 (Zen 4) runs AVX-512 on 256-bit units.
    """
    import torch

    info = Path("/proc/cpuinfo")
    flags = info.read_text() if info.is_file() else ""
    more = [f"-{name}" for name, flag in (("bf16", "avx512_bf16"), ("amx", "amx_bf16")) if flag in flags]
    capability = torch.backends.cpu.get_cpu_capability().lower()
    family = re.search(r"^cpu family\s*: (\d+)", flags, re.MULTILINE)
    if capability == "avx512" and family:
        more.append(f"-family{family[1]}")
    return capability + "".join(more)


def without_bf16(cuda: bool) -> str | None:
    """The reason why bf16 cannot be measured on this machine, or None."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text() if info.is_file() else ""
    if cuda or "avx512_bf16" in flags or "amx_bf16" in flags:
        return None
    return "this CPU has no bf16 instructions"


# ---------------------------------------------------------------------------------------------------- the program
@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(BenchmarkArgs, argv)
    repetitions = args.repetitions or (1 if args.quick else 5)
    folder = Path(args.output_dir or RESULTS.with_name(".quick" if args.quick else "results"))
    if args.insert:
        insert(args.suite, folder)
        return
    import torch

    from benchmarks.roofline import Limits
    from lightrlhf.cpu import enable

    cuda = args.suite == "gpu"
    if cuda and not torch.cuda.is_available():
        raise RunFailure("--suite gpu: not measured (no GPU)")
    threads = args.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    today = datetime.date.today().isoformat()
    results: dict[str, Any] = {
        "suite": args.suite,
        "repetitions": repetitions,
        "quick": args.quick,
        "machine": machine(threads, cuda),
        "cases": {},
    }
    with tempfile.TemporaryDirectory(prefix="benchmark-") as work:
        bench = Bench(Path(work), args.suite, args.quick)
        cases = all_cases(bench, without_bf16(cuda))
        if unknown := [name for name in args.only if name not in cases]:
            raise UsageError(f"--only {unknown[0]} must be one of: {', '.join(cases)}")
        folder.mkdir(parents=True, exist_ok=True)
        kind = "" if cuda else f"-{instructions()}"  # results of one kind of processor say little of another
        file = folder / f"{args.suite}{kind}.json"
        kept = earlier(file, results) if args.only else {}
        enable()  # as the programs do, so the limit is measured on the same products
        limits = {dtype: Limits(bench.device, dtype) for dtype in (torch.float32, torch.bfloat16)}
        for name, build in cases.items():
            if args.only and name not in args.only:
                continue
            case = replace(build(), together=not cuda)
            began = time.perf_counter()
            result = measure(case, Path(work), threads, repetitions)
            if "ours" in result and case.floor:
                dtype = torch.bfloat16 if cuda or case.floor.get("bytes_per_number") == 2 else torch.float32
                floor = limits[dtype].floor(case.floor, result["ours"])
                result["limit_share"] = floor / result["ours"]["seconds"]["median"]
            facts = ("what", "unit", "goal", "limit_goal", "memory_goal", "less_is_better")
            kept[name] = {fact: getattr(case, fact) for fact in facts} | {"date": today} | result
            results["cases"] = {each: kept[each] for each in cases if each in kept}
            write_text(file, json.dumps(results, indent=1))
            print(f"[{time.perf_counter() - began:4.0f} s] {row(kept[name])} {verdict(kept[name])}", flush=True)
    print(f"written to {file}")


def earlier(file: Path, results: dict[str, Any]) -> dict[str, Any]:
    """The cases of an earlier run of the same kind on the same machine."""
    if not file.is_file():
        return {}
    stored = json.loads(file.read_text(encoding="utf-8"))
    same = all(stored[name] == results[name] for name in ("suite", "quick", "machine"))
    return stored["cases"] if same else {}


if __name__ == "__main__":
    main()
