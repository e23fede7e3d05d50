"""A model over a paged KV cache: pieces of prompts, and steps of rows that come and go.

Each row has its own columns, in blocks of the cache (`blocks`), so rows need not begin together, and the model and its
adapters share one cache. On a CPU the common architectures run over packed weights and read the blocks where they lie
(`cpu.paged`). For others a step gathers the keys and values of its rows, right-aligned, for the model's own forward
pass, and reads each prompt by itself. On CUDA such steps have few shapes and are captured (`graphs`).

Left out: attention kernels that read blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightrlhf import cpu
from lightrlhf.cli.errors import UsageError
from lightrlhf.cpu import Piece
from lightrlhf.data.batch import to_device
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.generation.blocks import Blocks
from lightrlhf.generation.graphs import BucketedSlots, Captured, Shape, can_capture
from lightrlhf.generation.prefix_cache import make_cache
from lightrlhf.generation.slots import SlabLayer
from lightrlhf.models.architecture import is_close, trial_ids
from lightrlhf.models.forward import cache_inputs, position_inputs
from lightrlhf.models.frozen import activation_dtype

PLAIN_BLOCK = 32  # tokens of a block where the model itself is called


class Pages:
    """The paged KV cache of a model. Raises: ValueError when not even one block fits into the bytes.

    most: tokens beyond which more room is of no use.
    """

    def __init__(self, runner: Runner, num_bytes: int, most: int) -> None:
        sample = runner.make_layers(1, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
        self.bytes_of_block = sum(t[0].numel() * t.itemsize for layer in sample for t in (layer.keys, layer.values))
        count = min(num_bytes // self.bytes_of_block, -(-most // sample[0].block))
        if count < 1:
            raise ValueError(f"a KV cache of {num_bytes} bytes has no room for {sample[0].block} tokens")
        self.blocks = Blocks(count, sample[0].block)
        with torch.inference_mode(False), torch.no_grad():  # tensors that may be written to in any mode
            self.layers = runner.make_layers(count, runner.zeros)

    def copy(self, one: int, other: int) -> None:
        """Copy a block to another."""
        for layer in self.layers:
            for cache in (layer.keys, layer.values):
                cache[other] = cache[one]

    def clear(self, blocks: Sequence[int]) -> None:
        """Set blocks to 0: after a number that is not finite no weight of 0 would hide it."""
        for layer in self.layers:
            for cache in (layer.keys, layer.values):
                cache[list(blocks)] = 0.0


class Runner(Protocol):
    """Computes the tokens of rows with the weights of one policy."""

    def make_layers(self, count: int, zeros: Any) -> list[Any]:
        """Layers of `count` blocks; zeros: makes a tensor of a shape and dtype."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros on the device."""

    def prefill(self, pieces: Sequence[Piece], layers: Sequence[Any]) -> Tensor:
        """Logits (R, V) after each piece, whose keys and values are added to the cache."""

    def step(self, pieces: Sequence[Piece], layers: Sequence[Any], rows: Sequence[Any]) -> Tensor:
        """Logits (S, V) after pieces of one token; rows: what identifies the row of each, with its blocks."""


class PackedRunner:
    """Packed weights on a CPU."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = cpu.PagedDecoder(decoder)
        self.make_layers = self.decoder.make_layers
        self.prefill = self.decoder.prefill
        self.rows: list[Any] = []
        self.attention: Any = None

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros whose memory is taken when they are written to."""
        return torch.from_numpy(np.zeros(shape, {torch.float32: np.float32, torch.float16: np.float16}[dtype]))

    def step(self, pieces: Sequence[Piece], layers: Sequence[Any], rows: Sequence[Any]) -> Tensor:
        """As `Runner`; what is read is listed anew when rows or their blocks change."""
        if self.attention is None or self.rows != [*rows]:
            self.attention, self.rows = self.decoder.attention(pieces, layers[0]), [*rows]
        return self.decoder.step(pieces, self.attention, layers)


