"""Iterated programs: one experiment dir for all iterations, whose stages leave files.

Finished stages are skipped, so an interrupted run resumes in its directory. The policy of each finished iteration is
shown as a checkpoint of the experiment dir, which therefore is all that the next stage of a pipeline needs.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from lightrlhf.cli.args import is_gguf
from lightrlhf.cli.errors import TERMINATED, RunFailure, UsageError, one_line_errors
from lightrlhf.cli.latest import LATEST
from lightrlhf.cli.old_flags import flags_of, update_names
from lightrlhf.cli.parser import to_dict
from lightrlhf.data.splits import Row
from lightrlhf.models.loading import find_device
from lightrlhf.models.names import base_name, resolve, starting_model
from lightrlhf.models.quantisation import check_stored_quantisation
from lightrlhf.models.saving import upload
from lightrlhf.storage.checkpoint import MANIFEST, checkpoint_path, checkpoints, damage, set_aside, write_text
from lightrlhf.storage.locks import LOCK, lock_folder
from lightrlhf.storage.results import in_words
from lightrlhf.storage.run_dir import (
    check_parent,
    check_vacant,
    discard_runs,
    iterations,
    link_latest,
    make_parent,
    new_run_dir,
    stored_args,
)
from lightrlhf.storage.seals import seal
from lightrlhf.storage.writing import remove_empty, rename, sync_folder, writing
from lightrlhf.training.beginning import OLDER, describe_rows
from lightrlhf.training.distributed import training_device
from lightrlhf.training.dry_run import planned_results, texts_of_sample
from lightrlhf.training.provenance import check_given
from lightrlhf.training.resume import read_checkpoint
from lightrlhf.training.signals import NAMES, StopSignals, Terminated
from lightrlhf.training.sources import RESTORE, changed_source, sources_of
from lightrlhf.training.summary import Rows, describe_device, describe_model, lines, peak_memory, print_summary

SERVERS = ("rollout_server", "exchange_dir", "request_timeout", "health_timeout", "max_sampling_kl")
NO_EFFECT = ("save_minutes", "save_interval", "keep_last", "log_interval")  # any value gives the same models
# flags that may change when a run is resumed; older runs do not have all of them
FREE = ("resume_from", "iterations", "stage", "dry_run", *NO_EFFECT, *SERVERS)
Args = TypeVar("Args")
Result = TypeVar("Result")


# ----------------------------------------------------------------------------------------------- the experiment dir
def open_directory(
    args: Any,
    program: str,
    data: str,
    work: str,
    given: dict[str, str] | None = None,
    old_name: str | None = None,
    rows: Sequence[Any] | None = None,
) -> tuple[Path, str]:
    """The experiment dir, new or resumed, and the initial policy, which `args.json` records; prints the banner.

    Resumed is the directory of `--resume_from`, or an `--output_dir` that already is an experiment dir. data: path
    whose last two parts name the experiment dir; work: what an iteration is of, in words; given: objects that `train`
    was called with; old_name: of the program in older releases; rows: the training rows that iterations draw from; None
    for a stage that reads none.
    Raises: UsageError when it cannot be written, was started with other flags, objects, rows or sources, or the policy
    is no folder.
    """
    training_device(args)  # of a stage that trains, before any other
    output_dir = args.output_dir
    started = args.resume_from or (output_dir if output_dir and (Path(output_dir) / "args.json").is_file() else None)
    if started:
        source = f"{'--resume_from' if args.resume_from else '--output_dir'} {started}"
        initial = _check_resumed(args, (program, old_name or program), given or {}, source, Path(started), rows)
        if not (Path(started) / MANIFEST).exists():  # a kill came before the seal
            seal(Path(started), ["args.json"])
        reopen_damaged_policy(Path(started))
        print_banner(args, data, work, Path(started))
        return Path(started), as_given(args, initial)
    initial = initial_policy(args)
    if output_dir:
        if Path(output_dir).is_dir():
            check_vacant(Path(output_dir))
        flag, directory = f"--output_dir {output_dir}", make_parent(Path(output_dir), f"--output_dir {output_dir}")
    else:
        flag = f"--log_dir {args.log_dir}"
        directory = new_run_dir(place_of(args, data), flag)
    stored = {**to_dict(args), "program": program, "initial": initial} | ({"given": given} if given else {})
    stored["began"] = {
        "rows": None if rows is None else describe_rows(rows),
        "sources": sources_of(args, given or {}, initial),
    }
    with writing(flag), lock_folder(directory):
        write_text(directory / "args.json", json.dumps(stored, indent=1))
        seal(directory, ["args.json"])
    print_banner(args, data, work, directory)
    return directory, as_given(args, initial)


def initial_policy(args: Any) -> str:
    """The folder of the policy that a new run starts from.

    Raises: UsageError when it is none, or holds weights that cannot be trained as the flags say.
    """
    name, flag = starting_model(args)
    initial = resolve(name, flag)  # the newest checkpoint now; later ones do not change the run
    if not Path(initial).is_dir():
        raise UsageError(f"{flag} {name} is loaded in each iteration and must be a folder; train lightrlhf.sft first")
    check_stored_quantisation(base_name(initial, flag) or initial, flag, args)  # before any work is done
    return initial


@contextmanager
def trial_directory(args: Any, program: str, data: str, work: str) -> Iterator[tuple[Path, str]]:
    """Context manager of a dry run: a temporary folder in place of the experiment dir, and the initial policy.

    Prints the banner; data and work: see `open_directory`, whose errors it raises, too.
    """
    training_device(args)
    initial, place = initial_policy(args), place_of(args, data)
    if args.output_dir and place.is_dir():
        check_vacant(place)
    check_parent(place, "--output_dir" if args.output_dir else "--log_dir")
    with TemporaryDirectory(prefix="lightrlhf-dry-run-") as folder:
        stored = {**to_dict(args), "program": program, "initial": initial}
        write_text(Path(folder) / "args.json", json.dumps(stored, indent=1))
        print_banner(args, data, work, place)
        yield Path(folder), as_given(args, initial)


def place_of(args: Any, data: str) -> Path:
    """The experiment dir, or the folder that gets it; data: path whose last two parts name it."""
    return Path(args.output_dir or Path(args.log_dir, args.experiment_name, *Path(data).resolve().parts[-2:]))


def steps_of_iteration(args: Any, num_rows: int) -> int:
    """Steps of the training of an iteration on so many rows, as `Run.num_steps` counts them."""
    every = math.ceil(num_rows / (args.mini_batch_size * args.devices)) * (args.epochs or 1)
    return args.max_steps or every if args.epochs is None else min(every, args.max_steps or every)


def print_trial(args: Any, seconds: float, tried: int, of_all: int, what: str, sample: Row, tokenizer: Any) -> None:
    """Print the first sample of a dry run, and what the sampling of an iteration would take by that of a part of it.

    what: is sampled, in words; sample: a row as in `rollouts.jsonl`.
    """
    print("\n".join(texts_of_sample(sample, tokenizer)))
    whole = seconds * of_all / tried
    number = args.iterations
    print(
        f"\nsampling and scoring took {seconds:.1f} s for {tried:,} {what}, loading included; the {of_all:,} of an "
        f"iteration take {in_words(whole)} or less, {number:,} iterations {in_words(number * whole)}, without "
        "evaluations\n",
        flush=True,
    )


def print_banner(args: Any, data: str, work: str, directory: Path) -> None:
    """Print what is trained on what, where and for how many iterations."""
    done = 0 if args.dry_run else len(checkpoints(directory))
    fields = {
        "model": describe_model(args, (), {}),
        "data": data,
        "device": describe_device(find_device(args.accelerator), args, args.devices),
        "iterations": f"{args.iterations} of {work}" + (f"; resumes at iteration {done + 1}" if done else ""),
        "results": planned_results(args, directory) if args.dry_run else str(directory),
    }
    print(lines(fields), flush=True)


def as_given(args: Any, initial: str) -> str:
    """The initial policy by the name of its GGUF file, which cards show, while that still means the same weights."""
    name, flag = starting_model(args)
    with suppress(UsageError):  # the file is gone; what it was converted into may be there
        return name if is_gguf(name) and resolve(name, flag) == initial else initial
    return initial


def _check_resumed(
    args: Any,
    programs: tuple[str, str],
    given: dict[str, str],
    source: str,
    directory: Path,
    rows: Sequence[Any] | None,
) -> str:
    """The initial policy of a run, checked to be resumable with these flags, objects and rows."""
    stored = stored_args(str(directory))
    if stored.get("program") not in programs:
        raise UsageError(f"{source} is a run of {stored.get('program')}, not of {programs[0]}")
    flags = update_names(type(args), flags_of(stored), source)
    changed = [k for k, v in to_dict(args).items() if k not in FREE and v != flags.get(k)]
    if changed:
        remedy = f"start a new run, or go on as it was by --resume_from {directory} alone"
        raise UsageError(f"{source}: {changed[0]} was {flags.get(changed[0])} there; {remedy}")
    check_given(stored.get("given", {}), given, source)
    if "initial" not in stored:
        raise UsageError(f"{directory / 'args.json'} does not say which policy the run began with; restore it")
    _check_began(args, stored, given, source, rows)
    return str(stored["initial"])


def _check_began(
    args: Any, stored: dict[str, Any], given: dict[str, str], source: str, rows: Sequence[Any] | None
) -> None:
    """Raises: UsageError when the rows or the sources of a run have changed since it began."""
    if (began := stored.get("began")) is None:
        print(OLDER)
        return
    now, problem, remedy = describe_rows(rows or ()), "", ""
    if rows is not None and began["rows"] not in (None, now):  # a stage that reads no rows noted none
        problem = f"the content of {getattr(args, 'data_dir', 'the data')} is {now}, and was {began['rows']}"
    elif changed := changed_source(began["sources"], sources_of(args, given, str(stored["initial"]))):
        problem, remedy = changed
    if problem:
        raise UsageError(f"{source}: {problem}; {remedy or RESTORE}, or start a new run from one of its policies")


def find_started_run(folder: Path) -> str | None:
    """The training run of an iteration that can be resumed; one without a checkpoint is removed.

    One whose checkpoints are all damaged is renamed to `damaged-training`, one with files of others to
    `failed-training`, and a line says so.
    """
    training = folder / "training"
    runs = [path.parent for path in training.rglob("args.json")]
    resumable = next((str(run) for run in runs if any(read_checkpoint(one)[0] for one in checkpoints(run))), None)
    if resumable is None and any(map(checkpoints, runs)):
        kept = set_aside(training)
        print(f"note: no checkpoint of {training} is good; training starts again, and they are kept as {kept}")
    elif resumable is None:
        discard_runs(training)
    return resumable


def reopen_damaged_policy(directory: Path) -> None:
    """Go on with the training of the last iteration from an earlier checkpoint if that of its policy is damaged.

    What was generated and scored stays; a line says so.
    """
    policies = [folder / "policy" for folder in iterations(directory).values() if (folder / "policy").is_dir()]
    newest = checkpoints(policies[-1])[-1:] if policies else []
    problem = damage(newest[0]) if newest else None
    if problem:
        print(f"note: {newest[0]} is damaged ({problem}); the training of this iteration goes on from before it")
        training = policies[-1].with_name("training")
        training.mkdir(exist_ok=True)
        policies[-1].rename(training / "reopened")


def keep_policy(folder: Path) -> None:
    """Move the finished training run of an iteration to its `policy/`."""
    (run,) = [path.parent for path in (folder / "training").rglob("args.json")]
    with writing(folder / "policy"):
        rename(run, folder / "policy")
        remove_empty(folder / "training")


def link_checkpoint(directory: Path, number: int, policy: str) -> None:
    """Link an iteration's policy as a checkpoint of the experiment dir."""
    link = checkpoint_path(directory, number)
    if not link.is_symlink():
        with writing(link):
            link.symlink_to(Path(policy).resolve().relative_to(directory.resolve()))
            sync_folder(directory)


