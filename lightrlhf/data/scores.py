"""Scores of sampled responses: by one or several rewards, their weighted sum, and by an audit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

FAILURES = ("timeouts", "crashes", "errors")  # why a function gave no score though it was meant to


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of B responses by R rewards; NaN where missing."""

    total: Tensor  # (B,) weighted sum
    parts: Tensor  # (B, R)
    names: tuple[str, ...]  # of the R rewards
    weights: Tensor  # (R,) float64
    audit: Tensor | None = None  # (B,) second score, never trained on
    failures: dict[str, int] = field(default_factory=dict)  # responses that a function failed for, by kind

    def by_name(self) -> dict[str, Tensor]:
        """Scores (B,) of each reward."""
        return dict(zip(self.names, self.parts.unbind(1)))

    def select(self, index: Tensor) -> Scores:
        """Scores of some rows; failures are all counted."""
        audit = None if self.audit is None else self.audit[index]
        return dataclasses.replace(self, total=self.total[index], parts=self.parts[index], audit=audit)

    def replaced(self, keep: Tensor, fresh: Scores) -> Scores:
        """Scores of the rows `keep`, (B,) bool, and of fresh rows after them; failures of both are counted."""
        audit = None
        if self.audit is not None and fresh.audit is not None:
            audit = torch.cat([self.audit[keep], fresh.audit])
        return Scores(
            total=torch.cat([self.total[keep], fresh.total]),
            parts=torch.cat([self.parts[keep], fresh.parts]),
            names=self.names,
            weights=self.weights,
            audit=audit,
            failures={kind: count + fresh.failures[kind] for kind, count in self.failures.items()},
        )
