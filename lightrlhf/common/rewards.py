"""Scores of whole responses, and the per-token rewards made of them.

A score (B,) comes from a reward model, a Python function or an environment. A reward (B, T-1) is per token: the score
at the last action, minus the KL penalty at each. Left out: remote judges.
"""

from __future__ import annotations

import importlib
import inspect
import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightrlhf.common.args import RunFailure, UsageError
from lightrlhf.common.batch import Rollout, decode, encode_prompt, encode_response, reading_passes, response_batch
from lightrlhf.common.model import ScalarModel, last_token
from lightrlhf.common.ops import KL_ESTIMATORS

Scorer = Callable[[Rollout], Tensor]
STATISTICS = "reward_statistics.json"


@dataclass
class RewardModelScorer:
    """Scores by a reward model; its own tokenizer when it has another one than the policy (text in, score out)."""

    model: ScalarModel
    tokenizer: Any
    policy_tokenizer: Any
    batch_size: int

    @torch.no_grad()
    def __call__(self, rollout: Rollout) -> Tensor:
        """(B,) scores at each row's last token."""
        batch: Any = rollout
        if not same_tokenizer(self.tokenizer, self.policy_tokenizer):
            prompts = [
                encode_prompt(self.tokenizer, decode(self.policy_tokenizer, ids)) for ids in rollout.prompt_ids()
            ]
            answers = [
                encode_response(self.tokenizer, decode(self.policy_tokenizer, ids)) for ids in rollout.response_ids()
            ]
            cut = rollout.truncated.tolist()  # what was stopped by its length gets no end token here either
            answers = [ids[:-1] if truncated else ids for ids, truncated in zip(answers, cut)]
            batch = response_batch(prompts, answers, self.tokenizer.pad_token_id).to(rollout.input_ids.device)
        scores = torch.zeros(len(rollout), device=rollout.input_ids.device)
        for rows in reading_passes(batch.attention_mask.sum(1), self.batch_size):
            width = max(int(batch.attention_mask[rows].sum(1).max()), 2)
            ids, mask = batch.input_ids[rows, :width], batch.attention_mask[rows, :width]
            scores[rows] = last_token(self.model(ids, mask), mask)
        return scores


@dataclass
class FunctionScorer:
    """Scores by a Python function `f(prompts, completions, **columns) -> list[float]`; NaN masks a sample."""

    function: Callable[..., list[float]]
    tokenizer: Any

    def __call__(self, rollout: Rollout) -> Tensor:
        """(B,) scores. Raises: RunFailure when the function fails or does not return one number per completion."""
        prompts = [decode(self.tokenizer, ids) for ids in rollout.prompt_ids()]
        completions = [decode(self.tokenizer, ids) for ids in rollout.response_ids()]
        names = {name for columns in rollout.columns for name in columns}
        columns = {name: [row.get(name) for row in rollout.columns] for name in names}
        try:
            scores = [float(score) for score in self.function(prompts, completions, **columns)]
        except Exception as problem:  # whatever a user's function raises
            where = traceback.extract_tb(problem.__traceback__)[-1]
            raise RunFailure(
                f"the reward function failed with {type(problem).__name__}: {problem} ({where.filename}:{where.lineno})"
            ) from problem
        if len(scores) != len(prompts):
            raise RunFailure(f"the reward function returned {len(scores)} scores for {len(prompts)} completions")
        return torch.tensor(scores, device=rollout.input_ids.device)


def load_function(
    path: str, flag: str, shape: str = "f(prompts, completions, **columns) -> list[float]"
) -> Callable[..., Any]:
    """The function behind `package.module:name`. Raises: UsageError naming `flag`, and the `shape` it must have."""
    module, colon, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise UsageError(f"{flag} {path} cannot be imported as package.module:function: {problem}") from None
    if not colon or not callable(function):
        raise UsageError(f"{flag} {path} is not of the form package.module:function")
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        raise UsageError(f"{flag} {path} must accept **columns: {shape}")
    return function


def same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers give the same ids."""
    return one is other or (one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id)


def reward_statistics(model_dir: str | Path) -> tuple[float, float]:
    """Mean and standard deviation of a reward model's scores on its own validation split; (0, 1) when not stored."""
    path = Path(model_dir) / STATISTICS
    if not path.is_file():
        return 0.0, 1.0
    stored = json.loads(path.read_text(encoding="utf-8"))
    return stored["mean"], max(stored["std"], 1e-6)


def token_rewards(rollout: Rollout, scores: Tensor, kl_coeff: float, kl_estimator: str = "k1") -> Tensor:
    """r_t = -kl_coeff * KL_t, plus the score at the last action (Ziegler et al. 2019, eq. 2): (B,) -> (B, T-1)."""
    kl = KL_ESTIMATORS[kl_estimator](rollout.logprobs, rollout.ref_logprobs)
    rewards = torch.where(rollout.action_mask, -kl_coeff * kl, torch.zeros_like(kl))
    steps = torch.arange(rewards.shape[1], device=rewards.device)
    last = (rollout.action_mask.long() * (steps + 1)).argmax(1)  # an index, never a search for pad or end tokens
    rewards[torch.arange(len(rollout), device=rewards.device), last] += scores
    return torch.where(rollout.action_mask, rewards, torch.zeros_like(rewards))  # also of rows without any action


@dataclass
class FixedKL:
    """A KL coefficient that stays."""

    value: float

    def update(self, kl: float, num_samples: int) -> None:
        """Nothing changes."""


@dataclass
class AdaptiveKL:
    """A KL coefficient steered towards a target (Ziegler et al. 2019, section 2.2)."""

    value: float
    target: float
    horizon: int = 10_000

    def update(self, kl: float, num_samples: int) -> None:
        """value *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon, with kl summed over a response."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * num_samples / self.horizon
