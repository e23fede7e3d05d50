"""Anytime-valid tests of a mean: e-values by betting (Waudby-Smith and Ramdas 2024, 2010.09686).

A bettor starts with a wealth of 1 and stakes a part of it on each next difference being above 0. If the mean is at most
0, the wealth is a supermartingale. By Ville's inequality the probability that it ever reaches 1/a is at most a, so the
test may be read after every pair and stopped at any time (optional stopping). A 95% interval that is read after every
pair excludes the truth in more than 5% of comparisons.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_STAKE = 0.5  # of the wealth, so that it stays positive
LARGEST_LOG = 690.0  # of a wealth that is a finite number


def log_wealth(differences: Tensor) -> Tensor:
    """Log of the wealth after each difference, against a mean of at most 0: (..., n) in [-1, 1] -> (..., n) float64.

    The stake is the mean over the second moment of the differences before, which nearly maximises the growth; of the
    first it is 0.
    """
    x = differences.double()
    count = torch.arange(x.shape[-1], dtype=torch.float64, device=x.device)  # of differences before
    mean = (x.cumsum(-1) - x) / count.clamp(min=1)
    square = ((x * x).cumsum(-1) - x * x + 1) / (count + 1)  # with one of 1 added
    return torch.log1p((mean / square).clamp(0, LARGEST_STAKE) * x).cumsum(-1)


def e_values(differences: Tensor) -> tuple[float, float]:
    """The largest e-values so far that the mean is above 0, and that it is below: half of each bettor's wealth.

    differences: (n,) in [-1, 1], in random order. One of the two ever reaches 1/a with a probability of at most a where
    the mean is 0. Without differences both are 1/2.
    """
    wealth = torch.stack([log_wealth(differences), log_wealth(-differences)])  # (2, n)
    above, below = (wealth.amax(-1) if wealth.numel() else wealth.new_zeros(2)).clamp(0, LARGEST_LOG).exp().tolist()
    return above / 2, below / 2