def mean(values: Iterable[float]) -> float:
    """Mean of numbers; 0 of none."""
    numbers = [float(value) for value in values]
    return sum(numbers) / max(len(numbers), 1)


@contextmanager
def kept_if_started(args: Any, directory: Path) -> Iterator[None]:
    """Context manager: link an experiment dir as `latest`. If its first step is refused, a new one, which holds
    only its arguments, is removed, and the previous link is restored."""
    link = directory.with_name(LATEST)
    before = directory.with_name(os.readlink(link)) if link.is_symlink() else None
    link_latest(directory, resumed=bool(args.resume_from))
    try:
        yield
    except UsageError:
        if not args.resume_from and {path.name for path in directory.iterdir()} <= {"args.json", MANIFEST, LOCK}:
            shutil.rmtree(directory)
            if before and before.is_dir():
                link_latest(before)
            elif link.is_symlink() and not link.exists():
                link.unlink()
        raise


def finish(args: Any, directory: Path, left: str, started: float, rows: Rows = ()) -> Path:
    """Upload the last policy if requested, and print that the run is finished, or in one line what is left of it.

    left: stages and iterations that were not run; started: when this process began, by `time.perf_counter`; rows: of
    `metrics.jsonl`, for a table. Raises: RunFailure when the upload fails.
    """
    done = len(checkpoints(directory))
    if left:
        print(f"{done} of {args.iterations} iterations done, left: {left}; --resume_from {directory} does them")
        return directory
    memory = peak_memory(find_device(args.accelerator)) if args.devices == 1 else 0.0  # else of other processes
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    print_summary("policies of the iterations", directory, rows, memory, names)
    print(f"finished in {time.perf_counter() - started:.0f} s: {directory}")
    if args.push_to_hub and done:
        policy = checkpoints(directory)[-1].resolve()
        upload(policy, args.push_to_hub, getattr(torch, args.save_dtype))
        print(f"uploaded {policy} to {args.push_to_hub}")
    return directory


# ---------------------------------------------------------------------------------------------------------- stages
def shared_flags(args: Any, args_class: type) -> dict[str, Any]:
    """The flags that `args_class` has too, with their values in `args`."""
    names = {field.name for field in dataclasses.fields(args_class)}
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.name in names}


def check_one_machine(args: Any) -> None:
    """Raises: ValueError when several machines are requested: all stages but training run on one."""
    if args.num_nodes > 1:
        raise ValueError(f"--num_nodes {args.num_nodes}: iterations run on one machine; use --devices")


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
def stopped_by_signals(directory: Path) -> Iterator[None]:
    """Context manager: SIGTERM and SIGUSR1 end the stages, whose files a resumed run reuses. Raises: Terminated.

    A training run inside a stage has its own handlers, which save it.
    """
    signals = StopSignals(f"; go on by --resume_from {directory}")
    try:
        yield
    finally:
        signals.close()


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
