"""The KV cache of packed decoding, and attention that reads of it only the columns of each slot.

For a single query both products of attention are weighted sums of rows: the scores of a block of columns are the sum
over d of the query's number d times row d of the block's keys, (D, BLOCK), and the output is the sum over columns of
their weights times their values, (columns, D). torch's `embedding_bag` sums listed rows, with a list for each slot and
head, so no slot reads what is left of its prompt, and sums are made at the rate of the memory: on x86 by FBGEMM, about
twice as fast as batched products, in which a matrix times a vector is slow. A sum does not depend on other slots.

Under bfloat16 keys and values are float16, of which half as much is read: sums are made in float32 but rounded to the
dtype of what is summed, and scores in bfloat16 would be too coarse.

Left out: processors without FBGEMM's kernels, where `embedding_bag` is slow; under bfloat16 keys, values and scores
beyond 65,504, which float16 does not have.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCKS = {torch.float32: 32, torch.float16: 64}  # columns of a block, 128 bytes, by the dtype of the cache


class RaggedLayer:
    """The KV cache of one layer for all slots, updated in place; `Slots` uses it in place of a `SlabLayer`.

    Blocks come first, so that a step reads from few places; of fewer slots they are the first ones of each block.
    """

    multiple = max(BLOCKS.values())  # its number of columns, and those that are dropped, are multiples

    def __init__(self, prefilled: Any, num_slots: int, num_columns: int) -> None:
        groups, _, size = prefilled.keys.shape[1:]
        dtype = prefilled.keys.dtype
        self.block = BLOCKS[dtype]
        room = num_columns // self.block, num_slots, groups
        self.keys = torch.empty(*room, size, self.block, dtype=dtype)
        self.values = torch.empty(*room, self.block, size, dtype=dtype)
        self.start, self.end = 0, prefilled.get_seq_length()  # the columns that busy rows attend to
        self._clear_last_block()

    def update(self, keys: Tensor, values: Tensor) -> None:
        """Append one column, (slots, groups, head size) each."""
        block, column = divmod(self.end, self.block)
        if column == 0:
            self._clear_last_block()
        self.keys[block, : len(keys), :, :, column] = keys
        self.values[block, : len(values), :, column] = values
        self.end += 1

    def insert(self, slots: Tensor, prefilled: Any, source: Tensor) -> None:
        """Copy rows `source` of a prefilled layer into slots, right-aligned at the current column."""
        start = self.end - prefilled.get_seq_length()
        self.start = min(self.start, start)
        first, stop = start // self.block, -(-self.end // self.block)
        around = 0, 0, start - first * self.block, stop * self.block - self.end  # whole blocks: all of one is read
        for cache, states in ((self.keys.transpose(3, 4), prefilled.keys), (self.values, prefilled.values)):
            states = F.pad(states[source].to(cache.dtype), around).unflatten(2, (-1, self.block))
            cache[first:stop, slots] = states.permute(2, 0, 1, 3, 4)  # (blocks, rows, groups, block, D)

    def compact(self, holes: Tensor, movers: Tensor, num_slots: int) -> None:
        """Move rows into the holes among the first `num_slots` slots."""
        first, stop = self.start // self.block, -(-self.end // self.block)
        for cache in (self.keys, self.values):
            cache[first:stop, holes] = cache[first:stop, movers]

    def drop_columns(self, count: int) -> None:
        """Drop the first columns, a multiple of `multiple`, which no row attends to any more."""
        first, stop = count // self.block, -(-self.end // self.block)
        for cache in (self.keys, self.values):
            cache[: stop - first] = cache[first:stop].clone()
        self.start, self.end = self.start - count, self.end - count

    def _clear_last_block(self) -> None:
        """Set the block of the next column to 0, since all of it is read, and weights of 0 do not hide NaN.

        So a cache takes time for the columns that are used, not for all that there is room for.
        """
        block = self.end // self.block
        for cache in (self.keys, self.values):
            cache[block : block + 1] = 0.0  # none where no column is left


class Attention:
    """Attention of one token of each slot, in all layers, until slots change or the block of the next column is full.

    mask: (S, columns) what slots attend to; layer: one of the layers, before the token's column is added to it; heads:
    of queries. The rest of the last block is read, too, with weights of 0.
    """

    def __init__(self, mask: Tensor, layer: RaggedLayer, heads: int) -> None:
        num_slots = len(mask)
        room, groups = layer.keys.shape[1:3]  # for slots
        self.block = layer.block
        self.mask, self.first, self.stop = mask, layer.start // self.block, layer.end // self.block + 1  # blocks
        live = mask[:, self.first * self.block : self.stop * self.block].clone()  # (S, C)
        live[:, layer.end - self.first * self.block :] = True
        slot = torch.arange(num_slots)[:, None] * groups  # (S, 1), of a block's keys and values
        self._list(slot + torch.arange(self.first, self.stop) * room * groups, live, layer, heads)

    def _list(self, place: Tensor, live: Tensor, layer: Any, heads: int) -> None:
        """List what is read: the rows of keys and of values of each slot and head.

        place: (S, blocks), the number of a slot's block among all (block, slot, group), of its first group; live:
        (S, C), the columns that are read.
        """
        groups, size = layer.keys.shape[-3:-1]
        num_slots, width = live.shape
        group = torch.arange(heads) // (heads // groups)
        place = place[:, None] + group[:, None]  # (S, heads, blocks)
        self.scores = torch.zeros(num_slots, heads, width, dtype=layer.keys.dtype)

        has_live = live.view(num_slots, 1, -1, self.block).any(-1).expand(-1, heads, -1)  # (S, heads, blocks)
        self.blocks = has_live.flatten().nonzero()[:, 0]  # (P,) that are read, of those in `scores`
        head = torch.arange(num_slots)[:, None] * (heads + groups) + torch.arange(heads)  # among queries and keys
        self.queries = head.flatten()[self.blocks // place.shape[-1]]  # (P,)
        self.key_rows = (place.flatten()[self.blocks, None] * size + torch.arange(size)).flatten().int()
        self.key_offsets = torch.arange(len(self.blocks) + 1, dtype=torch.int32) * size

        is_live = live[:, None].expand(-1, heads, -1)  # (S, heads, C)
        self.columns = is_live.flatten().nonzero()[:, 0]  # (N,) that are read, of those in `scores`
        columns = place[..., None] * self.block + torch.arange(self.block)  # (S, heads, blocks, block)
        self.value_rows = columns.flatten()[self.columns].int()  # (N,)
        counts = live.sum(1).repeat_interleave(heads)
        self.value_offsets = F.pad(counts.cumsum(0), (1, 0)).int()  # (S * heads + 1,)
        self.bias: Tensor  # of a step

    def holds(self, layer: RaggedLayer) -> bool:
        """Whether the next column of a layer is in the last block."""
        return layer.end // self.block < self.stop

    def begin_step(self) -> None:
        """Hide the columns that slots do not attend to in this step."""
        mask = self.mask[:, self.first * self.block : self.stop * self.block]
        self.bias = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)[:, None]  # (S, 1, C)

    def __call__(self, turned: Tensor, layer: Any) -> Tensor:
        """Outputs (S, heads * D) of queries, the first heads of `turned` (S, heads + groups, D), scaled already."""
        size = turned.shape[-1]
        queries = turned.to(layer.keys.dtype).view(-1, size).index_select(0, self.queries)  # (P, D)
        scores = sums(layer.keys.view(-1, self.block), self.key_rows, self.key_offsets, queries)
        self.scores.view(-1, self.block).index_copy_(0, self.blocks, scores)
        weights = (self.bias + self.scores).softmax(-1).to(layer.values.dtype)
        weights = weights.flatten().index_select(0, self.columns)
        outputs = sums(layer.values.view(-1, size), self.value_rows, self.value_offsets, weights)
        return outputs.view(len(turned), -1)


def sums(table: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """Sums of listed rows of a table times their weights, one for each pair of neighbouring offsets into the list."""
    bags: Sequence[Tensor] = torch.embedding_bag(table, rows, offsets, False, 0, False, weights.view(-1), True)
    return bags[0]


def has_fast_sums() -> bool:
    """Whether torch sums by FBGEMM's kernels, which are for x86; some releases list it on ARM, too."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return is_x86 and "fbgemm" in torch.backends.quantized.supported_engines
