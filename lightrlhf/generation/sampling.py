"""Sampling one token per row from logits: temperature, top-k, top-p, min-p, repetition penalty, stop strings.

Left out: other penalties and logit biases.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightrlhf.cli.errors import NotFinite
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.data.tokens import decode
from lightrlhf.data.types import Tokenizer

BLOCK = 256  # tokens


def first_stop(tokenizer: Tokenizer | None, response: Sequence[int], stop_strings: Sequence[str]) -> int | None:
    """Length in tokens of the shortest prefix whose text contains a stop string, or None."""

    def stops(length: int) -> bool:
        assert tokenizer is not None, "stop strings need a tokenizer"
        text = decode(tokenizer, response[:length])
        return any(string in text for string in stop_strings)

    if not stop_strings or not stops(len(response)):
        return None
    return bisect_left(range(len(response)), True, key=stops)


def sample(
    logits: Tensor, uniforms: Tensor, args: SamplingArgs, seen: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row by inverse CDF: logits (S, V), uniforms (S,) -> three tensors (S,).

    Returns ids, their log-probabilities (at the temperature over the whole vocabulary, before penalty and truncation),
    and the probability removed by top-k, top-p and min-p. Where logits are NaN or infinite the log-probability is NaN,
    which the caller passes to `check_sampled` once it waits for the device anyway. Repetition penalty on the tokens of
    `seen` (S, V), temperature, top-k, top-p, min-p: in the order, and with the distribution, of Hugging Face's
    processors.
    """
    logits = logits.float()
    probs = unpenalised = at_temperature(logits, args).softmax(-1)  # (S, V)
    if seen is not None:
        penalised = torch.where(logits < 0, logits * args.repetition_penalty, logits / args.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
        probs = at_temperature(logits, args).softmax(-1)
    removed = torch.zeros_like(probs[:, 0])
    if args.do_sample:
        restricted = restrict(probs, args)
        token, total = inverse_cdf(restricted, uniforms)
        if restricted is not probs:
            removed = 1 - total / probs.sum(-1)
    else:
        token = logits.argmax(-1)
    return token, unpenalised.gather(-1, token[:, None])[:, 0].log(), removed


def at_temperature(logits: Tensor, args: SamplingArgs) -> Tensor:
    """Logits divided by the temperature, without a copy at 1."""
    return logits if args.temperature == 1 else logits / args.temperature


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (S,) of the tokens where running sums of probs (S, V) exceed uniforms (S,) of their totals, and the totals.

    Probabilities need not sum to 1. First a block of tokens is found by the sums of blocks, then the token within it:
    a running sum over a large vocabulary takes longer than all else in sampling.
    """
    size = probs.shape[-1]
    count = size // BLOCK
    sums = probs[:, : count * BLOCK].reshape(len(probs), count, BLOCK).sum(-1)
    if size % BLOCK:
        sums = torch.cat([sums, probs[:, count * BLOCK :].sum(-1, keepdim=True)], 1)  # (S, blocks)
    running = sums.cumsum(-1)
    total = running[:, -1:]
    wanted = torch.minimum(uniforms[:, None] * total, just_below(total))  # (S, 1)
    block = torch.searchsorted(running, wanted, right=True).clamp(max=sums.shape[-1] - 1)  # beyond it with NaN
    before = F.pad(running, (1, 0)).gather(1, block)
    tokens = block * BLOCK + torch.arange(BLOCK, device=probs.device)  # (S, BLOCK)
    inner = probs.gather(1, tokens.clamp(max=size - 1)).masked_fill(tokens >= size, 0.0).cumsum(-1)
    place = torch.searchsorted(inner, torch.minimum(wanted - before, just_below(inner[:, -1:])), right=True)
    return (block * BLOCK + place)[:, 0].clamp(max=size - 1), total[:, 0]


def just_below(total: Tensor) -> Tensor:
    """The largest numbers below these, since a product with a uniform near 1 may round up to the total."""
    return torch.nextafter(total, torch.zeros_like(total))


def check_sampled(logprobs: Tensor, model: Any) -> None:
    """Check log-probabilities (B,) or (B, T) of sampled tokens. Raises: NotFinite naming the model and the rows."""
    bad = logprobs.isnan().reshape(len(logprobs), -1).any(1)
    if bad.any():
        name = getattr(model.config, "name_or_path", "") or "the model"
        rows = bad.nonzero()[:, 0].tolist()
        shown = ", ".join(map(str, rows[:8])) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
        raise NotFinite(
            f"{name} gives logits that are not finite for {shown} of {len(bad)} prompts (counted from 0); "
            "its weights are damaged or its precision overflows: give an intact model, or --precision 32-true",
            rows,
        )


def restrict(probs: Tensor, args: SamplingArgs) -> Tensor:
    """Apply top-k, top-p and min-p in turn to probabilities (S, V); removed tokens get 0, without renormalising."""
    restricted = probs
    if 0 < args.top_k < probs.shape[-1]:
        least = restricted.topk(args.top_k, -1).values[:, -1:]
        restricted = torch.where(restricted < least, 0.0, restricted)
    if args.top_p < 1:
        ordered, index = restricted.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of the more likely tokens
        ordered = torch.where(before >= args.top_p * ordered.sum(-1, keepdim=True), 0.0, ordered)
        restricted = torch.zeros_like(restricted).scatter(-1, index, ordered)
    if args.min_p > 0:
        restricted = torch.where(restricted < args.min_p * restricted.amax(-1, keepdim=True), 0.0, restricted)
    return restricted
