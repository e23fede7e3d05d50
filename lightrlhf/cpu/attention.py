"""Attention in bfloat16 by oneDNN's batched products, on CPUs that multiply bfloat16 and have no AMX.

There torch's fused kernel of `scaled_dot_product_attention` is no faster in bfloat16 than in float32 for rows of up to
256 tokens. Batched products, which are oneDNN's in bfloat16, and a softmax between them take a third to two thirds of
its time (howto/speed.md). The two kernels of the CPU, forwards and backwards, are replaced for the process, so models
gain without a change. Queries are scaled before the product, and they and the scores are rounded to bfloat16; softmax
is float32. In the backward pass weights of attention are computed again (Dao et al. 2022, algorithm 4), for a few rows
of the batch at a time, so that the weights of all rows are never in memory.

Left to torch's kernel: other types, dropout, rows so long that it is as fast, and processors with AMX, which
it uses. Whether the kernels are replaced follows from the processor alone.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightrlhf.cpu.products import replace_kernels

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
MOST_SCORES = 2**22  # of the rows that are computed at a time; where one has more, torch's kernel is as fast
_own: dict[str, Any] = {}  # torch's kernels, by operator, while they are replaced
_lock = threading.Lock()
_replaced: list[torch.library.Library] = []  # the kernels are in place as long as this lives


def use_batched_attention() -> None:
    """Attend in bfloat16 by batched products from now on, if this is a processor where they are faster."""
    if is_faster():
        replace_attention()


def is_faster() -> bool:
    """Whether this processor multiplies bfloat16 but torch's kernel does not use that.

    False if ATEN_CPU_CAPABILITY limits torch to narrower vectors, whatever the processor has.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    names = "_is_avx512_bf16_supported", "_is_amx_tile_supported"  # private, so a release may have none
    if not hasattr(torch.library, "get_kernel") or not all(hasattr(torch.cpu, name) for name in names):
        return False
    has_bf16, has_amx = (getattr(torch.cpu, name)() for name in names)
    return has_bf16 and not has_amx and torch.backends.mkldnn.is_available()


def replace_attention() -> None:
    """Replace torch's attention kernels for CPUs, in this process."""
    with _lock:
        if _replaced:
            return
        for name in (FORWARD, BACKWARD):
            _own[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
        _replaced.append(replace_kernels({FORWARD: _forward, BACKWARD: _backward}, with_keyset=True))


def restore_attention() -> None:
    """Give torch its own kernels back. Between a forward pass and its backward pass this is not allowed."""
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
    attn_mask: Tensor | None = None,  # added to scores: (T or 1, C or 1), or with (B or 1, heads or 1) before
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, heads, T, D), and zeros in place of the scores' log-sums (B, heads, T), which `_backward` ignores."""
    if not _takes(query, key, value, dropout_p):
        given = query, key, value, dropout_p, is_causal
        outputs: tuple[Tensor, Tensor] = _own[FORWARD].call_boxed(keys, *given, attn_mask=attn_mask, scale=scale)
        return outputs
    out = _like(query)
    scaled = query * _scale(query, scale)
    for rows in _parts(query, key):
        q, k, v = (_by_group(states[rows], key.shape[1]) for states in (scaled, key, value))
        bias, is_seen = _bias(query, key, is_causal, attn_mask, rows)
        weights = _weights(q, k, bias, key.shape[1])
        out[rows] = torch.bmm(weights.to(q.dtype), v).view_as(out[rows])
        if is_seen is not None:
            out[rows] *= is_seen
    return out, query.new_zeros(query.shape[:3], dtype=torch.float32)  # as large as torch's, which estimates count


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
    scaled = query * factor
    for rows in _parts(query, key):
        bias, is_seen = _bias(query, key, is_causal, attn_mask, rows)
        grad = grad_out[rows] if is_seen is None else grad_out[rows] * is_seen
        means = (grad.float() * out[rows]).sum(-1, keepdim=True)  # (B, heads, T, 1) of the gradients of weights
        q, k, v = (_by_group(states[rows], groups) for states in (scaled, key, value))
        grad, means = _by_group(grad, groups), _by_group(means, groups)
        weights = _weights(q, k, bias, groups)
        of_value[rows] = torch.bmm(weights.to(q.dtype).transpose(1, 2), grad).view_as(of_value[rows])
        of_scores = torch.bmm(grad, v.transpose(1, 2)).float()  # of the weights, so far
        of_scores = of_scores.sub_(means).mul_(weights).to(q.dtype)
        of_query[rows] = torch.bmm(of_scores, k).view_as(of_query[rows])
        of_key[rows] = torch.bmm(of_scores.transpose(1, 2), q).view_as(of_key[rows])
    return of_query.mul_(factor), of_key, of_value


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
    """Slices of the rows of a batch that are computed at a time."""
    count = max(1, MOST_SCORES // (query.shape[1] * query.shape[2] * key.shape[2]))
    return (slice(first, first + count) for first in range(0, len(query), count))


def _by_group(states: Tensor, groups: int) -> Tensor:
    """(B, heads, T, D) -> (B * groups, heads / groups * T, D)"""
    return states.reshape(len(states) * groups, -1, states.shape[-1])


def _bias(
    query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """What is added to the scores of some rows of a batch, (B or 1, groups or 1, heads / groups or 1, T, C), and where
    a query sees any column, (B or 1, heads or 1, T, 1); None if all do.

    A query that sees none has finite scores, whose output is then 0, as in torch's kernel.
    """
    tokens, columns = query.shape[2], key.shape[2]
    if mask is None:
        hidden = query.new_full((tokens, columns), -torch.inf if is_causal else 0.0, dtype=torch.float32)
        return hidden.triu_(1)[None, None, None], None
    mask = mask[None, None] if mask.dim() == 2 else mask
    mask = mask[rows] if len(mask) > 1 else mask
    mask = mask.expand(-1, -1, tokens, columns).float()
    is_seen = mask.amax(-1, keepdim=True) > -torch.inf
    mask = mask.clamp(min=torch.finfo(torch.float32).min)
    return mask.unflatten(1, (key.shape[1], -1)) if mask.shape[1] > 1 else mask[:, :, None], is_seen


def _weights(query: Tensor, key: Tensor, bias: Tensor, groups: int) -> Tensor:
    """Softmax of scores (B * groups, heads / groups * T, C) in float32, of scaled queries and keys by group."""
    scores = torch.bmm(query, key.transpose(1, 2)).float()
    by_row = scores.view(-1, groups, query.shape[1] // bias.shape[-2], *bias.shape[-2:])  # (B, groups, .., T, C)
    by_row += bias
    return scores.softmax(-1)
