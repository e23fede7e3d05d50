"""The folder of prepared data: whose it is, and how all of its files are replaced at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets_prep.encoding import STAGES
from lightrlhf.cli.errors import UsageError
from lightrlhf.data.splits import SPLITS
from lightrlhf.storage.seals import seal, sealed_files
from lightrlhf.storage.temporary import remove, temporary_path
from lightrlhf.storage.writing import make_folder, sync_folder, writing

MUST_AGREE = (
    *("dataset_name", "dataset_config", "dataset_revision", "columns", "split", "seed"),
    *("tokenizer_name", "chat_template", "wrap_prompts", "validation_percentage", "test_percentage"),
)


@contextmanager
def replacing(destination: Path, stages: Iterable[str]) -> Iterator[Path]:
    """Yield a temporary folder; on success its files replace the old ones in `destination`, on an error it is removed.

    Older splits of `stages` that were not written again are removed. All files are fsynced before any is renamed, so
    `destination` never contains a partial file; the seal is among them, so files of two preparations are noticed.
    Raises: RunFailure when any of it cannot be written, with what is left.
    """
    folder: Path | None = None
    renamed = 0

    def left() -> str:
        words = [f"{destination} now has {renamed} new files among older ones, prepare it again"] if renamed else []
        return "; ".join(words + ([f"{folder} is left, remove it"] if folder and folder.exists() else []))

    with writing(f"--destination_dir {destination}", kept=left):
        try:
            make_folder(destination)
            folder = temporary_path(destination / "prepared")
            folder.mkdir()
            yield folder
            written = sealed_files(folder)
            stale = {f"{stage}_{split}.pt" for stage in stages for split in SPLITS} - {*written}
            seal(folder, [*written, *stale], before=destination)
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            for file in files:
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
            for file in files:
                target = destination / file.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                os.replace(file, target)
                renamed += 1
            for name in stale:
                (destination / name).unlink(missing_ok=True)
            for changed in {destination / file.relative_to(folder).parent for file in files}:
                sync_folder(changed)
            sync_folder(destination)
        finally:
            if folder:
                remove(folder)


def check_own(destination: Path, stage: str, arguments: Mapping[str, Any]) -> None:
    """Raises: UsageError for a file, a folder with other files, or one with stages that other arguments made."""
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"--destination_dir {destination} is a file; name a folder")
    before = read_object(destination / "args.json")
    splits = [f"{stage}_{split}.pt" for stage in STAGES for split in SPLITS]
    others = [name for name in ("args.json", *splits) if (destination / name).exists()]
    if others and "destination_dir" not in before:
        raise UsageError(f"--destination_dir {destination} holds {others[0]} of another program; name another folder")
    if stage == "all" or not before:
        return
    for name in MUST_AGREE:
        if before.get(name) != arguments.get(name):
            raise UsageError(
                f"--destination_dir {destination} contains data prepared with --{name} {before.get(name)}, "
                f"not {arguments.get(name)}; use the same value or another folder"
            )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file. Raises: UsageError for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as problem:
        raise UsageError(f"{path} cannot be read ({problem}); use another --destination_dir") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not a JSON object; use another --destination_dir")
    return found
