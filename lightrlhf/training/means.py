"""Means of metrics over the steps since the last row of `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping

# not averaged: the rate of the next step, the number of a stage, and what counts on over all steps
LAST = {"train/lr", "curriculum/stage", "train/skipped_steps", "train/loss_scale"}


class StepMeans:
    """Sums of metrics over steps. state: of `state`, from the checkpoint that a run is resumed from.

    Every step counts alike, whatever its tokens. A metric's mean is over the steps that have it: NaN, a mean over
    nothing, does not count. Speeds, `…_per_second`, are means over the time of the phases of their steps.
    """

    def __init__(self, state: Mapping[str, list[float]] | None = None) -> None:
        self.sums = dict(state or {})  # by name: of the weighted values, and of the weights

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
        """The means, NaN over nothing; the next step begins new ones."""
        means = {name: total / weights if weights else math.nan for name, (total, weights) in self.sums.items()}
        self.sums = {}
        return means

    def state(self) -> dict[str, list[float]]:
        """What a resumed run needs, as plain values."""
        return dict(self.sums)
