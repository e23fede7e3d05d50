"""Atomic checkpoints: written to a temporary folder, fsynced, hashed, then renamed.

A checkpoint is a folder `checkpoint-000500/`: a Hugging Face model with its tokenizer, `resume.pt` with the rest of the
training state, and `manifest.json` with the SHA-256 of each file. A kill while saving leaves a temporary folder, which
the next save removes; a full disk or missing permission is an error that names the last good checkpoint. `best` is a
link to the one that `--keep_best` keeps.

Left out: Fabric's own `save`, which does not fsync and (2.6) hides a PermissionError; asynchronous saving.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.temporary import create, remove_left, temporary_path
from lightrlhf.storage.writing import rename, sync_folder, writing

MANIFEST, BEST = "manifest.json", "best"
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
    """What a run that failed has to go on from, in words."""
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
        print(f"note: {link} is no link, so it is kept as {set_aside(link, 'copied')}", flush=True)
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


def read_manifest(folder: Path) -> dict[str, str]:
    """SHA-256 by file name. Raises: FileNotFoundError, or ValueError when the manifest is damaged."""
    try:
        hashes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, RecursionError) as problem:
        raise ValueError(f"{MANIFEST} cannot be read: {problem}") from None
    if not isinstance(hashes, dict) or not all(isinstance(one, str) for one in hashes.values()):
        raise ValueError(f"{MANIFEST} holds no hashes")
    return hashes


def sealed_files(folder: Path) -> list[str]:
    """Names of the files that a manifest lists: all in the folder, behind links too, but the manifest and hidden ones.

    Nothing loads a hidden file; file managers and network file systems add them.
    """
    names = []
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [(Path(place) / name).relative_to(folder).as_posix() for name in files if not name.startswith(".")]
    return sorted(name for name in names if name != MANIFEST)


def accepting(folder: Path) -> str:
    """How to accept the files of a folder that were changed on purpose."""
    return f"accept it by python -m lightrlhf.storage.seals {folder}"


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
    """The last checkpoint of a run, verified. Raises: UsageError when there is none or it is damaged."""
    existing = checkpoints(experiment_dir)
    if not existing:
        raise UsageError(
            f"{flag} {experiment_dir} has no checkpoint yet; run its training until the first --save_interval"
        )
    verify_checkpoint(existing[-1])
    return existing[-1]


def write_folder(target: Path, write: Callable[[Path], None], replace: bool = False) -> None:
    """Write a folder atomically, with a manifest of hashes; `write(folder)` writes its files.

    replace: the folder may be there, and is then removed. Raises: RunFailure when it cannot be written.
    """
    partial = temporary_path(target)
    with writing(target, kept=lambda: f"{partial} is left, remove it" if partial.exists() else ""):
        try:
            partial.mkdir()
            write(partial)
            hashes = {str(file.relative_to(partial)): _hash_and_sync(file) for file in _files(partial)}
            write_text(partial / MANIFEST, json.dumps(hashes, indent=1, sort_keys=True))
            for folder in (path for path in (partial, *partial.rglob("*")) if path.is_dir()):
                sync_folder(folder)
            if replace and target.exists():
                shutil.rmtree(target)
            partial.rename(target)  # refused where another folder with files has appeared
        except BaseException:  # an interrupt, too
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(target.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. Raises: RunFailure naming it when it cannot be written; an older one stays."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)


def save_tensors(path: Path, value: Any) -> None:
    """`torch.save` atomically. Raises: RunFailure naming the file when it cannot be written; an older one stays."""
    with replacing(path) as temporary:
        save_pickled(temporary, value)


def save_pickled(path: Path, value: Any) -> None:
    """`torch.save` that raises the operating system's own error, which torch's writer swallows. Raises: OSError."""
    raw = _NotedErrors(path, "wb")
    try:
        with io.BufferedWriter(raw, 1 << 20) as file:
            torch.save(value, file)
    except RuntimeError as problem:
        raise raw.problem or problem from None


class _NotedErrors(io.FileIO):
    """A file that keeps the first error of its writes: torch's C++ writer reports `unexpected pos` instead."""

    problem: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as problem:
            self.problem = self.problem or problem
            raise


@contextmanager
def replacing(path: Path, what: str = "") -> Iterator[Path]:
    """Context manager: yield a temporary name to write; then flush, rename to `path`, and flush the entry.

    what: named in errors instead of the path.
    Raises: RunFailure naming the file when any of it fails; the temporary one is removed.
    """
    temporary = temporary_path(path)
    with writing(what or path, kept=lambda: f"{temporary} is left, remove it" if temporary.exists() else ""):
        create(temporary)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            rename(temporary, path)
        except BaseException:  # an interrupt, too
            with suppress(OSError):
                temporary.unlink()
            raise


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint by its manifest, the first that is found; None if nothing is."""
    try:
        hashes = read_manifest(folder)
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except ValueError:
        return f"{MANIFEST} cannot be read"
    added = [name for name in sealed_files(folder) if name not in hashes]
    if added:
        return f"{added[0]} was added to it"
    for name, expected in hashes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if sha256(file) != expected:
            return f"{name} is not what was written"
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sha256(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _hash_and_sync(file: Path) -> str:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return sha256(file)
