"""What programs share that repeat their stages: one experiment dir for all iterations, whose stages leave files.

What is there is not done again, so the same directory is opened after a kill. A finished iteration's policy is a
checkpoint of the whole, so that the directory is all the next stage needs.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.parser import to_dict
from lightrlhf.models.names import base_name, resolve, starting_model
from lightrlhf.models.quantisation import check_stored_quantisation
from lightrlhf.storage.checkpoint import checkpoints, write_text

FREE = ("resume_from", "iterations", "stage")  # may be others when a run goes on


def open_directory(args: Any, program: str) -> tuple[Path, str]:
    """The experiment dir, new or that of `--resume_from`, and the initial policy, which `args.json` keeps.

    An `output_dir` of `args` that already is one is gone on with, too. Raises: UsageError when it cannot be written,
    was begun with other arguments, or starts from no folder.
    """
    output_dir = getattr(args, "output_dir", None)
    begun = args.resume_from or (output_dir if output_dir and (Path(output_dir) / "args.json").is_file() else None)
    if begun:
        flag = "--resume_from" if args.resume_from else "--output_dir"
        stored = json.loads((Path(begun) / "args.json").read_text(encoding="utf-8"))
        if stored.get("program") != program:
            raise UsageError(f"{flag} {begun} is a run of {stored.get('program')}, not of {program}")
        changed = [k for k, v in to_dict(args).items() if k not in FREE and v != stored.get(k)]
        if changed:
            raise UsageError(f"{flag} {begun}: {changed[0]} was {stored.get(changed[0])} there; start a new run")
        return Path(begun), stored["initial"]
    source, flag = starting_model(args)
    initial = resolve(source, flag)  # of an experiment dir its newest checkpoint now, whatever comes later
    if not Path(initial).is_dir():
        raise UsageError(f"{flag} {source} is loaded in each iteration and must be a folder; train lightrlhf.sft first")
    check_stored_quantisation(base_name(initial, flag), flag, args)  # before an iteration is generated
    data = Path(args.data_dir).resolve()
    parent = Path(args.log_dir) / args.experiment_name / data.parent.name / data.name
    directory = Path(output_dir) if output_dir else parent / time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        while not output_dir or not directory.is_dir():
            try:
                directory.mkdir()
                break
            except FileExistsError:  # two runs of one second
                directory = directory.with_name(f"{directory.name}x")
        stored = {**to_dict(args), "program": program, "initial": initial}
        write_text(directory / "args.json", json.dumps(stored, indent=1))
    except OSError as problem:
        where = f"--output_dir {output_dir}" if output_dir else f"--log_dir {args.log_dir}"
        raise UsageError(f"{where} cannot be written: {problem.strerror}") from None
    return directory, initial


def run_begun(folder: Path) -> str | None:
    """The training run of an iteration that has a checkpoint to go on from; one without is taken away."""
    began = [path.parent for path in (folder / "training").rglob("args.json")]
    resume = next((str(run) for run in began if checkpoints(run)), None)
    if resume is None:
        shutil.rmtree(folder / "training", ignore_errors=True)
    return resume


def keep_policy(folder: Path) -> None:
    """The finished training run of an iteration becomes its `policy/`."""
    (run,) = [path.parent for path in (folder / "training").rglob("args.json")]
    run.rename(folder / "policy")
    shutil.rmtree(folder / "training")


def link_checkpoint(directory: Path, number: int, policy: str) -> None:
    """Show an iteration's policy as a checkpoint of the experiment dir, so that it is all the next stage needs."""
    link = directory / f"checkpoint-{number:06d}"
    if not link.is_symlink():
        link.symlink_to(Path(policy).resolve().relative_to(directory.resolve()))


def mean(values: Iterable[float]) -> float:
    """The mean of numbers, 0 of none."""
    numbers = [float(value) for value in values]
    return sum(numbers) / max(len(numbers), 1)
