"""Checks of an exported model: what was written is loaded again and must be the model that it was made of.

The source is observed before its adapters are merged, so an incomplete merge is detected as well.

Compared are the token ids of texts that are hard to split, the rendered chat template, what ends a response, each
weight, the logits of a few prompts and the tokens that greedy decoding adds to them.

A weight may differ by the largest error of the type it is stored in (`largest_error`), and not at all in float32. What
such errors do to logits depends on the model, so it is measured: random errors of the largest size, of either sign, are
put on the weights of the source, and logits may differ by `MARGIN` times the change that they make. In float32, where
weights are equal, the errors allow for `ROUNDINGS` roundings, for another order of summation.

Left out: texts of a user's own (`lightrlhf.evaluate` measures a reloaded folder on any data).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.data.chat import render
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.models.tokenizer import end_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MARGIN = 3.0
ROUNDINGS = 8
NEW_TOKENS = 16
BLOCK = 32  # numbers of a row that share a scale in quantised types
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
    """What a model and its tokenizer do."""

    asked: list[str]  # TEXTS, and one with all named control tokens
    texts: list[list[int]]  # their token ids, with what the tokenizer adds to a text
    rendered: list[str]  # of EXCHANGE by the chat template
    ends: set[int]
    sequences: list[list[int]]  # prompts with their greedy continuations, as token ids
    starts: list[int]  # lengths of the prompts
    logits: list[Tensor]  # (tokens, vocabulary) of each sequence, or (1, 1) of a scalar model


class Pair(NamedTuple):
    """A weight of the source, what was read back, and the type it was stored in."""

    name: str
    value: Tensor
    read: Tensor
    type: str


class Finding(NamedTuple):
    """What a check has measured."""

    difference: float  # of logits, the largest
    bound: float
    greedy: str  # "16 of 16" tokens equal; "-" for a scalar model


def observe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Observed | None = None) -> Observed:
    """What a model does with the prompts; `source`: with the texts and sequences of another one instead of its own."""
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
    texts = [list(ids) for ids in tokenizer(asked)["input_ids"]]
    scores = [logits(model, row) for row in rows]
    return Observed(asked, texts, rendered(tokenizer), ends, rows, lengths, scores)


def prompts_for(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """The prompts of the check, with one as messages where the template takes them."""
    try:
        encode_prompt(tokenizer, EXCHANGE[:1])
    except (UsageError, ValueError):
        return [*PROMPTS]
    return [*PROMPTS, EXCHANGE[:1]]


def rendered(tokenizer: PreTrainedTokenizerBase) -> list[str]:
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
    source: PreTrainedModel, before: Observed, after: Observed, pairs: Iterable[Pair], types: dict[str, str]
) -> Finding:
    """Compare what was read back with what was observed of the source. The weights of the source are overwritten.

    pairs: the weights of both; types: by name, the type of each of the source's weights.
    Raises: RunFailure naming the first thing that differs.
    """
    for what, mine, read in (
        ("token ids of texts", before.texts, after.texts),
        ("chat template's rendering", before.rendered, after.rendered),
        ("tokens that end a response", before.ends, after.ends),
    ):
        if mine != read:
            raise RunFailure(
                f"the export was not kept: its {what} differ when it is loaded again ({first(mine, read)})"
            )
    for pair in pairs:
        check_weight(pair)
    differences = [(mine - read).abs().max().item() for mine, read in zip(before.logits, after.logits)]
    bound = MARGIN * sensitivity(source, before, types)
    difference = max(differences)
    if not difference <= bound:
        raise RunFailure(
            f"the export was not kept: its logits differ by {difference:.2g} from the source's, and errors of "
            f"the type it is stored in allow {bound:.2g}"
        )
    equal, total = equal_tokens(before, after)
    if equal < total and set(types.values()) == {"f32"}:
        raise RunFailure(f"the export was not kept: {equal} of {total} tokens of greedy decoding are as in the source")
    return Finding(difference, bound, f"{equal} of {total}" if total else "-")


def first(mine: Any, read: Any) -> str:
    """The first difference of two observations, in a few words."""
    if isinstance(mine, list) and isinstance(read, list):
        mine, read = next(((a, b) for a, b in zip(mine, read) if a != b), (len(mine), len(read)))
    return f"{str(mine)[:80]!r}, read as {str(read)[:80]!r}"


def check_weight(pair: Pair) -> None:
    """Raises: RunFailure when a weight is further from the source's than its type explains."""
    if pair.value.shape != pair.read.shape:
        raise RunFailure(f"the export was not kept: {pair.name} has another shape when it is loaded again")
    excess = (pair.value - pair.read).abs() - largest_error(pair.value, pair.type)
    if not (excess <= 0).all():
        at = int(excess.nan_to_num(float("inf")).argmax())
        mine, read = pair.value.flatten()[at].item(), pair.read.flatten()[at].item()
        raise RunFailure(
            f"the export was not kept: a weight of {pair.name} is {mine:.6g} and read as {read:.6g}, which is more "
            f"than the rounding of {pair.type}"
        )


def equal_tokens(before: Observed, after: Observed) -> tuple[int, int]:
    """How many tokens of greedy decoding are equal, each prompt up to its first other one, and how many there are."""
    equal = total = 0
    for row, start, scores in zip(before.sequences, before.starts, after.logits):
        if len(row) > start:
            chosen = scores[start - 1 : -1].argmax(-1).tolist()
            total += len(row) - start
            equal += next((i for i, (a, b) in enumerate(zip(row[start:], chosen)) if a != b), len(chosen))
    return equal, total


def largest_error(value: Tensor, kind: str) -> Tensor:
    """The most by which each number of a weight may change when it is stored; broadcasts over it.

    Halves have 11 and 8 bits of precision. The quantised types share a scale (of 11 bits), and some an offset, among 32
    numbers of a row; half a step is lost, but a whole one where an even number of levels lies around zero, since the
    largest level is then missing on one side.
    """
    size = value.abs()
    if kind == "f32":
        return torch.zeros_like(size)
    if kind in ("f16", "bf16"):
        return size * (2.0**-11 if kind == "f16" else 2.0**-8) + (2.0**-25 if kind == "f16" else 2.0**-134)
    width = BLOCK if value.shape[-1] % BLOCK == 0 else value.shape[-1]
    blocks = value.reshape(*value.shape[:-1], -1, width)
    largest = blocks.abs().amax(-1, keepdim=True)
    spread = blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)
    step = {
        "q8_0": largest / 127 / 2,
        "q5_0": largest / 16,
        "q4_0": largest / 8,
        "q5_1": spread / 31 / 2,
        "q4_1": spread / 15 / 2,
    }[kind]
    rounded_scale = (largest + (spread if kind.endswith("_1") else 0)) * 2.0**-11 + 2.0**-18
    return (step * 1.001 + rounded_scale).expand_as(blocks).reshape(value.shape)


@torch.no_grad()
def sensitivity(model: PreTrainedModel, observed: Observed, types: dict[str, str]) -> float:
    """How far random errors of the largest size on all weights, of either sign, move a logit. Changes the weights."""
    before = [logits(model, row) for row in observed.sequences]  # its own: what was observed may be another model
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        value = weight.detach().float().cpu()
        error = largest_error(value, types.get(name, "f32"))
        error = torch.maximum(error, value.abs() * ROUNDINGS * 2.0**-24)
        sign = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8) * 2 - 1
        weight.copy_(value + error * sign)
    changes = [(logits(model, row) - mine).abs().max() for row, mine in zip(observed.sequences, before)]
    return float(max(changes))
