"""Divergences between a student and a teacher, per position and of whole responses.

At an action p is the student's distribution of the next token, q the teacher's, both (N, V). Two objectives have
different gradients by the student's weights:

    position   E_y sum_t D_t with the prefixes y_<t held fixed, D_t = D(p(. | y_<t), q(. | y_<t))
    sequence   KL(p(y) || q(y)) = E_y sum_t KL_t, whose gradient also knows that a token changes the later prefixes:
               E_y sum_t [grad KL_t + grad log p(y_t) sum_{u>t} KL_u]

The second line is the policy gradient with the reward log q(y_t) - log p(y_t), its own position and all later ones
replaced by their exact means, which leaves the expectation and lowers the variance (Rao-Blackwell).

Left out: estimators of another gradient than their name says: k3 as a loss (on samples of p that is the gradient of
KL(q || p)), k1 as a loss (whose gradient has mean 0), k2 and k3 as a reward.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightrlhf.maths.ops import SumOverRanks


def divergence(student: Tensor, teacher: Tensor, beta: float = 1.0) -> Tensor:
    """Generalised Jensen-Shannon divergence of each row (Agarwal et al. 2024, 2306.13649, eq. 1): (N, V) -> (N,).

    beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p; at the ends, as in TRL, 1 is the reverse
    KL(p || q) and 0 the forward KL(q || p). student, teacher: log-probabilities; -inf is a token without probability.
    """
    if beta == 1.0:
        return kl(student, teacher)
    if beta == 0.0:
        return kl(teacher, student)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))  # (N, V)
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of each row of log-probabilities: (N, V) -> (N,); tokens of probability 0 in first add 0."""
    terms = first.exp() * (first - second)
    return torch.where(first == -math.inf, 0.0, terms).sum(-1)


def later_sum(values: Tensor, action_mask: Tensor) -> Tensor:
    """Sum of the values at later actions of the row, 0 off actions: (B, T-1) -> (B, T-1)."""
    counted = torch.where(action_mask, values, 0.0)
    return torch.where(action_mask, counted.flip(1).cumsum(1).flip(1) - counted, 0.0)


def other_rows_mean(
    values: Tensor, action_mask: Tensor, group: Tensor, num_groups: int, sum_over_ranks: SumOverRanks | None = None
) -> Tensor:
    """Mean of the values at the same action number of the group's other rows: (B, T-1) -> (B, T-1), 0 off actions.

    A row that has ended counts as 0 there. It does not depend on the row's own tokens, so as a baseline it leaves the
    expectation of a gradient as it is; 0 for a group of one row. Numbers count actions: 0 is a row's first one.
    """
    reduce = sum_over_ranks or (lambda tensor: tensor)
    number = (action_mask.long().cumsum(1) - 1).clamp(min=0)  # (B, T-1)
    counted = torch.where(action_mask, values, 0.0)
    by_number = torch.zeros_like(counted).scatter_add(1, number, counted)  # (B, T-1), left-aligned
    totals = reduce(by_number.new_zeros(num_groups, by_number.shape[1]).index_add(0, group, by_number))  # (G, T-1)
    sizes = reduce(by_number.new_zeros(num_groups).index_add(0, group, torch.ones_like(by_number[:, 0])))  # (G,)
    others = (totals[group] - by_number) / (sizes[group, None] - 1).clamp(min=1)
    return torch.where(action_mask & (sizes[group, None] > 1), others.gather(1, number), 0.0)
