"""Sweep over flags and seeds: train a program for each combination of a file, then show a table and a picture.

`lightrlhf sweep FILE.yaml` runs a grid of flags of any training program (the file: `cli/sweep_file.py`),
each run in a separate process, whose memory is free when it ends and whose failure ends nothing else. What is done is
read from the folder, so the same command goes on after a kill, retries what failed, and adds values and seeds that were
added to the file.

Left out: several runs at once (`--jobs`), which share the memory and the time of one device; with several devices, run
one sweep on each, with some of the seeds. Early stopping of bad runs, which needs a schedule that all combinations
share.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightrlhf.cli.errors import TERMINATED, RunFailure, UsageError, one_line_errors
from lightrlhf.cli.fields import Args, check_args, flag
from lightrlhf.cli.parser import parse, to_dict
from lightrlhf.cli.sweep_file import Sweep, non_default_words, parse_words, read_sweep, text_of
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.curves import NO_SETTINGS, columns, differences
from lightrlhf.storage.destinations import check_destination
from lightrlhf.storage.jsonl import Row, read_jsonl, write_jsonl
from lightrlhf.storage.locks import LOCK, lock_folder
from lightrlhf.storage.run_dir import discard_runs, is_experiment_dir, read_logged
from lightrlhf.storage.sweep_results import PICTURE, draw, show, summarise
from lightrlhf.storage.writing import make_folder, writing
from lightrlhf.training.signals import StopSignals, Terminated
from lightrlhf.training.summary import lines

RESULTS = "results.jsonl"
OWN = ("output_dir", "resume_from")  # flags in which runs of one setting differ
PATIENCE = 60  # seconds that an interrupted run has to end by itself
LARGEST = 1e300  # of the numbers of a row, so that their sums are finite
TAIL = 65536  # bytes at the end of a log, in which its last line is looked for


@dataclass(frozen=True, kw_only=True)
class SweepArgs(Args):
    """Train a program for each combination of flags and each seed of a file."""

    sweep_file: str = flag(show="first", positional=True)
    """YAML file with program, flags, grid, seeds and metric; may be given without its flag."""
    output_dir: str | None = None
    """Folder of all runs and results. Default: `logs/sweeps/` plus the file's name."""


class Planned(NamedTuple):
    """A run of a sweep; name: its folder within the sweep's; args: all of its program's flags."""

    name: str
    combination: str
    folder: Path
    args: Any


def run(args: SweepArgs) -> list[dict[str, Any]]:
    """Train the remaining runs of a sweep; returns one row of results per combination, best first.

    Raises: UsageError, before anything is trained, for an invalid file or a folder of other settings; RunFailure when
        runs have failed, after the others and the table, or when the metric is not logged; Terminated when none has
        failed, but a signal has stopped some or the sweep.
    """
    check_args(args, SweepArgs)
    sweep = read_sweep(args.sweep_file)
    folder = Path(args.output_dir or Path("logs", "sweeps", Path(args.sweep_file).stem))
    planned = [
        Planned(f"{one.name}/seed-{seed}", one.name, folder / one.name / f"seed-{seed}", replace(one.args, seed=seed))
        for one in sweep.combinations
        for seed in sweep.seeds
    ]
    check_destination(folder, "--output_dir")
    with lock_folder(folder, "--output_dir"):
        check_settings(sweep, planned, folder)
        rows = train_all(sweep, planned, folder)
        own = [rows[one.name] for one in planned]
        results = summarise(sweep, own)
        show(sweep, results)
        if others := len(rows) - len(own):
            print(f"note: {others} runs in {folder} have values that are no longer in the file; they are left out")
        print(f"wrote {folder / RESULTS}")
        if any(one["seeds"] for one in results):
            draw(sweep, own, results, folder)
            print(f"wrote {folder / PICTURE}")
    if failed := [row["run"] for row in own if row["status"] == "failed"]:
        raise RunFailure(
            f"{len(failed)} of {len(own)} runs failed: {', '.join(failed)}; see the .log next to each in {folder}; "
            "the same command retries them"
        )
    if stopped := [row["run"] for row in own if row["status"] == "interrupted"]:
        names = ", ".join(stopped)
        print(f"{len(stopped)} of {len(own)} runs were stopped: {names}; the same command continues them")
        raise Terminated
    return results


