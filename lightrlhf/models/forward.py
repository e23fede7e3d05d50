"""Forward passes of a Hugging Face model: their mode, their arguments, and the parts that they use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.data.batch import to_device
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.maths.ops import position_ids
from lightrlhf.models.frozen import activation_dtype
from lightrlhf.models.packing import MOST_COST, PackedTexts, pack_texts
from lightrlhf.models.varlen import TextRow, text_row

CAUSAL = "causal"  # name of an attention in transformers, see `without_mask`


def device_of(module: nn.Module) -> torch.device:
    """Device of a module's parameters, a shared backbone's too."""
    return next((getattr(module, "model", module)).parameters()).device


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
    """Arguments of a forward pass without a KV cache, with explicit positions; ids and mask may be on the host."""
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask.long()}
    inputs |= position_inputs(model, position_ids(attention_mask))
    return {name: to_device(values, model.device) for name, values in inputs.items()} | {"use_cache": False}


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


def is_right_padded(attention_mask: Tensor) -> bool:
    """Whether padding (B, T) stands only behind the texts; a mask on the host."""
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())


def causal_inputs(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    """`model_inputs` for right-padded rows in a pass `without_mask`."""
    inputs = model_inputs(model, input_ids, attention_mask)
    return inputs | {"attention_mask": None}


@contextmanager
def without_mask(model: PreTrainedModel) -> Iterator[list[None]]:
    """Context manager: each token attends to all before it, by a fused kernel and with no mask to build or to read.

    Right-padded rows have the same outputs except at padding. Yields a list that gets an entry from each attention. An
    architecture with attention of another kind adds none: without a mask its tokens would see later ones.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import AttentionInterface

    calls: list[None] = []

    def attend(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return sdpa_attention_forward(*args, **options)

    config, name = model.config, model.config._attn_implementation
    AttentionInterface.register(CAUSAL, attend)  # transformers makes no masks for names that it does not know
    config._attn_implementation = CAUSAL
    try:
        yield calls
    finally:
        config._attn_implementation = name


def packed_texts(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, group: Tensor | None, by_text: bool = False
) -> PackedTexts | TextRow | None:
    """The texts of a pass, packed; None where they stay separate. Here the layout is chosen by the device:

    | texts | CPU | CUDA, half precision | else |
    |---|---|---|---|
    | of which some share a prefix | `pack_texts` | `pack_texts` | `pack_texts` |
    | others | `pack_texts` | `text_row` | plain rows |

    Packing leaves out padding and repeated prefixes. Its dense mask costs a CPU nothing, and a GPU its fused kernel of
    causal attention, which plain rows have (`without_mask`) and a row of texts has (`varlen`).

    by_text: the model takes such a row. The mask of packed rows ignores windows and chunks of attention, so no text may
    exceed one; GPT-Neo's window counts the columns of a row.
    """
    shares = group is not None and len(group.unique()) < len(group)
    if exceeds_window(model, input_ids.shape[1]):
        return None
    if by_text and not shares:
        is_shorter = attention_mask.sum() <= MOST_COST * attention_mask.numel()
        return text_row(input_ids, attention_mask) if is_shorter and attention_mask.any() else None
    if not shares and model.device.type != "cpu":
        return None
    config = model.config.get_text_config()
    hidden_size = getattr(config, "hidden_size", 1024)  # a rare architecture has no such name
    return pack_texts(input_ids, attention_mask, group, hidden_size, getattr(config, "window_size", None))


def exceeds_window(model: PreTrainedModel, length: int) -> bool:
    """Whether texts of this length are longer than a window or a chunk of the model's attention."""
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return any(window and length > window for window in windows)


def packed_inputs(model: PreTrainedModel, packed: PackedTexts | TextRow) -> dict[str, Any]:
    """`model_inputs` for packed texts, which may be on the host."""
    there = functools.partial(to_device, device=model.device)
    if isinstance(packed, TextRow):
        mask = packed._replace(ends=there(packed.ends)).as_mask()  # (1, 1, longest, B+1)
    else:
        dtype = activation_dtype(model)
        visible = packed._replace(part=there(packed.part), text=there(packed.text)).visible
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        mask = mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]  # (N, 1, W, W)
    positions = position_inputs(model, there(packed.positions))
    return {"input_ids": there(packed.input_ids), "attention_mask": mask, "use_cache": False, **positions}


def embedding_rows(model: PreTrainedModel) -> int:
    """Rows of the embedding table of a Hugging Face model."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.shape[0]
