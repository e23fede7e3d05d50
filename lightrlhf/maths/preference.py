"""Losses on preference pairs: DPO and its relatives, one pure function each.

With a and b the log-ratios of policy to reference of the chosen and the rejected response, each loss maps `Pairs` to
one number per pair, (B,). `LOSSES` holds them by name; `RAPO` has the weights of the rejected side.

Left out: losses without a reference (SimPO, ORPO), divergences other than KL, unpaired data (KTO).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

EXO_SMOOTHING = 1e-3  # EXO compares with smoothed labels; at 0 its loss would be infinite


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """B pairs of responses, the input of a loss. Tensors are (B,); log-probabilities are summed over a response."""

    policy_chosen_logps: Tensor
    policy_rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    beta: float
    chosen_lengths: Tensor | float = 1.0  # tokens of the responses
    rejected_lengths: Tensor | float = 1.0
    label_smoothing: float = 0.0
    rejected_weight: Tensor | float = 1.0  # RAPO's lambda
    length_alpha: float = 0.0
    margins: Tensor = field(
        default_factory=lambda: torch.zeros(())
    )  # annotated reward of the chosen response less that of the rejected one
    baseline: float = 0.0  # BCO's delta

    @property
    def chosen_ratio(self) -> Tensor:
        """a = log pi(y_w) - log pi_ref(y_w)."""
        return self.policy_chosen_logps - self.ref_chosen_logps

    @property
    def rejected_ratio(self) -> Tensor:
        """b = log pi(y_l) - log pi_ref(y_l)."""
        return self.policy_rejected_logps - self.ref_rejected_logps

    @property
    def logits(self) -> Tensor:
        """z = beta (a - lambda b) + alpha (|y_w| - |y_l|).

        The length term is R-DPO's (Park et al. 2024, 2403.19159): maximising r(y) - alpha |y| - beta KL gives
        r(y) = beta log(pi/pi_ref) + alpha |y| + c(x), and the difference of two such rewards is z. A chosen response
        that is longer is thereby partly explained, and pulls less.
        """
        gap = self.chosen_ratio - self.rejected_weight * self.rejected_ratio
        return self.beta * gap + self.length_alpha * (self.chosen_lengths - self.rejected_lengths)


def sigmoid(pairs: Pairs) -> Tensor:
    """DPO (Rafailov et al. 2023, eq. 7), -log s(z); with label smoothing e cDPO (Mitchell 2023), the mean of it and
    its mirror image: -(1-e) log s(z) - e log s(-z)."""
    return smoothed(pairs.logits, pairs.label_smoothing)


def robust(pairs: Pairs) -> Tensor:
    """Robust DPO (Chowdhury et al. 2024, 2403.00409): [-(1-e) log s(z) + e log s(-z)] / (1-2e), unbiased when a share
    e of the labels is flipped."""
    flipped = pairs.label_smoothing
    right, wrong = -F.logsigmoid(pairs.logits), -F.logsigmoid(-pairs.logits)
    return ((1 - flipped) * right - flipped * wrong) / (1 - 2 * flipped)


def ipo(pairs: Pairs) -> Tensor:
    """IPO (Azar et al. 2023, 2310.12036, eq. 17): (u - 1/(2 beta))^2 with u of log-ratios averaged over each response's
    tokens, as its authors advise for language models."""
    chosen = pairs.chosen_ratio / pairs.chosen_lengths
    rejected = pairs.rejected_ratio / pairs.rejected_lengths
    return (chosen - pairs.rejected_weight * rejected - 1 / (2 * pairs.beta)).pow(2)


def hinge(pairs: Pairs) -> Tensor:
    """SLiC's hinge (Zhao et al. 2023, 2305.10425), normalised by the reference (Liu et al. 2023, 2309.06657):
    max(0, 1 - z)."""
    return F.relu(1 - pairs.logits)


def nca_pair(pairs: Pairs) -> Tensor:
    """NCA for pairs (Chen et al. 2024, 2402.05369): -log s(beta a) - 1/2 log s(-beta a) - 1/2 log s(-beta b); keeps the
    chosen likelihood from falling."""
    chosen, rejected = pairs.beta * pairs.chosen_ratio, pairs.beta * pairs.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def sppo_hard(pairs: Pairs) -> Tensor:
    """SPPO (Wu et al. 2024, 2405.00675, eq. 4.7) with winning probabilities 1 and 0:
    (a - 1/(2 beta))^2 + (b + 1/(2 beta))^2."""
    half = 1 / (2 * pairs.beta)
    return (pairs.chosen_ratio - half).pow(2) + (pairs.rejected_ratio + half).pow(2)


def exo_pair(pairs: Pairs) -> Tensor:
    """EXO for pairs (Ji et al. 2024, 2402.00856, eq. 16), the KL from s(z) to smoothed labels:
    s(z) [log s(z) - log(1-e)] + s(-z) [log s(-z) - log e]."""
    e = pairs.label_smoothing or EXO_SMOOTHING
    return binary_kl(pairs.logits, math.log(1 - e), math.log(e))


def bco_pair(pairs: Pairs) -> Tensor:
    """BCO for pairs (Jung et al. 2024, 2404.04656): -log s(beta a - d) - log s(d - beta b), where d is the mean
    implicit reward of both sides over the steps so far."""
    chosen, rejected = pairs.beta * pairs.chosen_ratio, pairs.beta * pairs.rejected_ratio
    return -F.logsigmoid(chosen - pairs.baseline) - F.logsigmoid(pairs.baseline - rejected)


def apo_zero(pairs: Pairs) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, 2408.06266, eq. 7): 1 - s(beta a) + s(beta b); chosen up, rejected down."""
    return 1 - torch.sigmoid(pairs.beta * pairs.chosen_ratio) + torch.sigmoid(pairs.beta * pairs.rejected_ratio)


