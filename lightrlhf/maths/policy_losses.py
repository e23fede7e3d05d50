"""Policy losses per token, and the weight that each token has in their sum.

All tensors are (B, T-1), aligned as in `data/batch.py`. A loss is a function f(logprobs, log_ratio, advantages,
action_mask) -> (B, T-1) of the log-probabilities, of log rho = log pi - log pi_old, which carries gradients too, and of
the advantages; its values off actions have no weight. The loop minimises the sum of weights times losses. The weights
contain every count, over all micro-batches and ranks, so that splitting a batch changes no gradient.

Left out: the geometric mean of clipped ratios (GMPO), masks by total variation (DPPO), weights of sequences (VESPO).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightrlhf.maths import macro_actions
from lightrlhf.maths.ops import SumOverRanks, clipped_surrogate, kl_k2

TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
SAPO_TEMPERATURES = 1.0, 1.05  # for positive and for other advantages: 2511.20347, section 4


# ------------------------------------------------------------------------------------------------------------ losses
def clip_loss(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> Tensor:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) (Schulman et al. 2017, eq. 7; two ranges: DAPO, 2503.14476, eq. 10).

    dual: where A < 0 the loss is at most -dual A, however large the ratio (Ye et al. 2020, 1912.09729, eq. 5).
    """
    surrogate = clipped_surrogate(log_ratio, advantages, low, high)
    if dual is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual * advantages), surrogate)
    return -surrogate


def cispo_loss(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, action_mask: Tensor, low: float = 0.2, high: float = 0.2
) -> Tensor:
    """-clip(rho, 1 - low, 1 + high) A log pi, the ratio a constant (CISPO, MiniMax 2025, 2506.13585, eq. 4-5)."""
    return -log_ratio.detach().exp().clamp(1 - low, 1 + high) * advantages * logprobs


def sapo_loss(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    """-4/tau sigmoid(tau (rho - 1)) A: a soft gate in place of the clip (SAPO, 2511.20347)."""
    positive, other = SAPO_TEMPERATURES
    tau = other + (positive - other) * (advantages > 0).to(advantages)
    return -4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantages


def reinforce_loss(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    """-A log pi (Williams 1992): right for one update on samples of the policy itself."""
    return -advantages * logprobs


LOSSES: dict[str, TokenLoss] = {"clip": clip_loss, "cispo": cispo_loss, "sapo": sapo_loss, "reinforce": reinforce_loss}


def make_loss(name: str, low: float, high: float, dual: float | None) -> TokenLoss:
    """The loss of this name with its ranges."""
    if name == "clip":
        return functools.partial(clip_loss, low=low, high=high, dual=dual)
    return functools.partial(cispo_loss, low=low, high=high) if name == "cispo" else LOSSES[name]


def sequence_log_ratio(log_ratio: Tensor, action_mask: Tensor, turn: Tensor | None = None) -> Tensor:
    """Mean log-ratio of each row's actions at each of them (GSPO, Zheng et al. 2025, 2507.18071, eq. 7): (B, T-1).

    turn: (B, T-1) of episodes, each of whose turns is a sequence.
    """
    if turn is not None:
        segments = macro_actions.turn_segments(action_mask, turn)
        return macro_actions.broadcast(macro_actions.value_equal(log_ratio, segments), segments)
    counted = torch.where(action_mask, log_ratio, torch.zeros_like(log_ratio))
    mean = counted.sum(1, keepdim=True) / action_mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
    return torch.where(action_mask, mean, torch.zeros_like(log_ratio))


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, log_ratio: Tensor) -> Tensor:
    """rho (log pi - log pi_ref)^2 / 2, the ratio a constant: the gradient of KL(pi || pi_ref) at each token.

    This holds on samples of pi (rho = 1) and of pi_old. The gradient of k3, which many use, belongs to another
    divergence, KL(pi_ref || pi); howto/algorithms/grpo.md has the table.
    """
    return log_ratio.detach().exp() * kl_k2(logprobs, ref_logprobs)


def entropy_bonus(entropy: Tensor, weights: Tensor, actions: Tensor | tuple[Tensor, ...]) -> Tensor:
    """sum_t w_t H(pi(. | s_t)), a scalar; the loss is reduced by `--entropy_coeff` times it (Schulman 2017, eq. 9).

    The entropy belongs to a state, not to the action that was sampled there: weights hold no importance weights.
    actions: their mask, or their rows and columns.
    """
    return (weights * entropy)[actions].sum()


# ------------------------------------------------------------------------------------------------------- aggregation
class Counts(NamedTuple):
    """What a batch of all micro-batches and ranks holds; rows without an action do not count."""

    tokens: Tensor  # () actions
    sequences: Tensor  # () rows, or episodes of rows
    groups: Tensor  # () groups
    row_tokens: Tensor  # (B, 1) actions of each row, or of its episode
    group_tokens: Tensor  # (B, 1) actions of each row's group
    length: int  # the longest response that may be sampled


AGGREGATIONS: dict[str, Callable[[Counts], Tensor]] = {
    "token": lambda n: 1 / n.tokens,  # DAPO, 2503.14476, eq. 8
    "sequence": lambda n: 1 / (n.sequences * n.row_tokens),  # GRPO, 2402.03300, eq. 3
    "sum": lambda n: 1 / n.sequences,  # RLOO, 2402.14740
    "constant": lambda n: 1 / (n.sequences * n.length),  # Dr. GRPO, 2503.20783
    "prompt": lambda n: 1 / (n.groups * n.group_tokens),  # ScaleRL, 2510.13786
}


def token_weights(
    action_mask: Tensor,
    group: Tensor,
    num_groups: int,
    aggregation: str,
    length: int,
    sum_over_ranks: SumOverRanks | None = None,
    episode: Tensor | None = None,
) -> Tensor:
    """Weight of each action in the loss, (B, T-1), 0 elsewhere; `aggregation` is a name of `AGGREGATIONS`.

    Counts are over the rows of all ranks. group: (B,) int64 below num_groups; length: the constant of `constant`;
    episode: (B,) int64, whose rows, all of them here, count as one sequence; by default each row is one.
    """
    reduce = sum_over_ranks or (lambda tensor: tensor)
    row_tokens = action_mask.sum(1).double()  # (B,)
    number = torch.arange(len(group)) if episode is None else episode.unique(return_inverse=True)[1]  # (B,) below E
    tokens_of = row_tokens.new_zeros(len(group)).index_add(0, number, row_tokens)  # (B,), of the first E episodes
    group_of = torch.zeros_like(group).scatter(0, number, group)  # likewise
    rows = torch.stack([tokens_of, (tokens_of > 0).double()], 1)  # (B, 2)
    by_group = reduce(rows.new_zeros(num_groups, 2).index_add(0, group_of, rows))  # (G, 2)
    tokens, sequences = by_group.sum(0)
    groups = (by_group[:, 0] > 0).sum()
    counts = Counts(tokens, sequences, groups, tokens_of[number, None], by_group[group, :1], length)
    weights = AGGREGATIONS[aggregation](counts).float()  # infinite for an empty count
    return torch.where(action_mask, weights.expand(action_mask.shape), 0.0)
