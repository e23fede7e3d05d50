"""The gap between the sampler of responses, mu, and the trainer that learns from them, pi: weights, and its size.

A server computes the probabilities of the same weights by other kernels, in another precision, or has older weights.
With r_t = pi(y_t) / mu(y_t), pi of the trainer's scoring pass before the first update (pi_old of the losses), and R the
product of a response's r_t, a weight multiplies all that is in the policy loss of a token, a KL included (not PPO's
entropy bonus and value loss):

    sequence kinds   exact where no R is out of bounds: the mean over mu of R f is the mean over pi_old of f, of any f
                     of the response alone, so at each update of a rollout, for each loss, and for advantages that a
                     response has by itself. The scores of others carry no weight. Against their mean the first update
                     is exact, later ones for losses that are linear in the ratio: not where ratios are clipped, nor
                     for `sapo` and `reinforce`. A group's deviation remains the scores' under mu.
    token kinds      at pi_old the sum over t is the gradient as if only token t were from pi, prefix and rest from mu
                     (2605.07331). The bias that is left is of first order in the gap, as is that without weights.
    truncation       removes the mean over mu of (ratio - C)_+ f; masking removes all ratios outside [1/C, C],
                     and with a bound inside the usual range of ratios can bias more than no weights.

The variance of R grows with length, and its typical value shrinks: at a KL of k nats a token the mean of log R over
responses of T tokens is -T k. All losses of `policy_losses.py` and PPO's are homogeneous in the advantage: weight times
advantage gives what weight times loss does. tests/maths/test_sampling_gap.py enumerates all of this. A masked token
keeps its place in the counts that losses are divided by.

Left out: weights divided by their mean, masks by the geometric mean of r_t, and products of prefixes (2605.07331).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightrlhf.maths.ops import kl_k3


# ----------------------------------------------------------------------------------------------------------- weights
def of_tokens(log_ratio: Tensor) -> Tensor:
    """log r_t: (B, T-1) -> (B, T-1)."""
    return log_ratio


def of_sequences(log_ratio: Tensor) -> Tensor:
    """log R, the sum over actions, at each of them: (B, T-1), 0 off actions -> (B, T-1)."""
    return log_ratio.sum(1, keepdim=True).expand_as(log_ratio)


def truncate(log_ratio: Tensor, bound: float) -> Tensor:
    """min(ratio, C) (Ionides 2008)."""
    return log_ratio.exp().clamp(max=bound)


def mask_out(log_ratio: Tensor, bound: float) -> Tensor:
    """The ratio within [1/C, C], 0 outside."""
    return torch.where(log_ratio.abs() <= math.log(bound), log_ratio.exp(), 0.0)


Correction = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, float], Tensor]]
CORRECTIONS: dict[str, Correction] = {
    "token_truncate": (of_tokens, truncate),  # TIS, Yao et al. 2025, fengyao.notion.site/off-policy-rl
    "token_mask": (of_tokens, mask_out),  # IcePop, Ling Team 2025, 2510.18855: M(k), there of two bounds
    "sequence_truncate": (of_sequences, truncate),  # Liu, Li et al. 2025, richardli.xyz/rl-collapse
    "sequence_mask": (of_sequences, mask_out),  # the same
}


def importance_weights(log_ratio: Tensor | None, mask: Tensor, kind: str, bound: float) -> Tensor | None:
    """Weight of each action in the loss, in the type of `log_ratio` and without a gradient, 0 elsewhere: (B, T-1).

    log_ratio: (B, T-1) of log pi - log mu, both at the temperature of sampling and over the same tokens, mu finite at
    actions (mask, bool); None where mu is pi. kind: a name of `CORRECTIONS`, or none; bound: C, above 1, infinity for
    none. A weight is exactly 1 where pi = mu, and never NaN, since a ratio that overflows is out of bounds. None stands
    for weights that are all 1.
    """
    if log_ratio is None or kind == "none":
        return None
    level, cut = CORRECTIONS[kind]
    return torch.where(mask, cut(level(of_actions(log_ratio, mask)), bound).to(log_ratio), 0.0)


def of_actions(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """log r_t at actions, 0 elsewhere, (B, T-1), float64: so that padding does not change a sum over thousands."""
    return torch.where(mask, log_ratio.detach(), 0.0).double()


# -------------------------------------------------------------------------------------------------------------- size
class GapSize(NamedTuple):
    """How far pi is from mu on a rank's actions."""

    sums: Tensor  # (3,) float64, to be added over ranks: of the k3 estimates, of actions cut, of actions
    ratio_max: Tensor  # () float64, largest r_t, 0 without actions; the largest over ranks counts

    def metrics(self) -> dict[str, float]:
        """KL(mu || pi) per token, the largest ratio, and the share of actions cut; NaN for a mean over no action."""
        kl, dropped, count = self.sums.tolist()
        means = (kl / count, dropped / count) if count else (math.nan, math.nan)
        return {"sampling/kl": means[0], "sampling/ratio_max": self.ratio_max.item(), "sampling/dropped": means[1]}


def gap_size(log_ratio: Tensor, mask: Tensor, kind: str | None = None, bound: float = math.inf) -> GapSize:
    """Size of the gap, of tensors as in `importance_weights`; without a kind nothing is cut.

    The KL at a token sampled from mu is estimated by k3, r - 1 - log r (Schulman 2020), as in verl's `rollout_corr`;
    infinite where pi = 0. An action is cut where its weight is truncated, masked, or 0.
    """
    log_ratio = of_actions(log_ratio, mask)
    cut = torch.zeros_like(mask)
    if kind is not None:
        level, weigh = CORRECTIONS[kind]
        weights = weigh(level(log_ratio), bound)
        cut = mask & ((weights == 0) | (weights != level(log_ratio).exp()))
    k3 = kl_k3(torch.zeros_like(log_ratio), log_ratio)  # of mu, as the policy, against pi; 0 off actions
    ratio_max = torch.where(mask, log_ratio.exp(), 0.0).flatten()
    return GapSize(
        torch.stack([k3.sum(), cut.sum().to(k3.dtype), mask.sum().to(k3.dtype)]),
        torch.cat([ratio_max, ratio_max.new_zeros(1)]).max(),  # of an empty batch, too
    )
