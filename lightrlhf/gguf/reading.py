"""A GGUF file as a model of transformers.

Sizes and token ids of the metadata are checked before transformers builds anything of them. It then reads tensors,
config and tokenizer, and the result is compared with the file: every weight used and finite, each token's id, a
chat template that renders. No code of a file is run but that template, in transformers' sandbox.

Left out: quantised weights themselves (they become float32, unless half precision holds every weight exactly).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lightrlhf.cli.errors import UsageError, first_line, list_names, write_problem
from lightrlhf.gguf.layout import check_kinds, check_layout, read_header
from lightrlhf.gguf.tokens import INTACT, PRE_TOKENIZERS, check_loads, check_tokenizer, complete_tokenizer, ends_of
from lightrlhf.maths.finite import not_finite

LONGEST_SHOWN = 40  # characters of a value in an error
UNUSED = ("rope_freqs.weight",)  # a table that the config computes
NOT_READ = ("logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.clamp_kqv")
SIZES = {"block_count": 1, "context_length": 1, "embedding_length": 1, "attention.head_count": 0}  # the least of each
TOKEN_IDS = ("bos", "eos", "padding", "unknown", "eot", "eom")
KINDS = {
    "general.architecture": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.ggml.tokens": list,
    "tokenizer.ggml.token_type": list,
    "tokenizer.ggml.scores": list,
    "tokenizer.chat_template": str,
}
FOLDER_INSTEAD = "give the folder that it was made of"


def read_gguf(file: Path, named: str) -> tuple[Any, Any, dict[str, Any]]:
    """Model and tokenizer of a GGUF file, and its metadata.

    named: the file in errors. Raises: UsageError when it cannot be read, or does not match its metadata.
    """
    try:
        return _read(file, named)
    except Exception as problem:  # damaged contents make other libraries raise anything
        if isinstance(problem, UsageError) or write_problem(problem):
            raise
        raise UsageError(f"{named} cannot be loaded: {first_line(problem)}; {INTACT}") from None


def _read(file: Path, named: str) -> tuple[Any, Any, dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    reader, stored = open_file(file, named)
    check_metadata(named, stored, len(reader.tensors))
    with TemporaryDirectory() as alone:  # transformers would also read other files of its folder
        (Path(alone) / file.name).symlink_to(file.resolve())
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name)
        config: Any = AutoConfig.from_pretrained(alone, gguf_file=file.name)
        if config.model_type == "mistral":  # which transformers takes from a Llama's name, and cannot load
            config = LlamaConfig(**{key: value for key, value in config.to_dict().items() if key != "model_type"})
        complete_config(config, stored, {one.name: one for one in reader.tensors}, named)
        check_size(named, config, sum(int(one.n_elements) for one in reader.tensors if one.name not in UNUSED))
        load: Any = AutoModelForCausalLM.from_pretrained
        options = {"gguf_file": file.name, "config": config, "dtype": exact_dtype(reader.tensors)}
        options["ignore_mismatched_sizes"] = True  # they are refused by name
        model, found = load(alone, output_loading_info=True, **options)
    check_weights(named, model, found)
    tokenizer = complete_tokenizer(tokenizer, stored)
    check_tokenizer(named, tokenizer, stored, model.get_input_embeddings().num_embeddings)
    plain = as_plain(model)
    plain.generation_config.eos_token_id = ends_of(stored, tokenizer)
    plain.generation_config.pad_token_id = tokenizer.pad_token_id
    check_loads(named, plain.config, tokenizer)
    return plain, tokenizer, stored


def open_file(file: Path, named: str) -> tuple[Any, dict[str, Any]]:
    """The reader of a GGUF file with its tensors, and its metadata. Raises: UsageError when it cannot be read."""
    try:
        reader = read_header(file)
        stored = {key: field.contents() for key, field in reader.fields.items()}
        if reader.byte_order == "I":
            check_layout(reader)
            check_kinds(reader, stored)
    except Exception as problem:  # a damaged file makes the reader raise anything
        raise UsageError(f"{named} is not a readable GGUF file: {first_line(problem)}; give an intact copy") from None
    if reader.byte_order != "I":
        raise UsageError(f"{named} is of the other byte order (big-endian); give a copy made for this machine")
    return reader, stored


def check_metadata(named: str, stored: dict[str, Any], num_tensors: int) -> None:
    """Raises: UsageError for the first metadata that do not fit a model of `num_tensors` tensors."""
    if (parts := stored.get("split.count", 1)) != 1:  # all parts but the first have no other metadata
        raise UsageError(f"{named} is one of {parts!r} parts; join them first: llama-gguf-split --merge")
    for key in _misfits(stored, num_tensors):
        what = f"have {key} {repr(stored[key])[:LONGEST_SHOWN]}, which does not fit" if key in stored else f"lack {key}"
        raise UsageError(f"{named}: its metadata {what}; {INTACT}")
    pre = stored.get("tokenizer.ggml.pre")
    if stored.get("tokenizer.ggml.model") == "gpt2" and pre not in PRE_TOKENIZERS:
        raise UsageError(
            f"{named} names a way to split texts (tokenizer.ggml.pre {pre!r}) that is not known here; {FOLDER_INSTEAD}"
        )


def _misfits(stored: dict[str, Any], num_tensors: int) -> Iterator[str]:
    """Keys of metadata that are missing, of another kind, or out of bounds; one read after another."""
    yield from (key for key, kind in KINDS.items() if not isinstance(stored.get(key, kind()), kind))
    yield from (key for key in ("general.architecture", "tokenizer.ggml.tokens") if not stored.get(key))
    if not stored["general.architecture"].isprintable() or len(stored["general.architecture"]) > LONGEST_SHOWN:
        yield "general.architecture"
    own, tokens = f"{stored['general.architecture']}.", stored["tokenizer.ggml.tokens"]
    for name, least in SIZES.items():
        size = stored.get(own + name)
        if not isinstance(size, int) or size < least or (name == "block_count" and size > num_tensors):
            yield own + name
    if not any(key.startswith(own) and key.endswith("_epsilon") for key in stored):
        yield f"{own}attention.layer_norm_rms_epsilon"
    for key, value in stored.items():
        if key.startswith(own) and isinstance(value, float) and not math.isfinite(value):
            yield key
    if not stored.get(f"{own}rope.freq_base", 1.0) > 0:
        yield f"{own}rope.freq_base"
    for key in (f"tokenizer.ggml.{name}_token_id" for name in TOKEN_IDS):
        index = stored.get(key, None if key.endswith(".eos_token_id") else 0)
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            yield key
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        if len(stored.get(key, tokens)) != len(tokens):
            yield key


def complete_config(config: Any, stored: dict[str, Any], tensors: dict[str, Any], named: str) -> None:
    """Give a config what transformers leaves out of a file: widths, biases and scaled positions."""
    sizes = {"head_dim": "attention.key_length", "n_positions": "context_length", "n_inner": "feed_forward_length"}
    for name, key in sizes.items():
        size = stored.get(f"{stored['general.architecture']}.{key}")
        if size and hasattr(config, name):
            setattr(config, name, size)
    for name, tensor in (("attention_bias", "attn_q.bias"), ("mlp_bias", "ffn_up.bias")):
        if hasattr(config, name):
            setattr(config, name, f"blk.0.{tensor}" in tensors)
    if "rope_freqs.weight" in tensors:
        factors = torch.tensor(tensors["rope_freqs.weight"].data)
        config.rope_parameters = find_position_scaling(config, factors.float(), named)
    for key in NOT_READ if config.model_type in ("llama", "mistral", "qwen2", "qwen3") else ():
        if stored.get(f"{stored['general.architecture']}.{key}"):
            raise UsageError(f"{named} has {key}, which is not read here; {FOLDER_INSTEAD}")
    window = stored.get(f"{stored['general.architecture']}.attention.sliding_window")
    if window and getattr(config, "sliding_window", None) is None and window < config.max_position_embeddings:
        raise UsageError(f"{named} attends to {window} tokens at a time, which is not read here; {FOLDER_INSTEAD}")
    scaling = stored.get(f"{stored['general.architecture']}.rope.scaling.type", "none")
    if scaling != "none" and (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "default":
        raise UsageError(f"{named} scales its positions ({scaling!r}), which is not read here; {FOLDER_INSTEAD}")


def find_position_scaling(config: Any, factors: torch.Tensor, named: str) -> dict[str, Any]:
    """Settings of rotary positions whose frequencies are divided by `factors`. Raises: UsageError for unknown ones.

    Llama 3.1 and later slow down low frequencies alone, all of its models by the same wavelengths.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta, largest = config.rope_parameters["rope_theta"], round(float(factors.max()), 3)
    plain = 1 / theta ** (torch.arange(len(factors)) / len(factors))
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for kind, more in (("linear", {}), ("llama3", llama3)):
        tried = copy.deepcopy(config)
        tried.rope_parameters = {"rope_type": kind, "rope_theta": theta, "factor": largest, **more}
        if factors.min() > 0 and torch.allclose(ROPE_INIT_FUNCTIONS[kind](tried, None)[0], plain / factors, rtol=1e-5):
            return dict(tried.rope_parameters)
    raise UsageError(f"{named} scales its positions by other factors than Llama 3; {FOLDER_INSTEAD}")


