"""User-defined losses and advantages, by import path: tried at the start, and checked at each call.

Each of these functions returns a tensor of the shape that it got. One that fails, or returns anything else, ends the
run in one line that says what to return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.functions import load_function
from lightrlhf.data.batch import Rollout
from lightrlhf.maths.groups import TableFunction, table_advantages
from lightrlhf.maths.policy_losses import TokenLoss
from lightrlhf.rewards.functions import failure_of
from lightrlhf.training.ranks import Ranks

LOSS_SHAPE = "f(logprobs, log_ratio, advantages, action_mask) -> (B, T-1) losses"
ADVANTAGE_SHAPE = "f(scores) -> (P, K) advantages of K responses to each of P prompts"


def check_known_or_own(known: Collection[str], name: str, flag: str) -> None:
    """Raises: ValueError for a text that is neither a known name nor the path of a function."""
    if name not in known and ":" not in name:
        raise ValueError(f"{flag} {name} is unknown; give {', '.join(known)}, or a function package.module:name")


@functools.cache
def load_own_loss(path: str) -> TokenLoss:
    """A loss by its import path. Raises: UsageError unless it gives losses for a trial batch.

    The loss that is returned raises RunFailure where the function fails, or returns anything but a loss for each token.
    """
    checked = _load_checked(path, "--loss_type", LOSS_SHAPE)

    def loss(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
        if not len(logprobs):  # of a rank without rows
            return logprobs
        losses = checked(logprobs, log_ratio, advantages, action_mask)
        if not losses.requires_grad:
            raise RunFailure(f"--loss_type {path} returned losses without a gradient; compute them from logprobs")
        return losses

    trial = torch.full((2, 3), -1.0, requires_grad=True)
    _try(loss, trial, trial + 1, torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))
    return loss


@functools.cache
def load_own_advantage(path: str, num_generations: int) -> TableFunction:
    """Advantages by their import path. Raises: UsageError unless the function gives some for trial scores.

    What is returned raises RunFailure where the function fails, or returns anything but a finite number for each score.
    """
    checked = _load_checked(path, "--advantage", ADVANTAGE_SHAPE)

    def advantage(scores: Tensor) -> Tensor:
        advantages = checked(scores)
        if not advantages.isfinite().all():
            raise RunFailure(f"--advantage {path} returned advantages that are not finite; it is {ADVANTAGE_SHAPE}")
        return advantages

    _try(advantage, torch.arange(2.0 * num_generations, dtype=torch.float64).view(2, num_generations))
    return advantage


def own_advantages(path: str, num_generations: int, scores: Tensor, rollout: Rollout, ranks: Ranks) -> Tensor:
    """Advantages (B,) of this rank's rows by a function of all ranks' scores, see `groups.table_advantages`.

    scores: (B,), NaN where a score is missing; an episode's count once. Raises: RunFailure where the function fails.
    """
    parts = ranks.gather((rollout.group.tolist(), rollout.once(scores).double().tolist()))
    groups = torch.tensor([number for numbers, _ in parts for number in numbers], dtype=torch.int64)
    values = torch.tensor([value for _, values in parts for value in values], dtype=torch.float64)
    start = sum(len(numbers) for numbers, _ in parts[: ranks.rank])
    advantages = table_advantages(values, groups, load_own_advantage(path, num_generations))
    return advantages[start : start + len(scores)][rollout.last_rows()].to(scores)


def _load_checked(path: str, flag: str, shape: str) -> Callable[..., Tensor]:
    """A function whose result has the shape of its first argument; it raises RunFailure otherwise."""
    function = load_function(path, flag, shape, takes_columns=False)

    def call(*tensors: Tensor) -> Tensor:
        try:
            found = function(*tensors)
        except Exception as problem:  # whatever a user's function raises
            raise RunFailure(f"{flag} {path} failed with {failure_of(problem)}; it is {shape}") from problem
        wanted = tensors[0].shape
        if not isinstance(found, Tensor) or found.shape != wanted:
            what = f"{tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise RunFailure(f"{flag} {path} returned {what} for {tuple(wanted)}; it is {shape}")
        return found

    return call


def _try(function: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Call a function before any model is loaded. Raises: UsageError when it fails."""
    try:
        function(*tensors)
    except RunFailure as problem:
        raise UsageError(str(problem)) from None
