"""Pure maths: tensors and floats in, tensors out.

Shapes follow `batch.py`: what concerns the prediction of token t+1 stands at position t. Losses return sums over what
they count; a loop divides once, by the count over all micro-batches and ranks.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lightrlhf.maths.student import Z, quantile

SumOverRanks = Callable[[Tensor], Tensor]
Groups = Sequence[Hashable] | NDArray[Any]  # of rows that depend on each other: a name or number for each row


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions that count tokens without padding, left or right: (B, T) -> (B, T)."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask`, over all or along `dim`; 0 where the mask is empty (never NaN)."""
    masked = torch.where(mask, values, torch.zeros_like(values))
    total = masked.sum() if dim is None else masked.sum(dim)
    count = mask.sum() if dim is None else mask.sum(dim)
    return total / count.clamp(min=1)


def whiten(values: Tensor, mask: Tensor, keep_mean: bool = False, sum_over_ranks: SumOverRanks | None = None) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over all counted values of all rows and ranks; 0 elsewhere.

    Never per sequence: that would give a good and a bad answer the same mean advantage.
    """
    reduce = sum_over_ranks or (lambda tensor: tensor)
    masked = torch.where(mask, values, torch.zeros_like(values))
    count, total = reduce(torch.stack([mask.sum().to(values.dtype), masked.sum()]))
    mean = total / count.clamp(min=1)
    centred = torch.where(mask, values - mean, torch.zeros_like(values))
    variance = reduce(centred.pow(2).sum()) / count.clamp(min=1)
    scaled = centred * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, scaled + mean, scaled) if keep_mean else scaled


def gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    gamma: float | Tensor,
    lambd: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 11-16): (B, T-1) -> advantages, returns (B, T-1).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}, along the action positions of each
    row; the value after the last action is `last_values`, (B,), or 0. Actions of a row may have gaps (turns
    of a dialogue). `gamma` is one number, or (B, T-1) with a discount for each step (of a macro action: gamma to the
    power of its length).
    """
    discounts = gamma if isinstance(gamma, Tensor) else torch.full_like(rewards, gamma)
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[:, 0]) if last_values is None else last_values
    next_advantage = torch.zeros_like(rewards[:, 0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        counted = action_mask[:, t]
        discount = discounts[:, t]
        advantage = rewards[:, t] + discount * next_value - values[:, t] + discount * lambd * next_advantage
        next_advantage = torch.where(counted, advantage, next_advantage)
        next_value = torch.where(counted, values[:, t], next_value)
        advantages[:, t] = torch.where(counted, advantage, torch.zeros_like(advantage))
    return advantages, torch.where(action_mask, advantages + values, torch.zeros_like(values))


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, low: float, high: float | None = None) -> Tensor:
    """PPO's min(rho A, clip(rho, 1 - low, 1 + high) A) (Schulman et al. 2017, eq. 7), of any shape; high: low."""
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + (low if high is None else high)) * advantages)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    actions: Tensor | tuple[Tensor, ...],
    clip_coeff: float,
    entropy: Tensor | None = None,
    entropy_coeff: float = 0.0,
) -> Tensor:
    """Minus the sum over actions of the clipped surrogate and an entropy bonus (Schulman et al. 2017, eq. 7 and 9).

    Tensors are (B, T-1); actions: their mask, or their rows and columns. Divide the scalar by the number of actions of
    all micro-batches and ranks.
    """
    surrogate = clipped_surrogate(logprobs - old_logprobs, advantages, clip_coeff)  # (B, T-1)
    if entropy is not None:
        surrogate = surrogate + entropy_coeff * entropy
    return -surrogate[actions].sum()


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k1 estimator of KL(pi || ref) from samples of pi: log pi - log ref. Unbiased, may be negative (Schulman 2020)."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k2 estimator: half the squared log-ratio. Biased, low variance, and its gradient is the KL's (Schulman 2020)."""
    return 0.5 * (logprobs - ref_logprobs).pow(2)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 estimator: exp(-r) - 1 + r with r = log pi - log ref. Unbiased and never negative (Schulman 2020)."""
    ratio = ref_logprobs - logprobs
    return ratio.exp() - 1 - ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def preference_loss(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """Bradley-Terry negative log-likelihood of each pair, -log sigmoid(chosen - rejected): (B,) -> (B,)."""
    return -F.logsigmoid(chosen_scores - rejected_scores)


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, sum_over_ranks: SumOverRanks | None = None
) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the actions of all ranks; 1 is perfect, 0 as good as a constant.

    A scalar in float64; 0 where there is no action.
    """
    counted = torch.stack([(returns - values)[mask], returns[mask]]).double()  # (2, N)
    sums = torch.cat([counted.sum(1), counted.pow(2).sum(1), mask.sum()[None].double()])
    *moments, count = sum_over_ranks(sums) if sum_over_ranks else sums
    if count == 0:
        return count
    error, total = (square / count - (linear / count) ** 2 for linear, square in zip(moments[:2], moments[2:]))
    return 1 - error / total.clamp(min=1e-8)


