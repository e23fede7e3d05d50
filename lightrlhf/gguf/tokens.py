"""Tokenizers in the metadata of a GGUF file: tokens, their types, merges or scores, what ends a text, the template.

llama.cpp splits a text before any merge by its own regular expressions, which a file can only name
(`tokenizer.ggml.pre`). So the name is found by comparing the tokenizer's own expressions with the known ones; without
one llama.cpp would split, and hence tokenise, other than the model was trained.

Left out: Unigram and WordPiece vocabularies, and a normaliser: llama.cpp has none for these tokenizers, so the NFC of
Qwen's is left to the caller.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from tempfile import TemporaryDirectory
from typing import Any

from lightrlhf.cli.errors import UsageError, first_line, list_names
from lightrlhf.data.tokens import adds_bos
from lightrlhf.data.turn_ends import turn_end
from lightrlhf.data.types import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # GGUF's types of tokens
END_KEYS = ("eos", "eot", "eom")  # of a text, a turn and a message: llama.cpp ends a response at each
INTACT = "give an intact copy, or the folder that it was made of"

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


def tokenizer_metadata(tokenizer: Tokenizer, ends: Iterable[int], rows: int) -> dict[str, Any]:
    """GGUF metadata of a tokenizer, for a model whose embedding has `rows` rows and whose responses end at `ends`.

    Raises: UsageError when llama.cpp cannot tokenise as it does, or end a response where it does.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    if parts["model"]["type"] != "BPE" or parts["model"].get("end_of_word_suffix"):
        raise UsageError(f"{refusal_of(tokenizer)}: GGUF takes byte-level BPE and SentencePiece BPE")
    is_bytes = not parts["model"].get("byte_fallback")
    tokens, types = tokens_and_types(tokenizer, rows, is_bytes)
    found: dict[str, Any] = {"model": "gpt2" if is_bytes else "llama", "tokens": tokens, "token_type": types}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in parts["model"]["merges"]]
    if is_bytes:
        found |= {"pre": pre_tokenizer_name(tokenizer, parts), "merges": merges}
    else:
        found |= {"pre": "default", "scores": merge_scores(tokens, merges)}
    found["add_space_prefix"] = prefixes_space(parts)
    # Raw text: a letter, to see what is added behind it, and a greeting.
    adds_end = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    found |= {"add_bos_token": bool(adds_bos(tokenizer)), "add_eos_token": adds_end}
    ids = {"bos": tokenizer.bos_token_id, "padding": tokenizer.pad_token_id, "unknown": tokenizer.unk_token_id}
    ids |= name_ends(tokenizer, ends)
    found |= {f"{name}_token_id": index for name, index in ids.items() if index is not None}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in found.items()}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template["default"]
    return metadata | ({"tokenizer.chat_template": template} if template else {})


def refusal_of(tokenizer: Tokenizer) -> str:
    """How an error about a tokenizer begins."""
    return f"the tokenizer ({type(tokenizer).__name__}) cannot be written as GGUF"


def tokens_and_types(tokenizer: Tokenizer, rows: int, is_bytes: bool) -> tuple[list[str], list[int]]:
    """Each token's text and GGUF type by id; rows of the embedding without a token get made-up names."""
    texts = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(texts) >= rows:
        raise UsageError(f"{refusal_of(tokenizer)}: it has {max(texts) + 1} tokens, the model {rows}")
    types = {index: NORMAL for index in texts}
    if not is_bytes:
        types |= {index: BYTE for index, text in texts.items() if text.startswith("<0x") and len(text) == 6}
    for index, token in tokenizer.added_tokens_decoder.items():
        types[index] = CONTROL if token.special else USER_DEFINED
    if not is_bytes and tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = UNKNOWN
    return (
        [texts.get(index, f"[PAD{index}]") for index in range(rows)],
        [types.get(index, UNUSED) for index in range(rows)],
    )


