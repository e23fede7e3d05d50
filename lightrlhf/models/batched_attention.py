"""Attention in bfloat16 by oneDNN's batched products, on CPUs that multiply bfloat16 and have no AMX.

There torch's fused kernel of `scaled_dot_product_attention` takes as long in bfloat16 as in float32. Batched products,
which are oneDNN's in bfloat16, and a softmax between them take a quarter to two thirds of its time for texts of up to a
few hundred tokens (howto/speed.md). The two kernels of the CPU, forwards and backwards, are replaced for the process,
so models gain without a change. Scores are rounded to bfloat16, as in transformers' eager attention; softmax is
float32. Backwards weights are computed again (Dao et al. 2022, algorithm 4), a few texts at a time, so that those of
all texts and heads are never in memory.

Left to torch's kernel: other types, dropout, long texts, for which it is as fast, and processors with AMX, which it
uses. Whether the kernels are replaced follows from the processor alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightrlhf.models.products import keep_few_kernels

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
MOST_SCORES = 2**22  # of the texts that are computed at a time; where one has more, torch's kernel is as fast
_own: dict[str, Any] = {}  # torch's kernels, by operator, while they are replaced
_replaced: list[torch.library.Library] = []  # the kernels are in place as long as this lives


def use_batched_attention() -> None:
    """Attend in bfloat16 by batched products from now on, if this is a processor where they are faster."""
    if not _replaced and is_faster():
        replace_attention()


def is_faster() -> bool:
    """Whether this processor multiplies bfloat16 but torch's kernel does not make use of it."""
    names = "_is_avx512_bf16_supported", "_is_amx_tile_supported"  # private, so a release may have none
    if not hasattr(torch.library, "get_kernel") or not all(hasattr(torch.cpu, name) for name in names):
        return False
    has_bf16, has_amx = (getattr(torch.cpu, name)() for name in names)
    return has_bf16 and not has_amx and torch.backends.mkldnn.is_available()


def replace_attention() -> None:
    """Replace torch's attention kernels for CPUs, in this process."""
    keep_few_kernels()
    library = torch.library.Library("aten", "IMPL")
    for name, own in ((FORWARD, _forward), (BACKWARD, _backward)):
        _own[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is a kernel already
            library.impl(name, own, "CPU", with_keyset=True)
    _replaced.append(library)


def restore_attention() -> None:
    """Give torch its own kernels back."""
    while _replaced:
        _replaced.pop()._destroy()


def _forward(
    keys: Any,
    query: Tensor,  # (B, heads, T, D)
    key: Tensor,  # (B, groups, C, D)
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,  # added to scores: (T, C) or (B or 1, heads or 1, T, C)
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, heads, T, D), and in place of the scores' log-sums, which `_backward` does not need, nothing."""
    if not _takes(query, key, value, dropout_p):
        given = query, key, value, dropout_p, is_causal
        outputs: tuple[Tensor, Tensor] = _own[FORWARD].call_boxed(keys, *given, attn_mask=attn_mask, scale=scale)
        return outputs
    out = _like(query)
    bias, is_seen = _bias(query, key, is_causal, attn_mask)
    for texts in _parts(query, key):
        q, k, v = (_by_group(states[texts], key.shape[1]) for states in (query, key, value))
        weights = _weights(q, k, bias[texts] if len(bias) > 1 else bias, _scale(query, scale), key.shape[1])
        out[texts] = torch.bmm(weights.to(q.dtype), v).view_as(out[texts])
    return (out if is_seen is None else out.mul_(is_seen)), query.new_empty(0, dtype=torch.float32)


def _backward(
    keys: Any,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in their shapes."""
    if not _takes(query, key, value, dropout_p):
        given = grad_out, query, key, value, out, logsumexp, dropout_p, is_causal
        gradients: tuple[Tensor, Tensor, Tensor]
        gradients = _own[BACKWARD].call_boxed(keys, *given, attn_mask=attn_mask, scale=scale)
        return gradients
    groups, factor = key.shape[1], _scale(query, scale)
    of_query, of_key, of_value = map(_like, (query, key, value))
    bias, is_seen = _bias(query, key, is_causal, attn_mask)
    if is_seen is not None:
        grad_out = grad_out * is_seen
    means = (grad_out.float() * out).sum(-1, keepdim=True)  # (B, heads, T, 1) of the gradients of weights
    for texts in _parts(query, key):
        q, k, v, grad = (_by_group(states[texts], groups) for states in (query, key, value, grad_out))
        weights = _weights(q, k, bias[texts] if len(bias) > 1 else bias, factor, groups)
        of_value[texts] = torch.bmm(weights.to(q.dtype).transpose(1, 2), grad).view_as(of_value[texts])
        of_scores = torch.bmm(grad, v.transpose(1, 2)).float()  # of the weights, so far
        of_scores = of_scores.sub_(_by_group(means[texts], groups)).mul_(weights).mul_(factor).to(q.dtype)
        of_query[texts] = torch.bmm(of_scores, k).view_as(of_query[texts])
        of_key[texts] = torch.bmm(of_scores.transpose(1, 2), q).view_as(of_key[texts])
    return of_query, of_key, of_value


def _takes(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> bool:
    """Whether attention is computed here."""
    is_known = query.dtype is torch.bfloat16 and dropout_p == 0 and value.shape == key.shape
    return is_known and query.numel() > 0 and 0 < math.prod((*query.shape[1:3], key.shape[2])) <= MOST_SCORES


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _like(states: Tensor) -> Tensor:
    """Memory for states (B, heads, T, D) that lie by tokens, as layers around attention have them."""
    count, heads, tokens, size = states.shape
    return states.new_empty(count, tokens, heads, size).transpose(1, 2)


def _parts(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Slices of texts that are computed at a time."""
    texts = max(1, MOST_SCORES // (query.shape[1] * query.shape[2] * key.shape[2]))
    return (slice(first, first + texts) for first in range(0, len(query), texts))


def _by_group(states: Tensor, groups: int) -> Tensor:
    """(B, heads, T, D) -> (B * groups, heads / groups * T, D)"""
    return states.reshape(len(states) * groups, -1, states.shape[-1])


def _bias(query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What is added to scores, and where a query sees any column, which is unknown if nothing is hidden or causal.

    A query that sees none has finite scores, whose output is then 0, as that of torch's kernel.
    """
    rows, columns = query.shape[2], key.shape[2]
    if mask is None:
        hidden = query.new_full((rows, columns), -torch.inf if is_causal else 0.0, dtype=torch.float32)
        return hidden.triu_(1)[None, None, None], None
    mask = mask.float().expand(1, 1, -1, -1) if mask.dim() == 2 else mask.float()
    is_seen = mask.amax(-1, keepdim=True) > -torch.inf
    mask = mask.clamp(min=torch.finfo(torch.float32).min)
    return mask.unflatten(1, (key.shape[1], -1)) if mask.shape[1] > 1 else mask[:, :, None], is_seen


def _weights(query: Tensor, key: Tensor, bias: Tensor, scale: float, groups: int) -> Tensor:
    """Softmax of scores (B * groups, heads / groups * T, C) in float32, of queries and keys by group."""
    scores = torch.bmm(query, key.transpose(1, 2)).float().mul_(scale)
    by_text = scores.view(-1, groups, query.shape[1] // bias.shape[-2], *bias.shape[-2:])
    by_text += bias  # (B or 1, groups or 1, heads / groups or 1, T, C)
    return scores.softmax(-1)
