"""Prepared token ids as texts that a harness tokenises to the same ids.

Harnesses take texts, not ids, and tokenise prompt and response as one. Control tokens are written out, BOS included, so
that a harness that adds no special tokens reads them as what they are. Each text is tokenised here as lm-eval does
(`TemplateLM._encode_pair` of 0.4) and compared: a row whose ids do not come back is left out and counted, never
evaluated on other ids.

Left out: repairing such rows, whose response begins within a token, or whose content spells a control token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lightrlhf.data.schema import IGNORE_INDEX
from lightrlhf.data.splits import Row
from lightrlhf.data.types import Tokenizer


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str | None:
    """The text of ids with their control tokens, None where its tokenisation gives other ids."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return text if _ids_of(tokenizer, text) == list(ids) else None


class Split(NamedTuple):
    """Texts of a prompt and a response as a harness gets them."""

    prompt: str  # without the white space at its end
    space: str  # that white space, of which the response's text begins
    response: str


def split_text(tokenizer: Tokenizer, ids: Sequence[int], start: int) -> Split | None:
    """The texts of ids up to `start` and from there on, None where lm-eval would read other ids.

    It tokenises prompt and response as one and counts what is behind as many ids as the prompt alone has. White space
    at the end of a prompt it moves to the response; here it is moved already.
    """
    whole, context = text_of(tokenizer, ids), text_of(tokenizer, ids[:start])
    if whole is None or not context or not whole.startswith(context):
        return None
    prompt = context.rstrip()
    before = _ids_of(tokenizer, prompt)
    if not before or before != list(ids[: len(before)]):
        return None
    return Split(prompt, context[len(prompt) :], whole[len(prompt) :])


def target_spans(row: Row) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each run of tokens of a demonstration that has targets, as perplexity counts them."""
    counted = (torch.as_tensor(row["targets"]) != IGNORE_INDEX).tolist()
    counted[0] = False  # the first token is never predicted
    start = None
    for place, is_target in enumerate([*counted, False]):
        if is_target and start is None:
            start = place
        elif not is_target and start is not None:
            yield start, place
            start = None


def _ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    # Raw text: texts of ids, to see that a harness reads the same ids.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
