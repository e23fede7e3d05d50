"""Flags of the rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.functions import check_columns, load_function
from lightrlhf.cli.hub import is_gguf
from lightrlhf.cli.latest import why_missing


@dataclass(frozen=True, kw_only=True)
class RewardArgs(Args):
    """Reward."""

    rm_experiment_dir: str | None = flag(None, required="reward", show="first")
    """Experiment dir or checkpoint of the reward model."""
    reward_function: list[str] = flag([], unique=True, required="reward", show="first")
    """Python functions `package.module:name` that score responses, one or several, alone or beside a reward model."""
    reward_weights: list[float] = flag([], show="rarely")
    """Weight of each reward in the sum, the reward model's first. Default: 1 each."""
    reward_timeout: float = at_least(0, 0.0, show="rarely")
    """Timeout of a function per response, in seconds, in a separate process; 0: in this process, no timeout."""

    @property
    def has_rewards(self) -> bool:
        """Whether the flags name a reward."""
        return bool(self.rm_experiment_dir or self.reward_function)

    def _check_given(self, given: Mapping[str, object]) -> None:
        reward = given.get("reward")
        functions: Any = self.reward_function if reward is None else reward
        functions = list(functions) if isinstance(functions, list | tuple) else [functions]
        if reward is not None and (not functions or self.reward_function):
            raise UsageError("reward: give a function or several, and no --reward_function")
        check_reward_model(self.rm_experiment_dir)
        num_rewards = len(functions) + (self.rm_experiment_dir is not None) + bool(getattr(self, "env", None))
        weights = " ".join(map(str, self.reward_weights))
        if not num_rewards and (weights or self.reward_timeout):
            unused = f"weights {weights}" if weights else f"timeout {self.reward_timeout}"
            raise UsageError(f"--reward_{unused} needs --rm_experiment_dir or --reward_function")
        if self.reward_weights and len(self.reward_weights) != num_rewards:
            first = ", the reward model first" if self.rm_experiment_dir else ""
            raise UsageError(f"--reward_weights {weights}: give {num_rewards}, one for each reward{first}")
        if self.reward_weights and not any(self.reward_weights):
            raise UsageError("--reward_weights are all 0; give at least one reward a weight")
        for function in functions:
            if reward is None:
                load_function(function, "--reward_function")
            else:
                check_columns(function, "reward")


@dataclass(frozen=True, kw_only=True)
class AuditArgs(RewardArgs):
    """Reward."""

    audit_function: str | None = flag(None, show="rarely")
    """Python function `package.module:name` that also scores the samples but is never trained on (`audit/score`)."""

    def _check(self) -> None:
        if self.audit_function in self.reward_function:
            raise ValueError(f"--audit_function {self.audit_function} is the reward itself; give another one")

    def _check_given(self, given: Mapping[str, object]) -> None:
        if self.audit_function is not None:
            load_function(self.audit_function, "--audit_function")


def check_reward_model(name: str | None, flag: str = "--rm_experiment_dir") -> None:
    """Raises: UsageError when a reward model is not a local folder; called before any model is loaded."""
    if not name or Path(name).is_dir():
        return
    if is_gguf(name):
        raise UsageError(
            f"{flag} {name}: a GGUF file holds a language model, not a reward model; "
            f"train one on it: python -m lightrlhf.rm --model_name {name}"
        )
    raise UsageError(f"{flag} {name} {why_missing(name)}")
