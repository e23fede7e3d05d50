"""Checks of an exported model: what was written is loaded again and must be the model that it was made of.

Compared are the token ids of texts that are hard to split, the rendered chat template, what ends a response, and each
weight, which must be the source's as its type rounds it. Then two models with equal weights must compute equal logits,
up to the order of their sums: the source before and after its adapters are merged, and the source with the weights that
were read and the model that was read.

Left out: what rounding does to answers (`lightrlhf.evaluate` measures a reloaded folder on any data).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.data.rendering import render
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.models.tokenizer import end_ids

TOLERANCE = 1e-4  # of the largest logit, for another order of sums
NEW_TOKENS = 16
PROMPTS = ("The capital of France is", "Question: What is 12 + 7?\nAnswer:", "def mean(numbers):\n")
EXCHANGE = (
    {"role": "user", "content": "Could I get 2 large oat lattes, please?"},
    {"role": "assistant", "content": "Of course! Anything else?"},
    {"role": "user", "content": "No, thanks."},
)
TEXTS = (
    "Hello, world! It's 2026, isn't it? They'LL pay $1234567.89 (10% off).",
    "  two spaces,\ttab\n\n\nlines \r\n end  ",
    "for (int i=0; i<10; ++i) { x[i] += 3e-5; } // done...",
    "Ünïcödé: straße, naïve, 中文字符, русский, العربية, हिन्दी, ３４, ½, x²",
    "emoji 🙂👩‍👩‍👧 and \u200b zero width; 'quotes' \"double\" — dash",
    "",
)


class Observed(NamedTuple):
    """Outputs of a model and its tokenizer."""

    asked: list[str]  # TEXTS, and one with all named control tokens
    texts: list[list[int]]  # their token ids, with what the tokenizer adds to a text
    rendered: list[str]  # of EXCHANGE by the chat template
    ends: set[int]
    sequences: list[list[int]]  # prompts with their greedy continuations, as token ids
    starts: list[int]  # lengths of the prompts
    logits: list[Tensor]  # (tokens, vocabulary) of each sequence, or (1, 1) of a scalar model


class Pair(NamedTuple):
    """A weight of the source, rounded to the type that it is stored in, and what was read back."""

    name: str
    rounded: Tensor
    read: Tensor


class Finding(NamedTuple):
    """The result of a check."""

    difference: float  # of logits, the largest
    greedy: str  # "16 of 16" tokens equal; "-" for a scalar model


def observe(model: PreTrainedModel, tokenizer: Tokenizer, source: Observed | None = None) -> Observed:
    """Outputs of a model on the prompts; source: outputs whose texts and sequences to use instead of new ones."""
    is_scalar = hasattr(model, "score")
    ends = {tokenizer.eos_token_id} if is_scalar else set(end_ids(tokenizer, model))
    if source is None:
        controls = "".join(f"a{token} b" for token in dict.fromkeys(tokenizer.all_special_tokens))
        asked = [*TEXTS, controls]
        starts = [encode_prompt(tokenizer, prompt) for prompt in prompts_for(tokenizer)]
        rows = starts if is_scalar else [[*ids, *greedy(model, ids, ends)] for ids in starts]
        lengths = [len(ids) for ids in starts]
    else:
        asked, rows, lengths = source.asked, source.sequences, source.starts
    # Raw text: texts of this file, to compare two tokenizers.
    texts = [list(ids) for ids in tokenizer(asked)["input_ids"]]
    scores = [logits(model, row) for row in rows]
    return Observed(asked, texts, render_exchange(tokenizer), ends, rows, lengths, scores)


def prompts_for(tokenizer: Tokenizer) -> list[Any]:
    """The prompts of the check, with one as messages where the template takes them."""
    try:
        encode_prompt(tokenizer, EXCHANGE[:1])
    except (UsageError, ValueError):
        return [*PROMPTS]
    return [*PROMPTS, EXCHANGE[:1]]


def render_exchange(tokenizer: Tokenizer) -> list[str]:
    """The exchange as the chat template renders it at each length, or why it refuses."""
    if not tokenizer.chat_template:
        return []
    texts = []
    for length in range(1, len(EXCHANGE) + 1):
        try:
            texts.append(render(tokenizer, EXCHANGE[:length], add_generation_prompt=length % 2 == 1))
        except UsageError as problem:
            texts.append(str(problem))
    return texts


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: Sequence[int], ends: set[int]) -> list[int]:
    """The most likely continuation of a prompt, up to an end token."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=sorted(ends), pad_token_id=min(ends)
    )
    prompt = torch.tensor([list(ids)], device=model.device)
    generate: Any = model.generate
    found = generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
    return [int(token) for token in found[0, len(ids) :]]


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Logits of a sequence (tokens, vocabulary) in float32, or its score (1, 1)."""
    return model(torch.tensor([list(ids)], device=model.device), use_cache=False).logits.float().cpu().flatten(0, -2)


def check(
    source: PreTrainedModel, before: Observed, read: PreTrainedModel, after: Observed, pairs: Iterable[Pair]
) -> Finding:
    """Compare what was read back with what was observed of the source, whose weights are replaced by those read.

    Raises: RunFailure naming the first thing that differs.
    """
    for what, mine, theirs in (
        ("token ids of texts", before.texts, after.texts),
        ("chat template's rendering", before.rendered, after.rendered),
        ("tokens that end a response", before.ends, after.ends),
    ):
        if mine != theirs:
            raise RunFailure(
                f"the export was not kept: its {what} differ when it is loaded again ({first(mine, theirs)})"
            )
    for pair in pairs:
        if not torch.equal(pair.rounded, pair.read):
            raise RunFailure(f"the export was not kept: {pair.name} is not the source's when it is loaded again")
    check_logits(before.logits, [logits(source, row) for row in before.sequences])
    source.load_state_dict(read.state_dict(), strict=False)  # an adapter has another name, and nothing is rounded
    check_logits([logits(source, row) for row in before.sequences], after.logits)
    equal, total = equal_tokens(before, after)
    return Finding(difference(before.logits, after.logits), f"{equal} of {total}" if total else "-")


def difference(mine: Sequence[Tensor], read: Sequence[Tensor]) -> float:
    """The largest of logits."""
    return max((one - other).abs().max().item() for one, other in zip(mine, read))


def check_logits(mine: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    """Raises: RunFailure when logits of equal weights differ."""
    allowed = TOLERANCE * max(one.abs().max().item() for one in mine)
    if not (found := difference(mine, read)) <= allowed:
        raise RunFailure(
            f"the export was not kept: its logits differ by {found:.2g} from the source's with the same weights"
        )


def first(mine: Any, read: Any) -> str:
    """The first difference of two observations, in a few words."""
    if isinstance(mine, list) and isinstance(read, list):
        mine, read = next(((a, b) for a, b in zip(mine, read) if a != b), (len(mine), len(read)))
    return f"{str(mine)[:80]!r}, read as {str(read)[:80]!r}"


def equal_tokens(before: Observed, after: Observed) -> tuple[int, int]:
    """How many tokens of greedy decoding are equal, each prompt up to its first other one, and how many there are."""
    equal = total = 0
    for row, start, scores in zip(before.sequences, before.starts, after.logits):
        if len(row) > start:
            chosen = scores[start - 1 : -1].argmax(-1).tolist()
            total += len(row) - start
            equal += next((i for i, (a, b) in enumerate(zip(row[start:], chosen)) if a != b), len(chosen))
    return equal, total
