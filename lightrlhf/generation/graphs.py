"""Steps of the generation engine with few shapes, captured as CUDA graphs.

A decoding step of a small model takes a GPU less time than its hundreds of kernels take the host to start. A CUDA graph
starts them all at once, but repeats a step exactly: the same shapes, at the same addresses, without a read by the host.
So here a step reads and writes tensors that stay where they are, the current column is a number on the device, and
shapes are rounded up to buckets: slots to powers of two, columns to two sizes for each doubling (64, 128, 192, 256,
384, 512, 768, ...). A call has at most (ceil(log2 slots) + 1) * (2 * ceil(log2(columns / 64)) + 1) shapes.

A step attends to the first columns of the slab, a bucket of them; the mask hides those that no row uses. Columns before
the first busy row are dropped where a smaller bucket then suffices. Noise comes from outside, as for all slots.

The first step of a shape runs eagerly and allocates memory, which a capture may not; the second is captured, the
others are replayed. Graphs of slots last for one call: under autocast they read casts of weights that do not outlive
it. The engine's trial of an architecture compares a replayed step with the model's own log-probabilities, too. Steps of
an open batch are captured by `paged`, and last as long as the weights.

The steps are tested on the CPU, where they run as they are; `make gpu` captures them.

Left out: graphs of prefilling, of sharded models and of architectures that transformers does not compile with a static
cache (their steps have no buckets), and of streaming (`generate_steps`). Adapters merged into the weights for a call:
in bfloat16 small changes would be lost, float32 takes a second copy of the weights, and a graph starts the small
products of adapters at no cost to the host.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightrlhf.cli.errors import first_line
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.generation.slots import SlabLayer, Slots
from lightrlhf.models.sharding import is_sharded

Shape = tuple[int, int]  # rows, columns
DEVICES = {"cuda"}  # where slots have buckets, until a capture fails
LEAST_COLUMNS = 64  # of a bucket


class BucketLayer(SlabLayer):
    """A layer that writes to a column known on the device alone, and attends to a fixed number of columns."""

    is_compileable = True  # transformers makes a mask then without looking at its values
    column: Tensor  # (1,), the next token's; shared by all layers
    columns: int  # of the bucket

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one column, (slots, heads, 1, head size) each; returns the columns of the bucket."""
        for slab, states in zip(self.slabs, (keys, values)):
            slab.index_copy_(2, self.column, states.to(slab.dtype))
        return self.slabs[0][:, :, : self.columns], self.slabs[1][:, :, : self.columns]

    def get_seq_length(self) -> Any:
        """The column of the next token, as a tensor: transformers places the query by it."""
        return self.column

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns, 0


class Captured:
    """Steps of few shapes. steps: how many each shape (rows, columns) has had; graphs: the captured ones."""

    def allow_captures(self, device: torch.device) -> None:
        self.steps: Counter[Shape] = Counter()
        self.graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self.captures, self.kind = device.type == "cuda", device.type

    def run(self, shape: Shape, compute: Callable[[], None]) -> None:
        """Compute a step of a shape, by its graph from its second one on."""
        self.steps[shape] += 1
        if self.captures and self.steps[shape] == 2:
            self._capture(shape, compute)
        if shape in self.graphs:
            self.graphs[shape].replay()
        else:
            compute()

    def _capture(self, shape: Shape, compute: Callable[[], None]) -> None:
        pool = next((graph.pool() for graph in self.graphs.values()), None)  # one for all: they never run together
        try:
            self.graphs[shape] = capture(compute, pool)
        except RuntimeError as problem:
            self.stop_captures(problem)

    def stop_captures(self, problem: Exception) -> None:
        """Go on eagerly after a failure; later calls have no buckets."""
        self.captures = False
        DEVICES.discard(self.kind)
        note(f"decoding steps are not captured, and slower for it: {first_line(problem)}")


class BucketedSlots(Captured, Slots):
    """Slots whose steps have few shapes and fixed addresses, so that they can be captured."""

    layer_type = BucketLayer
    layers: Sequence[BucketLayer]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.allow_captures(self.device)
        self.column = torch.zeros(1, dtype=torch.int64, device=self.device)
        for layer in self.layers:
            layer.column = self.column
        self._choose_columns()

    @staticmethod
    def columns_for(count: int) -> int:
        """The smallest bucket for this many columns: 64, 128, 192, 256, 384, 512, 768, ..."""
        step = max(LEAST_COLUMNS, 2 ** (count - 1).bit_length() // 4)
        return -(-count // step) * step

    @staticmethod
    def slots_for(busy: int) -> int:
        """The smallest power of two that is at least the number of busy slots."""
        return 2 ** (busy - 1).bit_length()

    def step(self) -> None:
        """Decode one token in every slot."""
        if self.layers[0].end == self.layers[0].columns:
            self._choose_columns()
        self.run((len(self.row), self.layers[0].columns), self._compute)
        for layer in self.layers:
            layer.end += 1

    def set_window(self, idle: Tensor) -> None:
        """Restrict attention to the columns that busy rows occupy, up to the size of a bucket."""
        super().set_window(idle)
        self._choose_columns()

    def _choose_columns(self) -> None:
        """Choose the smallest bucket with room for a token, dropping unused columns where that makes it smaller."""
        unused = min(self.layers[0].start, self.layers[0].end - self.longest)
        needed = self.layers[0].end + 1
        if self.columns_for(needed - unused) < self.columns_for(needed):
            self._drop_columns(unused)
        for layer in self.layers:
            layer.columns = self.columns_for(layer.end + 1)
        self.column.fill_(self.layers[0].end)

    def _compute(self) -> None:
        """The work of a step on the device: no shape, address or argument but its bucket's."""
        self.mask.index_fill_(1, self.column, True)
        self._decode(self.mask[:, : self.layers[0].columns])
        self.column += 1


def note(text: str) -> None:
    """Print a line about the speed of decoding, once for each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr)


def capture(step: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """The kernels that a function starts, to be replayed. Raises: RuntimeError where it waits for the device."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads may use the device
        step()
    return graph


def can_capture(model: PreTrainedModel) -> bool:
    """Whether a model's steps have buckets."""
    if model.device.type not in DEVICES or not getattr(model, "_can_compile_fullgraph", False):
        return False
    from torch.distributed.fsdp import FSDPModule

    return not is_sharded(model) and not any(isinstance(module, FSDPModule) for module in model.modules())


def slots_type(model: PreTrainedModel) -> type[Slots]:
    """The slots for a model: with buckets where its steps can be captured."""
    return BucketedSlots if can_capture(model) else Slots
