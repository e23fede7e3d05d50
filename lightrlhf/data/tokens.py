"""Encoding text as token ids and decoding ids, for training, generation, data preparation and the demo.

Prompt and response are tokenised separately and their ids concatenated, so that no token spans the border between them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch

from lightrlhf.data.splits import Row


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, str]]) -> list[int]:
    """Token ids of a prompt, exactly as in the prepared data.

    A string is tokenised without special tokens, after one BOS if the tokenizer adds one by default. Messages are
    rendered by the tokenizer's chat template, which writes its own special tokens.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        bos = tokenizer.bos_token_id
        if bos is not None and adds_bos(tokenizer) and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def messages_of(tokenizer: Any, ids: Sequence[int]) -> list[dict[str, str]] | None:
    """Messages that the chat template renders as exactly these prompt ids; None if there are none.

    Inverts the template: the text it writes around the turns is found by rendering a dialogue of known words.
    """
    if not tokenizer.chat_template:
        return None
    words = ["first-turn-words", "second-turn-words", "third-turn-words"]
    known = [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]
    shape = tokenizer.apply_chat_template(known, tokenize=False, add_generation_prompt=True)
    parts = re.split("|".join(words), shape)
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if len(parts) != 4 or not all(parts[1:3]) or not (text.startswith(parts[0]) and text.endswith(parts[3])):
        return None
    start, after_user, after_assistant, end = parts
    rounds = text[len(start) : len(text) - len(end)].split(after_assistant)
    *answered, last = [turn.split(after_user) for turn in rounds]
    if len(last) != 1 or any(len(turn) != 2 for turn in answered):
        return None
    contents = [content for turn in (*answered, last) for content in turn]
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return messages if encode_prompt(tokenizer, messages) == list(ids) else None


def encode_response(tokenizer: Any, response: str) -> list[int]:
    """Token ids of a response, ending with exactly one end token.

    The text is tokenised after an end token, whose id is then removed: SentencePiece tokenizers prepend a space to a
    text, but not to its continuation after a special token.
    """
    eos = tokenizer.eos_token_id
    ids = tokenizer(tokenizer.eos_token + response, add_special_tokens=False)["input_ids"][1:]
    return ids if ids[-1:] == [eos] else [*ids, eos]


def turn_end(tokenizer: Any) -> int | None:
    """Id of the token with which the chat template ends an assistant turn; None if it leaves turns open.

    Found by rendering a known exchange: the first control token after the assistant's words, such as `<|im_end|>`.
    None also without a template, and with one that cannot render the exchange.
    """
    template = tokenizer.chat_template
    return _turn_end(tokenizer, str(template), tokenizer.eos_token) if template else None


@functools.lru_cache(maxsize=16)
def _turn_end(tokenizer: Any, template: str, eos_token: str) -> int | None:
    """`turn_end`, remembered while neither the template nor the end token changes."""
    from jinja2.exceptions import TemplateError

    word = "assistant-turn-words"
    exchange = [{"role": "user", "content": "user-turn-words"}, {"role": "assistant", "content": word}]
    try:
        _, found, rest = tokenizer.apply_chat_template(exchange, tokenize=False).rpartition(word)
    except (TemplateError, TypeError, ValueError):
        return None
    if not found:
        return None
    added = tokenizer.added_tokens_decoder
    control = {i for i in {*added, *tokenizer.all_special_ids} if i not in added or added[i].content.strip()}
    ids = tokenizer(eos_token + rest, add_special_tokens=False)["input_ids"][1:]  # see `encode_response`
    return next((i for i in ids if i in control), None)  # Gemma's added tokens include runs of newlines


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of token ids, without special tokens and without a clean-up of spaces.

    The token that ends a turn is left out, too, although some tokenizers declare it as no special token.
    """
    if (end := turn_end(tokenizer)) is not None:
        ids = [index for index in ids if index != end]
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer prepends its BOS token to a text by default."""
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def pair_prompt(tokenizer: Any, prompt: Sequence[int], first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Input ids of a pair-preference model, whose score is the logit that the first response is the better one."""
    marks = [tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in ("\n\n[A]", "\n\n[B]", "\n\n[?]")]
    return [*prompt, *marks[0], *first, *marks[1], *second, *marks[2]]


def pair_rows(tokenizer: Any, rows: Sequence[Row]) -> list[Row]:
    """Preference rows for a pair-preference model: both orders of the two responses, the better one first in `chosen`.

    As in other preference rows, the score of `chosen` must be the higher one, so all code for those applies.
    """
    pairs = []
    for row in rows:
        start = row["prompt_len"]
        chosen, rejected = (torch.as_tensor(row[f"{side}_input_ids"]).tolist() for side in ("chosen", "rejected"))
        prompt, better, worse = chosen[:start], chosen[start:], rejected[start:]
        sides = {
            "chosen_input_ids": pair_prompt(tokenizer, prompt, better, worse),
            "rejected_input_ids": pair_prompt(tokenizer, prompt, worse, better),
        }
        pairs.append({**row, **sides})
    return pairs
