"""Raw results: what every row says, the rows that the repository keeps, and how a learning rate is chosen by trials.

A row of `results.jsonl` is one run: its seed, its arm, what was measured, its curve where it has one, its
clock and processor seconds, and `made_by`. The settings that all rows of a file share lie beside it, in
`results.args.json`. The repository keeps both in `examples/experiments/results`, as `NAME.jsonl.gz` and
`NAME.args.json`.
"""

from __future__ import annotations

import datetime
import gzip
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lightrlhf import doctor
from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.jsonl import SEAL, JsonlWriter, read_jsonl, read_settings, write_jsonl
from lightrlhf.storage.writing import replacing, write_text
from lightrlhf.training.provenance import git_commit, versions

KEPT = Path(__file__).parent / "results"
TEN, FIVE = tuple(range(1, 11)), tuple(range(1, 6))  # planned seeds: of arms under ten minutes, and of longer ones
Row = dict[str, Any]


def made_by() -> Row:
    """Versions of what results depend on, the library's commit, the day (UTC) and the processor's name."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"versions": versions(), "commit": git_commit(), "day": day, "processor": processor()}


def now() -> tuple[float, float]:
    """Clock and processor seconds, to count from with `spent`."""
    return time.perf_counter(), time.process_time()


def spent(since: tuple[float, float]) -> Row:
    """Clock and processor seconds of this process since `now`: on a shared machine the second is its own work."""
    clock, cpu = (round(end - start, 1) for start, end in zip(since, now()))
    return {"seconds": clock, "cpu_seconds": cpu}


def processor() -> str:
    """Name of the processor and the instructions that torch uses: one name is sold with AVX2 and with AVX512."""
    return f"{doctor.processor()}, {torch.backends.cpu.get_cpu_capability()}"


def best_rate(trials: Iterable[Row]) -> float:
    """The learning rate of the trial with the highest validation score; of equals the first."""
    return float(max(trials, key=lambda row: row["score"])["learning_rate"])


def common_seeds(rows: Iterable[Row], arms: Iterable[str]) -> list[int]:
    """The seeds that every one of these arms has a row of, in order."""
    pairs = {(row["arm"], row["seed"]) for row in rows}
    of_arm = [{seed for name, seed in pairs if name == arm} for arm in arms]
    return sorted(set.intersection(*of_arm)) if of_arm else []


# ------------------------------------------------------------------------------------------------ rows that are kept
def results(name: str, folder: Path, settings: Row) -> JsonlWriter:
    """The rows of an experiment in `folder`, to append to; where it has none they start as those kept under `name`.

    Kept rows of other settings, and those of a smoke test, are not started from.
    Raises: UsageError where `folder` has rows of other settings.
    """
    path, settings = folder / "results.jsonl", json.loads(json.dumps(settings))
    kept = settings_file(name)
    if not path.exists() and not settings.get("smoke") and kept.is_file():
        if json.loads(kept.read_text(encoding="utf-8")) == settings:
            write_jsonl(path, kept_rows(name), settings)
        else:
            print(f"{name}: the rows that the repository keeps have other settings and are not started from")
    return JsonlWriter(path, settings)


def kept_rows(name: str) -> list[Row]:
    """The rows that the repository keeps of an experiment; none where it keeps none."""
    path = KEPT / f"{name}.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n") if path.is_file() else []
    return [json.loads(line) for line in lines if line]


def settings_file(name: str) -> Path:
    """The settings of the rows that the repository keeps of an experiment."""
    return KEPT / f"{name}.args.json"


def keep(name: str, folder: Path) -> None:
    """Put the rows of an experiment in `folder` into the repository, under its name.

    Raises: UsageError for rows of a smoke test, and where rows of the same settings that are kept would be lost.
    """
    path = folder / "results.jsonl"
    rows, settings = read_jsonl(path), read_settings(path)
    settings = {key: value for key, value in settings.items() if key not in SEAL}
    if settings.get("smoke"):
        raise UsageError(f"{path} has rows of a smoke test, which mean nothing")
    lost = sum(row not in rows for row in kept_rows(name))
    if lost and json.loads(settings_file(name).read_text(encoding="utf-8")) == settings:
        raise UsageError(
            f"{path} lacks {lost} of the rows that {KEPT} keeps of {name}; run where they were started from"
        )
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with replacing(KEPT / f"{name}.jsonl.gz") as temporary:
        temporary.write_bytes(gzip.compress(lines.encode("utf-8"), mtime=0))  # the same bytes each time
    write_text(settings_file(name), json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
