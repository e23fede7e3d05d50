"""Per-token rewards: the score at the last action, minus the KL penalty at each; fixed and adaptive KL weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrlhf.data.batch import Rollout
from lightrlhf.maths import macro_actions
from lightrlhf.maths.ops import KL_ESTIMATORS


def bound_scores(scores: Tensor, truncated: Tensor, limit: float | None, missing_eos_penalty: float) -> Tensor:
    """Scores (B,) clipped to +-limit, less the penalty of truncated responses; NaN (no score) stays NaN."""
    if limit is not None:
        scores = scores.clamp(-limit, limit)
    return scores - missing_eos_penalty * truncated.to(scores)


def overlong(lengths: Tensor, longest: int, buffer: int) -> Tensor:
    """Share of the last `buffer` tokens below `longest` that each response took, in [0, 1] (DAPO, 2503.14476, eq. 13).

    lengths: (B,) -> (B,) float32.
    """
    return ((lengths - (longest - buffer)) / buffer).clamp(0, 1)


def token_rewards(rollout: Rollout, scores: Tensor, kl_coeff: float, kl_estimator: str = "k1") -> Tensor:
    """r_t = -kl_coeff * KL_t, plus the score at the last action (Ziegler et al. 2019, eq. 2): (B,) -> (B, T-1).

    scores: (B,) of responses, or of each turn of an episode (B, N), which stands at the turn's last action. Without a
    score, NaN, there must be no actions (`Rollout.masked`); their rewards are 0.
    """
    kl = KL_ESTIMATORS[kl_estimator](rollout.logprobs, rollout.ref_logprobs)
    if not kl_coeff:  # there may be no reference
        kl = torch.zeros_like(kl)
    mask, turn = rollout.action_mask, rollout.turn
    rewards = torch.where(mask, -kl_coeff * kl, torch.zeros_like(kl))
    if turn is None:
        turn, scores = torch.zeros_like(mask, dtype=torch.int64), scores.reshape(len(mask), 1)
    last = macro_actions.ends(macro_actions.turn_segments(mask, turn))  # by index: a pad token may be the end token
    return torch.where(last, rewards + scores.gather(1, turn), rewards)


@dataclass
class FixedKL:
    """A constant KL coefficient."""

    value: float

    def update(self, kl: float, num_samples: int) -> None:
        """Leave the coefficient as it is."""


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
