"""Curves of metrics over runs: columns of `metrics.jsonl`, runs that differ by their seed alone, means over them.

What the plots of the command line and the demo share. Left out: intervals at a level of confidence. Of two to five
seeds the t quantile is so large (12.7 for two) that bands would hide the curves, so bands are standard errors.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightrlhf.storage.run_dir import read_args, short_name

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
NO_SETTINGS = {  # arguments that change no number, or that runs of one setting differ by
    *("seed", "experiment_name", "log_dir", "output_dir", "resume_from", "logger", "wandb_project", "profile"),
    *("push_to_hub", "verify", "save_interval", "save_minutes", "keep_last", "log_rollouts"),
    *("versions", "git_commit", "began"),
}
SEED_OR_TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\dx*|seed[-_=]?\d+")  # in a path, as of a model to start from

MAX_TOLD, MAX_VALUE = 3, 40  # arguments in a label, characters of each


class Column(NamedTuple):
    """A metric of a run, by step in ascending order: (N,) each."""

    steps: Steps
    values: Floats


class Curve(NamedTuple):
    """Mean of a metric over seeds, by step in ascending order: (N,) each."""

    steps: Steps
    means: Floats
    errors: Floats  # standard errors of the means; 0 where one seed has a value
    seeds: Steps  # how many have a value


# ------------------------------------------------------------------------------------------------------------ one run
class Kind(NamedTuple):
    """Rows of the same metrics."""

    places: array[int]  # of the rows among all
    steps: array[int]
    values: list[array[float]]  # by metric

    @classmethod
    def of(cls, names: Sequence[str]) -> Kind:
        return cls(array("q"), array("q"), [array("d") for _ in names])


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, Column]:
    """Columns of the rows of `metrics.jsonl`; values that are not finite numbers are left out.

    Evaluations are separate rows; of two values of a step the last one counts. Memory: 8 bytes a value, 16 a row.
    """
    kinds: dict[tuple[str, ...], Kind] = {}
    for place, row in enumerate(rows):
        names = tuple(name for name, value in row.items() if name != "step" and _is_finite(value))
        kind = kinds.get(names) or kinds.setdefault(names, Kind.of(names))
        kind.places.append(place)
        kind.steps.append(row["step"])
        for name, values in zip(names, kind.values):
            values.append(row[name])
    parts: dict[str, list[tuple[Kind, array[float]]]] = {}
    for names, kind in kinds.items():
        for name, values in zip(names, kind.values):
            parts.setdefault(name, []).append((kind, values))
    return {name: _joined(own) for name, own in parts.items()}


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _view(values: array[Any]) -> NDArray[Any]:
    return np.frombuffer(values, values.typecode)


def _joined(parts: Sequence[tuple[Kind, array[float]]]) -> Column:
    """The column of a metric from all kinds of rows that have it."""
    arrays = [(_view(kind.places), _view(kind.steps), _view(values)) for kind, values in parts]
    places, steps, values = arrays[0] if len(arrays) == 1 else map(np.concatenate, zip(*arrays))
    if len(arrays) > 1 or (np.diff(steps) <= 0).any():
        order = np.lexsort((places, steps))
        order = order[np.diff(steps[order], append=steps[order[-1]] + 1) > 0]  # the last row of each step
        steps, values = steps[order], values[order]
    return Column(steps, values)


def column(points: Mapping[int, float]) -> Column:
    """A column of values by step."""
    steps = np.fromiter(points.keys(), np.int64, len(points))
    values = np.fromiter(points.values(), np.float64, len(points))
    order = steps.argsort()
    return Column(steps[order], values[order])


def join_columns(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Several folders of one run that was resumed; where they share a step, the last one's values count."""
    whole = dict(parts[0])
    for part in parts[1:]:
        repeated = np.unique(np.concatenate([own.steps for own in part.values()])) if part else np.empty(0, np.int64)
        for name in whole.keys() | part.keys():
            old, new = (found.get(name, column({})) for found in (whole, part))
            kept = ~np.isin(old.steps, repeated)
            steps, values = (np.concatenate([a[kept], b]) for a, b in zip(old, new))
            order = steps.argsort()
            whole[name] = Column(steps[order], values[order])
    return {name: own for name, own in whole.items() if len(own.steps)}