def apo_down(pairs: Pairs) -> Tensor:
    """APO-down (same, eq. 8): s(beta a) + 1 - s(beta (a - b)); chosen down, rejected down by more."""
    gap = pairs.chosen_ratio - pairs.rejected_ratio
    return torch.sigmoid(pairs.beta * pairs.chosen_ratio) + 1 - torch.sigmoid(pairs.beta * gap)


def aot(pairs: Pairs) -> Tensor:
    """AOT for pairs (Melnyk et al. 2024, 2406.05882): the i-th smallest log-ratio chosen to rejected of the policy
    against the i-th smallest of the reference, over all pairs of a step: -log s(beta (pi_(i) - ref_(i))), smoothed."""
    policy = (pairs.policy_chosen_logps - pairs.policy_rejected_logps).sort().values
    reference = (pairs.ref_chosen_logps - pairs.ref_rejected_logps).sort().values
    return smoothed(pairs.beta * (policy - reference), pairs.label_smoothing)


def aot_pair(pairs: Pairs) -> Tensor:
    """AOT (same), in the paper the one for unpaired data; TRL's code gave it this name. The i-th smallest a against the
    i-th smallest b, over all pairs of a step: -log s(beta (a_(i) - b_(i))), smoothed."""
    gap = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return smoothed(pairs.beta * gap, pairs.label_smoothing)


def rev_kl(pairs: Pairs) -> Tensor:
    """Soft labels (Dong et al. 2024, 2405.07863, code): with p = s(margin) of the annotated rewards,
    -p log s(z) - (1-p) log s(-z), the KL from p to s(z) and a constant."""
    p = torch.sigmoid(pairs.margins)
    return -p * F.logsigmoid(pairs.logits) - (1 - p) * F.logsigmoid(-pairs.logits)


def kl(pairs: Pairs) -> Tensor:
    """Soft labels (same), the KL from q = s(z) to p = s(margin): q log(q/p) + (1-q) log((1-q)/(1-p)), in logarithms
    where that code clamps q at 0.999."""
    return binary_kl(pairs.logits, F.logsigmoid(pairs.margins), F.logsigmoid(-pairs.margins))


def tv(pairs: Pairs) -> Tensor:
    """Soft labels (same), total variation: |s(z) - s(margin)|."""
    return (torch.sigmoid(pairs.logits) - torch.sigmoid(pairs.margins)).abs()


