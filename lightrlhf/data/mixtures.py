"""Several sets of rows at once: how many of each are in an epoch, and their order.

Sets lie one after the other, so a row is an index, and an epoch is a function of (seed, epoch) as for a single set.

Left out: sampling with replacement, weights that change during a run, sets that stop when one of them is used up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightrlhf.data.batch import epoch_order, mix_seed
from lightrlhf.data.flat import Rows, View


@functools.lru_cache(maxsize=2)  # every step of an epoch asks for it
def mixed_order(sizes: tuple[int, ...], weights: tuple[float, ...], seed: int, epoch: int) -> Tensor:
    """Seeded order of one epoch of several sets that lie one after the other: as many indices (N,) as they have rows.

    Each set has its share of them by weight (`mixed_shares`), and goes through seeded permutations of its rows, one
    after the other and on through the epochs: a row comes again once all others of its set have come.
    """
    chosen, start = list[Tensor](), 0
    for number, (size, share) in enumerate(zip(sizes, mixed_shares(sizes, weights))):
        for place in range(epoch * share // size, math.ceil((epoch + 1) * share / size)):
            generator = torch.Generator().manual_seed(mix_seed(number, place, start=seed))
            first, last = (max(end * share - place * size, 0) for end in (epoch, epoch + 1))
            chosen.append(start + torch.randperm(size, generator=generator)[first:last])
        start += size
    return torch.cat(chosen)[epoch_order(sum(map(len, chosen)), seed, epoch)]


def mixed_shares(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows that each set gives to an epoch as long as all sets together: in proportion to the weights, rounded."""
    exact = [sum(sizes) * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_rest[: sum(sizes) - sum(shares)]:
        shares[i] += 1
    return shares


def interleave(sets: Sequence[Sequence[Any]]) -> Rows:
    """The rows of all sets, each spread evenly, so that the first rows are of all of them."""
    if len(sets) == 1 and isinstance(sets[0], Rows):
        return sets[0]
    placed = [(torch.arange(len(rows), dtype=torch.float64) + 0.5) / len(rows) for rows in sets]
    return View(sets, torch.cat(placed).argsort(stable=True)) if placed else View([])