def exact_dtype(tensors: Iterable[Any]) -> torch.dtype:
    """Half precision if it holds every weight of the file exactly, else float32."""
    kinds = {tensor.tensor_type.name for tensor in tensors}
    for name, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        whole = (torch.tensor(tensor.data) for tensor in tensors if tensor.tensor_type.name == "F32")  # one at a time
        if kinds == {name, "F32"} and all(torch.equal(values.to(dtype).float(), values) for values in whole):
            return dtype
    return torch.float32


def check_size(named: str, config: Any, given: int) -> None:
    """Compare the weights of a model by its config with those that a file has, before memory is taken for either.

    Raises: UsageError when their numbers differ.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        described = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if described > given:
        raise UsageError(f"{named} lacks weights: its metadata tell of {described:,}, it holds {given:,}; {INTACT}")
    if described < given:
        raise UsageError(
            f"{named} holds {given:,} weights of which transformers reads {described:,} as {config.model_type}; "
            f"{FOLDER_INSTEAD}"
        )


def check_weights(named: str, model: Any, found: dict[str, Any]) -> None:
    """Raises: UsageError when a weight was not in the file, had another shape there, or is not finite."""
    missing = sorted(found["missing_keys"]) + sorted(key for key, *_ in found["mismatched_keys"])
    if missing:
        raise UsageError(f"{named} lacks weights that its architecture has: {list_names(missing)}; {INTACT}")
    if bad := not_finite(model.named_parameters()):
        raise UsageError(f"{named} has weights that are not finite: {list_names(bad)}; {INTACT}")


def as_plain(model: Any) -> Any:
    """The model without its note of having been quantised, which would keep it from being saved; shares its weights."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    config.architectures = [type(model).__name__]
    with torch.device("meta"):
        plain = type(model)(config)
    state = model.state_dict()
    plain.load_state_dict(state, assign=True)
    for name, buffer in model.named_buffers():  # those that no state dict holds, as of rotary positions
        parent, _, last = name.rpartition(".")
        owner = plain.get_submodule(parent)
        owner.register_buffer(last, buffer, persistent=name in state)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
