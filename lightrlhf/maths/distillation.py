"""Divergences between a student and a teacher, per position and of whole responses.

At an action p is the student's distribution of the next token, q the teacher's, both (N, V). Two objectives have
different gradients by the student's weights:

    position   E_y sum_t D_t with the prefixes y_<t held fixed, D_t = D(p(. | y_<t), q(. | y_<t))
    sequence   KL(p(y) || q(y)) = E_y sum_t KL_t, whose gradient also knows that a token changes the later prefixes:
               E_y sum_t [grad KL_t + grad log p(y_t) sum_{u>t} KL_u]

The second line is the policy gradient with the reward log q(y_t) - log p(y_t), its own position and all later ones
replaced by their exact means, which leaves the expectation and lowers the variance (Rao-Blackwell).

Where log q of the sampled tokens alone is known, k1_t = log p(y_t) - log q(y_t) takes the place of KL_t, and its own
position is a policy gradient, too: grad log p(y_t) k1_t, whose mean is grad KL_t. Of the k likeliest tokens of q the
others are one bucket.

Left out: estimators of another gradient than their name says, see `cli.groups.teacher`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightrlhf.maths.ops import SumOverRanks

FLOOR = 1e-7  # least probability of the tokens that a server does not name


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
    values: Tensor,
    action_mask: Tensor,
    group: Tensor,
    num_groups: int,
    longest: int,
    sum_over_ranks: SumOverRanks | None = None,
) -> Tensor:
    """Mean of the values at the same action number of the group's other rows: (B, T-1) -> (B, T-1), 0 off actions.

    A row that has ended counts as 0 there, and a row without actions does not count. As a baseline it leaves the
    expectation of a gradient as it is, since it does not depend on the row's own tokens; 0 for a group of one row.
    Numbers count actions: 0 is a row's first one; longest: the most that a row of any rank may have.
    """
    reduce = sum_over_ranks or (lambda tensor: tensor)
    number = (action_mask.long().cumsum(1) - 1).clamp(min=0)  # (B, T-1)
    counted = torch.where(action_mask, values, 0.0)
    by_number = counted.new_zeros(len(counted), longest).scatter_add(1, number, counted)  # (B, L), left-aligned
    totals = reduce(by_number.new_zeros(num_groups, longest).index_add(0, group, by_number))  # (G, L)
    sizes = reduce(by_number.new_zeros(num_groups).index_add(0, group, action_mask.any(1).to(counted)))  # (G,)
    others = (totals[group] - by_number) / (sizes[group, None] - 1).clamp(min=1)
    return torch.where(action_mask & (sizes[group, None] > 1), others.gather(1, number), 0.0)


# ----------------------------------------------------------------------------------------- a part of the vocabulary
def with_tail(logprobs: Tensor) -> Tensor:
    """Log-probabilities of the k likeliest tokens and of all others together: (N, k) -> (N, k + 1), a distribution.

    A server rounds, so that the k may sum to 1 and more: the others have `FLOOR` then, and all are divided by the sum.
    """
    tail = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=FLOOR).log()
    return torch.cat([logprobs, tail], -1).log_softmax(-1)


def in_buckets(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of k < V tokens and of all others together: (N, V), (N, k) -> (N, k + 1).

    A KL of such buckets is at most the whole vocabulary's, and 0 where both distributions are equal.
    """
    others = logprobs.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(1, ids), others], -1)


# ------------------------------------------------------------------------------------- tokens of another tokenizer
def span_logprobs(logprobs: Tensor, ids: Tensor, span: Tensor) -> Tensor:
    """Log-probabilities of spans of tokens with each token in place of the last: (N, V), (N,), (N,) -> (S, V).

    The chain rule for tokens that another tokenizer merges: p(y_1) .. p(y_k-1 | y_<k-1) p(v | y_<k) at v. A row sums to
    the probability of the earlier tokens. logprobs: row t is of token t, so of a model's output one position before;
    span: numbers from 0, in order. No program trains on it: the gradient of its divergence is not 0 where both say the
    same of texts (`benchmarks/distillation.py`).
    """
    taken = logprobs.gather(1, ids[:, None])[:, 0]  # (N,)
    is_last = torch.cat([span[1:] != span[:-1], torch.ones_like(span[:1], dtype=torch.bool)])
    earlier = logprobs.new_zeros(int(is_last.sum())).index_add(0, span[~is_last], taken[~is_last])  # (S,)
    return logprobs[is_last] + earlier[:, None]
