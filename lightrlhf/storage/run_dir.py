"""Experiment dirs, read without loading a model: arguments, initial model, metrics; and new ones.

Paths in `args.json` are stored as typed, so a relative one is relative to the directory of the run's start; `locate`
resolves it from other directories, too.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.latest import LATEST, why_missing
from lightrlhf.storage.checkpoint import checkpoints, follow_best, is_sealed, set_aside, step_of
from lightrlhf.storage.destinations import MODEL, check_destination, check_output
from lightrlhf.storage.locks import LOCK
from lightrlhf.storage.seals import MANIFEST, accepting, check_sealed
from lightrlhf.storage.temporary import is_temporary, temporary_path
from lightrlhf.storage.writing import make_folder, rename, sync_folder, writing

MOST_FOLDERS = 1000  # in which runs are looked for
ITERATION = re.compile(r"iteration-([0-9]+)")
# files that a run writes before its first checkpoint
BEGINNING = {"args.json", "base", "logs", "metrics.jsonl", "rollouts.jsonl", "samples.jsonl", "trajectories", "wandb"}
BEGINNING |= {LOCK, MANIFEST}
NAMED_BY_TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\dx*")
WITHOUT_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def read_arg(directory: str, key: str) -> Any:
    """A value of `read_args`, or None. Raises: UsageError."""
    return read_args(directory).get(key)


def read_args(directory: str) -> dict[str, Any]:
    """`{directory}/args.json` (for a checkpoint, of its experiment dir); empty when missing.

    Raises: UsageError when it cannot be read or a run's file has changed; prepared data is compared where its files
        are read.
    """
    folder = experiment_of(directory)
    try:
        values = json.loads((folder / "args.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        values = {}
    except (OSError, ValueError, RecursionError) as problem:
        raise UsageError(f"{folder / 'args.json'} cannot be read: {first_line(problem)}; restore it") from None
    if not isinstance(values, dict):
        raise UsageError(f"{folder / 'args.json'} contains no arguments but a {type(values).__name__}; restore it")
    if "destination_dir" not in values and (values or is_sealed(folder)):  # a model of others may have such a manifest
        check_args(folder)
    return values


def check_args(directory: Path) -> None:
    """Compare `args.json` of a run with its seal, if it has one. Raises: UsageError."""
    if (directory / MANIFEST).is_file():
        check_sealed(directory, ["args.json"], remedy=accepting(directory))


def data_dir_of(directory: str) -> str | None:
    """Folder of the data that an experiment was trained on; None where its rows were given from Python.

    Raises: UsageError when it was trained on several.
    """
    given = read_arg(directory, "given") or {}
    folder = None if {"rows", "prompts", "dialogues"} & given.keys() else read_arg(directory, "data_dir")
    if isinstance(folder, list):
        raise UsageError(f"--data_dir is required: {directory} was trained on several, {', '.join(folder)}; give one")
    return folder


def experiment_of(directory: str) -> Path:
    """The experiment dir of a checkpoint; any other path unchanged."""
    path = follow_best(Path(directory))
    return path if step_of(path) is None else path.parent


def is_experiment_dir(directory: str) -> bool:
    """Whether a path is an experiment dir, rather than a checkpoint or a plain model folder."""
    path = Path(directory)
    return (path / "args.json").is_file() and step_of(path) is None


def why_no_model(folder: Path) -> str | None:
    """Why a folder is neither a model nor an experiment dir, and what to give instead; None if it may be one."""
    has_args = (folder / "args.json").is_file()
    if any((folder / name).is_file() for name in MODEL) or (is_sealed(folder) and not has_args):
        return None
    if any(folder.glob("*_train.pt")):
        return "holds prepared data, which --data_dir takes; give an experiment dir or a model folder here"
    if has_args or step_of(folder) is not None:
        return None
    below = [Path(place) for place, _, files in islice(os.walk(folder), MOST_FOLDERS) if "metrics.jsonl" in files]
    if below:
        return f"holds runs, such as {max(below, key=lambda run: run.stat().st_mtime)}; give one of them"
    return "is neither a model folder (config.json) nor an experiment dir (args.json)"


def locate(directory: str, key: str) -> str | None:
    """The path stored under `key`, unchanged if it exists, else relative to the directory of the run's start.

    Of several, the first.
    """
    name, place = read_arg(directory, key), read_arg(directory, "output_dir") or read_arg(directory, "log_dir")
    name = name[0] if isinstance(name, list) else name
    if name is None or Path(name).exists() or place is None or Path(place).is_absolute():
        return name
    folder, depth = experiment_of(directory).resolve(), len(Path(place).parts)
    for root in (folder, *folder.parents):
        if root.parts[-depth:] == Path(place).parts and (there := root.parents[depth - 1] / name).exists():
            return str(there)
    return name


def pretrained_model(experiment_dir: str) -> str:
    """The pretrained model that an experiment goes back to. Raises: UsageError when args.json has none."""
    before = "sft_experiment_dir" if read_arg(experiment_dir, "sft_experiment_dir") else "model_name"
    name = locate(experiment_dir, before)
    if name is None or name == "tiny":
        raise UsageError(f"--use_pretrained: {experiment_dir} did not start from a pretrained model")
    return pretrained_model(name) if read_arg(name, "program") else name


def short_name(name: str) -> str:
    """Experiment name of an experiment dir, else the last part of the path."""
    return read_arg(name, "experiment_name") or Path(name).name


def labels(folders: Sequence[str]) -> dict[str, str]:
    """Experiment dirs by a short unique label: the experiment name, with its time if repeated, or the whole path."""
    names: dict[str, str] = {}
    for folder in folders:
        path, name = Path(folder), short_name(folder)
        shortest = [label for label in (name, f"{name} {path.name}") if label not in names]
        names[shortest[0] if shortest else folder] = folder  # the same folder given twice is one run
    return names


def choices(folders: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Models of experiments as (model, experiment dir) by label: pretrained ones first, the newest checkpoint last."""
    models: dict[str, tuple[str, str]] = {}
    for folder in dict.fromkeys(folders):
        try:
            models.setdefault(f"pretrained {Path(pretrained_model(folder)).name}", (pretrained_model(folder), folder))
        except UsageError:
            pass  # not an experiment, or one without a pretrained model
    for label, folder in labels(folders).items():
        steps = checkpoints(Path(folder))
        for path in steps:
            models[f"{label} step {step_of(path)}"] = (str(path), folder)
        if not steps:
            models[label] = (str(follow_best(Path(folder))), folder)
    return models


