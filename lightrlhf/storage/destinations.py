"""Destinations: checks whether a program may write to a given path, before any work.

A path inside an experiment dir or a checkpoint is refused: an extra file breaks the seal of a checkpoint, and another
`args.json` replaces the one that resuming needs. Only the places of results in an experiment dir are accepted.

Left out: quotas and free space, which may change until the write.
"""

from __future__ import annotations

import json
import os
from fnmatch import fnmatch
from pathlib import Path

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.seals import MANIFEST

RESULTS = ("eval", "export", "iteration-*", "curves.png", "votes.jsonl")  # places of results in an experiment dir
MODEL = ("config.json", "adapter_config.json")  # each folder of weights has one of them


def check_output(path: str | Path, flag: str) -> None:
    """Raises: ValueError, before any work, when a file cannot be written to `path`, whose folders need not exist."""
    path = Path(path)
    try:
        is_folder, exists = path.is_dir(), path.exists()
        above = next(folder for folder in path.absolute().parents if folder.exists())
        is_below_file = not above.is_dir()
    except OSError as problem:  # a name too long
        raise ValueError(f"{flag} {path} cannot be written: {problem.strerror}") from None
    if is_folder:
        raise ValueError(f"{flag} {path} is a folder; name a file")
    if is_below_file:
        raise ValueError(f"{flag} {path} cannot be written: {above} is not a folder")
    if not os.access(path if exists else above, os.W_OK):
        raise ValueError(f"{flag} {path} cannot be written: allow access there or name another place")
    if owner := owner_of(path):
        raise ValueError(f"{flag} {path} lies in {owner}; name a place outside")


def check_data_output(folder: str, flag: str, own: str) -> None:
    """Raises: ValueError for a folder of data that cannot be written, or has the data of another program.

    own: an argument that only this program has; a kill may have left its arguments without a seal.
    """
    check_output(Path(folder) / "report.json", flag)
    try:
        values = json.loads((Path(folder) / "args.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or own not in values:
        raise ValueError(f"{flag} {folder} holds data of another program; name another folder")


def check_destination(folder: Path, flag: str) -> None:
    """Raises: UsageError, before any work, when files to be written to a folder would lie in a run or a checkpoint."""
    if owner := owner_of(folder):
        raise UsageError(f"{flag} {folder} lies in {owner}; name a place outside")


def owner_of(path: Path) -> str | None:
    """The experiment dir, checkpoint or sealed model that a path lies in or is, in words; None without one."""
    place = Path(os.path.realpath(path))  # a link may lead into one
    for folder in (place, *place.parents):
        if os.path.isfile(folder / "resume.pt"):
            return f"the checkpoint {folder}"
        is_sealed = os.path.isfile(folder / MANIFEST) and any(os.path.isfile(folder / name) for name in MODEL)
        if is_sealed and folder != place:  # a program may replace a model in the folder itself
            return f"the sealed model {folder}"
        inside = place.relative_to(folder).parts
        if is_run(folder) and not (inside and any(fnmatch(inside[0], name) for name in RESULTS)):
            return f"the experiment dir {folder}"
    return None


def is_run(folder: Path) -> bool:
    """Whether a folder is an experiment dir, also one whose `args.json` cannot be read, rather than prepared data."""
    try:
        stored = json.loads((folder / "args.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError, RecursionError):
        return os.path.isdir(folder) and bool(checkpoints(folder) or os.path.isfile(folder / "metrics.jsonl"))
    return isinstance(stored, dict) and "program" in stored
