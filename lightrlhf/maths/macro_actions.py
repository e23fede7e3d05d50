"""Macro actions (MA-RLHF, Chai et al. 2025): segments of a response, and reductions to and from them.

Segments are a tensor (B, T-1) next to `action_mask`: 0, 1, 2, … the segment of each action in its row, -1 where there
is no action. Segments tile a response in order; M is the largest number of them in a row. All functions are vectorised
over rows; padding, end tokens, empty and one-token responses need no special case.

Left out: learned terminations. `data/macro_parsers.py` finds the segments of parsed text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

RANDOM_LENGTHS = (2, 3, 5, 10)  # of the paper's randomised condition
NO_ACTION = -1


def action_index(action_mask: Tensor) -> Tensor:
    """Number of each action in its row, 0 for the first: (B, T-1) -> (B, T-1)."""
    return action_mask.long().cumsum(1) - 1


def fixed_segments(action_mask: Tensor, ngram: int) -> Tensor:
    """Segments of `ngram` actions; 1 is a segment per token, 0 one segment per response."""
    index = action_index(action_mask)
    return _off_actions(index // ngram if ngram else torch.zeros_like(index), action_mask)


def random_segments(action_mask: Tensor, noise: Tensor) -> Tensor:
    """Segments of the lengths 2, 3, 5 and 10, each equally often, in a random order per row.

    noise: (B, 4 * repeats), whose order in a row is the order of the lengths. The rest of a response beyond the sum of
    them is one last segment.
    """
    sizes = torch.tensor(RANDOM_LENGTHS).repeat(noise.shape[1] // len(RANDOM_LENGTHS))  # (L,)
    ends = sizes[noise.argsort(1).cpu()].cumsum(1).to(action_mask.device)  # (B, L)
    index = action_index(action_mask).clamp(min=0)
    return _off_actions(torch.searchsorted(ends, index.contiguous(), right=True), action_mask)


def perplexity(action_mask: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Segments that begin where the reference's perplexity of a token exceeds the previous token's.

    ref_logprobs: (B, T-1), the reference's log-probability of each action; perplexity is exp of its negative.
    """
    index = action_index(action_mask)
    for_row = torch.where(action_mask, ref_logprobs, torch.zeros_like(ref_logprobs))
    compact = torch.zeros_like(ref_logprobs).scatter_add(1, index.clamp(min=0), for_row)  # action number -> log-prob
    before = compact.gather(1, (index - 1).clamp(min=0))  # (B, T-1) of the action before, gaps between turns skipped
    rises = action_mask & (index > 0) & (ref_logprobs < before)
    return _off_actions(rises.long().cumsum(1), action_mask)


def turn_segments(action_mask: Tensor, turn: Tensor) -> Tensor:
    """A segment for each turn of an episode that a row has; turn: (B, T-1), rising along its actions."""
    first = torch.where(action_mask, turn, turn.new_full((), torch.iinfo(turn.dtype).max)).amin(1, keepdim=True)
    return _off_actions(turn - first, action_mask)


def beginning_at(action_mask: Tensor, starts: Sequence[Sequence[int]]) -> Tensor:
    """Segments that begin at the given action numbers of each row, and at its first action."""
    begins = torch.zeros(action_mask.shape, dtype=torch.int64)  # (B, T-1), by number of the action
    for row, numbers in enumerate(starts):
        begins[row, [number for number in numbers if number > 0]] = 1
    segments = begins.cumsum(1).to(action_mask.device).gather(1, action_index(action_mask).clamp(min=0))
    return _off_actions(segments, action_mask)


def num_segments(segments: Tensor) -> int:
    """M, at least 1."""
    return max(int(segments.max()) + 1, 1) if len(segments) else 1


def segment_mask(segments: Tensor) -> Tensor:
    """Mask of the segments that each row has: (B, T-1) -> (B, M) bool."""
    return torch.arange(num_segments(segments), device=segments.device) <= segments.max(1, keepdim=True).values


