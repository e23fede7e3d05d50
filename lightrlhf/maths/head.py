"""Log-probabilities of tokens from hidden states, without the logits of all of them in memory.

Logits over a large vocabulary are most of a pass's memory, and reading and writing them much of its time. Beyond
`MOST_LOGITS` they are computed for a few rows at a time and thrown away:

- with a frozen head (LoRA) the gradient of each row's hidden state is computed with the row's logits, so that the
  backward pass multiplies nothing;
- with a linear head that is trained the backward pass computes the logits again, and adds the gradient of the weights
  of each chunk to one sum in place;
- in all other cases autograd's checkpointing does so.

Left out: fused kernels, and gradients in a lower precision than that of the products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

MOST_LOGITS = {"cpu": 2**24}  # in memory at a time: 64 MiB of each of the few tensors that a chunk has; others 2**26,
# since a GPU that multiplies few rows waits for the weights


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
    is_long = torch.is_grad_enabled() and len(targets) > chunk_size
    if is_long and not (with_entropy or with_mean):
        if is_frozen(head):
            return FrozenHead.apply(hidden, head, targets, temperature, chunk_size), None, None
        if is_plain(head):
            return LinearHead.apply(hidden, head.weight, targets, temperature, chunk_size), None, None

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
    for h, target in zip(hidden.split(chunk_size), targets.split(chunk_size)):
        pieces.append(checkpoint(chunk, h, target, use_reentrant=False) if is_long else chunk(h, target))
    out = torch.cat(pieces, -1)  # (1 to 3, N); of no targets there is one empty piece
    return out[0], (out[1] if with_entropy else None), (out[-1] if with_mean else None)


def logit_rows(vocab_size: int, device: str = "cpu") -> int:
    """Rows of logits over a vocabulary that `head_logprobs` computes at a time on a type of device."""
    return max(min(4096, MOST_LOGITS.get(device, 2**26) // vocab_size), 1)


def is_frozen(head: Any) -> bool:
    """Whether a head has weights, and none of them is trained."""
    needed = [parameter.requires_grad for parameter in head.parameters()] if isinstance(head, nn.Module) else []
    return bool(needed) and not any(needed)


def is_plain(head: Any) -> TypeGuard[nn.Linear]:
    """Whether a head is the product with a matrix that this process holds whole."""
    return type(head) is nn.Linear and head.bias is None and type(head.weight.data) is Tensor


class FrozenHead(torch.autograd.Function):
    """Log-probabilities (N,) of targets under a frozen head; keeps the gradient (N, H) of each row, not its logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, temperature: float, rows: int
    ) -> Tensor:
        logprobs, gradient = hidden.new_empty(len(hidden), dtype=torch.float32), torch.empty_like(hidden)
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            with torch.enable_grad():
                states = hidden[chunk].detach().requires_grad_()  # (n, H)
                logits = head(states).float() / temperature  # (n, V)
                found = -F.cross_entropy(logits, targets[chunk], reduction="none")
                (gradient[chunk],) = torch.autograd.grad(found.sum(), states)  # no row depends on another
            logprobs[chunk] = found.detach()
        ctx.save_for_backward(gradient)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return grad[:, None].to(gradient.dtype) * gradient, None, None, None, None


class LinearHead(torch.autograd.Function):
    """Log-probabilities (N,) of targets under a linear head (V, H); the backward pass computes its logits again.

    With p the probabilities of a row, the gradient of its log-probability by its logits is onehot(target) - p.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, rows: int) -> Tensor:
        device = hidden.device.type
        cast = torch.is_autocast_enabled(device)
        ctx.dtype = torch.get_autocast_dtype(device) if cast else weight.dtype
        ctx.temperature, ctx.rows = temperature, rows
        logprobs, log_sums = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        with torch.autocast(device, enabled=False):
            states, matrix = hidden.to(ctx.dtype), weight.to(ctx.dtype)  # (N, H), (V, H)
            for start in range(0, len(hidden), rows):
                chunk = slice(start, start + rows)
                logits = F.linear(states[chunk], matrix).float() / temperature  # (n, V)
                log_sums[chunk] = logits.logsumexp(-1)
                logprobs[chunk] = logits.gather(-1, targets[chunk, None])[:, 0] - log_sums[chunk]
        ctx.save_for_backward(hidden, weight, targets, log_sums)
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sums = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            states, matrix = hidden.to(ctx.dtype), weight.to(ctx.dtype)  # (N, H), (V, H)
            scaled = (grad[:, None] / ctx.temperature * states).to(ctx.dtype)  # (N, H)
            expected = torch.empty_like(states)  # (N, H): mean row of the matrix under p
            grad_weight = torch.zeros_like(weight)
            for start in range(0, len(hidden), ctx.rows):
                chunk = slice(start, start + ctx.rows)
                logits = F.linear(states[chunk], matrix).float() / ctx.temperature  # (n, V)
                probs = logits.sub_(log_sums[chunk, None]).exp_().to(ctx.dtype)
                expected[chunk] = probs @ matrix
                if ctx.dtype is weight.dtype:
                    grad_weight.addmm_(probs.t(), scaled[chunk], alpha=-1)
                else:
                    grad_weight.sub_(probs.t() @ scaled[chunk])
            grad_weight.index_add_(0, targets, scaled.to(weight.dtype))
            grad_hidden = grad[:, None] / ctx.temperature * (matrix[targets] - expected)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None
