"""Losses that rank all pairs of a step, by micro-batches: their values and slopes first, their gradient afterwards.

Ranks need the log-probabilities of all pairs, gradients only a micro-batch's. A first pass without gradients
finds the derivative of the loss by each log-probability, `loss_slopes`, a second carries it into the weights,
`ranked_loss`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def loss_slopes(loss: Callable[[Tensor], Tensor], logps: Tensor) -> tuple[float, Tensor]:
    """Value of a loss of all N pairs, a sum, and its derivative by each of their log-probabilities: (2, N) both."""
    logps = logps.detach().clone().requires_grad_()
    value = loss(logps).sum()
    return float(value.detach()), torch.autograd.grad(value, logps)[0]


def ranked_loss(values: float, slopes: Tensor, logps: Tensor) -> Tensor:
    """A micro-batch's part of a loss of all pairs: its value, and by `slopes` its gradient; slopes, logps (2B,)."""
    return values + (slopes * (logps - logps.detach())).sum()
