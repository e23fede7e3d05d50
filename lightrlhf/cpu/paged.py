"""The paged KV cache of packed decoding: rows whose columns begin at 0, in blocks that rows may share.

Prompts are computed by pieces, of several rows at a time and without padding; attention is computed for each piece
alone. A step reads by the lists of `cache.Attention`. Nothing that is computed for a row has the width of another,
so only the products with weights may round a row by how many there are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrlhf.cpu.cache import BLOCKS, Attention
from lightrlhf.cpu.decoder import PackedDecoder


class PagedLayer:
    """The blocks of one layer. They begin as zeros: a column that is read with a weight of 0 must be finite."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys  # (blocks, groups, D, block)
        self.values = values  # (blocks, groups, block, D)
        self.block = values.shape[2]

    def write(self, blocks: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write tokens (N, groups, D) to columns of blocks, (N,) each."""
        self.keys[blocks, :, :, columns] = keys.to(self.keys.dtype)
        self.values[blocks, :, columns] = values.to(self.values.dtype)

    def read(self, blocks: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The first keys and values of a row's blocks, (groups, count, D) each in float32."""
        keys = self.keys[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :count]
        values = self.values[blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :count]
        return keys.float(), values.float()


class PagedAttention(Attention):
    """Attention of one token of each row, in all layers, until rows change or one needs a further block.

    tables: the blocks (S, most) of each row, right-padded; counts: how many blocks each has.
    """

    def __init__(self, tables: Tensor, counts: Tensor, layer: PagedLayer, heads: int) -> None:
        self.block = layer.block
        self.counts = counts * self.block  # (S,) columns that are read
        self.column = torch.arange(tables.shape[1] * self.block)  # (C,)
        live = self.column < self.counts[:, None]  # (S, C)
        self._list(tables * layer.keys.shape[1], live, layer, heads)

    def begin_step_at(self, positions: Tensor) -> None:
        """Hide the columns after the positions (S,) of the rows' tokens."""
        self.bias = torch.zeros(len(positions), len(self.column))
        self.bias = self.bias.masked_fill_(self.column > positions[:, None], -torch.inf)[:, None]  # (S, 1, C)


class Piece(NamedTuple):
    """Neighbouring tokens of one row; blocks: of all its tokens up to these."""

    ids: Sequence[int]
    start: int  # tokens before these
    blocks: Sequence[int]


def places(pieces: Sequence[Piece], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, blocks and columns of the pieces' tokens, (N,) each; size: of blocks."""
    found = [
        (at, piece.blocks[at // size]) for piece in pieces for at in range(piece.start, piece.start + len(piece.ids))
    ]
    positions, blocks = torch.tensor(found).T
    return positions, blocks, positions % size


class PagedDecoder:
    """A packed decoder over blocks."""

    def __init__(self, decoder: PackedDecoder) -> None:
        self.decoder = decoder

    def make_layers(self, count: int, zeros: Any) -> list[PagedLayer]:
        """The layers of a cache of `count` blocks; zeros: makes a tensor of a shape and dtype."""
        own = self.decoder
        room, dtype = (count, own.groups), own.cache_dtype
        block = BLOCKS[dtype]
        return [
            PagedLayer(zeros((*room, own.head_size, block), dtype), zeros((*room, block, own.head_size), dtype))
            for _ in own.layers
        ]

    def prefill(self, pieces: Sequence[Piece], layers: Sequence[PagedLayer]) -> Tensor:
        """Logits (R, V) after each piece, whose keys and values are added to the cache."""
        own, heads = self.decoder, self.decoder.heads
        positions, blocks, columns = places(pieces, layers[0].block)
        lengths = [len(piece.ids) for piece in pieces]
        tables = [torch.tensor(piece.blocks) for piece in pieces]
        hidden_after = [causal_mask(piece) for piece in pieces]

        def attend(number: int, turned: Tensor, values: Tensor) -> Tensor:
            layer = layers[number]
            layer.write(blocks, columns, turned[:, heads:], values)
            outputs = []
            rows = zip(pieces, tables, hidden_after, turned.split(lengths), values.split(lengths))
            for piece, table, mask, states, own_values in rows:
                if piece.start:
                    keys, seen = layer.read(table, piece.start + len(piece.ids))
                else:
                    keys, seen = states[:, heads:].transpose(0, 1), own_values.transpose(0, 1)
                options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None}
                options |= {"scale": 1.0, "enable_gqa": own.heads != own.groups}
                queries = states[:, :heads].transpose(0, 1)  # (heads, n, D)
                found = F.scaled_dot_product_attention(queries[None], keys[None], seen[None], **options)
                outputs.append(found[0].transpose(0, 1).flatten(1))  # (n, heads * D)
            return torch.cat(outputs)

        with torch.autocast("cpu", enabled=False):
            ids = torch.tensor([index for piece in pieces for index in piece.ids])  # (N,)
            hidden = own.hidden_states(ids, positions, attend)
            return own.head(hidden[torch.tensor(lengths).cumsum(0) - 1])

    def attention(self, pieces: Sequence[Piece], layer: PagedLayer) -> PagedAttention:
        """Attention of rows, until they or their blocks change."""
        counts = torch.tensor([len(piece.blocks) for piece in pieces])
        tables = pad_sequence([torch.tensor(piece.blocks) for piece in pieces], batch_first=True)  # (S, most)
        return PagedAttention(tables, counts, layer, self.decoder.heads)

    def step(self, pieces: Sequence[Piece], attention: PagedAttention, layers: Sequence[PagedLayer]) -> Tensor:
        """Logits (S, V) after pieces of one token, whose keys and values are added to the cache."""
        ids = torch.tensor([piece.ids[0] for piece in pieces])
        positions, blocks, columns = places(pieces, layers[0].block)
        attention.begin_step_at(positions)

        def attend(number: int, turned: Tensor, values: Tensor) -> Tensor:
            layers[number].write(blocks, columns, turned[:, self.decoder.heads :], values)
            return attention(turned, layers[number])

        with torch.autocast("cpu", enabled=False):
            return self.decoder.head(self.decoder.hidden_states(ids, positions, attend))


def causal_mask(piece: Piece) -> Tensor | None:
    """What each token of a piece attends to, (n, start + n); None where it is the first of its row."""
    if piece.start == 0:
        return None
    count = len(piece.ids)
    return torch.ones(count, piece.start + count, dtype=torch.bool).tril(piece.start)