def pre_tokenizer_name(tokenizer: Tokenizer, parts: dict[str, Any]) -> str:
    """llama.cpp's name of how a byte-level tokenizer splits its texts. Raises: UsageError when it has none."""
    patterns = split_patterns(parts["pre_tokenizer"])
    kept = [part["type"] for part in _sequence(parts["normalizer"], "normalizers")]
    if parts["model"].get("ignore_merges") and patterns != (LLAMA3,) or kept not in ([], ["NFC"]):
        patterns = None
    name = next((name for name, known in PRE_TOKENIZERS.items() if known == patterns), None)
    if name is None:
        raise UsageError(
            f"{refusal_of(tokenizer)}: llama.cpp has no name for how it splits texts, so it would tokenise otherwise; "
            f"known are {', '.join(PRE_TOKENIZERS)}"
        )
    if name == "llama-bpe" and not parts["model"].get("ignore_merges"):
        return "smaug-bpe"  # the same expression, for tokenizers that always merge
    return name


def split_patterns(part: dict[str, Any] | None) -> tuple[str, ...] | None:
    """Regular expressions by which a pre-tokenizer splits a text, one after another; None if it does more."""
    patterns: list[str] = []
    steps = _sequence(part, "pretokenizers")
    for step in steps:
        if step["type"] == "ByteLevel" and not step["add_prefix_space"] and step is steps[-1]:
            return (*patterns, GPT2) if step["use_regex"] else tuple(patterns)
        if step["type"] == "Digits" and step["individual_digits"]:
            patterns.append(r"\p{N}")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            patterns.append(step["pattern"].get("Regex", ""))
        else:
            return None
    return None


def _sequence(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[name]) if part["type"] == "Sequence" else [part]


def prefixes_space(parts: dict[str, Any]) -> bool:
    """Whether a SentencePiece tokenizer puts a space before a text."""
    before = _sequence(parts["normalizer"], "normalizers")
    pre = _sequence(parts["pre_tokenizer"], "pretokenizers")
    spaced = any(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in pre)
    return spaced or any(step["type"] == "Prepend" for step in before)


def merge_scores(tokens: list[str], merges: list[str]) -> list[float]:
    """A score for each token that is the higher, the earlier a merge makes it: llama.cpp merges by scores alone."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [float(-ranks.get(token, len(merges) + index)) for index, token in enumerate(tokens)]


def name_ends(tokenizer: Tokenizer, ends: Iterable[int]) -> dict[str, int]:
    """What ends a response, by GGUF's names. Raises: UsageError when it has fewer names than the model ends."""
    first = [tokenizer.eos_token_id, turn_end(tokenizer)]
    ends = [index for index in dict.fromkeys([*first, *ends]) if index is not None]
    if len(ends) > len(END_KEYS):
        texts = ", ".join(tokenizer.convert_ids_to_tokens(ends))
        raise UsageError(
            f"the model ends a response at {len(ends)} tokens ({texts}), and GGUF names {len(END_KEYS)}; "
            "remove some from eos_token_id of its generation_config.json"
        )
    return dict(zip(END_KEYS, ends))


# ------------------------------------------------------------------------------------------------------------- reading
def complete_tokenizer(tokenizer: Tokenizer, stored: dict[str, Any]) -> Any:
    """A tokenizer with what transformers leaves out of a file's metadata.

    How text is split, control tokens, and whether a text begins with a BOS, by llama.cpp's default where the file does
    not say. It is of no class that names tokens, which a file might lack and which would then get new ids.
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


def check_tokenizer(named: str, tokenizer: Tokenizer, stored: dict[str, Any], rows: int) -> None:
    """Raises: UsageError when tokens differ from the file's or from the model's rows, or its template fails."""
    tokens, ids = stored["tokenizer.ggml.tokens"], tokenizer.get_vocab()
    wrong = [token for index, token in enumerate(tokens) if index not in (ids.get(token), ids.get(mark_spaces(token)))]
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


def check_loads(named: str, config: Any, tokenizer: Tokenizer) -> None:
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


def mark_spaces(token: str) -> str:
    """A token as SentencePiece writes its spaces; llama.cpp's files have runs of them as they are."""
    return token.replace(" ", "\u2581")


def ends_of(stored: dict[str, Any], tokenizer: Tokenizer) -> int | list[int]:
    """Ids that end a response: the end token, and those with which a turn or a message ends."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eom")]
    ends = list(dict.fromkeys([tokenizer.eos_token_id, *(stored[key] for key in keys if key in stored)]))
    return ends if len(ends) > 1 else ends[0]
