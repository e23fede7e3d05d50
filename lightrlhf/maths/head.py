"""Log-probabilities of tokens from hidden states, without the logits of all of them in memory.

Logits over a large vocabulary are most of a pass's memory, and reading and writing them much of its time. Where there
are more of them than `logit_rows` allows, they are computed for a few rows at a time and thrown away:

- with a frozen linear head (LoRA) the gradient of each row's hidden state is computed with the row's logits, so that
  the backward pass multiplies nothing;
- with a linear head that is trained the backward pass computes the logits again, and adds the gradient of the weights
  of each chunk to one sum in place;
- in all other cases autograd's checkpointing does so, in larger chunks: each makes a gradient of all weights.

Left out: fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

MOST_ROWS = 4096
MOST_LOGITS = {"cpu": 2**24}  # in memory at a time: 64 MiB of each of the few tensors that a chunk has; others 2**26,
# since a GPU that multiplies few rows waits for the weights
CHECKPOINTED = 4  # times as many rows where autograd's checkpointing is used
HEADS = ("Linear", "HeldLinear")  # classes of layers that are the product with a matrix
HALF_SCALE = 2.0**10  # of gradients in float16, which would lose small ones


def head_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_mean: bool = False,
    chunk_size: int = 4096,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probability of each target, and if requested entropy and (for label smoothing) mean log-probability.

    hidden (N, H), targets (N,) -> (N,) float32 tensors, None for what was not requested: over a large vocabulary each
    costs about as much again. Logits exist for `chunk_size` rows at a time (`logit_rows`), in the backward pass too, so
    that (N, V) is never in memory.
    """
    needs_grad = torch.is_grad_enabled()
    if needs_grad and len(targets) > chunk_size:
        if not (with_entropy or with_mean) and is_linear(head):
            return LinearHead.apply(hidden, head.weight, head.bias, targets, temperature, chunk_size), None, None
        chunk_size = min(CHECKPOINTED * chunk_size, max(MOST_ROWS, chunk_size))

    def chunk(h: Tensor, target: Tensor) -> Tensor:
        logits = head(h).float()  # (n, V)
        if temperature != 1.0:
            logits = logits / temperature
        if not (with_entropy or with_mean):
            return -F.cross_entropy(logits, target, reduction="none")[None]  # (1, n)
        logprobs = logits.log_softmax(-1)  # (n, V)
        rows = [logprobs.gather(-1, target[:, None])[:, 0]]
        rows += [-(logprobs.exp() * logprobs).sum(-1)] if with_entropy else []
        rows += [logprobs.mean(-1)] if with_mean else []
        return torch.stack(rows)  # (2 or 3, n)

    pieces = []
    save_memory = needs_grad and len(targets) > chunk_size
    for h, target in zip(hidden.split(chunk_size), targets.split(chunk_size)):
        pieces.append(checkpoint(chunk, h, target, use_reentrant=False) if save_memory else chunk(h, target))
    out = torch.cat(pieces, -1)  # (1 to 3, N); of no targets there is one empty piece
    return out[0], (out[1] if with_entropy else None), (out[-1] if with_mean else None)


def logit_rows(vocab_size: int, device: str = "cpu") -> int:
    """Rows of logits over a vocabulary that `head_logprobs` computes at a time on a type of device."""
    return max(min(MOST_ROWS, MOST_LOGITS.get(device, 2**26) // vocab_size), 1)


def is_linear(head: Any) -> TypeGuard[nn.Linear]:
    """Whether a head is the product with a matrix that this process holds whole, its bias, if any, frozen."""
    if type(head).__name__ not in HEADS or not head.weight.is_floating_point() or hasattr(head.weight, "placements"):
        return False
    return head.bias is None or not (head.weight.requires_grad or head.bias.requires_grad)


class LinearHead(torch.autograd.Function):
    """Log-probabilities (N,) of targets under a linear head (V, H), chunk by chunk.

    With p the probabilities of a row, the gradient of its log-probability by its logits is onehot(target) - p.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        rows: int,
    ) -> Tensor:
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.temperature, ctx.rows, is_frozen = temperature, rows, not ctx.needs_input_grad[1]
        logprobs, log_sums = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        gradient = torch.empty_like(hidden) if is_frozen else None  # (N, H)
        scale = HALF_SCALE if ctx.dtype is torch.float16 else 1.0
        with torch.autocast(device, enabled=False):
            states, matrix = hidden.to(ctx.dtype), weight.to(ctx.dtype)  # (N, H), (V, H)
            added = None if bias is None else bias.to(ctx.dtype)
            for start in range(0, len(hidden), rows):
                chunk = slice(start, start + rows)
                logits = _scaled(F.linear(states[chunk], matrix, added).float(), 1 / temperature)  # (n, V)
                log_sums[chunk] = logits.logsumexp(-1)
                logprobs[chunk] = logits.gather(-1, targets[chunk, None])[:, 0] - log_sums[chunk]
                if gradient is not None:
                    slope = _scaled(_by_logits(logits, targets[chunk], log_sums[chunk]), scale / temperature)
                    gradient[chunk] = _scaled((slope.to(ctx.dtype) @ matrix).to(hidden.dtype), 1 / scale)
        ctx.save_for_backward(*((hidden, weight, targets, log_sums) if gradient is None else (gradient,)))
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if len(ctx.saved_tensors) == 1:
            (gradient,) = ctx.saved_tensors
            return (grad[:, None] * gradient).to(gradient.dtype), None, None, None, None, None
        hidden, weight, targets, log_sums = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        by_row = grad[:, None] / ctx.temperature  # (N, 1)
        is_half = ctx.dtype is torch.float16  # then multiplied before small numbers are lost, else where it costs less
        with torch.autocast(hidden.device.type, enabled=False):
            states, matrix = hidden.to(ctx.dtype), weight.to(ctx.dtype)  # (N, H), (V, H)
            weighted = states if is_half else (by_row * states).to(ctx.dtype)
            for start in range(0, len(hidden), ctx.rows):
                chunk = slice(start, start + ctx.rows)
                logits = _scaled(F.linear(states[chunk], matrix).float(), 1 / ctx.temperature)  # (n, V)
                slope = _by_logits(logits, targets[chunk], log_sums[chunk])
                slope = (slope.mul_(by_row[chunk]) if is_half else slope).to(ctx.dtype)
                grad_hidden[chunk] = slope @ matrix
                if ctx.dtype is weight.dtype:
                    grad_weight.addmm_(slope.t(), weighted[chunk])
                else:
                    grad_weight.add_(slope.t() @ weighted[chunk])
        return grad_hidden if is_half else grad_hidden.mul_(by_row), grad_weight, None, None, None, None


def _scaled(values: Tensor, factor: float) -> Tensor:
    """Values times a factor, in place."""
    return values if factor == 1 else values.mul_(factor)


def _by_logits(logits: Tensor, targets: Tensor, log_sums: Tensor) -> Tensor:
    """onehot(target) - p of each row, in place: (n, V); float32, since beside a likely target the rest is small."""
    slope = logits.sub_(log_sums[:, None]).exp_().neg_()
    slope[torch.arange(len(targets), device=targets.device), targets] += 1
    return slope
