"""Advantages of groups: the responses to one prompt are each other's baseline.

A group's rows may lie in several micro-batches and on several ranks: its statistics count all its scored rows.
Group numbers count from 0 and are the same on all ranks. Scores that are NaN are in no statistic and have no advantage.

`table_advantages` is for user-defined functions, such as a median as the baseline.

Left out: baselines weighted by length (OPO), and by a greedy response (ReMax).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightrlhf.maths.ops import SumOverRanks

EPS = 1e-6  # added to what divides


class Moments(NamedTuple):
    """Statistics of the scored rows, in float64: `batch_std` over all rows, the others over each row's group."""

    size: Tensor  # (B,) scored rows
    mean: Tensor  # (B,)
    std: Tensor  # (B,) with n - 1, 0 of one row
    batch_std: Tensor  # () with n - 1

    @property
    def informative(self) -> Tensor:
        """Whether the scores of each row's group differ: (B,) bool."""
        return self.std > 0


def group_moments(
    scores: Tensor, group: Tensor, num_groups: int, sum_over_ranks: SumOverRanks | None = None
) -> Moments:
    """Statistics of each row's whole group, over all ranks; scores: (B,), NaN where there is none, group: (B,) int64.

    In float64 the mean of equal float32 scores is exact, so that their deviation is exactly 0.
    """
    reduce = sum_over_ranks or (lambda tensor: tensor)
    given = scores.double()  # (B,)
    scored = ~given.isnan()
    values = torch.where(scored, given, torch.zeros_like(given))  # (B,)

    def sums(*columns: Tensor) -> Tensor:
        """Sum of each column (B,) over each group: (G, C)."""
        return reduce(given.new_zeros(num_groups, len(columns)).index_add(0, group, torch.stack(columns, 1)))

    def std(squares: Tensor, count: Tensor) -> Tensor:
        return (squares / (count - 1).clamp(min=1)).sqrt()

    count, total = sums(scored.to(values.dtype), values).unbind(1)  # (G,) each
    mean = total / count.clamp(min=1)
    batch_mean = total.sum() / count.sum().clamp(min=1)
    centred = [torch.where(scored, values - middle, 0.0).pow(2) for middle in (mean[group], batch_mean)]  # (B,) each
    squares, batch_squares = sums(*centred).unbind(1)  # (G,) each
    within = std(squares, count)
    return Moments(count[group], mean[group], within[group], std(batch_squares.sum(), count.sum()))


Estimator = Callable[[Tensor, Moments], Tensor]


def raw(scores: Tensor, moments: Moments) -> Tensor:
    """The scores: no baseline (REINFORCE; REINFORCE++, Hu 2025, 2501.03262, then whitens them)."""
    return scores


def centre(scores: Tensor, moments: Moments) -> Tensor:
    """r - mean (Dr. GRPO, Liu et al. 2025, 2503.20783, section 3.2)."""
    return scores - moments.mean


def standardise(scores: Tensor, moments: Moments) -> Tensor:
    """(r - mean) / std (GRPO, Shao et al. 2024, 2402.03300, section 4.1.2)."""
    return (scores - moments.mean) / (moments.std + EPS)


def standardise_batch(scores: Tensor, moments: Moments) -> Tensor:
    """(r - mean) / std of all scores of the batch (Lite PPO, Liu et al. 2025, 2508.08221, section 4.1)."""
    return (scores - moments.mean) / (moments.batch_std + EPS)


def leave_one_out(scores: Tensor, moments: Moments) -> Tensor:
    """r - mean of the others of its group = n / (n - 1) (r - mean) (RLOO, Ahmadian et al. 2024, 2402.14740)."""
    return (scores - moments.mean) * moments.size / (moments.size - 1).clamp(min=1)


def max_likelihood(scores: Tensor, moments: Moments) -> Tensor:
    """(r - mean) / mean, for scores of at least 0 (MaxRL, 2602.02710)."""
    return (scores - moments.mean) / (moments.mean + EPS)


ADVANTAGES: dict[str, Estimator] = {
    "std": standardise,
    "mean": centre,
    "batch_std": standardise_batch,
    "rloo": leave_one_out,
    "maxrl": max_likelihood,
    "none": raw,
}


def group_advantages(scores: Tensor, moments: Moments, estimator: Estimator) -> Tensor:
    """Advantages (B,) of scores (B,), in their type; 0 without a score, and without a baseline in a group of one."""
    exact = scores.double()
    advantages = estimator(exact, moments)
    known = ~exact.isnan() & ((moments.size > 1) | (estimator is raw))
    return torch.where(known, advantages, torch.zeros_like(advantages)).to(scores)


TableFunction = Callable[[Tensor], Tensor]  # scores (P, K) of K responses to each of P prompts -> advantages (P, K)


def table_advantages(scores: Tensor, group: Tensor, function: TableFunction) -> Tensor:
    """Advantages (B,) in float64 by a function of tables of scores; 0 without a score, and in a group of one.

    A table (P, K) has the P groups with K scored rows, and is one call; all rows of a group, on any rank, must be here.
    scores: (B,), NaN where a score is missing.
    """
    exact = scores.double()
    members: dict[int, list[int]] = {}
    for row in (~exact.isnan()).nonzero()[:, 0].tolist():
        members.setdefault(int(group[row]), []).append(row)
    advantages = torch.zeros_like(exact)
    for size in sorted({len(rows) for rows in members.values()} - {1}):
        table = torch.tensor([rows for rows in members.values() if len(rows) == size])  # (P, K)
        advantages[table] = function(exact[table]).to(exact)
    return advantages
