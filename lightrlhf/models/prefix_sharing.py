"""Prefix sharing (Wang and Hegde 2024, 2410.20305): a forward pass computes the common prefix of a group of texts once.

A group is the K responses to a prompt, or the two texts of a pair. Its texts are packed into one row,

    common prefix | rest of text 1 | … | rest of text K

with positions that restart after the prefix for each text, and an attention mask that hides the texts from each other.
Outputs and gradients equal those of separate rows, for fewer tokens. Attention over a packed row costs its width
squared, so a group of long texts is packed into several rows, or not at all, whichever costs least.

A prefix pass whose keys and values are cached for the texts has less attention to compute. It is no choice here: a
cache excludes activation checkpointing, and a number of passes that depends on the data desynchronises FSDP's ranks.

Left out: attention kernels that skip masked blocks, and prefixes common to a part of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightrlhf.data.batch import group_members

MAX_RATIO = 0.8  # groups are packed if at most this fraction of their tokens remains, padding included
ATTENTION_SCALE = 4  # measured: attention over this many columns per hidden unit costs as much as the rest of a layer


class PackedGroups(NamedTuple):
    """The texts of B separate rows, packed into N rows of W tokens."""

    input_ids: Tensor  # (N, W)
    positions: Tensor  # (N, W)
    visible: Tensor  # (N, W, W) bool, whether the first token attends to the second
    rows: Tensor  # (B,) the packed row of each separate one
    columns: Tensor  # (B, T) the column of each of its tokens in there


class Layout(NamedTuple):
    """Which separate rows each packed row holds, and its width."""

    bins: list[list[int]]
    width: int

    def cost(self, hidden_size: int) -> float:
        """Cost of a pass, 1 for each token without attention."""
        return len(self.bins) * self.width * (1 + self.width / (ATTENTION_SCALE * hidden_size))


def pack_groups(input_ids: Tensor, attention_mask: Tensor, group: Tensor, hidden_size: int) -> PackedGroups | None:
    """Pack right-padded (B, T) rows by their `group` (B,), see `Batch`; None if separate rows cost less."""
    mask, device = attention_mask.bool(), input_ids.device
    members = group_members(group)
    first, shared = [0] * len(group), [0] * len(group)
    for rows in members:
        for row in rows:
            first[row] = rows[0]
    same = (input_ids == input_ids[first]) & mask  # the first row of a group, equal to itself, ends where it ends
    common, lengths = torch.stack([same.long().cumprod(1).sum(1), mask.sum(1)]).tolist()
    for rows in members:
        for row in rows:
            shared[row] = min(common[i] for i in rows)
    rests = [length - prefix for length, prefix in zip(lengths, shared)]

    layout = min(_layouts(members, shared, rests), key=lambda one: one.cost(hidden_size))
    separate = Layout([[row] for row in range(len(group))], input_ids.shape[1])
    too_many = len(layout.bins) * layout.width > MAX_RATIO * input_ids.numel()
    if too_many or layout.cost(hidden_size) >= separate.cost(hidden_size):
        return None

    places = [(0, 0, 0)] * len(group)  # of each row: its packed row, its number there, and where its rest starts
    for packed_row, rows in enumerate(layout.bins):
        start = shared[rows[0]]
        for number, row in enumerate(rows, start=1):
            places[row] = packed_row, number, start
            start += rests[row]
    place, number, start = torch.tensor(places, device=device).T[..., None]  # (B, 1) each
    prefix = torch.tensor(shared, device=device)[:, None]  # (B, 1)
    position = torch.arange(input_ids.shape[1], device=device)[None].expand_as(input_ids)  # (B, T)
    column = torch.where(position < prefix, position, position - prefix + start)
    width = layout.width + 1  # the last column takes the padding and is dropped
    target = (place * width + torch.where(mask, column, layout.width)).flatten()

    def packed(values: Tensor, padding: int) -> Tensor:
        """(B, T) values of the separate rows as (N, W); rows of a group have the same ones in their prefix."""
        out = torch.full((len(layout.bins) * width,), padding, device=device)
        return out.scatter(0, target, values.flatten()).view(-1, width)[:, :-1]

    text = packed(torch.where(position < prefix, 0, number), -1)  # (N, W): 0 in the prefix
    visible = (text[:, None, :] == 0) | (text[:, None, :] == text[:, :, None])
    columns = torch.where(mask, column, 0)
    return PackedGroups(packed(input_ids, 0), packed(position, 0), visible.tril(), place[:, 0], columns)


def _layouts(members: list[list[int]], shared: Sequence[int], rests: Sequence[int]) -> Iterator[Layout]:
    """Layouts with whole groups, halves, quarters … of them in a packed row, down to single texts.

    shared, rests: tokens of each row that its group shares, and the others. The rows of a group, longest first, each go
    to the packed row with the fewest tokens so far.
    """
    size = max(map(len, members))
    while True:
        bins: list[list[int]] = []
        for rows in members:
            parts: list[list[int]] = [[] for _ in range(-(-len(rows) // size))]
            for row in sorted(rows, key=lambda row: -rests[row]):
                min(parts, key=lambda part: (sum(rests[i] for i in part), len(part))).append(row)
            bins += [sorted(part) for part in parts]
        yield Layout(bins, max(shared[part[0]] + sum(rests[i] for i in part) for part in bins))
        if size == 1:
            return
        size = -(-size // 2)