class ModelRunner:
    """A model's own forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.model.device)

    def make_layers(self, count: int, zeros: Any) -> list[PooledLayer]:
        """As `Runner`; heads, sizes and dtypes are found by a pass."""
        cache = make_cache(self.model)
        self.model(input_ids=trial_ids(self.model, 1), **cache_inputs(self.model, cache))
        layers: Any = cache.layers
        return [
            PooledLayer(*(zeros((count, PLAIN_BLOCK, t.shape[1], t.shape[3]), t.dtype) for t in (one.keys, one.values)))
            for one in layers
        ]

    def prefill(self, pieces: Sequence[Piece], layers: Sequence[PooledLayer]) -> Tensor:
        """As `Runner`, a pass for each piece."""
        return torch.cat([self._forward([piece], layers) for piece in pieces])

    def step(self, pieces: Sequence[Piece], layers: Sequence[PooledLayer], rows: Sequence[Any]) -> Tensor:
        return self._forward(pieces, layers)

    def _forward(self, pieces: Sequence[Piece], layers: Sequence[PooledLayer]) -> Tensor:
        """Logits (R, V) after pieces of as many tokens each."""
        width = max(piece.start for piece in pieces) + len(pieces[0].ids)
        inputs = self._inputs(pieces, max(len(piece.blocks) for piece in pieces))
        return self._logits(*inputs, width, make_cache(self.model, layers))

    def _inputs(self, pieces: Sequence[Piece], num_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids (R, n), tokens before them (R,), and blocks of each row (R, num_blocks)."""
        blocks = [[*piece.blocks[:num_blocks]] + [0] * (num_blocks - len(piece.blocks)) for piece in pieces]
        listed = [[*piece.ids] for piece in pieces], [piece.start for piece in pieces], blocks
        ids, starts, table = (to_device(torch.tensor(one), self.model.device) for one in listed)
        return ids, starts, table

    def _logits(self, ids: Tensor, starts: Tensor, table: Tensor, width: int, cache: Any) -> Tensor:
        """Logits (R, V) after ids (R, n), which attend to `width` columns. The host reads nothing."""
        count = ids.shape[1]
        tokens = torch.arange(width, device=ids.device) - width + count + starts[:, None]  # (R, C), right-aligned
        mask, tokens = tokens >= 0, tokens.clamp(min=0)
        index = table.gather(1, tokens // PLAIN_BLOCK) * PLAIN_BLOCK + tokens % PLAIN_BLOCK  # (R, C) of the cache
        for layer in cache.layers:
            layer.use(index, count)
        return self.model(
            input_ids=ids,
            attention_mask=mask.long(),
            **position_inputs(self.model, tokens[:, -count:]),
            **cache_inputs(self.model, cache),
            logits_to_keep=1,
        ).logits[:, -1]


class BucketedRunner(Captured, ModelRunner):
    """A model's own forward pass whose steps have few shapes and fixed addresses, so that they can be captured.

    A step may be repeated, since it writes the same keys and values again: so each captured one is compared with the
    eager step. Rows that fill a bucket share one more block, behind the last of `Blocks`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.allow_captures(model.device)
        self.inputs: dict[Shape, tuple[Tensor, Tensor, Tensor]] = {}  # as `_inputs`, where they stay
        self.logits: dict[Shape, Tensor] = {}

    def make_layers(self, count: int, zeros: Any) -> list[PooledLayer]:
        layers = super().make_layers(count + 1, zeros)
        for layer in layers:
            layer.is_compileable = True
        return layers

    def step(self, pieces: Sequence[Piece], layers: Sequence[PooledLayer], rows: Sequence[Any]) -> Tensor:
        """As `Runner`; the logits are good until the next step."""
        width = BucketedSlots.columns_for(max(piece.start for piece in pieces) + 1)
        shape = BucketedSlots.slots_for(len(pieces)), width
        idle = Piece([0], 0, [len(layers[0].keys) - 1])
        filled = [*pieces, *[idle] * (shape[0] - len(pieces))]
        found = self._inputs(filled, -(-width // PLAIN_BLOCK))
        kept = self.inputs.setdefault(shape, found)
        for old, new in zip(kept, found):
            old.copy_(new)
        cache = make_cache(self.model, layers)

        def compute() -> None:
            self.logits[shape] = self._logits(*kept, width, cache)

        self.run(shape, compute)
        logits = self.logits[shape]
        if self.steps[shape] == 2 and shape in self.graphs:
            expected = self._logits(*kept, width, cache)
            if not is_close(logits, expected, self.model):
                self.graphs.clear()
                self.stop_captures(UsageError("a replayed step gives other logits"))
                logits = expected
        return logits[: len(pieces)]

    def _capture(self, shape: Shape, compute: Callable[[], None]) -> None:
        torch.clear_autocast_cache()  # the graph outlives the casts of this turn, so it makes its own
        super()._capture(shape, compute)
        torch.clear_autocast_cache()


class PooledLayer(SlabLayer):
    """The blocks of one layer, (blocks, PLAIN_BLOCK, heads, D), as a transformers cache layer of some rows."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.block = keys.shape[1]
        self.register()
        self.is_compileable |= keys.device.type != "cpu"

    def use(self, index: Tensor, count: int) -> None:
        """Be the cache of rows whose tokens are at `index` (R, C), the last `count` of which come next."""
        self.index, self.count = index, count

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the next tokens, (R, heads, n, D) each; returns all (R, heads, C, D)."""
        found = []
        for cache, states in ((self.keys, keys), (self.values, values)):
            flat = cache.flatten(0, 1)  # (tokens, heads, D)
            flat[self.index[:, -self.count :]] = states.transpose(1, 2).to(flat.dtype)
            found.append(flat[self.index].transpose(1, 2))
        return found[0], found[1]

    def get_seq_length(self) -> int:
        return self.index.shape[1] - self.count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.index.shape[1], 0


def make_runner(model: PreTrainedModel) -> PackedRunner | ModelRunner:
    """The runner of a model with its active adapters, and of the weights of this moment."""
    decoder = cpu.pack_decoder(model, cpu.LEAST_STEPS, activation_dtype(model))
    if decoder is not None:
        return PackedRunner(decoder)
    return BucketedRunner(model) if can_capture(model) else ModelRunner(model)
