"""Bootstrap over groups of rows that depend on each other, such as the judgements on one prompt.

Left out: corrections for bias and acceleration.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lightrlhf.maths.ops import wilson_interval

RESAMPLES = 1000


def resample(groups: Sequence[Hashable], seed: int) -> Tensor:
    """Count of each row in each bootstrap sample of the groups: (R + 1, N) float64. The first row is the data itself.

    Groups are drawn whole, as many as there are (Davison and Hinkley 1997, section 3.8).
    """
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    own = torch.tensor([numbers[group] for group in groups])  # (N,)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(numbers), (RESAMPLES, len(numbers)), generator=generator)
    weights = torch.zeros(RESAMPLES, len(numbers), dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return torch.cat([torch.ones(1, len(groups), dtype=torch.float64), weights[:, own]])


def bootstrap_interval(rates: Tensor, num_groups: int) -> tuple[float, float]:
    """95% interval of a rate: on each side the wider of the resamples' middle 95% and Wilson's interval: (R + 1,).

    If all values are equal, so are all resamples, although the rate is known no better than a share of as many groups.
    """
    low, high = rates[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    wilson = wilson_interval(min(max(float(rates[0]), 0.0), 1.0) * num_groups, num_groups)
    return min(low, wilson[0]), max(high, wilson[1])
