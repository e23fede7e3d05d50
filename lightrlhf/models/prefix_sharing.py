"""Prefix sharing (Wang and Hegde 2024, 2410.20305): a forward pass computes the common prefix of a pair once.

A batch of pairs has 2B rows, the chosen ones first. The two texts of a pair are packed into one row,

    common prefix | rest of the chosen text | rest of the rejected text

with positions that restart after the prefix for the rejected text, and an attention mask that hides the chosen text
from it. Outputs and gradients equal those of separate rows, for fewer tokens.

Left out: sharing among more than two texts, and attention kernels that skip masked blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_RATIO = 0.8  # pairs are packed if at most this fraction of their tokens remains, padding included


class PackedPairs(NamedTuple):
    """Pairs packed into one row each, of W tokens."""

    input_ids: Tensor  # (B, W)
    positions: Tensor  # (B, W)
    visible: Tensor  # (B, W, W) bool, whether the first token attends to the second
    columns: Tensor  # (2B, T), the column of each token of the separate rows in its packed row


def pack_pairs(input_ids: Tensor, attention_mask: Tensor) -> PackedPairs | None:
    """Pack right-padded (2B, T) rows of pairs; None if too few tokens are shared."""
    (chosen, rejected), (mask, other_mask) = input_ids.chunk(2), attention_mask.bool().chunk(2)
    same = (chosen == rejected) & mask & other_mask
    shared = same.long().cumprod(1).sum(1, keepdim=True)  # (B, 1) length of the common prefix
    end = mask.sum(1, keepdim=True)  # (B, 1) where the chosen text ends
    total = end + other_mask.sum(1, keepdim=True) - shared  # (B, 1)
    width = int(total.max())
    if width > MAX_RATIO * 2 * input_ids.shape[1]:
        return None
    packed = torch.arange(width, device=input_ids.device)[None]  # (1, W)
    positions = torch.where(packed < end, packed, packed - end + shared)
    positions = positions.clamp(max=input_ids.shape[1] - 1)  # (B, W); also the column in the separate row
    ids = torch.where(packed < end, chosen.gather(1, positions), rejected.gather(1, positions))
    row, column = packed[:, :, None], packed[:, None, :]  # (1, W, 1), (1, 1, W)
    hidden = (row >= end[..., None]) & (column >= shared[..., None]) & (column < end[..., None])  # chosen from rejected
    visible = (column <= row) & ~hidden & (column < total[..., None])
    separate = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # (1, T)
    moved = torch.where(separate < shared, separate, separate + end - shared)
    columns = torch.cat([separate.expand_as(moved), moved]).clamp(max=width - 1)
    return PackedPairs(ids, positions, visible, columns)