def win_rate(
    pairs: Iterable[tuple[float | None, float | None]], groups: Iterable[Hashable] | None = None
) -> tuple[float, tuple[float, float]]:
    """Share of pairs whose first number is the higher one, a tie half, with its 95% interval (`share_interval`).

    Pairs with None or NaN do not count; without any pair the share is 0. groups: see `share_interval`.
    """
    scores = array("d")
    kept: Any = array(groups.typecode) if isinstance(groups, array) else []
    for (one, other), group in zip(pairs, itertools.repeat(None) if groups is None else groups):
        if one is not None and other is not None and not (math.isnan(one) or math.isnan(other)):
            scores.append(float(one > other) + 0.5 * (one == other))
            if groups is not None:
                kept.append(group)
    return sum(scores) / max(len(scores), 1), share_interval(scores, None if groups is None else kept)


def wins(first: Tensor, second: Tensor) -> Tensor:
    """1 where the first is higher, 1/2 where both are equal, else 0; any shape, float32."""
    return (first > second).float() + 0.5 * (first == second).float()


def number_groups(groups: Groups) -> NDArray[np.int64]:
    """Numbers (N,) of the groups of N rows, in the order of their first rows; of an array without a dict of them."""
    if not isinstance(groups, array | np.ndarray):
        numbers: dict[Hashable, int] = {}
        return np.fromiter((numbers.setdefault(group, len(numbers)) for group in groups), np.int64, len(groups))
    _, first, place = np.unique(np.asarray(groups), return_index=True, return_inverse=True)
    return first.argsort().argsort()[place].astype(np.int64)


def share_interval(values: Sequence[float], groups: Groups | None = None) -> tuple[float, float]:
    """95% interval of the mean of values in [0, 1], such as wins with a tie as 1/2: Wilson's, on an effective number.

    Values of one group (programs for one problem, judgements on one prompt) depend on each other. With G groups and the
    variance v of their mean as a ratio's (Cochran 1977, eq. 6.13), n' = p (1-p) / v values would be independent
    (Kish 1965, section 8.2); n' is multiplied by (z / t_{G-1})^2, of the 97.5% quantiles of the normal distribution and
    of Student's t, as in Korn and Graubard 1998, and lies between G and the number of values. Where all groups agree v
    is 0, and n' is G. Ties make the interval wider than it needs to be. Without groups each value is one of its own,
    and the interval is `wilson_interval`.
    """
    total, count = sum(values), len(values)
    if groups is None:
        return wilson_interval(total, count)
    numbers = number_groups(groups)
    sums, sizes = np.bincount(numbers, np.asarray(values, np.float64)), np.bincount(numbers)
    num_groups = len(sums)
    if num_groups == count:
        return wilson_interval(total, count)
    effective = float(num_groups)
    mean = total / count
    residuals = sum(((sums - mean * sizes) ** 2).tolist())
    if num_groups > 1 and residuals > 1e-12 and 0 < mean < 1:
        variance = num_groups / (num_groups - 1) * residuals / count**2
        shrunk = mean * (1 - mean) / variance * (Z / quantile(num_groups - 1)) ** 2
        effective = min(max(shrunk, effective), float(count))
    return wilson_interval(mean * effective, effective)


def grouped_interval(values: Sequence[float], groups: Groups) -> tuple[float, float]:
    """95% interval of the mean where numbers of one group are dependent, by Student's t_{G-1}.

    The variance is a ratio's, of G groups (Cochran 1977, eq. 6.13). Infinite for a single group.
    """
    numbers, mean = number_groups(groups), sum(values) / len(values)
    sums, sizes = np.bincount(numbers, np.asarray(values, np.float64)), np.bincount(numbers)
    if len(sums) < 2:
        return -math.inf, math.inf
    variance = len(sums) / (len(sums) - 1) * float(((sums - mean * sizes) ** 2).sum()) / len(values) ** 2
    half = quantile(len(sums) - 1) * variance**0.5
    return mean - half, mean + half


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """95% interval of a share (Wilson 1927, eq. 1); holds for few trials and for shares near 0 and 1."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = (share + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z / (1 + Z * Z / trials) * (share * (1 - share) / trials + Z * Z / (4 * trials * trials)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def gae_over_rows(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    episode: Tensor | None,
    gamma: float,
    lambd: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gae` along the rows of each episode, in their order: (B, W) -> advantages, returns (B, W).

    episode: (B,) int64, equal in its rows; None: each row is one. last_values: (B,), 0 but in last rows of episodes.
    """
    if episode is None:
        return gae(rewards, values, action_mask, gamma, lambd, last_values)
    _, number, counts = episode.unique(return_inverse=True, return_counts=True)  # (B,) below E, (E,)
    place = number.argsort(stable=True).argsort() - (counts.cumsum(0) - counts)[number]  # (B,) of a row in its episode
    shape = len(counts), int(counts.max()), rewards.shape[1]

    def join(part: Tensor) -> Tensor:  # (B, W) -> (E, R W)
        return part.new_zeros(shape).index_put((number, place), part).flatten(1)

    last = None if last_values is None else last_values.new_zeros(len(counts)).index_add(0, number, last_values)
    found = gae(join(rewards), join(values), join(action_mask), gamma, lambd, last)  # (E, R W) each
    advantages, returns = (part.view(shape)[number, place] for part in found)
    return advantages, returns


def episode_gae(rewards: Tensor, values: Tensor, episode: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """GAE along the decisions of each episode: rewards, values and episode indices (B,) -> advantages, returns (B,)."""
    every = torch.ones_like(episode, dtype=torch.bool)[:, None]
    advantages, returns = gae_over_rows(rewards[:, None], values[:, None], every, episode, gamma, lambd)
    return advantages[:, 0], returns[:, 0]
