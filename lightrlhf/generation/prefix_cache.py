"""Prefix cache: reuses the KV cache of a previous prompt, so only the tokens after the common prefix are computed.

Each episode keeps the keys and values of its last prompt. The next prompt of the episode shares a prefix with it (the
task, earlier commands and observations), so its prefill starts where the two differ. In a batch the cached keys and
values are right-aligned, and for every prompt as many tokens are computed as for the one with most uncached tokens,
which costs nothing extra; with the computed tokens right-aligned no row has a gap.

Left out: sharing between episodes, caching the keys and values of sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.types import PreTrainedModel
from lightrlhf.models.forward import cache_name

if TYPE_CHECKING:
    from transformers import DynamicCache


class CachedPrefix(NamedTuple):
    """The KV cache of one prompt: its ids, and for each layer keys and values (heads, tokens, head size)."""

    ids: Sequence[int]
    layers: list[tuple[Tensor, Tensor]]


class PrefixBatch(NamedTuple):
    """The cached prefixes of a batch of prompts, for one forward pass over the rest of each."""

    cache: DynamicCache
    mask: Tensor  # (B, P) bool on the host, prefixes right-aligned
    rest: list[list[int]]  # uncached ids of each prompt, at least one; equally many of all that are long enough


def make_cache(model: PreTrainedModel, layers: Sequence[Any] = ()) -> DynamicCache:
    """A transformers cache with these layers. Sliding-window layers keep all columns; masks hide the old ones.

    Raises: UsageError for architectures with layers other than attention.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        raise unsupported_error(model, "it supports attention layers only")
    cache.layers = list(layers) or [DynamicLayer() for _ in range(model.config.num_hidden_layers)]
    return cache


def unsupported_error(model: PreTrainedModel, why: str) -> UsageError:
    """The error for an architecture that the engine cannot sample from."""
    return UsageError(
        f"the generation engine cannot sample from the architecture {model.config.model_type} ({why}); sft and dpo "
        "train it, and transformers' own generate samples from their checkpoints"
    )


def has_kv_cache(model: PreTrainedModel) -> bool:
    """Whether the model has a cache, and it consists of keys and values only."""
    if cache_name(type(model).forward) is None:
        return False
    try:
        make_cache(model)
    except UsageError:
        return False
    return True


def load_prefixes(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], prefixes: Sequence[CachedPrefix | None]
) -> PrefixBatch:
    """The cached part of each prompt, given the KV cache of an earlier prompt (`prefixes`)."""
    longest = max(len(prompt) - shared_length(prompt, prefix) for prompt, prefix in zip(prompts, prefixes))
    lengths = [max(len(prompt) - longest, 0) for prompt in prompts]
    cache, width = make_cache(model), max(lengths)
    if width:
        example = next(prefix for prefix in prefixes if prefix).layers
        layers: Any = cache.layers
        for number, layer in enumerate(layers):
            states = []
            for part in (0, 1):  # keys, values
                empty = example[number][part][:, :0]
                rows = [p.layers[number][part][:, :n] if p and n else empty for p, n in zip(prefixes, lengths)]
                padded = pad_sequence([row.transpose(0, 1) for row in rows], batch_first=True, padding_side="left")
                states.append(padded.transpose(1, 2))  # (B, heads, P, head size)
            layer.update(*states)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]  # (B, P)
    return PrefixBatch(cache, mask, [list(prompt[n:]) for prompt, n in zip(prompts, lengths)])


def store_prefixes(
    batch: PrefixBatch, prompts: Sequence[Sequence[int]], padded_left: bool = False
) -> list[CachedPrefix]:
    """The KV cache of each prompt after a forward pass with `batch.cache` over `batch.rest`, padded right or left."""
    longest = max(map(len, batch.rest))
    ends = [batch.mask.shape[1] + (longest if padded_left else len(rest)) for rest in batch.rest]
    spans = [(end - len(prompt), end) for end, prompt in zip(ends, prompts)]
    layers: Any = batch.cache.layers  # filled by the forward pass
    return [
        CachedPrefix(prompt, [(layer.keys[row, :, a:b], layer.values[row, :, a:b]) for layer in layers])
        for row, (prompt, (a, b)) in enumerate(zip(prompts, spans))
    ]


def shared_length(prompt: Sequence[int], prefix: CachedPrefix | None) -> int:
    """Length of the common prefix of a prompt and the cached ids; excludes its last id, whose output is needed."""
    if prefix is None:
        return 0
    pairs = zip(prompt[:-1], prefix.ids)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(prompt) - 1, len(prefix.ids)))
