"""Loss scale of `--precision 16-mixed`: losses are multiplied so that small gradients do not vanish in float16.

Gradients are divided again before they are clipped. Where one has overflowed the step is skipped and the scale halved;
after 2,000 steps without overflow it is doubled (torch.amp.GradScaler, as Fabric makes it; Micikevicius et al. 2018,
arXiv:1710.03740).

Left out: a scale for each model. Models whose gradients come from the same pass, such as a critic's and its policy's,
share one, which changes only when all of them have made their step.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

MOST_SKIPPED = 20  # steps in a row; from 65,536 the scale is then below 0.1


def scaled_precision(device: str) -> Any:
    """Fabric's precision 16-mixed, whose optimisers step without scaler: `LossScale` takes its place."""
    from lightning.fabric.plugins import MixedPrecision, Precision

    class ScaledPrecision(MixedPrecision):
        def optimizer_step(self, optimizer: Any, **options: Any) -> Any:
            return Precision.optimizer_step(self, optimizer, **options)

    return ScaledPrecision("16-mixed", device)


class LossScale:
    """The scale of the losses of a run, and the optimiser steps that were skipped because gradients overflowed.

    scaler: Fabric's, which multiplies losses in its backward passes.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler, self.skipped = scaler, 0
        self.in_a_row: dict[str, int] = {}  # by learner
        # If the first step is skipped, torch believes that schedule and optimiser are called in the wrong order.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale, once between updates of it."""
        self.scaler.unscale_(optimizer)

    def update(self) -> None:
        """Halve the scale if gradients unscaled since the last update were not finite, else maybe double it."""
        self.scaler.update()

    def count(self, name: str, is_finite: bool) -> str:
        """Count an optimiser step of a learner; returns what is wrong when many in a row were skipped, else ""."""
        self.skipped += not is_finite
        self.in_a_row[name] = 0 if is_finite else self.in_a_row.get(name, 0) + 1
        if self.in_a_row[name] < MOST_SKIPPED:
            return ""
        return (
            f"{name} gradients of {MOST_SKIPPED} optimiser steps in a row are not finite, down to a loss scale of "
            f"{self.scaler.get_scale():g}; use --precision bf16-mixed or 32-true, or a lower learning rate"
        )

    def metrics(self) -> dict[str, float]:
        """Steps skipped so far, and the scale."""
        return {"train/skipped_steps": float(self.skipped), "train/loss_scale": self.scaler.get_scale()}

    def state(self) -> dict[str, Any]:
        """The state to resume from, as plain values."""
        return {"scaler": self.scaler.state_dict(), "skipped": self.skipped, "in_a_row": dict(self.in_a_row)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        self.scaler.load_state_dict(state["scaler"])
        self.skipped, self.in_a_row = state["skipped"], dict(state["in_a_row"])
