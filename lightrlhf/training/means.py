"""Means over steps: of metrics since the last row of `metrics.jsonl`, and running ones that a loss reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# not averaged: the next step's learning rate, the number of a stage, and counters over all steps
LAST = {"train/lr", "curriculum/stage", "train/skipped_steps", "train/loss_scale"}


class StepMeans:
    """Sums of metrics over steps. state: the value of `state()` in the checkpoint that a run is resumed from.

    Every step has the same weight, whatever its number of tokens. A metric is averaged over the steps that have it; NaN
    is ignored. Speeds, `…_per_second`, are weighted by the time of the phases of their steps.
    """

    def __init__(self, state: Mapping[str, list[float]] | None = None) -> None:
        self.sums = dict(state or {})  # by name: the sums of weighted values and of weights

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        phases = [name for name in metrics if name.startswith("time/") and not name.endswith("_per_second")]
        seconds = sum(metrics[name] for name in phases)
        for name, value in metrics.items():
            total, weights = self.sums.get(name, [0.0, 0.0]) if name not in LAST else [0.0, 0.0]
            weight = seconds if name.endswith("_per_second") else 1.0
            number = float(value)
            self.sums[name] = [total, weights] if math.isnan(number) else [total + weight * number, weights + weight]

    def end(self) -> dict[str, float]:
        """Return the means, NaN for a metric without values, and reset the sums."""
        means = {name: total / weights if weights else math.nan for name, (total, weights) in self.sums.items()}
        self.sums = {}
        return means

    def state(self) -> dict[str, list[float]]:
        """The state to resume from, as plain values."""
        return dict(self.sums)


@dataclass
class RunningMean:
    """Mean over all finished steps, 0 before the first.

    The current step is not included: its values are known only after all its micro-batches.
    """

    total: float = 0.0
    count: int = 0

    @property
    def value(self) -> float:
        return self.total / max(self.count, 1)

    def update(self, total: float, count: int) -> None:
        """Add the values of a step: their sum and their number."""
        self.total += total
        self.count += count
