"""Attention of texts that follow one another in a row, by torch's kernel for variable lengths (2.11, CUDA).

Each text attends to itself alone: no padding is computed and no mask is made, at the speed of a causal kernel. The
function below stands in for transformers' `sdpa` in this process. Where a mask would be it may get the ends of texts,
which recomputation by activation checkpointing so gets again; with any other mask it is `sdpa`.

Left out, and computed as before: float32, which the kernel does not take; dropout of attention, soft caps, texts longer
than a window, and models in whose layers a trial pass finds other attention.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from lightrlhf.data.types import PreTrainedModel
from lightrlhf.maths.ops import position_ids

DEVICES = {"cuda"}  # that have the kernel
HALF = (torch.bfloat16, torch.float16)
TOLERANCE = 0.03  # of the kernel, relative to the largest value: three roundings of bfloat16


class TextRow(NamedTuple):
    """The texts of B separate rows, one behind the other in a row of W tokens."""

    input_ids: Tensor  # (1, W)
    positions: Tensor  # (1, W)
    ends: Tensor  # (B+1,) int32: 0, and the column where each text ends
    longest: int  # tokens of a text
    rows: Tensor  # (B,) 0: the row of each text
    columns: Tensor  # (B, T) the column of each token of the separate rows, 0 of padding

    def as_mask(self) -> Tensor:
        """Ends (1, 1, longest, B+1) in place of an attention mask: a view whose shape tells the longest text."""
        return self.ends.expand(1, 1, self.longest, -1)


def text_row(input_ids: Tensor, attention_mask: Tensor) -> TextRow:
    """The tokens of (B, T) rows without their padding; all tensors are on the host."""
    mask = attention_mask.bool()
    lengths, positions = mask.sum(1), position_ids(mask)  # (B,), (B, T)
    ends = pad(lengths.cumsum(0), (1, 0))
    columns = torch.where(mask, positions + ends[:-1, None], 0)
    row = input_ids[mask][None], positions[mask][None]
    return TextRow(*row, ends.int(), int(lengths.max()), torch.zeros_like(lengths), columns)


class Attention:
    """The function that transformers calls for attention by `sdpa`."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int, int]] | None = None  # of the calls of a trial pass: heads, groups, D

    def __call__(
        self,
        module: Any,
        query: Tensor,  # (1, heads, W, D)
        key: Tensor,  # (1, groups, W, D)
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Outputs (1, W, heads, D), and no weights. Raises: NotImplementedError for ends of texts where the kernel does
        not compute what the layer asks for."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if attention_mask is None or attention_mask.dtype is not torch.int32:
            given = module, query, key, value, attention_mask, dropout, scaling
            return sdpa_attention_forward(*given, **options)
        others = [name for name in ("softcap", "position_bias", "cache") if options.get(name) is not None]
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if dropout or others or not is_causal:
            raise NotImplementedError(f"attention by text: dropout {dropout:g}, causal {is_causal}, {others}")
        dtype = half_precision(query.device) or query.dtype
        q, k, v = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))  # (W, heads or groups, D) each
        if self.sizes is not None:
            self.sizes.append((query.shape[1], key.shape[1], query.shape[3]))
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        out = kernel()(q, k, v, attention_mask[0, 0, 0], attention_mask.shape[2], scale)  # (W, heads, D)
        return out[None], None


attend = Attention()


def half_precision(device: torch.device) -> torch.dtype | None:
    """The half precision of autocast on a device; None where it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    dtype = torch.get_autocast_dtype(device.type)
    return dtype if dtype in HALF else None


@functools.cache
def kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]:
    """Causal attention of texts: of queries (W, heads, D), keys and values (W, groups, D), ends (B+1,), the longest
    text and the scale. Raises: ImportError where torch has none.
    """
    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters.keys()
    if not {"scale", "window_size"} <= names:
        raise ImportError("varlen_attn of torch 2.10 takes no scale")
    options: dict[str, Any] = {"window_size": (-1, 0)} | ({"enable_gqa": True} if "enable_gqa" in names else {})

    def run(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
        out: Any = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale, **options)
        return cast(Tensor, out)

    return run


# ------------------------------------------------------------------------------------------------------------- trials
def attends_by_text(model: PreTrainedModel, inputs: dict[str, Any]) -> bool:
    """Whether all attention of a model takes the ends of texts on its device, and the kernel is right there.

    By a trial pass over `inputs`, in train mode for dropout. It does not depend on data, so all ranks find the same.
    """
    from transformers.modeling_utils import AttentionInterface

    device, was_training = model.device, model.training
    devices = [] if device.type == "cpu" else [device]
    AttentionInterface.register("sdpa", attend)
    sizes: list[tuple[int, int, int]] = []
    attend.sizes = sizes
    try:
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
            model.train().base_model(**inputs)
        layers, dtype = model.config.get_text_config().num_hidden_layers, half_precision(device)
        return len(sizes) == layers and all(is_right(*size, device, dtype) for size in set(sizes))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # each architecture, card and release of torch rejects it by another error
        return False
    finally:
        attend.sizes = None
        model.train(was_training)


@functools.cache
def is_right(heads: int, groups: int, size: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether outputs and gradients of the kernel equal attention to each text alone in float32, up to rounding."""
    lengths = [3, 1, 40]
    drawn = torch.Generator().manual_seed(0)
    states = [torch.randn(sum(lengths), number, size, generator=drawn) for number in (heads, groups, groups)]
    found = [part.to(device, dtype).requires_grad_(True) for part in states]
    expected = [part.to(device).requires_grad_(True) for part in states]
    ends, scale = torch.tensor([0, 3, 4, 44], dtype=torch.int32, device=device), size**-0.5
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        out = kernel()(found[0], found[1], found[2], ends, max(lengths), scale)
        texts = zip(*(part.split(lengths) for part in expected))
        options = {"is_causal": True, "enable_gqa": heads != groups, "scale": scale}
        alone = [scaled_dot_product_attention(*(part.transpose(0, 1) for part in text), **options) for text in texts]
        right = torch.cat(alone, 1).transpose(0, 1)  # (44, heads, D)
        weights = torch.randn(right.shape, generator=drawn).to(device)
        slopes = torch.autograd.grad((out.float() * weights).sum(), found)
        others = torch.autograd.grad((right * weights).sum(), expected)
    pairs = zip((out, *slopes), (right, *others))
    return all(bool((one.float() - other).abs().max() <= TOLERANCE * other.abs().max()) for one, other in pairs)
