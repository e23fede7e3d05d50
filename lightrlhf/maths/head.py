"""Log-probabilities of tokens from hidden states, without the logits of all of them in memory.

Logits over a large vocabulary are most of a pass's memory, and reading and writing them much of its time. Where there
are more of them than `logit_rows` allows, some are computed at a time and thrown away:

- a linear head is multiplied with all rows for a part of the vocabulary at a time, which keeps products large, and sums
  over the vocabulary are carried from part to part, as attention's are in Dao et al. 2022, section 3.1. If it is frozen
  (LoRA), the gradient of hidden states is computed with the logits, and the backward pass multiplies nothing; if it is
  trained, the backward pass computes the logits again, and the gradient of each part's weights is complete at once;
- in all other cases a few rows are multiplied with all weights at a time, and autograd's checkpointing computes them
  again, in larger chunks: each makes a gradient of all weights.

Left out: fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

MOST_ROWS = 4096
MOST_LOGITS = {"cpu": 2**22}  # in memory at a time: 16 MiB of each of the few tensors that a part has, for the system
# maps and clears those over 32 MiB anew (`cpu/heap.py`); others 2**26, since a GPU waits where products are small
CHECKPOINTED = 4  # times as many rows where autograd's checkpointing is used
HEADS = ("Linear", "HeldLinear")  # classes of layers that are the product with a matrix
LogitFunction = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
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
    costs about as much again. As many logits as `chunk_size` rows have (`logit_rows`) exist at a time, in the backward
    pass too, so that (N, V) is never in memory.
    """
    if len(targets) > chunk_size and not (with_entropy or with_mean) and is_linear(head):
        count = chunk_size * len(head.weight)
        return LinearHead.apply(hidden, head.weight, head.bias, targets, temperature, count), None, None
    needs_grad = torch.is_grad_enabled()
    if needs_grad and len(targets) > chunk_size:
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


def head_sum(hidden: Tensor, head: nn.Module, function: LogitFunction, chunk_size: int = 4096) -> tuple[Tensor, Tensor]:
    """Sum over all rows of a function of their logits, and values of each row, which carry no gradient.

    hidden (N, H); function(logits (n, V) float32, rows) -> a scalar, and (n, k) values of these rows. The gradient is
    computed with the logits, `chunk_size` rows at a time, so that (N, V) is never in memory and no logits are computed
    twice (Hsu et al. 2024, 2410.10989, section 3.2). -> (), (N, k)
    """
    weights = [weight for weight in head.parameters() if weight.requires_grad and torch.is_grad_enabled()]
    return HeadSum.apply(hidden, head, function, chunk_size, *weights)