# ------------------------------------------------------------------------------------------------------------- the runs
def check_settings(sweep: Sweep, planned: Sequence[Planned], folder: Path) -> None:
    """Compare the flags of the runs in the folder with the file's, so that no two settings are mixed.

    A planned run must have all flags as planned; one of values that the file no longer has, those that all planned runs
    share. Raises: UsageError naming the flag, or the folder when it holds something else than a sweep.
    """
    names = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
    if names and not any(name.startswith(RESULTS) for name in names):
        raise UsageError(f"--output_dir {folder} contains {names[0]}, not a sweep; name another folder")
    by_folder = {one.folder: to_dict(one.args) for one in planned}
    everyone = list(by_folder.values())
    swept = sweep.combinations[0].values.keys() | differences(everyone).keys()
    shared = {name: value for name, value in everyone[0].items() if name not in {*swept, *OWN, "seed"}}
    for path in sorted(folder.glob("*/seed-*/args.json")):
        before = to_dict(parse_words(type(planned[0].args), ["--resume_from", str(path.parent)]))
        for name, value in by_folder.get(path.parent, shared).items():
            if name not in {*OWN, *NO_SETTINGS} - {"seed"} and before[name] != value:
                raise UsageError(
                    f"{path.parent} was trained with {name} {text_of(before[name])}, now it is {text_of(value)}; "
                    "name another --output_dir, or restore the value"
                )


def train_all(sweep: Sweep, planned: Sequence[Planned], folder: Path) -> dict[str, Row]:
    """Train the runs that are not finished; returns the row of each run by name, also of those that are not planned.

    Raises: RunFailure when a finished run has not logged the metric.
    """
    from tqdm import tqdm

    path = folder / RESULTS
    found = read_state(path) if path.is_file() else {}
    begun = [one for one in planned if is_experiment_dir(str(one.folder))]
    rows = {one.name: new_row(sweep, one) for one in planned} | found
    done = [one for one in begun if rows[one.name]["status"] == "finished"]
    for one in done:
        rows[one.name] |= scores(sweep, one)
    counts = f"{len(sweep.combinations)} of flags by {len(sweep.seeds)} of seeds"
    state = f"{len(done)} finished, {len(begun) - len(done)} begun"
    fields = {"program": f"lightrlhf.{sweep.program}", "runs": f"{len(planned)}, {counts}; {state}"}
    print(lines(fields | {"results": str(folder)}), flush=True)
    write_jsonl(path, rows.values())
    with tqdm(total=len(planned), initial=len(done), desc="sweep", unit="run") as bar, end_on_signals():
        for one in planned:
            if one in done:
                continue
            bar.set_postfix_str(one.name)
            row, started = rows[one.name], time.perf_counter()
            try:
                row["status"], row["error"] = train_one(sweep.program, one)
                if row["status"] == "finished":
                    row |= scores(sweep, one)
                elif row["status"] == "failed":
                    tqdm.write(f"{one.name} failed: {row['error']}", file=sys.stderr)
                else:
                    tqdm.write(f"{one.name} was stopped by a signal", file=sys.stderr)
            except (KeyboardInterrupt, Terminated):
                row["status"], row["error"] = "interrupted", None
                tqdm.write(f"{one.name} is stopped; the same command continues it", file=sys.stderr)
                raise
            finally:
                row["seconds"] += time.perf_counter() - started
                write_jsonl(path, rows.values())
            bar.update()
    return rows


def read_state(path: Path) -> dict[str, Row]:
    """The rows of the runs of a sweep by name. Raises: UsageError for a row that no sweep has written."""
    found = {}
    for number, row in enumerate(read_jsonl(path, ("run", "combination", "status", "seconds")), start=1):
        numbers = ("seconds", "final", "best") if row["status"] == "finished" else ("seconds",)
        wrong = [name for name in ("run", "combination", "status") if not isinstance(row[name], str)]
        wrong += [name for name in numbers if name in row and not is_number(row[name])]
        if not wrong and not row["run"].startswith(f"{row['combination']}/seed-"):
            wrong = ["combination"]
        if wrong:
            what = f"{wrong[0]} {row.get(wrong[0])!r}"
            raise UsageError(f"{path}: row {number} has {what:.100}; restore the file, or name another folder")
        found[row["run"]] = row
    return found


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST


