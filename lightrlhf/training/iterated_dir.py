"""The experiment dir of an iterated program: one for all iterations, new or resumed.

The policy of each finished iteration is linked as a checkpoint of the experiment dir, which therefore is all that the
next stage of a pipeline needs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import at_least
from lightrlhf.cli.groups import DataArgs, RolloutLogArgs, ServerArgs, StartArgs, TrainArgs
from lightrlhf.cli.hub import is_gguf
from lightrlhf.cli.latest import LATEST
from lightrlhf.cli.parser import to_dict
from lightrlhf.cli.stored_flags import flags_of
from lightrlhf.models.loading import find_device
from lightrlhf.models.names import base_name, resolve, starting_model
from lightrlhf.models.quantisation import check_stored_quantisation
from lightrlhf.storage import run_dir
from lightrlhf.storage.checkpoint import checkpoint_path, checkpoints, set_aside
from lightrlhf.storage.locks import LOCK, lock_folder
from lightrlhf.storage.seals import MANIFEST, damage, seal
from lightrlhf.storage.writing import remove_empty, rename, sync_folder, write_text, writing
from lightrlhf.training.beginning import describe_rows
from lightrlhf.training.distributed import training_device
from lightrlhf.training.provenance import check_given
from lightrlhf.training.resume import read_checkpoint
from lightrlhf.training.sources import RESTORE, find_changed_source, sources_of
from lightrlhf.training.summary import describe_device, describe_model, describe_results, lines

NO_EFFECT = ("save_minutes", "save_interval", "keep_last", "log_interval")  # any value gives the same models
FREE = (
    "resume_from",
    "iterations",
    "stage",
    "dry_run",
    "rollout_server",
    *NO_EFFECT,
)  # may change when a run is resumed


@dataclass(frozen=True, kw_only=True)
class IteratedArgs(TrainArgs, DataArgs, StartArgs, ServerArgs, RolloutLogArgs):
    """Iterations.

    The last base of a program's flags, for it declares the flags of all training programs, too.
    """

    iterations: int = at_least(1, 3)
    """Number of iterations, each from the policy of the previous one."""

    def _check(self) -> None:
        find_device(self.accelerator)
        if self.num_nodes > 1:  # all stages but training run on one
            raise ValueError(f"--num_nodes {self.num_nodes}: iterations run on one machine; use --devices")

    def num_steps(self, num_rows: int) -> int:
        """Training steps of an iteration with this many rows, as `Run.num_steps` counts them."""
        every = math.ceil(num_rows / (self.mini_batch_size * self.devices)) * (self.epochs or 1)
        return self.max_steps or every if self.epochs is None else min(every, self.max_steps or every)


def open_directory(
    args: IteratedArgs,
    program: str,
    data: str,
    work: str,
    given: Mapping[str, str] | None = None,
    rows: Sequence[Any] | None = None,
) -> tuple[Path, str]:
    """Begin or resume an experiment dir and print the banner; returns it and the initial policy of its `args.json`.

    Resumes the directory of `--resume_from`, or an `--output_dir` that already is an experiment dir. data: path whose
    last two parts name the experiment dir; work: the work of an iteration, in words; given: objects that `train` was
    called with; rows: the training rows that iterations draw from, None for a stage that reads none.
    Raises: UsageError when it cannot be written, was started with other flags, objects, rows or sources, or the policy
    is not a folder.
    """
    training_device(args)  # of a stage that trains, before any other
    output_dir = args.output_dir
    started = args.resume_from or (output_dir if output_dir and (Path(output_dir) / "args.json").is_file() else None)
    if started:
        directory = Path(started)
        source = f"{'--resume_from' if args.resume_from else '--output_dir'} {started}"
        initial = _check_resumed(args, program, given or {}, source, directory, rows)
        if not (directory / MANIFEST).exists():  # a kill came before the seal
            seal(directory, ["args.json"])
        reopen_damaged_policy(directory)
        print_banner(args, data, work, directory)
        return directory, as_given(args, initial)
    initial = initial_policy(args)
    if output_dir:
        if Path(output_dir).is_dir():
            run_dir.check_vacant(Path(output_dir))
        flag = f"--output_dir {output_dir}"
        directory = run_dir.make_parent(Path(output_dir), flag)
    else:
        flag = f"--log_dir {args.log_dir}"
        directory = run_dir.new_run_dir(path_of(args, data), flag)
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


@contextmanager
def trial_directory(args: IteratedArgs, program: str, data: str, work: str) -> Iterator[tuple[Path, str]]:
    """Context manager of a dry run: a temporary folder in place of the experiment dir, and the initial policy.

    Prints the banner; data and work: see `open_directory`, whose errors it raises, too.
    """
    training_device(args)
    initial, path = initial_policy(args), path_of(args, data)
    if args.output_dir and path.is_dir():
        run_dir.check_vacant(path)
    run_dir.check_parent(path, "--output_dir" if args.output_dir else "--log_dir")
    with TemporaryDirectory(prefix="lightrlhf-dry-run-") as folder:
        stored = {**to_dict(args), "program": program, "initial": initial}
        write_text(Path(folder) / "args.json", json.dumps(stored, indent=1))
        print_banner(args, data, work, path)
        yield Path(folder), as_given(args, initial)


def path_of(args: IteratedArgs, data: str) -> Path:
    """The experiment dir, or the folder that gets it; data: path whose last two parts name it."""
    return Path(args.output_dir or Path(args.log_dir, args.experiment_name, *Path(data).resolve().parts[-2:]))


def initial_policy(args: IteratedArgs) -> str:
    """The folder of the policy that a new run starts from.

    Raises: UsageError when there is no such folder, or its weights cannot be trained as the flags say.
    """
    name, flag = starting_model(args)
    initial = resolve(name, flag)  # the newest checkpoint now; later ones do not change the run
    if not Path(initial).is_dir():
        raise UsageError(f"{flag} {name} is loaded in each iteration and must be a folder; train lightrlhf.sft first")
    check_stored_quantisation(base_name(initial, flag) or initial, flag, args)  # before any work is done
    return initial


def as_given(args: IteratedArgs, initial: str) -> str:
    """The initial policy as cards name it: its GGUF file, if that still means the same weights, else its folder."""
    name, flag = starting_model(args)
    with suppress(UsageError):  # the file is gone; its converted folder may be there
        return name if is_gguf(name) and resolve(name, flag) == initial else initial
    return initial


def print_banner(args: IteratedArgs, data: str, work: str, directory: Path) -> None:
    """Print the model, data, device, number of iterations and where the results go."""
    done = 0 if args.dry_run else len(checkpoints(directory))
    fields = {
        "model": describe_model(args, (), {}),
        "data": data,
        "device": describe_device(find_device(args.accelerator), args, args.devices),
        "iterations": f"{args.iterations} of {work}" + (f"; resumes at iteration {done + 1}" if done else ""),
        "results": describe_results(args, directory) if args.dry_run else str(directory),
    }
    print(lines(fields), flush=True)


# --------------------------------------------------------------------------------------------------------- resumed
def _check_resumed(
    args: IteratedArgs, program: str, given: Mapping[str, str], source: str, directory: Path, rows: Sequence[Any] | None
) -> str:
    """The initial policy of a run. Raises: UsageError when these flags, objects, rows or sources do not continue it."""
    stored = run_dir.read_args(str(directory))
    if stored.get("program") != program:
        raise UsageError(f"{source} is a run of {stored.get('program')}, not of {program}")
    flags = flags_of(stored)
    divided = {"iterations"} if flags.get("prompts_per_iteration", 0) is None else set()  # the prompts, evenly
    changed = [k for k, v in to_dict(args).items() if k not in {*FREE} - divided and v != flags.get(k)]
    if changed:
        remedy = f"start a new run, or go on as it was by --resume_from {directory} alone"
        raise UsageError(f"{source}: {changed[0]} was {flags.get(changed[0])} there; {remedy}")
    check_given(stored.get("given", {}), given, source)
    if "initial" not in stored or "began" not in stored:
        path = directory / "args.json"
        raise UsageError(f"{path} does not say with which policy and data the run began; restore it")
    before = stored["began"]
    now = describe_rows(rows or (), str(before["rows"]))
    remedy = f"{RESTORE}, or start a new run from one of its policies"
    if rows is not None and before["rows"] not in (None, now):  # a stage that reads no rows noted none
        raise UsageError(f"{source}: the content of {args.data_dir} is {now}, and was {before['rows']}; {remedy}")
    if found := find_changed_source(before["sources"], sources_of(args, given, str(stored["initial"]))):
        problem, own = found
        raise UsageError(f"{source}: {problem}; {own or RESTORE}, or start a new run from one of its policies")
    return str(stored["initial"])


def reopen_damaged_policy(directory: Path) -> None:
    """Go on with the training of the last iteration from an earlier checkpoint if its policy's is damaged.

    Its responses and scores stay; a line says so.
    """
    policies = [folder / "policy" for folder in run_dir.iterations(directory).values()]
    policies = [policy for policy in policies if policy.is_dir()]
    newest = checkpoints(policies[-1])[-1:] if policies else []
    problem = damage(newest[0]) if newest else None
    if problem:
        print(f"note: {newest[0]} is damaged ({problem}); the training of this iteration goes on from before it")
        training = policies[-1].with_name("training")
        training.mkdir(exist_ok=True)
        policies[-1].rename(training / "reopened")


@contextmanager
def keep_if_started(args: IteratedArgs, directory: Path) -> Iterator[None]:
    """Context manager: link an experiment dir as `latest`. If its first step is refused, a new one, which holds
    only its arguments, is removed, and the previous link is restored."""
    link = directory.with_name(LATEST)
    before = directory.with_name(os.readlink(link)) if link.is_symlink() else None
    run_dir.link_latest(directory, resumed=bool(args.resume_from))
    try:
        yield
    except UsageError:
        if not args.resume_from and {path.name for path in directory.iterdir()} <= {"args.json", MANIFEST, LOCK}:
            shutil.rmtree(directory)
            if before and before.is_dir():
                run_dir.link_latest(before)
            elif link.is_symlink() and not link.exists():
                link.unlink()
        raise


# ------------------------------------------------------------------------------------- training runs of iterations
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
        run_dir.discard_runs(training)
    return resumable


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