def logit_rows(vocab_size: int, device: str = "cpu") -> int:
    """Rows of logits over a vocabulary that `head_logprobs` computes at a time on a device, or as many logits."""
    return max(min(MOST_ROWS, MOST_LOGITS.get(device, 2**26) // vocab_size), 1)


def is_linear(head: Any) -> TypeGuard[nn.Linear]:
    """Whether a head is the product with a matrix that this process holds whole, its bias, if any, frozen."""
    if type(head).__name__ not in HEADS or not head.weight.is_floating_point() or hasattr(head.weight, "placements"):
        return False
    return head.bias is None or not (head.weight.requires_grad or head.bias.requires_grad)


class LinearHead(torch.autograd.Function):
    """Log-probabilities (N,) of targets under a linear head (V, H), for a part of the vocabulary at a time.

    With p the probabilities of a row, the gradient of its log-probability by its logits is onehot(target) - p.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, count: int
    ) -> Tensor:
        """count: number of logits computed at a time."""
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.temperature, ctx.count = temperature, count
        is_frozen = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        log_sums = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)  # over the parts so far
        logprobs = torch.full_like(log_sums, torch.nan)  # stays so for a target that is not in the vocabulary
        gradient = torch.zeros_like(hidden, dtype=torch.float32) if is_frozen else None  # (N, H)
        scale = HALF_SCALE if ctx.dtype is torch.float16 else 1.0
        with torch.autocast(device, enabled=False):
            states, matrix = hidden.to(ctx.dtype), weight.to(ctx.dtype)  # (N, H), (V, H)
            added = None if bias is None else bias.to(ctx.dtype)
            for rows, part, target, is_there in _parts(targets, len(weight), count):
                logits = F.linear(states[rows], matrix[part], None if added is None else added[part])  # (n, v)
                logits = _scale(logits.float(), 1 / temperature)
                own = logits.gather(1, target)  # (n, 1)
                logprobs[rows] = torch.where(is_there, own, logprobs[rows, None])[:, 0]
                before = log_sums[rows].clone()
                log_sums[rows] = torch.logaddexp(before, logits.logsumexp(-1))
                if gradient is not None:  # of log_sums without the target, by probabilities over the parts so far
                    probs = logits.sub_(log_sums[rows, None]).exp_()
                    probs.scatter_(1, target, probs.gather(1, target).masked_fill_(is_there, 0.0))
                    others = _scale((_scale(probs, scale).to(ctx.dtype) @ matrix[part]).float(), 1 / scale)
                    gradient[rows] = gradient[rows].mul_((before - log_sums[rows]).exp_()[:, None]).add_(others)
            logprobs -= log_sums
            if gradient is not None:
                gradient = torch.addcmul(-gradient, -logprobs.expm1()[:, None], matrix[targets].float())
                gradient = _scale(gradient, 1 / temperature).to(hidden.dtype)
        ctx.save_for_backward(*((hidden, weight, targets, log_sums) if gradient is None else (gradient,)))
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if len(ctx.saved_tensors) == 1:
            (gradient,) = ctx.saved_tensors
            return (grad[:, None] * gradient).to(gradient.dtype), None, None, None, None, None
        hidden, weight, targets, log_sums = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden, dtype=torch.float32), torch.zeros_like(weight)
        by_row = grad[:, None] / ctx.temperature  # (N, 1)
        is_half = ctx.dtype is torch.float16  # then multiplied before small numbers are lost, else where it costs less
        with torch.autocast(hidden.device.type, enabled=False):
            states, matrix = hidden.to(ctx.dtype), weight.to(ctx.dtype)  # (N, H), (V, H)
            weighted = states if is_half else (by_row * states).to(ctx.dtype)
            for rows, part, target, is_there in _parts(targets, len(weight), ctx.count):
                logits = _scale(F.linear(states[rows], matrix[part]).float(), 1 / ctx.temperature)  # (n, v)
                slope = logits.sub_(log_sums[rows, None]).exp_().neg_()
                slope.scatter_add_(1, target, is_there.float())  # in float32: 1 - p of a likely target is small
                slope = (slope.mul_(by_row[rows]) if is_half else slope).to(ctx.dtype)
                grad_hidden[rows] += slope @ matrix[part]
                grad_weight[part] += slope.t() @ weighted[rows]
        grad_hidden = grad_hidden if is_half else grad_hidden.mul_(by_row)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


class HeadSum(torch.autograd.Function):
    """See `head_sum`; weights: the head's trained parameters."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: nn.Module, function: LogitFunction, chunk_size: int, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]]
        device = hidden.device.type
        is_half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16
        scale = HALF_SCALE if is_half else 1.0
        total, values = hidden.new_zeros((), dtype=torch.float32), []
        by_row = torch.zeros_like(hidden) if wanted[0] else None
        by_weight = [torch.zeros_like(weight) if is_wanted else None for weight, is_wanted in zip(weights, wanted[1:])]
        for start in range(0, max(len(hidden), 1), chunk_size):
            rows = slice(start, start + chunk_size)
            with torch.set_grad_enabled(any(wanted)):
                part = hidden[rows].detach().requires_grad_(wanted[0])
                one, of_rows = function(head(part).float(), rows)
                leaves = [leaf for leaf, is_wanted in zip([part, *weights], wanted) if is_wanted]
                found = iter(torch.autograd.grad(one * scale, leaves) if leaves else ())
            if by_row is not None:
                by_row[rows] = next(found) / scale
            for gradient in by_weight:
                if gradient is not None:
                    gradient += next(found) / scale
            total += one.detach()
            values.append(of_rows.detach())
        ctx.save_for_backward(by_row, *by_weight)
        result = torch.cat(values)
        ctx.mark_non_differentiable(result)
        return total, result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        by_row, *by_weight = (None if saved is None else saved * grad for saved in ctx.saved_tensors)
        return by_row, None, None, None, *by_weight


def _parts(targets: Tensor, size: int, count: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Rows and parts of a vocabulary of `size` tokens that have at most `count` logits, or one a row.

    With each, of its rows: the target's place in the part, or another one, and whether it is there, (n, 1) both.
    """
    for start in range(0, len(targets), MOST_ROWS):
        rows = slice(start, start + MOST_ROWS)
        wanted = targets[rows, None]
        width = max(count // len(wanted), 1)
        width -= width % 64 if width > 64 else 0  # products of odd widths are slower
        for first in range(0, size, width):
            part = slice(first, min(first + width, size))
            is_there = (wanted >= part.start) & (wanted < part.stop)
            yield rows, part, (wanted - first).clamp(0, part.stop - first - 1), is_there


def _scale(values: Tensor, factor: float) -> Tensor:
    """Values times a factor, in place."""
    return values if factor == 1 else values.mul_(factor)
