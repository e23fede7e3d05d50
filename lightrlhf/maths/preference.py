"""Losses on preference pairs: DPO and its relatives, one pure function each.

With a and b the log-ratios of policy to reference of the chosen and the rejected response, each loss maps `Pairs` to
one number per pair, (B,). `LOSSES` holds them by name; `RAPO` has the weights of the rejected side, `DIVERGENCES` the
rewards of divergences other than the reverse KL. The losses of `REFERENCE_FREE` take log pi_ref = 0.

Left out: label smoothing of the losses without a reference, lists of more than two responses. Unpaired responses:
`maths.unpaired`.
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
DISCOPOP_TEMPERATURE = 0.05  # the paper's
LARGEST_EXPONENT = 30.0  # from here an exponential continues as its tangent, so that losses and gradients stay finite


# ----------------------------------------------------------------------------------------------------- divergences
def reverse_kl(log_ratio: Tensor, alpha: float = 0.0) -> Tensor:
    """Derivative of f(u) = u log u at u = exp(log_ratio), less that at u = 1: the log-ratio itself, as in DPO.

    The policy that maximises a reward less beta times the f-divergence to the reference has the reward
    beta f'(pi / pi_ref) + c(x) (Wang et al. 2023, 2309.16240, theorem 1). A constant cancels in a pair; each function
    here has the one that makes the reward 0 at the reference.
    """
    return log_ratio


def alpha_divergence(log_ratio: Tensor, alpha: float) -> Tensor:
    """The same for the alpha-divergence (table 1): (1 - u^-alpha) / alpha; the reverse KL for alpha to 0."""
    return -bounded_expm1(-alpha * log_ratio) / alpha


def js(log_ratio: Tensor, alpha: float = 0.0) -> Tensor:
    """The same for the Jensen-Shannon divergence: log(2u / (1+u)), in logarithms log 2 + log s(log u)."""
    return math.log(2) + F.logsigmoid(log_ratio)


def forward_kl(log_ratio: Tensor, alpha: float = 0.0) -> Tensor:
    """The same for the forward KL: 1 - 1/u; the alpha-divergence for alpha to 1."""
    return -bounded_expm1(-log_ratio)


def bounded_expm1(exponent: Tensor) -> Tensor:
    """exp(x) - 1, continued as a straight line from `LARGEST_EXPONENT`."""
    beyond = F.relu(exponent - LARGEST_EXPONENT)
    return torch.expm1(exponent.clamp(max=LARGEST_EXPONENT)) + math.exp(LARGEST_EXPONENT) * beyond


DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": reverse_kl,
    "alpha": alpha_divergence,
    "js": js,
    "forward_kl": forward_kl,
}


# ----------------------------------------------------------------------------------------------------------- losses
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
    )  # annotated reward of the chosen response minus that reward of the rejected one
    baseline: float = 0.0  # BCO's delta
    divergence: Callable[[Tensor], Tensor] = reverse_kl  # f'(u) by log u, see `DIVERGENCES`
    gamma: float = 0.0  # SimPO's target margin

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
        """z = beta (a - lambda b) + alpha (|y_w| - |y_l|), or with f'(exp a) and f'(exp b) of another divergence.

        The length term is R-DPO's (Park et al. 2024, 2403.19159): maximising r(y) - alpha |y| - beta KL gives
        r(y) = beta log(pi/pi_ref) + alpha |y| + c(x), and the difference of two such rewards is z. A chosen response
        that is longer is thereby partly explained, and pulls less.
        """
        gap = self.divergence(self.chosen_ratio) - self.rejected_weight * self.divergence(self.rejected_ratio)
        return self.beta * gap + self.length_alpha * (self.chosen_lengths - self.rejected_lengths)


def sigmoid(pairs: Pairs) -> Tensor:
    """DPO (Rafailov et al. 2023, eq. 7), -log s(z); with label smoothing e cDPO (Mitchell 2023), the mean of it and
    its mirror image: -(1-e) log s(z) - e log s(-z)."""
    return smooth_labels(pairs.logits, pairs.label_smoothing)


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
    return smooth_labels(pairs.beta * (policy - reference), pairs.label_smoothing)


def aot_pair(pairs: Pairs) -> Tensor:
    """AOT (same), in the paper the one for unpaired data; TRL's code gave it this name. The i-th smallest a against the
    i-th smallest b, over all pairs of a step: -log s(beta (a_(i) - b_(i))), smoothed."""
    gap = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return smooth_labels(pairs.beta * gap, pairs.label_smoothing)


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


def discopop(pairs: Pairs) -> Tensor:
    """DiscoPOP, the log-ratio modulated loss (Lu et al. 2024, 2406.08414): with m = s(z / 0.05),
    -(1-m) log s(z) + m exp(-z); logistic below 0, exponential above, the product in logarithms."""
    logits, scaled = pairs.logits, pairs.logits / DISCOPOP_TEMPERATURE
    return -torch.sigmoid(-scaled) * F.logsigmoid(logits) + (F.logsigmoid(scaled) - logits).exp()


def simpo(pairs: Pairs) -> Tensor:
    """SimPO (Meng et al. 2024, 2405.14734, eq. 6): -log s(beta log pi(y_w) / |y_w| - beta log pi(y_l) / |y_l| - gamma);
    no reference."""
    chosen, rejected = mean_rewards(pairs)
    return -F.logsigmoid(chosen - rejected - pairs.gamma)


def orpo(pairs: Pairs) -> Tensor:
    """ORPO (Hong et al. 2024, 2403.07691, eq. 6 and 7): -log P(y_w) - beta log s(log odds(y_w) - log odds(y_l)), where
    P is the geometric mean of a response's token probabilities and odds = P / (1-P); no reference, and beta is the
    paper's lambda."""
    chosen, rejected = log_odds(pairs)
    return chosen_nll(pairs) - pairs.beta * F.logsigmoid(chosen - rejected)


