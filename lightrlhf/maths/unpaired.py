"""Losses on single responses that are labelled good or bad: KTO and BCO, one pure function each.

With r = beta (log pi - log pi_ref) the implicit reward of a response and d a reference point, each loss maps
`Responses` to one number per response, (B,). What differs besides the loss is d: for KTO an estimate of the KL to the
reference, for BCO the middle between the mean rewards of both labels.

Left out: BCO's weights by the ratio of the prompts' densities under both labels (its UDM), which need an embedding
model and a classifier of prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Responses:
    """B labelled responses, the input of a loss. Tensors are (B,); log-probabilities are summed over a response."""

    policy_logps: Tensor
    ref_logps: Tensor
    desirable: Tensor  # bool
    beta: float
    reference_point: float = 0.0  # KTO's beta z0, BCO's delta: no gradient flows through it
    desirable_weight: float = 1.0  # lambda_D
    undesirable_weight: float = 1.0  # lambda_U

    @property
    def rewards(self) -> Tensor:
        """beta (log pi - log pi_ref)."""
        return self.beta * (self.policy_logps - self.ref_logps)

    @property
    def margins(self) -> Tensor:
        """How far a reward is on the right side of the reference point: above it if desirable, else below."""
        above = self.rewards - self.reference_point
        return torch.where(self.desirable, above, -above)

    @property
    def weights(self) -> Tensor:
        """lambda_D or lambda_U."""
        ones = torch.ones_like(self.policy_logps)
        return torch.where(self.desirable, self.desirable_weight * ones, self.undesirable_weight * ones)


def kto(responses: Responses) -> Tensor:
    """KTO (Ethayarajh et al. 2024, 2402.01306, eq. 8), lambda_y - v(x, y): lambda_D (1 - s(beta (r - z0))) of a
    desirable response, lambda_U (1 - s(beta (z0 - r))) of another, where the paper's r is without beta."""
    return responses.weights * torch.sigmoid(-responses.margins)


def bco(responses: Responses) -> Tensor:
    """BCO (Jung et al. 2024, 2404.04656): the cross-entropy of a classifier of labels whose logit is the reward less a
    shift, -log s(r - d) of a desirable response, -log s(d - r) of another; lambda as in KTO."""
    return -responses.weights * F.logsigmoid(responses.margins)


UNPAIRED_LOSSES: dict[str, Callable[[Responses], Tensor]] = {f.__name__: f for f in (kto, bco)}