# ---------------------------------------------------------------------------------------------------------- over seeds
def over_seeds(runs: Sequence[Column]) -> Curve:
    """Mean and standard error of a metric at each step, over the runs that have a value there."""
    steps, place = np.unique(np.concatenate([run.steps for run in runs]), return_inverse=True)
    values = np.concatenate([run.values for run in runs])
    seeds = np.bincount(place, minlength=len(steps))
    means = np.bincount(place, values, len(steps)) / seeds
    squares = np.bincount(place, (values - means[place]) ** 2, len(steps))
    return Curve(steps, means, np.sqrt(squares / np.maximum(seeds - 1, 1) / seeds), seeds)


def seed_groups(folders: Sequence[str]) -> dict[str, dict[Any, list[str]]]:
    """Experiment dirs by label and seed: a label for the runs of one experiment name that differ by their seed alone.

    Several folders of one label and seed are one run that was resumed. Of an experiment name with several settings, a
    label names the arguments that tell them apart.
    """
    by_name: dict[str, dict[str, list[str]]] = {}
    for folder in dict.fromkeys(folders):
        by_name.setdefault(short_name(folder), {}).setdefault(str(settings(folder)), []).append(folder)
    groups: dict[str, dict[Any, list[str]]] = {}
    for name, by_settings in by_name.items():
        apart = differences([settings(own[0]) for own in by_settings.values()])
        for number, own in enumerate(by_settings.values()):
            told = [f"{key} {str(values[number])[:MAX_VALUE]}" for key, values in apart.items()]
            label = ", ".join([name, *told[:MAX_TOLD]])
            seeds = groups.setdefault(label if label not in groups else f"{label} ({number + 1})", {})
            for folder in own:
                seeds.setdefault(read_args(folder).get("seed"), []).append(folder)
    return groups


def curves_of(metric: str, runs: Mapping[str, Sequence[Mapping[str, Column]]]) -> dict[str, Curve]:
    """The curve of a metric by label, over the runs that logged it; none of a label where no run did."""
    logged = {label: [run[metric] for run in seeds if metric in run] for label, seeds in runs.items()}
    return {label: over_seeds(own) for label, own in logged.items() if own}


def settings(folder: str) -> dict[str, Any]:
    """Arguments of an experiment that its numbers depend on, without its seed; paths without seeds and times."""
    kept = {key: value for key, value in read_args(folder).items() if key not in NO_SETTINGS}
    return {key: SEED_OR_TIME.sub("*", value) if isinstance(value, str) else value for key, value in kept.items()}


def differences(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Values of the arguments in which runs differ, by name; None for a run that has none."""
    keys = dict.fromkeys(key for run in runs for key in run)
    found = {key: [run.get(key) for run in runs] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


# -------------------------------------------------------------------------------------------------------------- shapes
def smooth(values: Sequence[float] | Floats, width: int) -> Floats:
    """Centred moving average, narrower towards both ends."""
    given = np.asarray(values, np.float64)
    places = np.arange(len(given))
    half = np.minimum(np.minimum(width // 2, places), len(given) - 1 - places)
    if not len(given) or not half.any():
        return given
    sums = np.concatenate([[0.0], np.cumsum(given - given.mean())])  # centred, for the rounding of long sums
    means = (sums[places + half + 1] - sums[places - half]) / (2 * half + 1) + given.mean()
    return np.where(half == 0, given, means)


def thin(values: Floats, limit: int) -> NDArray[np.intp]:
    """Places of at most `limit` >= 4 values that draw the same line: both ends, and of each part lowest and highest."""
    if len(values) <= limit:
        return np.arange(len(values))
    bounds = np.linspace(1, len(values) - 1, (limit - 2) // 2 + 1).astype(int)
    parts = [(start, values[start:end]) for start, end in zip(bounds, bounds[1:])]
    extremes = [start + place for start, part in parts for place in (part.argmin(), part.argmax())]
    return np.unique([0, *extremes, len(values) - 1])