def cpo(pairs: Pairs) -> Tensor:
    """CPO (Xu et al. 2024, 2401.08417): -log s(beta (log pi(y_w) - log pi(y_l))) - log pi(y_w) / |y_w|; no
    reference. The likelihood is per token as in the authors' code; the paper writes the sum."""
    return -F.logsigmoid(pairs.logits) + chosen_nll(pairs)


def smooth_labels(logits: Tensor, label_smoothing: float) -> Tensor:
    """-(1-e) log s(z) - e log s(-z)."""
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def binary_kl(logits: Tensor, log_p: Tensor | float, log_not_p: Tensor | float) -> Tensor:
    """KL from q = s(logits) to p."""
    right = torch.sigmoid(logits) * (F.logsigmoid(logits) - log_p)
    return right + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - log_not_p)


Loss = Callable[[Pairs], Tensor]
SOFT_LABEL_LOSSES: dict[str, Loss] = {f.__name__: f for f in (rev_kl, kl, tv, hellinger)}
RANKED_LOSSES: dict[str, Loss] = {f.__name__: f for f in (aot, aot_pair)}  # these look at all pairs of a step together
REFERENCE_FREE: dict[str, Loss] = {f.__name__: f for f in (simpo, orpo, cpo)}
LOSSES: dict[str, Loss] = {
    f.__name__: f
    for f in (sigmoid, robust, ipo, hinge, nca_pair, sppo_hard, exo_pair, bco_pair, apo_zero, apo_down, raft, discopop)
} | (SOFT_LABEL_LOSSES | RANKED_LOSSES | REFERENCE_FREE)
SMOOTHED = {"sigmoid", "robust", "exo_pair", *RANKED_LOSSES}
LENGTH_LOSSES = {"sigmoid", "robust", "hinge", "exo_pair", "discopop", *SOFT_LABEL_LOSSES}  # of z
GAP_LOSSES = {"ipo", *LENGTH_LOSSES}


def chosen_nll(pairs: Pairs) -> Tensor:
    """RPO's addition (Pang et al. 2024, 2404.19733, eq. 1): -log pi(y_w) / |y_w|."""
    return -pairs.policy_chosen_logps / pairs.chosen_lengths


def implicit_rewards(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """beta log(pi / pi_ref) of both responses, or beta f'(pi / pi_ref) of another divergence."""
    return pairs.beta * pairs.divergence(pairs.chosen_ratio), pairs.beta * pairs.divergence(pairs.rejected_ratio)


def mean_rewards(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """SimPO's rewards: beta times the mean log-probability of a response's tokens."""
    chosen, rejected = pairs.policy_chosen_logps, pairs.policy_rejected_logps
    return pairs.beta * chosen / pairs.chosen_lengths, pairs.beta * rejected / pairs.rejected_lengths


def log_odds(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """ORPO's log odds: log P - log(1-P), with log P the mean log-probability of a response's tokens."""

    def odds(logp: Tensor) -> Tensor:
        return logp - (-torch.expm1(logp.clamp(max=-1e-6))).log()  # finite where P is 1

    return (
        odds(pairs.policy_chosen_logps / pairs.chosen_lengths),
        odds(pairs.policy_rejected_logps / pairs.rejected_lengths),
    )


REWARDS = {"simpo": mean_rewards, "orpo": log_odds}  # of the other losses: `implicit_rewards`


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


def constant_weight(rapo: str, flag: str = "--rapo") -> float | None:
    """The number of `const:0.5`; None for another weight of `RAPO`. Raises: ValueError when it is neither."""
    if rapo in RAPO:
        return None
    found = re.fullmatch(r"const(?::(\d+(?:\.\d*)?|\.\d+))?", rapo)
    if found is None:
        raise ValueError(f"{flag} {rapo} is not const:NUMBER, {', '.join(RAPO)}")
    return float(found[1] or "0.5")
