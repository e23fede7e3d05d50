"""Data of the tab Runs: lines over seeds, the audit's warnings, samples, arguments and model card of experiment dirs.

Nothing is written. Files are read again when they have grown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightrlhf.cli.groups.evaluation import best_metric
from lightrlhf.demo.chart import Drawn
from lightrlhf.demo.models import format_score
from lightrlhf.demo.rollout_file import Row, rollout_file
from lightrlhf.storage.curves import (
    Column,
    Curve,
    Floats,
    Steps,
    column,
    columns,
    curves_of,
    differences,
    join_columns,
    over_seeds,
    seed_groups,
)
from lightrlhf.storage.results import USUAL_METRICS
from lightrlhf.storage.run_dir import read_arg, read_args, read_logged
from lightrlhf.training.rollout_log import FILE, SAMPLES

AXES = ("step", "tokens", "hours")
MAX_ROWS = 100  # of a table of values by step
HELD_OUT = ", held-out prompts"  # behind a run's label: its answers to the same prompts throughout training
MAX_SAMPLES = 400  # of the table
MAX_NEAREST = 4  # samples of a run beside a point of its curve
NO_ARGUMENTS = ("versions", "git_commit", "given", "began")  # of args.json
LONGEST = 200  # characters of an argument in a table


class Line(NamedTuple):
    """Runs that are drawn as one line: all seeds of a setting, or a single run."""

    label: str
    runs: list[str]  # labels
    seeds: list[dict[str, Column]]  # metrics of each run, by name


class Warned(NamedTuple):
    """A range of steps at which the audit of a run warned, with reward and audit at its last step."""

    run: str  # label
    name: str
    first: int
    last: int
    score: float | None
    audit: float | None


# -------------------------------------------------------------------------------------------------------------- files
def metrics(folder: str) -> dict[str, Column]:
    """Return the metrics of a run by name; empty if it has not logged any."""
    path = Path(folder) / "metrics.jsonl"
    return _metrics(path, path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else {}


@functools.lru_cache(maxsize=64)
def _metrics(path: Path, *written: int) -> dict[str, Column]:
    return columns(read_logged(path))


def last_samples(folder: str | None) -> tuple[list[Row], int]:
    """Return the last `MAX_SAMPLES` answers to held-out prompts, oldest first, and the number of all."""
    found = rollout_file(Path(folder) / SAMPLES).refresh() if folder else None
    return [found.row(number) for number in range(len(found))[-MAX_SAMPLES:]] if found else [], len(found or ())


def nearest_samples(folder: str, step: int) -> list[Row]:
    """Return the first samples of the logged step nearest to `step`, of evaluations or else of training."""
    for name in (SAMPLES, FILE):
        if found := rollout_file(Path(folder) / name).refresh():
            steps = found.table["step"]
            numbers = np.flatnonzero(steps == steps[(steps - step).abs().idxmin()])
            return [found.row(number) for number in numbers[:MAX_NEAREST]]
    return []


def card(folder: str | None) -> str:
    """Return the model card without its YAML header; empty if it does not exist."""
    path = Path(folder or "") / "README.md"
    text = path.read_text(encoding="utf-8") if folder and path.is_file() else ""
    return text.split("---\n", 2)[-1] if text.startswith("---\n") else text


# -------------------------------------------------------------------------------------------------------------- lines
def lines_of(folders: Mapping[str, str], by_settings: bool) -> list[Line]:
    """Group runs (folder by label) into lines: one line for each setting over its seeds, or one for each run."""
    if not by_settings:
        return [Line(label, [label], [metrics(folder)]) for label, folder in folders.items()]
    names = {folder: label for label, folder in folders.items()}
    lines = []
    for label, seeds in seed_groups(list(names)).items():
        runs = [names[folder] for folders in seeds.values() for folder in folders]
        lines.append(Line(label, runs, [join_columns([metrics(folder) for folder in own]) for own in seeds.values()]))
    return lines


def curves(metric: str, lines: Sequence[Line]) -> dict[str, Curve]:
    """Return the curve of a metric by the label of the line."""
    return curves_of(metric, {line.label: line.seeds for line in lines})


def metric_names(lines: Sequence[Line]) -> list[str]:
    """Return the names of the metrics of all lines, the usual ones first."""
    names = {name for line in lines for seed in line.seeds for name in seed}
    return [name for name in USUAL_METRICS if name in names] + sorted(names.difference(USUAL_METRICS))


def locate_steps(axis: str, line: Line, steps: Steps) -> Floats | None:
    """Convert steps to an axis: steps, or tokens or hours of training (means over seeds); None if not logged.

    A step that was not logged counts as much as the next logged one.
    """
    if axis == "step":
        return steps.astype(np.float64)
    spent = [own for seed in line.seeds if (own := per_step(axis, seed)) is not None]
    if not spent:
        return None
    mean = over_seeds(spent)
    total = np.cumsum(mean.means * np.diff(mean.steps, prepend=0))
    return np.interp(steps, [0, *mean.steps], [0.0, *total])


def per_step(axis: str, run: Mapping[str, Column]) -> Column | None:
    """Return tokens trained on (without padding), or hours of rollout, scoring and update, at each logged step."""
    timed = [own for name, own in run.items() if name.startswith("time/") and not name.endswith("_per_second")]
    if timed and axis == "hours":
        spent = over_seeds(timed)
        return Column(spent.steps, spent.means * spent.seeds / 3600)  # sums
    if not {"time/update", "time/tokens_per_second"} <= run.keys():
        return None
    speed, seconds = run["time/tokens_per_second"], run["time/update"]
    steps, one, other = np.intersect1d(speed.steps, seconds.steps, return_indices=True)
    return Column(steps, speed.values[one] * seconds.values[other])


def make_line(line: Line, found: Mapping[str, Curve], axis: str, warnings: Sequence[Warned]) -> Drawn | None:
    """Make a line of the chart; None where it has no values of the metric, or none on the axis."""
    curve = found.get(line.label)
    places = locate_steps(axis, line, curve.steps) if curve else None
    if curve is None or places is None:
        return None
    edges = np.array([[each.first, each.last] for each in warnings if each.run in line.runs], np.int64)
    ranges = locate_steps(axis, line, edges.flatten())
    assert ranges is not None  # as of the curve
    ranges = ranges.clip(places[0], places[-1])
    return Drawn(line.label, line.runs, places, *curve, list(zip(ranges[::2].tolist(), ranges[1::2].tolist())))


def value_rows(found: Mapping[str, Curve]) -> list[list[Any]]:
    """Return rows of a table: a step and the value of each curve; at most `MAX_ROWS`, with first and last step."""
    if not found:
        return []
    steps = np.unique(np.concatenate([curve.steps for curve in found.values()]))
    kept = steps[np.unique(np.linspace(0, len(steps) - 1, MAX_ROWS).round().astype(int))].tolist()
    return [[step, *(_value_at(curve, step) for curve in found.values())] for step in kept]


def _value_at(curve: Curve, step: int) -> str:
    """Describe the mean at a step, with its standard error over several seeds; empty where there is none."""
    place = _place_of(curve.steps, step)
    if place is None:
        return ""
    return number(curve.means[place]) + (f" ± {number(curve.errors[place])}" if curve.seeds[place] > 1 else "")


def _place_of(steps: Steps, step: int) -> int | None:
    """Return the place of a step among ascending ones."""
    place = int(np.searchsorted(steps, step))
    return place if place < len(steps) and steps[place] == step else None


def final_values(metric: str, found: Mapping[str, Curve]) -> list[list[Any]]:
    """Return rows of a table: line, seeds, first, last, standard error of the last, best and its step.

    The best is left open where the name does not say whether lower or higher values are better.
    """
    find_best: Callable[[Floats], Any] | None
    try:
        find_best = np.argmin if best_metric(metric)[1] else np.argmax
    except ValueError:
        find_best = None
    rows = []
    for label, curve in found.items():
        ends = [number(curve.means[0]), number(curve.means[-1])]
        error = number(curve.errors[-1]) if curve.seeds[-1] > 1 else format_score(None)
        best: list[Any] = [format_score(None)] * 2
        if find_best is not None:
            place = find_best(curve.means)
            best = [number(curve.means[place]), int(curve.steps[place])]
        rows.append([label, int(curve.seeds.max()), *ends, error, *best])
    return rows


def number(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:.4g}"


# ----------------------------------------------------------------------------------------------- audit and arguments
def find_warnings(label: str, folder: str) -> list[Warned]:
    """Return the ranges of steps at which the audit of a run warned (see `lightrlhf.rewards.audit`)."""
    run = metrics(folder)
    if "audit/warning" not in run:
        return []
    steps, flags = run["audit/warning"]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags > 0, [0]])))

    def value(name: str, step: int) -> float | None:
        own = run.get(name, column({}))
        place = _place_of(own.steps, step)
        return None if place is None else float(own.values[place])

    return [
        Warned(
            label,
            name_run(label, folder),
            int(first),
            int(last),
            value("objective/score", last),
            value("audit/score", last),
        )
        for first, last in zip(steps[edges[::2]], steps[edges[1::2] - 1])
    ]


def warning_line(found: Warned) -> str:
    """Describe a warning on one line."""
    steps = f"step {found.first}" if found.first == found.last else f"steps {found.first} to {found.last}"
    if found.score is None or found.audit is None:
        return f"{found.name}: {steps}"
    return f"{found.name}: {steps}, in the end with score {number(found.score)} and audit {number(found.audit)}"


def name_run(label: str, folder: str) -> str:
    """Name a run by its label and seed."""
    seed = read_arg(folder, "seed")
    return label if seed is None else f"{label}, seed {seed}"


def argument_table(folders: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows: the arguments in which runs (folder by label) differ, without times."""
    found = differences([read_args(folder) for folder in folders.values()])
    rows = [
        [key, *(str(value)[:LONGEST] for value in values)] for key, values in found.items() if key not in NO_ARGUMENTS
    ]
    return ["argument", *folders], rows
