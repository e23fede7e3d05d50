"""What raw rows say of an arm beside its control: pure functions from rows to differences over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from examples.experiments.records import Row, common_seeds
from examples.experiments.stats import paired

Curve = list[dict[str, float]]  # of a run: one entry for each iteration or checkpoint
Gap = tuple[float, float, float]  # mean of a difference, and its 95% interval
Values = dict[str, dict[int, float]]  # by arm and seed
Read = Callable[[Sequence[Row]], Values]  # from rows of two arms


class Comparison(NamedTuple):
    """An arm minus its control over the seeds that both have, turned so that more is better."""

    n: int
    gap: Gap
    arm: float  # means, as they were measured
    control: float


def compare(rows: Sequence[Row], arm: str, control: str, read: Read, less_is_better: bool = False) -> Comparison | None:
    """An arm beside its control, seed by seed; None where they have no seed in common."""
    own = [row for row in rows if row["arm"] in (arm, control)]
    seeds = common_seeds(own, (arm, control))
    if not seeds:
        return None
    values = read([row for row in own if row["seed"] in seeds])
    ours, theirs = ([values[name][seed] for seed in seeds] for name in (arm, control))
    gap = paired(theirs, ours) if less_is_better else paired(ours, theirs)
    return Comparison(len(seeds), gap, sum(ours) / len(ours), sum(theirs) / len(theirs))


def each(value: Callable[[Row], float]) -> Read:
    """A reading of each row by itself."""

    def read(rows: Sequence[Row]) -> Values:
        values: Values = {}
        for row in rows:
            values.setdefault(row["arm"], {})[row["seed"]] = value(row)
        return values

    return read


def equal_kl(rows: Sequence[Row]) -> Values:
    """The reward of each arm's curve at the lowest final KL of the arms with that seed."""
    curves: dict[str, list[Curve]] = {}
    seeds = sorted({row["seed"] for row in rows})
    for row in sorted(rows, key=lambda row: row["seed"]):
        curves.setdefault(row["arm"], []).append(row["curve"])
    return {arm: dict(zip(seeds, values)) for arm, values in at_equal_kl(curves).items()}


def at_equal_kl(curves: Mapping[str, Sequence[Curve]]) -> dict[str, list[float]]:
    """Each arm's reward, one value per seed, at the lowest final KL of these arms with that seed."""
    seeds = range(min(map(len, curves.values())))
    ends = [min(curves[arm][i][-1]["kl"] for arm in curves) for i in seeds]
    return {arm: [reward_at(curves[arm][i], ends[i]) for i in seeds] for arm in curves}


def reward_at(curve: Curve, kl: float) -> float:
    """The reward where a curve first reaches a KL, interpolated linearly between iterations."""
    for before, after in zip(curve, curve[1:]):
        if after["kl"] >= kl:
            span = after["kl"] - before["kl"]
            share = (kl - before["kl"]) / span if span > 0 else 1.0
            return before["reward"] + share * (after["reward"] - before["reward"])
    return curve[-1]["reward"]


ByMethod = dict[str, dict[str, list[float]]]  # by method and measure, one value per seed


def at_equal_samples_and_time(curves: Mapping[str, Sequence[Curve]], measures: Sequence[str]) -> dict[str, ByMethod]:
    """Measures of methods with the same seeds where their curves end, and where that of the fastest with a seed does.

    curves: `seconds` and measures of each checkpoint, by seed.
    """
    ends = [min(curve[-1]["seconds"] for curve in of_seed) for of_seed in zip(*curves.values())]
    return {
        "equal samples": {m: {name: [c[-1][name] for c in runs] for name in measures} for m, runs in curves.items()},
        "equal time": {
            m: {name: [at_seconds(c, name, end) for c, end in zip(runs, ends)] for name in measures}
            for m, runs in curves.items()
        },
    }


def at_seconds(curve: Curve, measure: str, seconds: float) -> float:
    """A measure after so many seconds of training, on the line between two checkpoints."""
    for before, after in zip(curve, curve[1:]):
        if after["seconds"] >= seconds:
            share = (seconds - before["seconds"]) / (after["seconds"] - before["seconds"])
            return before[measure] + share * (after[measure] - before[measure])
    return curve[-1][measure]
