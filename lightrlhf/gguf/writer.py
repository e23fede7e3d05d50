"""GGUF files, the format of llama.cpp: writes a model of transformers with its tokenizer.

A property of a model that the format cannot express shows as different logits when the file is read back
(`models/export_check.py`). Matrices get the requested type, vectors and positions stay float32. In the types of 4 and
5 bits the embedding and the head, on which every token depends, have 8. A matrix whose rows are not a multiple of a
block, 32 numbers, is stored as float16.

Left out: mixtures of experts, other architectures, K-quants (`llama-quantize` makes them of a file in f32), positions
scaled other than by a factor of each frequency, and attention over a window, which is why the context ends with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.gguf.tokens import tokenizer_metadata

BLOCK = 32  # numbers that share a scale
SMALL_TYPES = ("q4_0", "q4_1", "q5_0", "q5_1")
FILE_TYPES = {  # `general.file_type`
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "bf16": 32,
}
DECODER = {  # GGUF's name: name in a config of transformers
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
GPT2 = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores an architecture of transformers."""

    name: str  # llama.cpp's
    keys: dict[str, str] = field(default_factory=lambda: DECODER)
    rotates_pairs: bool = False  # its rotary positions turn neighbouring numbers; transformers turns the two halves
    scales_positions: bool = False  # it reads a factor of each frequency
    transposes: bool = False  # transformers stores the matrices of its layers transposed


LLAMA = Architecture("llama", rotates_pairs=True, scales_positions=True)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gpt2": Architecture("gpt2", keys=GPT2, transposes=True),
}


class Stored(NamedTuple):
    """A tensor as it is stored."""

    name: str  # GGUF's
    source: str  # in the state dict of transformers; empty for one that is computed
    value: Tensor  # in GGUF's layout
    type: str


def architecture_of(model: PreTrainedModel) -> Architecture:
    """How llama.cpp stores a model. Raises: UsageError when it cannot be written."""
    kind = model.config.model_type
    if kind not in ARCHITECTURES:
        raise UsageError(
            f"the architecture {kind} cannot be written as GGUF here, only {', '.join(ARCHITECTURES)}; "
            "export it by --to merged and convert that by llama.cpp's own convert_hf_to_gguf.py"
        )
    return ARCHITECTURES[kind]


def hyperparameters(model: PreTrainedModel, rows: int) -> dict[str, Any]:
    """A model's metadata, by GGUF's names without the architecture's; rows: of its embedding."""
    config: Any = model.config
    values = {name: getattr(config, own, None) for name, own in architecture_of(model).keys.items()}
    if values["feed_forward_length"] is None:  # of GPT-2, which has a default
        values["feed_forward_length"] = 4 * config.n_embd
    if "attention.key_length" in values:
        width = values["attention.key_length"] or config.hidden_size // config.num_attention_heads
        window = getattr(config, "sliding_window", None) or config.max_position_embeddings
        values |= {"attention.key_length": width, "attention.value_length": width, "rope.dimension_count": width}
        values |= {"rope.freq_base": float(config.rope_parameters["rope_theta"])}
        values |= {"context_length": min(window, config.max_position_embeddings), "vocab_size": rows}
    return values


def frequency_factors(model: PreTrainedModel) -> Tensor | None:
    """By how much each rotary frequency is slowed down (Llama 3.1 and later); None if all are as usual.

    Raises: UsageError when positions are scaled in a way that such factors do not express.
    """
    rope: dict[str, Any] = getattr(model.config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "default" and rope.get("partial_rotary_factor", 1.0) == 1.0:
        return None
    if kind not in ("llama3", "linear") or not architecture_of(model).scales_positions:
        raise UsageError(
            f"positions scaled by rope_type {kind} cannot be written as GGUF for {model.config.model_type}"
        )
    scaled = model.get_submodule("model.rotary_emb").get_buffer("inv_freq").float().cpu()
    plain = 1 / float(rope["rope_theta"]) ** (torch.arange(len(scaled)) / len(scaled))
    return plain / scaled


def stored_tensors(model: PreTrainedModel, type_name: str) -> Iterator[Stored]:
    """The tensors of a file, in the order of the state dict. Raises: UsageError for one that GGUF has no name for."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture, config = architecture_of(model), model.config
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    factors = frequency_factors(model)
    if factors is not None:
        yield Stored("rope_freqs.weight", "", factors, "f32")
    state = model.state_dict()
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    tied = head.weight.data_ptr() == embedding.weight.data_ptr()
    for source, weight in state.items():
        stem, _, last = source.rpartition(".")
        if stem == "lm_head" and tied:
            continue
        name = names.get_name(stem)
        if name is None:
            raise UsageError(f"{source} of the architecture {config.model_type} has no place in GGUF")
        value = weight.detach().float().cpu()
        if architecture.transposes and stem.rpartition(".")[2] in ("c_attn", "c_proj", "c_fc") and value.dim() == 2:
            value = value.T.contiguous()
        if architecture.rotates_pairs and stem.endswith(("q_proj", "k_proj")):
            is_query = stem.endswith("q_proj")
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            value = interleave_halves(value, heads)
        yield Stored(f"{name}.{last}", source, value, choose_type(name, value, type_name))


def interleave_halves(value: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection, or its bias, with the two halves of each head in turns."""
    return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def choose_type(name: str, value: Tensor, type_name: str) -> str:
    """The type in which a tensor is stored when `type_name` is asked for."""
    if value.dim() < 2 or name == "position_embd":
        return "f32"
    if type_name in SMALL_TYPES and name in ("token_embd", "output"):
        type_name = "q8_0"
    if type_name.startswith("q") and value.shape[-1] % BLOCK:
        return "f16"
    return type_name


def round_as_stored(stored: Stored) -> Tensor:
    """A tensor as it is read back from the type that it is stored in."""
    import gguf

    kind = gguf.GGMLQuantizationType[stored.type.upper()]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(stored.value.numpy(), kind), kind))


def metadata(model: PreTrainedModel, tokenizer: Tokenizer, ends: Iterable[int]) -> dict[str, Any]:
    """Metadata of a model and its tokenizer, by GGUF's names. ends: ids at which a response ends.

    Raises: UsageError when either cannot be written.
    """
    architecture, embedding = architecture_of(model), cast(nn.Embedding, model.get_input_embeddings())
    frequency_factors(model)  # raises
    rows = embedding.num_embeddings
    values = {f"{architecture.name}.{key}": value for key, value in hyperparameters(model, rows).items()}
    return values | tokenizer_metadata(tokenizer, ends, rows)


def write_gguf(model: PreTrainedModel, described: dict[str, Any], file: Path, type_name: str, name: str) -> None:
    """Write a model as GGUF, one tensor in memory at a time.

    described: its `metadata`; type_name: one of `FILE_TYPES`; name: of the model, shown by programs.
    """
    import gguf

    writer = gguf.GGUFWriter(file, architecture_of(model).name)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[type_name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in described.items():
        add_value(writer, key, value)
    for one in stored_tensors(model, type_name):
        kind = gguf.GGMLQuantizationType[one.type.upper()]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape, size = tuple(one.value.shape), one.value.numel() // block * size
        writer.add_tensor_info(one.name, shape, np.dtype(np.float32), size, kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for one in stored_tensors(model, type_name):
            writer.write_tensor_data(gguf.quantize(one.value.numpy(), gguf.GGMLQuantizationType[one.type.upper()]))
    finally:
        writer.close()


def add_value(writer: Any, key: str, value: Any) -> None:
    """Add a value of metadata in the type that llama.cpp reads."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
