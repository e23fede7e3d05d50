"""Win rates at equal lengths (Dubois et al. 2024, 2404.04475), which correct for a judge's preference for long answers.

Left out: the paper's term for the difficulty of a prompt, which needs the verdicts of many models on the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrlhf.maths.bootstrap import bootstrap_interval, resample
from lightrlhf.maths.ops import Groups, number_groups


def length_controlled_win_rate(
    scores: Sequence[float], lengths: Sequence[Sequence[int]], groups: Groups, seed: int
) -> tuple[float, tuple[float, float]]:
    """Length-controlled share of wins of the first of two responses, and its 95% interval by a bootstrap of the groups.

    scores: 1 for a win, 1/2 for a tie, 0 for a loss. lengths: of the first and of the second ones, in one unit.
    groups: the prompts.
    """
    sizes = torch.stack([torch.tensor(own, dtype=torch.float64) for own in lengths], 1)  # (N, 2)
    wins = torch.tensor(scores, dtype=torch.float64)  # (N,)
    rates = torch.cat([length_controlled(wins, sizes, weights) for weights in resample(groups, seed)])  # (R + 1,)
    return float(rates[0]), bootstrap_interval(rates, int(number_groups(groups).max()) + 1)


def length_controlled(scores: Tensor, lengths: Tensor, weights: Tensor, ridge: float = 0.1) -> Tensor:
    """Win rate of a logistic model at equal lengths, for each resample: (N,), (N, 2), (R, N) float64 -> (R,).

    P(A wins) = sigmoid(theta + phi tanh(d / std(d))), d the difference in length; then sigmoid(theta). This is eq. 2
    of the paper without its term for the prompt. Newton's method, with a small ridge. Where one side is the longer one
    by about as much in every pair, length and quality cannot be told apart, and the rate is close to the plain one.
    """
    difference = lengths[:, 0] - lengths[:, 1]
    features = torch.stack(
        [torch.ones_like(scores), (difference / difference.std(correction=0).clamp(min=1e-9)).tanh()]
    )
    products = (features[:, None] * features).flatten(0, 1).T  # (N, 4)
    penalty = torch.tensor([1e-3, ridge], dtype=torch.float64)
    beta = torch.zeros(len(weights), 2, dtype=torch.float64)  # (R, 2)
    for _ in range(25):
        chance = (beta @ features).sigmoid()  # (R, N)
        gradient = (weights * (scores - chance)) @ features.T - penalty * beta
        curvature = (weights * chance * (1 - chance) @ products).unflatten(1, (2, 2))
        beta = beta + torch.linalg.solve(curvature + penalty.diag(), gradient).clamp(-2, 2)
    return beta[:, 0].sigmoid()
