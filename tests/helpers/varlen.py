"""Attention of texts that follow one another in a row, by the definition: what a kernel of CUDA computes."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

calls: list[int] = []  # tokens of each


def attend_alone(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    """Outputs (W, heads, D) of `varlen.kernel()`: each text attends causally to itself."""
    calls.append(len(query))
    host = getattr(ends, "host", ends).tolist()  # a kernel reads it on its device
    assert longest >= max(end - start for start, end in zip(host, host[1:]))
    parts = []
    for start, end in zip(host, host[1:]):
        text = [part[start:end].transpose(0, 1)[None] for part in (query, key, value)]  # (1, heads or groups, T, D)
        text[1:] = [part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in text[1:]]
        parts.append(scaled_dot_product_attention(*text, is_causal=True, scale=scale)[0].transpose(0, 1))
    return torch.cat(parts)
