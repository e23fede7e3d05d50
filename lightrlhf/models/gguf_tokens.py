"""Tokenizers in the metadata of a GGUF file: tokens, their types, merges or scores, what ends a text, the template.

llama.cpp splits a text before any merge by regular expressions of its own, which a file can only name
(`tokenizer.ggml.pre`). So the name is found by comparing the tokenizer's own expressions with the known ones; without
one llama.cpp would split, and hence tokenise, other than the model was trained.

Left out: Unigram and WordPiece vocabularies, and a normaliser: llama.cpp has none for these tokenizers, so the NFC of
Qwen's is left to the caller.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.tokens import adds_bos
from lightrlhf.data.turn_ends import turn_end
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.storage.gguf_files import GPT2, LLAMA3, PRE_TOKENIZERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # GGUF's types of tokens
END_KEYS = ("eos", "eot", "eom")  # of a text, a turn and a message: llama.cpp ends a response at each


def tokenizer_metadata(tokenizer: PreTrainedTokenizerBase, model: Any, rows: int) -> dict[str, Any]:
    """GGUF metadata of a tokenizer, for a model of transformers whose embedding has `rows` rows.

    Raises: UsageError when llama.cpp cannot tokenise as it does, or end a response where it does.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    if parts["model"]["type"] != "BPE" or parts["model"].get("end_of_word_suffix"):
        raise UsageError(f"{refused(tokenizer)}: GGUF takes byte-level BPE and SentencePiece BPE")
    is_bytes = not parts["model"].get("byte_fallback")
    tokens, types = tokens_and_types(tokenizer, rows, is_bytes)
    found: dict[str, Any] = {"model": "gpt2" if is_bytes else "llama", "tokens": tokens, "token_type": types}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in parts["model"]["merges"]]
    if is_bytes:
        found |= {"pre": pre_tokenizer_name(tokenizer, parts), "merges": merges}
    else:
        found |= {"pre": "default", "scores": merge_scores(tokens, merges)}
    found["add_space_prefix"] = prefixes_space(parts)
    ends = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    found |= {"add_bos_token": bool(adds_bos(tokenizer)), "add_eos_token": ends}
    ids = {"bos": tokenizer.bos_token_id, "padding": tokenizer.pad_token_id, "unknown": tokenizer.unk_token_id}
    ids |= named_ends(tokenizer, model)
    found |= {f"{name}_token_id": index for name, index in ids.items() if index is not None}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in found.items()}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template["default"]
    return metadata | ({"tokenizer.chat_template": template} if template else {})


def refused(tokenizer: PreTrainedTokenizerBase) -> str:
    """How an error about a tokenizer begins."""
    return f"the tokenizer ({type(tokenizer).__name__}) cannot be written as GGUF"


def tokens_and_types(tokenizer: PreTrainedTokenizerBase, rows: int, is_bytes: bool) -> tuple[list[str], list[int]]:
    """Each token's text and GGUF type by id; rows of the embedding without a token get a name of their own."""
    texts = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(texts) >= rows:
        raise UsageError(f"{refused(tokenizer)}: it has {max(texts) + 1} tokens, the model {rows}")
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


def pre_tokenizer_name(tokenizer: PreTrainedTokenizerBase, parts: dict[str, Any]) -> str:
    """llama.cpp's name of how a byte-level tokenizer splits its texts. Raises: UsageError when it has none."""
    patterns = split_patterns(parts["pre_tokenizer"])
    kept = [part["type"] for part in _sequence(parts["normalizer"], "normalizers")]
    if parts["model"].get("ignore_merges") and patterns != (LLAMA3,) or kept not in ([], ["NFC"]):
        patterns = None
    name = next((name for name, known in PRE_TOKENIZERS.items() if known == patterns), None)
    if name is None:
        raise UsageError(
            f"{refused(tokenizer)}: llama.cpp has no name for how it splits texts, so it would tokenise otherwise; "
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


def named_ends(tokenizer: PreTrainedTokenizerBase, model: Any) -> dict[str, int]:
    """What ends a response, by GGUF's names. Raises: UsageError when it has fewer names than the model ends."""
    first = [tokenizer.eos_token_id, turn_end(tokenizer)]
    ends = list(dict.fromkeys([*first, *end_ids(tokenizer, model)]))
    ends = [index for index in ends if index is not None]
    if len(ends) > len(END_KEYS):
        texts = ", ".join(tokenizer.convert_ids_to_tokens(ends))
        raise UsageError(
            f"the model ends a response at {len(ends)} tokens ({texts}), and GGUF names {len(END_KEYS)}; "
            "remove some from eos_token_id of its generation_config.json"
        )
    return dict(zip(END_KEYS, ends))
