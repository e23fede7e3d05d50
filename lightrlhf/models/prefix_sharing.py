"""Prefix sharing (Wang and Hegde 2024, 2410.20305): what both texts of a pair begin with is read once.

A batch of pairs has 2B rows, the chosen ones first. For a forward pass the two of a pair are laid in one row,

    shared beginning | rest of the chosen text | rest of the rejected text

with positions that go back after the chosen text, and a mask by which the rejected text does not see the chosen one.
What comes out for a token is what its own row would have given, gradients included, from fewer tokens.

Left out: sharing among more than two texts, and attention kernels that skip what the mask hides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WORTH = 0.8  # a batch is laid together where that leaves at most so many of its tokens, padding counted


class PackedPairs(NamedTuple):
    """Pairs laid in one row each."""

    input_ids: Tensor  # (B, W)
    positions: Tensor  # (B, W)
    seen: Tensor  # (B, W, W) bool, whether the first token sees the second
    column: Tensor  # (2B, T), where each token of the rows has come to


def pack_pairs(input_ids: Tensor, attention_mask: Tensor) -> PackedPairs | None:
    """Right-padded (2B, T) rows and their mask -> pairs; None where too little is shared to be worth it."""
    (chosen, rejected), (mask, other_mask) = input_ids.chunk(2), attention_mask.bool().chunk(2)
    same = (chosen == rejected) & mask & other_mask
    shared = same.long().cumprod(1).sum(1, keepdim=True)  # (B, 1) tokens that both begin with
    end = mask.sum(1, keepdim=True)  # (B, 1) where the chosen text ends
    total = end + other_mask.sum(1, keepdim=True) - shared
    width = int(total.max())
    if width > WORTH * 2 * input_ids.shape[1]:
        return None
    at = torch.arange(width, device=input_ids.device)[None]  # (1, W)
    positions = torch.where(at < end, at, at - end + shared)
    places = positions.clamp(max=input_ids.shape[1] - 1)
    ids = torch.where(at < end, chosen.gather(1, places), rejected.gather(1, places))
    row, column = at[:, :, None], at[:, None, :]  # (1, W, 1), (1, 1, W)
    apart = (row >= end[..., None]) & (column >= shared[..., None]) & (column < end[..., None])
    seen = (column <= row) & ~apart & (column < total[..., None])
    steps = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # (1, T)
    moved = torch.where(steps < shared, steps, steps + end - shared)
    columns = torch.cat([steps.expand_as(moved), moved]).clamp(max=width - 1)
    return PackedPairs(ids, places, seen, columns)
