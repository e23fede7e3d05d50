"""Packing: a forward pass computes several texts in one row, without padding, and what they have in common once.

A group is the K responses to a prompt, or the two texts of a pair. Behind their common prefix its texts follow one
another (prefix sharing, Wang and Hegde 2024, 2410.20305), and other groups, or texts without one, behind them:

    common prefix | rest of text 1 | … | rest of text K | another text | …

Positions restart after the prefix for each text and at 0 for each group, and an attention mask hides the texts from
each other. Outputs and gradients are as for separate rows, with fewer tokens. Attention over a packed row costs
its width squared, so of several numbers of rows the cheapest is taken, or texts are not packed at all.

A prefix pass whose keys and values are cached for the texts has less attention to compute. It cannot be used here: a
cache excludes activation checkpointing, and a number of passes that depends on the data desynchronises FSDP's ranks.

Left out: attention kernels that skip masked blocks, and prefixes common to a part of a group.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightrlhf.data.batch import group_members

MOST_COST = 0.9  # texts are packed if they then cost at most this fraction of what they cost in separate rows
ATTENTION_SCALE = 3  # measured: attention over this many columns per hidden unit costs as much as the rest of a layer
Part = list[int]  # texts of a group that share its prefix in a packed row


class PackedTexts(NamedTuple):
    """The texts of B separate rows, packed into N rows of W tokens."""

    input_ids: Tensor  # (N, W)
    positions: Tensor  # (N, W)
    part: Tensor  # (N, W) number of the part of a group in its row, -1 of padding
    text: Tensor  # (N, W) number of the text in its row, 0 in a prefix, -1 of padding
    rows: Tensor  # (B,) the packed row of each separate one
    columns: Tensor  # (B, T) the column of each of its tokens in there, 0 of padding

    @property
    def visible(self) -> Tensor:
        """Whether the first token attends to the second: (N, W, W) bool, on the device of the texts."""
        part, text = self.part, self.text
        visible = (text[:, None, :] == 0) | (text[:, None, :] == text[:, :, None])
        visible &= part[:, None, :] == part[:, :, None]
        return (visible | (text[:, :, None] < 0)).tril()  # padding sees all before it, as in separate rows


class Layout(NamedTuple):
    """Which parts of groups each packed row holds, and its width."""

    bins: list[list[Part]]
    width: int

    def cost(self, hidden_size: int) -> float:
        """Cost of a pass, 1 for each token without attention."""
        return len(self.bins) * self.width * (1 + self.width / (ATTENTION_SCALE * hidden_size))


def pack_texts(
    input_ids: Tensor, attention_mask: Tensor, group: Tensor | None, hidden_size: int, most_columns: int | None = None
) -> PackedTexts | None:
    """Pack (B, T) rows by their `group` (B,), see `Batch`; None if separate rows cost less or are not right-padded.

    All tensors are on the host.

    most_columns: of a packed row.
    """
    mask, count = attention_mask.bool(), len(input_ids)
    members = [[row] for row in range(count)] if group is None else group_members(group)
    first, shared = [0] * count, [0] * count
    for rows in members:
        for row in rows:
            first[row] = rows[0]
    same = (input_ids == input_ids[first]) & mask  # the first row of a group, equal to itself, ends where it ends
    counts = torch.stack([same.long().cumprod(1).sum(1), mask.long().cumprod(1).sum(1), mask.sum(1)])  # (3, B)
    common, ends, lengths = counts.tolist()
    if ends != lengths or not any(lengths):
        return None
    for rows in members:
        for row in rows:
            shared[row] = min(common[i] for i in rows)
    rests = [length - prefix for length, prefix in zip(lengths, shared)]

    layouts = [one for one in _layouts(members, shared, rests) if one.width <= (most_columns or one.width)]
    layout = min(layouts, key=lambda one: one.cost(hidden_size), default=None)
    separate = Layout([[[row]] for row in range(count)], input_ids.shape[1]).cost(hidden_size)
    if layout is None or layout.cost(hidden_size) > MOST_COST * separate:
        return None

    places = torch.tensor(_places(layout, shared, rests))  # (B, 5)
    place, part_of, number_of, start_of, rest_of = places.T[..., None]  # (B, 1) each
    prefix = torch.tensor(shared)[:, None]  # (B, 1)
    position = torch.arange(input_ids.shape[1])[None].expand_as(input_ids)  # (B, T)
    is_shared = position < prefix
    column = torch.where(is_shared, position + start_of, position - prefix + rest_of)
    width = layout.width + 1  # the last column takes the padding and is dropped
    target = (place * width + torch.where(mask, column, layout.width)).flatten()

    def pack(values: Tensor, padding: int) -> Tensor:
        """(B, T) values of the separate rows as (N, W); rows of a part have the same ones in their prefix."""
        out = torch.full((len(layout.bins) * width,), padding)
        return out.scatter(0, target, values.flatten()).view(-1, width)[:, :-1]

    part = pack(part_of.expand_as(input_ids), -1)  # (N, W)
    text = pack(torch.where(is_shared, 0, number_of), -1)  # (N, W): 0 in a prefix
    columns = torch.where(mask, column, 0)
    return PackedTexts(pack(input_ids, 0), pack(position, 0), part, text, place[:, 0], columns)


def _places(layout: Layout, shared: Sequence[int], rests: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    """Of each row: its packed row, its part and number there, and the columns where its prefix and its rest begin."""
    places = [(0, 0, 0, 0, 0)] * len(rests)
    for packed_row, parts in enumerate(layout.bins):
        end = number = 0
        for part_number, rows in enumerate(parts):
            start, end = end, end + shared[rows[0]]
            for row in rows:
                number += 1
                places[row] = packed_row, part_number, number, start, end
                end += rests[row]
    return places


def _layouts(members: list[list[int]], shared: Sequence[int], rests: Sequence[int]) -> Iterator[Layout]:
    """Layouts with whole groups, halves, quarters … of them as parts, down to single texts, in few or many packed rows.

    shared, rests: tokens of each row that its group shares, and the others. Packed rows are one for each part, then as
    many as would be as long as the longest part, half as many, … and one.
    """
    for size in halves(max(map(len, members))):
        parts: list[Part] = []
        for rows in members:
            split = balance({row: rests[row] for row in rows}, -(-len(rows) // size))
            parts += [sorted(part) for part in split]
        lengths = {i: shared[part[0]] + sum(rests[row] for row in part) for i, part in enumerate(parts)}
        longest = max(lengths.values())
        yield Layout([[part] for part in parts], longest)
        count = min(len(parts), -(-sum(lengths.values()) // longest))
        for fewer in halves(count):
            bins = balance(lengths, fewer)
            width = max(sum(lengths[i] for i in one) for one in bins)
            yield Layout([[parts[i] for i in sorted(one)] for one in bins], width)


def halves(count: int) -> Iterator[int]:
    """A number, half of it, … and 1, rounded up."""
    yield count
    while count > 1:
        count = -(-count // 2)
        yield count


def balance(lengths: dict[int, int], count: int) -> list[list[int]]:
    """Keys in `count` lists, longest first, each to the list with the fewest tokens so far."""
    lists: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, number) for number in range(count)]  # tokens, keys, number of each list
    for key in sorted(lengths, key=lambda key: -lengths[key]):
        tokens, size, number = heap[0]
        lists[number].append(key)
        heapq.heapreplace(heap, (tokens + lengths[key], size + 1, number))
    return lists
