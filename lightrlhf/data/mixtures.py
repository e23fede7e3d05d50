"""Several sets of rows at once: how many of each are in an epoch, and their order.

Sets lie one after the other, so a row is an index, and an epoch is a function of (seed, epoch) as for a single set.

Left out: sampling with replacement, weights that change during a run, sets that stop when one of them is used up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TypeVar

import torch

from lightrlhf.data.batch import epoch_order, mix_seed

Item = TypeVar("Item")


@functools.lru_cache(maxsize=2)  # every step of an epoch asks for it
def mixed_order(sizes: tuple[int, ...], weights: tuple[float, ...], seed: int, epoch: int) -> list[int]:
    """Seeded order of one epoch of several sets that lie one after the other: as many indices as they have rows.

    Each set has its share of them by weight (`mixed_shares`), and goes through seeded permutations of its rows, one
    after the other and on through the epochs: a row comes again once all others of its set have come.
    """
    chosen, start = [], 0
    for number, (size, share) in enumerate(zip(sizes, mixed_shares(sizes, weights))):
        for place in range(epoch * share // size, math.ceil((epoch + 1) * share / size)):
            generator = torch.Generator().manual_seed(mix_seed(number, place, start=seed))
            first, last = (max(end * share - place * size, 0) for end in (epoch, epoch + 1))
            chosen += (start + torch.randperm(size, generator=generator)[first:last]).tolist()
        start += size
    return [chosen[i] for i in epoch_order(len(chosen), seed, epoch)]


def mixed_shares(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows that each set gives to an epoch as long as all sets together: in proportion to the weights, rounded."""
    exact = [sum(sizes) * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_rest[: sum(sizes) - sum(shares)]:
        shares[i] += 1
    return shares


def interleave(sets: Sequence[Sequence[Item]]) -> list[Item]:
    """The rows of all sets, each spread evenly, so that the first rows are of all of them."""
    placed = [((i + 0.5) / len(rows), number, i) for number, rows in enumerate(sets) for i in range(len(rows))]
    return [sets[number][i] for _, number, i in sorted(placed)]
