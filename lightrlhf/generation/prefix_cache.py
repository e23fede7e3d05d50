"""A prefix cache: of a prompt that begins like the last one of its episode, only the rest is read.

A reader keeps, for each episode, the keys and values of the prompt it has just read. The next prompt shares its
beginning with it (the task, and the earlier commands with what came of them), so a forward pass begins where they
part. Keys and values are put side by side at their right ends, and of each prompt as much is read as of the one with
the most to read, which costs a batch nothing: with the rest at its right end, no row has a gap.

Left out: sharing between episodes, and keeping what a model has said besides what it has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightrlhf.cli.errors import UsageError


class CachedPrefix(NamedTuple):
    """What a model has read: ids, and of each layer keys and values, each (heads, tokens, head size)."""

    ids: Sequence[int]
    layers: list[tuple[Tensor, Tensor]]


class PrefixBatch(NamedTuple):
    """Beginnings of prompts that need not be read again, as a cache for one forward pass over the rest of each."""

    cache: Any
    mask: Tensor  # (B, P) bool, the beginnings on the right
    rest: list[list[int]]  # of each prompt, one token or more; as many of all, where a prompt has so many


def make_cache(model: nn.Module, layers: Sequence[Any] = ()) -> Any:
    """A transformers cache with these layers. Sliding-window layers keep all columns; masks still hide the old ones.

    Raises: UsageError for architectures with other layers than attention.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        raise UsageError(f"the generation engine knows attention layers only, not those of {model.config.model_type}")
    cache.layers = list(layers) or [DynamicLayer() for _ in range(model.config.num_hidden_layers)]
    return cache


def can_keep(model: nn.Module) -> bool:
    """Whether the model's cache consists of keys and values alone."""
    try:
        make_cache(model)
    except UsageError:
        return False
    return True


def load_prefixes(
    model: nn.Module, prompts: Sequence[Sequence[int]], read: Sequence[CachedPrefix | None]
) -> PrefixBatch:
    """What of each prompt has been read before, when `read` is what was read last in its place."""
    most = max(len(prompt) - shared_length(prompt, one) for prompt, one in zip(prompts, read))
    known = [max(len(prompt) - most, 0) for prompt in prompts]
    cache, width = make_cache(model), max(known)
    if width:
        shape = next(one for one in read if one).layers
        for number, layer in enumerate(cache.layers):
            columns = []
            for part in (0, 1):  # keys, values
                nothing = shape[number][part][:, :0]
                rows = [one.layers[number][part][:, :n] if n else nothing for one, n in zip(read, known)]
                padded = pad_sequence([row.transpose(0, 1) for row in rows], batch_first=True, padding_side="left")
                columns.append(padded.transpose(1, 2))  # (B, heads, P, head size)
            layer.update(*columns)
    mask = torch.arange(width) >= width - torch.tensor(known)[:, None]  # (B, P)
    return PrefixBatch(cache, mask.to(model.device), [list(prompt[n:]) for prompt, n in zip(prompts, known)])


def store_prefixes(
    past: PrefixBatch, prompts: Sequence[Sequence[int]], padded_left: bool = False
) -> list[CachedPrefix]:
    """What has been read after a forward pass over `past.rest`, padded on the right or the left, with `past.cache`."""
    longest = max(map(len, past.rest))
    ends = [past.mask.shape[1] + (longest if padded_left else len(rest)) for rest in past.rest]
    spans = [(end - len(prompt), end) for end, prompt in zip(ends, prompts)]
    return [
        CachedPrefix(prompt, [(layer.keys[row, :, a:b], layer.values[row, :, a:b]) for layer in past.cache.layers])
        for row, (prompt, (a, b)) in enumerate(zip(prompts, spans))
    ]


def shared_length(prompt: Sequence[int], read: CachedPrefix | None) -> int:
    """How many ids a prompt begins with that were read before; its last one is always read, for what comes after."""
    if read is None:
        return 0
    pairs = zip(prompt[:-1], read.ids)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(prompt) - 1, len(read.ids)))
