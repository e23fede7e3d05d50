"""Forward passes of a Hugging Face model: their mode, their arguments, and the parts that they use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.data.types import PreTrainedModel
from lightrlhf.maths.ops import position_ids
from lightrlhf.models.frozen import activation_dtype
from lightrlhf.models.packing import PackedTexts, pack_texts


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Context manager: eval mode without gradients; the module's mode is restored on leaving, also on errors."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)


def model_inputs(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    """Arguments of a forward pass without a KV cache, with explicit positions."""
    positions = position_inputs(model, position_ids(attention_mask))
    return {"input_ids": input_ids, "attention_mask": attention_mask.long(), "use_cache": False, **positions}


def cache_inputs(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """Arguments of a forward pass that extends a KV cache."""
    return {cache_name(type(model).forward) or "past_key_values": cache, "use_cache": True}


@functools.cache
def cache_name(forward: Callable[..., Any]) -> str | None:
    """A model's argument for its KV cache, renamed to `cache` in transformers 5.24; None if it takes no cache."""
    names = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def position_inputs(model: PreTrainedModel, positions: Tensor) -> dict[str, Tensor]:
    """The `position_ids` argument; empty for Bloom, the only supported architecture that does not accept it."""
    return {} if model.config.model_type == "bloom" else {"position_ids": positions}


def packed_texts(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, group: Tensor | None
) -> PackedTexts | None:
    """The texts of a pass, packed; None where they stay separate.

    The mask of packed rows ignores windows and chunks of attention, so no text may exceed one; GPT-Neo's window counts
    the columns of a row.
    """
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if any(window and input_ids.shape[1] > window for window in windows):
        return None
    hidden_size = getattr(config, "hidden_size", 1024)  # a rare architecture has no such name
    return pack_texts(input_ids, attention_mask, group, hidden_size, getattr(config, "window_size", None))


def packed_inputs(model: PreTrainedModel, packed: PackedTexts) -> dict[str, Any]:
    """`model_inputs` for packed texts."""
    dtype = activation_dtype(model)
    mask = torch.zeros(packed.visible.shape, dtype=dtype, device=packed.visible.device)
    mask = mask.masked_fill_(~packed.visible, torch.finfo(dtype).min)[:, None]  # (N, 1, W, W)
    positions = position_inputs(model, packed.positions)
    return {"input_ids": packed.input_ids, "attention_mask": mask, "use_cache": False, **positions}


def embedding_rows(model: PreTrainedModel) -> int:
    """Rows of the embedding table of a Hugging Face model."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.shape[0]