def reduce_sum(values: Tensor, segments: Tensor) -> Tensor:
    """Sum of each segment's values: (B, T-1) -> (B, M). The adjoint of `broadcast`."""
    out = values.new_zeros(len(values), num_segments(segments))
    kept = torch.where(segments >= 0, values, torch.zeros_like(values))
    return out.scatter_add(1, segments.clamp(min=0), kept)


def broadcast(values: Tensor, segments: Tensor) -> Tensor:
    """Each segment's value at each of its actions, 0 elsewhere: (B, M) -> (B, T-1). The adjoint of `reduce_sum`."""
    out = values.gather(1, segments.clamp(min=0))
    return torch.where(segments >= 0, out, torch.zeros_like(out))


def lengths(segments: Tensor) -> Tensor:
    """Actions in each segment: (B, T-1) -> (B, M)."""
    return reduce_sum(torch.ones(segments.shape, device=segments.device), segments)


def place(segments: Tensor) -> Tensor:
    """Number of each action in its segment, 0 for the first: (B, T-1) -> (B, T-1), 0 off actions."""
    index = action_index(segments >= 0)
    sizes = lengths(segments)  # (B, M)
    starts = sizes.cumsum(1) - sizes
    return torch.where(segments >= 0, index - broadcast(starts, segments).long(), torch.zeros_like(index))


def ends(segments: Tensor) -> Tensor:
    """Whether an action is the last one of its segment: (B, T-1) -> (B, T-1) bool."""
    return (segments >= 0) & (place(segments) == broadcast(lengths(segments), segments).long() - 1)


def discounted_sum(rewards: Tensor, segments: Tensor, gamma: float) -> Tensor:
    """Reward of each segment, sum_i gamma^i r_i over its tokens (summed, not averaged: so is its KL): -> (B, M)."""
    return reduce_sum(rewards * gamma ** place(segments).to(rewards), segments)


def value_equal(values: Tensor, segments: Tensor) -> Tensor:
    """A segment's value as the mean of its tokens' values: (B, T-1) -> (B, M)."""
    return reduce_sum(values, segments) / lengths(segments).clamp(min=1)


def value_unit(values: Tensor, segments: Tensor) -> Tensor:
    """A segment's value, the value of its last token: (B, T-1) -> (B, M)."""
    return reduce_sum(values * ends(segments), segments)


def value_position(values: Tensor, segments: Tensor) -> Tensor:
    """A segment's value as the mean weighted by 1 / (|w| - i), i the token's number: late tokens count more."""
    left = broadcast(lengths(segments), segments).to(values.dtype) - place(segments)  # (B, T-1)
    return _weighted_mean(values, 1 / left.clamp(min=1), segments)


def value_position_first(values: Tensor, segments: Tensor) -> Tensor:
    """The same weighted by 1 / (i + 1), as in the authors' code: early tokens count more."""
    return _weighted_mean(values, 1 / (place(segments).to(values.dtype) + 1), segments)


def value_first(values: Tensor, segments: Tensor) -> Tensor:
    """A segment's value, the value of the state it starts in: the only one that depends on this state alone."""
    return reduce_sum(values * (place(segments) == 0), segments)


VALUE_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "equal": value_equal,
    "unit": value_unit,
    "position": value_position,
    "position_first": value_position_first,
    "first": value_first,
}


def _weighted_mean(values: Tensor, weights: Tensor, segments: Tensor) -> Tensor:
    """Mean of each segment's values by weights (B, T-1): -> (B, M), 0 of no action."""
    weights = torch.where(segments >= 0, weights, torch.zeros_like(weights))
    return reduce_sum(values * weights, segments) / reduce_sum(weights, segments).clamp(min=1e-8)


def _off_actions(segments: Tensor, action_mask: Tensor) -> Tensor:
    return torch.where(action_mask, segments, torch.full_like(segments, NO_ACTION))
