"""Scores of RewardBench 2 (Malik et al. 2025, 2506.01937): best of n responses, and the subset Ties.

The weights of Ties come from the benchmark's own scorer (package `rewardbench` 0.1.4), with which all scores agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def best_of_n(chosen: Sequence[float], rejected: Sequence[float]) -> float:
    """Chance that a response drawn among the best-scored ones is a chosen one: 1 / k where k score the same.

    With one chosen response and three rejected ones it is the accuracy of best of four.
    """
    best = max(*chosen, *rejected)
    right = sum(score == best for score in chosen)
    return right / (right + sum(score == best for score in rejected))


class TiedScores(NamedTuple):
    """The parts of a prompt's scores that the subset Ties reads."""

    gap: float  # the lowest score of a right response less the highest of a wrong one
    spread: float  # the highest less the lowest score of a right response, 0 of one


def tied_scores(chosen: Sequence[float], rejected: Sequence[float]) -> TiedScores:
    """Gap and spread of the scores of right (chosen) and wrong (rejected) responses."""
    return TiedScores(min(chosen) - max(rejected), max(chosen) - min(chosen))


class TiesScore(NamedTuple):
    """Terms of the score of the subset Ties, float64: (R,) each, a number for each resample of the prompts."""

    tied_accuracy: Tensor  # share of prompts with several right answers, all of which score above all wrong ones
    ref_accuracy: Tensor  # the same of prompts with one right answer
    preferred: Tensor  # share of prompts whose right answers differ by less than right from wrong
    preferred_hard: Tensor  # the same, with the smaller gap of that prompt and of its reference with one right answer
    margin: Tensor  # mean of tanh(that gap / spread - 1)

    @property
    def total(self) -> Tensor:
        """The weighted score: (R,), at most 1.01 and at least -0.01."""
        weights = (0.3, 0.3, 0.2, 0.2, 0.01)
        return torch.stack([weight * term for weight, term in zip(weights, self)]).sum(0)


def ties_score(ref_gap: Tensor, tied_gap: Tensor, spread: Tensor, weights: Tensor) -> TiesScore:
    """Score of the subset Ties from the gaps and spreads of P prompts, float64: (P,) three times, (R, P) -> (R,) each.

    ref_gap is of a prompt's reference question, which has one right answer, tied_gap and spread of the question with
    several; NaN where a prompt has only the other. The accuracies are means over all prompts that have such a question,
    the shares over prompts with both, and the margin over such prompts with a spread above 0. weights: how often each
    prompt counts.
    """
    has_ref, has_tied = ~ref_gap.isnan(), ~tied_gap.isnan()
    has_both = has_ref & has_tied
    least = torch.minimum(ref_gap, tied_gap)  # NaN unless both

    def mean(values: Tensor, counted: Tensor) -> Tensor:
        """Mean of the values where the mask is True: (P,), (P,) bool -> (R,); 0 where it is True nowhere."""
        known = torch.where(counted, values.double(), 0.0)
        return (weights @ known) / (weights @ counted.double()).clamp(min=1)

    return TiesScore(
        tied_accuracy=mean(tied_gap > 0, has_tied),
        ref_accuracy=mean(ref_gap > 0, has_ref),
        preferred=mean(tied_gap > spread, has_both),
        preferred_hard=mean(least > spread, has_both),
        margin=mean((least / spread - 1).tanh(), has_both & (spread > 0)),
    )


def mean_interval(
    values: Sequence[float], intervals: Sequence[tuple[float, float]]
) -> tuple[float, tuple[float, float]]:
    """Mean of independent values, and its 95% interval from their intervals, such as a benchmark's from its subsets.

    The distances of the mean to its bounds are the root mean squares of the values' own, over the root of their number
    (Zou and Donner 2008, of a sum), which holds for intervals that are not symmetric.
    """
    count, mean = len(values), sum(values) / len(values)
    below = math.sqrt(sum((value - low) ** 2 for value, (low, _) in zip(values, intervals))) / count
    above = math.sqrt(sum((high - value) ** 2 for value, (_, high) in zip(values, intervals))) / count
    return mean, (mean - below, mean + above)
