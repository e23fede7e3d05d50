"""Tensor parallelism (Shoeybi et al. 2019, 1909.08053, sec. 3): the matrices of each layer split over a group of ranks.

Which matrix is split by its rows or columns is the plan that transformers gives with an architecture; queries, keys and
values are split by heads. All ranks of a group read the same rows, and two sums over the group for each layer and pass
make their hidden states equal. Embeddings, norms and head are whole on each rank of a group.

Left out: split embeddings and heads, sequence parallelism, experts, and plans that split a fused matrix.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

from torch import nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.types import PreTrainedModel

PER_HEAD = "replicated_with_grad_allreduce"  # norms of queries and keys, whose gradient sums over the group's heads
SUPPORTED = ("colwise", "rowwise", PER_HEAD)


def check_splittable(model: PreTrainedModel, size: int) -> None:
    """Raises: UsageError when a model has no plan to be split over `size` ranks, or its widths do not divide by it."""
    config, flag = model.config, f"--tensor_parallel {size}"
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise UsageError(f"{flag}: transformers has no plan by which to split {config.model_type}; leave it out")
    if other := sorted(set(plan.values()) - set(SUPPORTED)):
        raise UsageError(f"{flag}: the plan of {config.model_type} asks for {other[0]}, unsupported; leave it out")
    sizes = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    for name, module in model.base_model.named_modules():
        style = next((plan[pattern] for pattern in plan if fnmatch(name, pattern)), None)
        if isinstance(module, nn.Linear) and style in ("colwise", "rowwise"):
            sizes[name] = module.out_features if style == "colwise" else module.in_features
    for name, width in sizes.items():
        if width and width % size:
            raise UsageError(f"{flag}: {name} of this {config.model_type} is {width}, not a multiple of {size}")


def split_layers(model: PreTrainedModel, mesh: Any) -> None:
    """Split the layers of a model over the ranks of a mesh of one dimension, in place."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def style(name: str) -> ParallelStyle:
        if name == PER_HEAD:
            return SequenceParallel(sequence_dim=2, use_local_output=True)  # (B, T, heads, width): split by heads
        return ColwiseParallel() if name == "colwise" else RowwiseParallel()

    plan: Any = model.config.base_model_tp_plan
    parallelize_module(model.base_model, mesh, {pattern: style(name) for pattern, name in plan.items()})
