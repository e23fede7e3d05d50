"""Rewards: one or several scorers with their weights, and an audit that is never trained on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrlhf.data.batch import Rollout
from lightrlhf.data.scores import FAILURES, Scores
from lightrlhf.rewards.audit import RewardAudit
from lightrlhf.rewards.encoding import samples_of
from lightrlhf.rewards.scorers import EnvScorer, FunctionScorer, Groups, GroupScorer, has_failed


@dataclass
class Rewards:
    """One or several scorers, weighted.

    A function returns None where its reward does not apply: the others count (as in TRL). A response is not scored if
    no reward applies, or where one failed: killed, crashed, raised, returned no finite number, or a reward model that
    could not read it. A reward of weight 0 is only logged and its failures cost nothing. An episode whose environment
    failed is seen by no scorer, and is not scored.
    """

    scorers: list[GroupScorer]
    names: tuple[str, ...]
    weights: Tensor  # (R,) float64
    audit: RewardAudit | None = None

    def __call__(self, rollout: Rollout, audited: bool = True) -> Scores:
        """Scores of a rollout's responses, each by itself, and the audit's unless they are not to be audited.

        An episode is scored by its last row, for all of its rows.
        """
        if rollout.episode is not None:
            ends = rollout.ends().nonzero()[:, 0]
            episodes = rollout.select(ends)
            episodes.episode = None
            return self(episodes, audited).select(torch.searchsorted(ends, rollout.last_rows()))
        parts = self.parts([[sample] for sample in samples_of(rollout)])
        known = [[math.nan if value is None else value for value in row] for row in parts]
        total = [math.nan if (value := self.total(row)) is None else value for row in parts]
        return Scores(
            total=torch.tensor(total),
            parts=torch.tensor(known).reshape(len(parts), len(self.names)),
            names=self.names,
            weights=self.weights,
            audit=self.audit.score(rollout) if self.audit and audited else None,
            failures=self.failures,
        )

    def close(self) -> None:
        """End the processes in which functions are called; a later call starts new ones."""
        for scorer in [*self.scorers, *([self.audit.scorer] if self.audit else [])]:
            if isinstance(scorer, FunctionScorer):
                scorer.close()

    def state(self) -> dict[str, Any]:
        """State of the audit for a checkpoint, as plain values."""
        return {"audit": self.audit.state() if self.audit else None}

    @property
    def failures(self) -> dict[str, int]:
        """Responses of the last call on which a function failed, by kind."""
        counted: Counter[str] = Counter()
        for scorer in self.scorers:
            counted.update(scorer.failures if isinstance(scorer, FunctionScorer) else {})
        return {kind: counted[kind] for kind in FAILURES}

    def of_groups(self, groups: Groups) -> list[list[float | None]]:
        """Weighted sums for the responses of each group, None where a response is not scored."""
        totals = iter([self.total(row) for row in self.parts(groups)])
        return [[next(totals) for _ in group] for group in groups]

    def parts(self, groups: Groups) -> list[list[float | None]]:
        """A row of R values for each response: a number, None where a reward does not apply, NaN where it failed.

        All are NaN for an episode whose environment failed.
        """
        columns = []
        failed = [has_failed(sample) for group in groups for sample in group]
        groups = [[sample for sample in group if not has_failed(sample)] for group in groups]
        for scorer in self.scorers:
            if isinstance(scorer, FunctionScorer | EnvScorer):
                values = scorer.score([sample for group in groups for sample in group])
            else:
                scores = [value for group in scorer(groups) for value in group]
                values = [math.nan if value is None else value for value in scores]
            known = iter(values)
            columns.append([math.nan if missing else next(known) for missing in failed])
        return [list(row) for row in zip(*columns)]

    def total(self, row: Sequence[float | None]) -> float | None:
        """Weighted sum of the R values of a response, see `parts`; None where it is not scored."""
        weights = self.weights.tolist()
        terms = [weight * value for weight, value in zip(weights, row) if weight and value is not None]
        total = sum(terms) if terms else math.nan
        return None if math.isnan(total) else total
