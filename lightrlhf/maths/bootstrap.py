"""Bootstrap over groups of rows that depend on each other, such as the judgements on one prompt.

Left out: corrections for bias and acceleration.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightrlhf.maths.ops import Groups, number_groups, wilson_interval

RESAMPLES = 1000
BLOCK = 2**21  # counts in memory at a time


def resample(groups: Groups, seed: int) -> Iterator[Tensor]:
    """Count of each row in each bootstrap sample of the groups: R + 1 rows of (N,) float64, in blocks (r, N).

    The first row is the data itself. Groups are drawn whole, as many as there are (Davison and Hinkley 1997, section
    3.8). Small data comes in one block.
    """
    own = torch.from_numpy(number_groups(groups))  # (N,)
    num_groups = int(own.max()) + 1 if len(own) else 0
    generator = torch.Generator().manual_seed(seed)
    block, size = [torch.ones(1, len(groups), dtype=torch.float64)], max(1, BLOCK // max(len(groups), 1))
    for start in range(0, RESAMPLES, size):
        drawn = torch.randint(num_groups, (min(size, RESAMPLES - start), num_groups), generator=generator)
        weights = torch.zeros(drawn.shape, dtype=torch.float64)
        weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
        yield torch.cat([*block, weights[:, own]])
        block = []


def bootstrap_interval(rates: Tensor, num_groups: int) -> tuple[float, float]:
    """95% interval of a rate: on each side the wider of the resamples' middle 95% and Wilson's interval: (R + 1,).

    If all values are equal, so are all resamples, although the rate is known no better than a share of as many groups.
    """
    low, high = rates[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    wilson = wilson_interval(min(max(float(rates[0]), 0.0), 1.0) * num_groups, num_groups)
    return min(low, wilson[0]), max(high, wilson[1])