def new_row(sweep: Sweep, one: Planned) -> Row:
    """The row of a run that has not begun."""
    values = {name: getattr(one.args, name) for name in sweep.combinations[0].values}
    own = {"run": one.name, "combination": one.combination, **values, "seed": one.args.seed}
    return own | {"status": "new", "error": None, "seconds": 0.0}


def train_one(program: str, one: Planned) -> tuple[str, str | None]:
    """Train a run in a process, from its last checkpoint if there is one; returns its status, and why it failed."""
    with writing(one.folder.parent):
        make_folder(one.folder.parent)
    if one.folder.exists():
        lock_folder(one.folder, wait=True).release()  # the process of a sweep that was killed may still train there
    if is_experiment_dir(str(one.folder)) and not (checkpoints(one.folder) or hasattr(one.args, "iterations")):
        discard_runs(one.folder)  # has nothing to resume; iterative programs resume from the files of their stages
    if is_experiment_dir(str(one.folder)):
        words = ["--resume_from", str(one.folder)]
    else:
        words = [*non_default_words(one.args), "--output_dir", str(one.folder)]
    log = one.folder.with_name(f"{one.folder.name}.log")  # the folder must be empty when the run starts
    status = run_child([*program_command(program), *words], log)
    if status in (TERMINATED, -signal.SIGTERM):  # it was saved, or had nothing to save yet
        return "interrupted", None
    return ("failed", why_failed(status, log)) if status else ("finished", None)


def program_command(program: str) -> list[str]:
    return [sys.executable, "-m", f"lightrlhf.{program}"]


def run_child(command: Sequence[str], log: Path) -> int:
    """Exit status of a process whose output is appended to a file. An interruption is forwarded to it once.

    A signal of a batch system is forwarded as well; the process then has all the time that the system leaves to save.

    The process has its own session, so that Ctrl-C reaches it, and the ranks that it starts, from here alone.
    """
    with writing(log), log.open("ab") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return child.wait()
    except KeyboardInterrupt:
        os.killpg(child.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE)
        raise
    except Terminated:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait()
        raise
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextmanager
def end_on_signals() -> Iterator[None]:
    """Context manager: SIGTERM and SIGUSR1 raise Terminated; SIGHUP, as closed terminals send it, acts as Ctrl-C does.

    Where SIGINT is ignored, as shells have it for jobs in the background of a script, a run must not inherit that.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
        before = {number: signal.SIG_DFL for number in numbers if signal.getsignal(number) == signal.SIG_DFL}
        before |= {signal.SIGINT: signal.SIG_IGN} if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else {}
    for number in before:
        signal.signal(number, (lambda *_: None) if number == signal.SIGINT else signal.default_int_handler)
    signals = StopSignals("; the same command goes on")
    try:
        yield
    finally:
        signals.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def why_failed(status: int, log: Path) -> str:
    """The signal that ended a process, or the last line that it printed."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        printed = file.read().decode("utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(printed) if line.strip()), "$ ")
    return f"exit status {status}" if last.startswith("$ ") else re.sub(r"^(.*?: )?error: ", "", last)


def scores(sweep: Sweep, one: Planned) -> Row:
    """Last and best value of the metric of a finished run, and the step of the best. Raises: RunFailure without one."""
    metrics = columns(read_logged(one.folder / "metrics.jsonl"))
    if sweep.metric not in metrics:
        known = ", ".join(name for name in metrics if not name.startswith("time/")) or "none"
        raise RunFailure(
            f"metric {sweep.metric} is not logged by lightrlhf.{sweep.program} in {one.folder}; it logs {known}"
        )
    steps, values = metrics[sweep.metric]
    at = values.argmin() if sweep.lower_is_better else values.argmax()
    best = {"best": float(values[at]), "best_step": int(steps[at])}
    return {"metric": sweep.metric, "final": float(values[-1]), "final_step": int(steps[-1]), **best}


@one_line_errors
def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the program; returns the rows of the table."""
    return run(parse(SweepArgs, argv))


if __name__ == "__main__":
    main()
