"""Dumps of other trainers as steps, each reader with the version whose form it reads. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightrlhf.checks.readers import openenv, verifiers, verl
from lightrlhf.checks.step import Step
from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.jsonl import read_jsonl

OWN = ("rows.jsonl", "step.json")  # of a folder in our own schema
Rows = list[dict[str, Any]]
READERS: dict[str, tuple[Callable[[dict[str, Any]], bool], Callable[[Rows, str], list[Step]]]] = {
    "verl": (verl.is_row, verl.steps),
    "verifiers": (verifiers.is_row, verifiers.steps),
    "openenv": (openenv.is_row, openenv.steps),
}


def read_foreign(path: str) -> list[Step]:
    """Steps of a dump: a file of JSON or JSON lines, or a folder of them; empty where no reader knows their form.

    Raises: UsageError for a file that is not JSON.
    """
    place = Path(path)
    files = [place] if place.is_file() else sorted(place.glob("*.json*"), key=_number)
    others = [file for file in files if file.suffix in (".json", ".jsonl") and file.name not in OWN]
    return [step for file in others for step in _read(file)]


def _read(file: Path) -> list[Step]:
    if file.suffix == ".json":
        try:
            whole = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as problem:
            raise UsageError(f"{file} is not JSON: {problem}") from problem
        rows = whole if isinstance(whole, list) else [whole]
    else:
        rows = read_jsonl(file)
    for is_row, steps in READERS.values():
        if rows and all(isinstance(row, dict) and is_row(row) for row in rows):
            try:
                return steps(rows, file.name)
            except (KeyError, TypeError, ValueError, IndexError) as problem:
                raise UsageError(f"{file}: a row lacks what its form needs: {problem!r}") from problem
    return []


def _number(file: Path) -> tuple[int, str]:
    """Files named by steps in the order of the steps."""
    return int(file.stem) if file.stem.isdecimal() else -1, file.name