def read_metrics(experiment_dir: str) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl`. Raises: UsageError when it is missing."""
    return list(logged_metrics(experiment_dir))


def logged_metrics(experiment_dir: str) -> Iterator[dict[str, Any]]:
    """Yields what `read_metrics` returns."""
    path = Path(experiment_dir) / "metrics.jsonl"
    if not path.is_file():
        reason = why_no_model(path.parent) if path.parent.is_dir() else why_missing(experiment_dir)
        reason = reason or "has no metrics.jsonl"
        raise UsageError(f"--experiment_dir {experiment_dir} {reason}")
    rows = read_logged(path)
    first = next(rows, None)
    if first is None:
        raise UsageError(f"{path} has no metrics yet")
    yield first
    yield from rows


def read_logged(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a run's log, such as `metrics.jsonl`; none when there is no file.

    Raises: UsageError when a row has no step, or as `read_growing` does.
    """
    for number, row in enumerate(read_growing(path), start=1):
        check_logged(row, path, number)
        yield row


def check_logged(row: Any, path: Path, number: int) -> None:
    """Raises: UsageError when a row of a run's log is not of a step; number: which one it is."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise UsageError(f"{path}: row {number} has no step, so no run has written it; remove it, or restore the file")


def read_growing(path: Path) -> Iterator[Any]:
    """Yields the rows of a JSONL file that another process may be writing; none when it cannot be read.

    Raises: UsageError when a line other than the last is not JSON.
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        cut = 0  # number of a line that is not JSON
        for number, line in enumerate(filter(bytes.strip, file), start=1):
            if cut:
                raise UsageError(f"{path} line {cut} is not JSON")
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                cut = number
                continue
            yield row


def make_parent(parent: Path, flag: str) -> Path:
    """Create a directory and those above it.

    Raises: UsageError naming `flag` when it cannot be written, or lies in another run or a checkpoint.
    """
    check_destination(parent, flag.partition(" ")[0])
    with writing(flag, error=UsageError):
        make_folder(parent)
    return parent


def check_parent(parent: Path, flag: str) -> Path:
    """A directory that is not created. Raises: UsageError naming `flag` when `make_parent` could not write it."""
    try:
        check_output(parent / "args.json", flag.partition(" ")[0])
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    return parent


def new_run_dir(parent: Path, flag: str) -> Path:
    """Create a directory below `parent` that is named by the time; two runs of one second get two.

    Raises: UsageError naming `flag` when it cannot be written.
    """
    directory = make_parent(parent, flag) / time.strftime("%Y-%m-%d_%H-%M-%S")  # as NAMED_BY_TIME
    with writing(flag, error=UsageError):
        while True:
            try:
                directory.mkdir()
                sync_folder(parent)
                return directory
            except FileExistsError:
                directory = directory.with_name(f"{directory.name}x")


def check_vacant(directory: Path) -> None:
    """Raises: UsageError when `--output_dir` of a new run holds another run or other files.

    Files of a run that was killed before it wrote its arguments do not count.
    """
    names = sorted(path.name for path in directory.iterdir() if path.name != LOCK and not is_temporary(path.name))
    what, other = f"--output_dir {directory}", "name another folder"
    if "args.json" in names and checkpoints(directory):
        raise UsageError(f"{what} holds a run already; continue it by --resume_from {directory}, or {other}")
    if "args.json" in names:
        raise UsageError(f"{what} holds a run without a checkpoint; remove it, or {other}")
    if names:
        raise UsageError(f"{what} is not empty, it holds {names[0]}; {other}")


def discard_runs(folder: Path) -> None:
    """Remove a run that has no checkpoint, or a folder of such runs; a run with other files is renamed.

    A line says so. Raises: RunFailure when it cannot be renamed.
    """
    others = []
    for _, folders, files in os.walk(folder):
        entries = list(files)
        if "args.json" in files:
            entries += folders
            folders.clear()  # everything below a run belongs to it
        others += [name for name in entries if name not in BEGINNING and not is_temporary(name)]
    if others:
        print(f"note: {others[0]} is of no run, so it is kept in {set_aside(folder, 'failed')}", flush=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def find_resumed_dir(resume_from: str, output_dir: str | None) -> Path:
    """The experiment dir of `--resume_from`. Raises: UsageError when `--output_dir` was given and is another one."""
    is_other = output_dir and Path(output_dir).resolve() != Path(resume_from).resolve()
    if is_other and output_dir != read_arg(resume_from, "output_dir"):  # else the run has moved since
        raise UsageError(f"--output_dir {output_dir}: a resumed run goes on in {resume_from}; leave it out")
    return Path(resume_from)


def is_stage(directory: Path) -> bool:
    """Whether a run is the training of an iteration, in the experiment dir of the program in iterations."""
    return whole_run(directory) != directory


def whole_run(directory: Path) -> Path:
    """The experiment dir to resume: for the training run of an iteration, the dir of the iterative program."""
    stages = (one for one in directory.parents if ITERATION.fullmatch(one.name))
    return next((one.parent for one in stages if is_experiment_dir(str(one.parent))), directory)


def iterations(directory: Path) -> dict[int, Path]:
    """The folders of the iterations of an experiment dir by number, in order; copies that a user made are left out."""
    named = {path: ITERATION.fullmatch(path.name) for path in directory.glob("iteration-*")}
    return dict(sorted((int(match[1]), path) for path, match in named.items() if match))


def link_latest(run: Path, resumed: bool = False) -> None:
    """Link `latest` to a run that begins, atomically; to a resumed run only if there is no such link.

    Names do not show which run began last, since clocks can go back. Only runs that are named by their time get a link.
    A file or folder of that name is left alone, and a file system may not support links; a printed line says so.
    Raises: RunFailure when the link cannot be written for any other reason.
    """
    link = run.with_name(LATEST)
    if not NAMED_BY_TIME.fullmatch(run.name):
        return
    if link.exists() and not link.is_symlink():
        print(f"note: {link} is not a link and is left alone; it does not stand for this run", flush=True)
        return
    if resumed and link.is_dir():
        return
    with writing(link):
        temporary = temporary_path(link)
        try:
            temporary.symlink_to(run.name)
        except OSError as problem:
            if problem.errno not in WITHOUT_LINKS:
                raise
            print(f"warning: {link} is missing, this file system has no links; name runs by folder", flush=True)
            return
        try:
            rename(temporary, link)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