def hellinger(pairs: Pairs) -> Tensor:
    """Soft labels (same), squared Hellinger distance with q = s(z), p = s(margin):
    1/2 [(sqrt q - sqrt p)^2 + (sqrt(1-q) - sqrt(1-p))^2]."""

    def root(logits: Tensor) -> Tensor:
        return (0.5 * F.logsigmoid(logits)).exp()  # finite gradients where q is 0

    differences = [root(side * pairs.logits) - root(side * pairs.margins) for side in (1, -1)]
    return 0.5 * (differences[0].pow(2) + differences[1].pow(2))


def raft(pairs: Pairs) -> Tensor:
    """RAFT (Dong et al. 2023, 2304.06767): -log pi(y_w); supervised learning of the chosen response, no reference."""
    return -pairs.policy_chosen_logps


def smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """-(1-e) log s(z) - e log s(-z)."""
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def binary_kl(logits: Tensor, log_p: Tensor | float, log_not_p: Tensor | float) -> Tensor:
    """KL from q = s(logits) to p."""
    right = torch.sigmoid(logits) * (F.logsigmoid(logits) - log_p)
    return right + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - log_not_p)


Loss = Callable[[Pairs], Tensor]
SOFT_LABEL_LOSSES: dict[str, Loss] = {f.__name__: f for f in (rev_kl, kl, tv, hellinger)}
RANKED_LOSSES: dict[str, Loss] = {f.__name__: f for f in (aot, aot_pair)}  # these look at all pairs of a step together
LOSSES: dict[str, Loss] = {
    f.__name__: f
    for f in (sigmoid, robust, ipo, hinge, nca_pair, sppo_hard, exo_pair, bco_pair, apo_zero, apo_down, raft)
} | (SOFT_LABEL_LOSSES | RANKED_LOSSES)
SMOOTHED = {"sigmoid", "robust", "exo_pair", *RANKED_LOSSES}
LENGTH_LOSSES = {"sigmoid", "robust", "hinge", "exo_pair", *SOFT_LABEL_LOSSES}  # those of z
GAP_LOSSES = {"ipo", *LENGTH_LOSSES}


def chosen_nll(pairs: Pairs) -> Tensor:
    """RPO's addition (Pang et al. 2024, 2404.19733, eq. 1): -log pi(y_w) / |y_w|."""
    return -pairs.policy_chosen_logps / pairs.chosen_lengths


def rapo_ra(pairs: Pairs, rejected_scores: Tensor) -> Tensor:
    """RAPO's weight of the rejected side (Online-RLHF's code) from its annotated reward r: 1 / (1 + max(r, 0))."""
    return 1 / (1 + rejected_scores.clamp(min=0))


def rapo_app_1(pairs: Pairs, rejected_scores: Tensor | None = None) -> Tensor:
    """The same from the reference's log-probability: 1 / (1 - 0.1 beta log pi_ref(y_l))."""
    return 1 / (1 - 0.1 * pairs.beta * pairs.ref_rejected_logps)


def rapo_app_2(pairs: Pairs, rejected_scores: Tensor | None = None) -> Tensor:
    """The same from the implicit reward: 1 / (1 + max(beta b, 0)); a weight, so no gradient flows through b."""
    return 1 / (1 + (pairs.beta * pairs.rejected_ratio.detach()).clamp(min=0))


RAPO: dict[str, Callable[..., Tensor]] = {"ra": rapo_ra, "app_1": rapo_app_1, "app_2": rapo_app_2}


def constant_weight(rapo: str) -> float | None:
    """The number of `const:0.5`; None for another weight of `RAPO`. Raises: ValueError when it is neither."""
    if rapo in RAPO:
        return None
    found = re.fullmatch(r"const(?::(\d+(?:\.\d*)?|\.\d+))?", rapo)
    if found is None:
        raise ValueError(f"--rapo {rapo} is not const:NUMBER, {', '.join(RAPO)}")
    return float(found[1] or "0.5")
