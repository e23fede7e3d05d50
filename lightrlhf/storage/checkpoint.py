"""Atomic checkpoints: written to a temporary folder, fsynced, hashed, then renamed.

A checkpoint is a folder `checkpoint-000500/`: a Hugging Face model with its tokenizer, `resume.pt` with the rest of the
training state, and `manifest.json` with the SHA-256 of each file. A kill while saving leaves a temporary folder, which
the next save removes; a full disk or missing permission is an error that names the last good checkpoint. `best` is a
link to the one that `--keep_best` keeps.

Left out: Fabric's own `save`, which does not fsync and (2.6) hides a PermissionError; asynchronous saving.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.seals import MANIFEST, accepting, damage, write_folder
from lightrlhf.storage.temporary import remove_left, temporary_path
from lightrlhf.storage.writing import rename, writing

BEST = "best"
CHECKPOINT = r"checkpoint-[0-9]+"


def save_checkpoint(
    experiment_dir: Path, step: int, write: Callable[[Path], None], keep_last: int = 0, best: int | None = None
) -> Path:
    """Write a checkpoint atomically; `write(folder)` writes its files.

    keep_last: delete all but this many checkpoints and the best; 0 keeps all. best: step of the best one.
    Raises: RunFailure naming the last good checkpoint, which stays unchanged.
    """
    target = checkpoint_path(experiment_dir, step)
    with writing(target, kept=lambda: last_good(experiment_dir)):
        remove_left(experiment_dir, CHECKPOINT)
        write_folder(target, write, replace=True)
        link_best(experiment_dir, best)
        drop_lost_best(experiment_dir)
    for old in checkpoints(experiment_dir)[:-keep_last] if keep_last else []:
        if best is None or old != checkpoint_path(experiment_dir, best):
            shutil.rmtree(old, ignore_errors=True)
    return target


def last_good(experiment_dir: Path) -> str:
    """Which checkpoint a failed run can resume from, in words."""
    saved = checkpoints(experiment_dir)
    if not saved:
        return "there is no earlier checkpoint, so start again"
    return f"the last good checkpoint is {saved[-1].name}, go on by --resume_from {experiment_dir}"


def checkpoint_path(experiment_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return experiment_dir / f"checkpoint-{step:06d}"


def link_best(experiment_dir: Path, step: int | None) -> None:
    """Link `best` to the checkpoint of a step, atomically; without such a checkpoint nothing changes.

    A file or folder of that name is renamed, and a printed line says so: a copy of the experiment dir may have followed
    the link.
    """
    if step is None or not checkpoint_path(experiment_dir, step).is_dir():
        return
    link = experiment_dir / BEST
    if link.exists() and not link.is_symlink():  # a copy of the experiment dir may have followed the link
        print(f"note: {link} is not a link, so it is kept as {set_aside(link, 'copied')}", flush=True)
    temporary = temporary_path(link)
    temporary.symlink_to(checkpoint_path(experiment_dir, step).name)
    rename(temporary, link)


def follow_best(path: Path) -> Path:
    """The checkpoint that `{experiment dir}/best` links to; any other path unchanged."""
    return path.parent / os.readlink(path) if path.name == BEST and path.is_symlink() else path


def final_checkpoint(experiment_dir: Path) -> Path:
    """The result of a finished run: the checkpoint of `--keep_best`, or the newest if that is missing."""
    best = experiment_dir / BEST
    return follow_best(best) if best.is_dir() else checkpoints(experiment_dir)[-1]


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint by the name of its folder; None for any other folder.

    Other folders that a user keeps in a run, such as `checkpoint-000500-backup`, are neither read nor removed.
    """
    return int(folder.name.partition("-")[2]) if re.fullmatch(CHECKPOINT, folder.name) else None


def checkpoints(experiment_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    by_step = {path: step_of(path) for path in Path(experiment_dir).glob("checkpoint-*") if path.is_dir()}
    numbered = [(step, path.name, path) for path, step in by_step.items() if step is not None]
    return [path for *_, path in sorted(numbered)]


def verify_checkpoint(folder: Path) -> None:
    """Compare a checkpoint with its manifest, also under another name or behind a link.

    Raises: UsageError naming the first missing, changed or added file, and how to go on.
    """
    problem = damage(folder)
    if problem:
        real = folder.resolve()
        step = step_of(real)
        others = [] if step is None else checkpoints(real.parent)
        before = [path for path in others if (step_of(path) or 0) < (step or 0) and not damage(path)]
        remedy = f"the one before it is intact: {before[-1]}" if before else "no earlier checkpoint is intact"
        raise UsageError(f"{folder} is damaged ({problem}); {remedy}; a file changed on purpose: {accepting(folder)}")


def is_sealed(folder: Path) -> bool:
    """Whether a folder is one that `write_folder` wrote, whatever its name is now, rather than a model of others.

    One without a manifest counts if it has our `resume.pt`, or lies where an experiment dir keeps its own.
    """
    own = step_of(folder) is not None or folder.name in (BEST, "base")
    if (folder / "resume.pt").exists() or (own and (folder.resolve().parent / "args.json").is_file()):
        return True
    try:
        stored = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(stored, dict) and any(isinstance(one, str) and len(one) == 64 for one in stored.values())


def set_aside(folder: Path, why: str = "damaged") -> Path:
    """Rename a damaged checkpoint, so that no step writes over it and none counts it; returns where it is.

    why: the new name begins with it, for other folders that are in the way. Raises: RunFailure if it cannot be renamed.
    """
    kept = folder.with_name(f"{why}-{folder.name}")
    while kept.exists():
        kept = kept.with_name(f"{kept.name}x")
    with writing(kept):
        rename(folder, kept)
    drop_lost_best(folder.parent)
    return kept


def drop_lost_best(experiment_dir: Path) -> str | None:
    """Remove the link `best` where its checkpoint is gone; returns the name that the checkpoint had, if so."""
    link = experiment_dir / BEST
    if not link.is_symlink() or link.exists():
        return None
    name = os.readlink(link)
    link.unlink()
    return name


def newest_checkpoint(experiment_dir: Path, flag: str) -> Path:
    """The last checkpoint of a run, verified. Raises: UsageError when it is missing or damaged."""
    existing = checkpoints(experiment_dir)
    if not existing:
        raise UsageError(
            f"{flag} {experiment_dir} has no checkpoint yet; run its training until the first --save_interval"
        )
    verify_checkpoint(existing[-1])
    return existing[-1]
