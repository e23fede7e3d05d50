"""The audit of a reward: a second score of the same samples, never trained on, and a warning when they diverge.

A policy that exploits its reward raises the reward while what the reward stands for gets worse. Each step the last
`RECENT` steps are compared with `EARLIER` ones, directly before them and again `DISTANCES` steps back, which sees a
slower change. A score rises (or falls) between two windows when the difference of their means exceeds both `Z` standard
errors and `EFFECT` standard deviations of single scores. The warning needs a reward that rises and an audit that falls
between the same two windows; flat scores, and a reward that rises alone, never cause it.

The noise of a step's mean is the larger of two estimates, from the spread of its samples and from the differences of
successive steps (von Neumann 1941), because samples of one prompt are not independent and policies wander. The test is
made at every step, so the constants were set by simulation (`tests/rewards/test_audit.py`): of 1,000 honest runs of 200
steps none warned, and 1% where the policy wanders, with a memory of 0.9, by as much as the sampling error of a step.

Left out: a stop of the run (`on_step` reads `audit/warning` and may raise `StopTraining`), and audits of evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrlhf.cli.functions import load_function
from lightrlhf.cli.groups import AuditArgs
from lightrlhf.data.batch import Rollout
from lightrlhf.data.scores import Scores
from lightrlhf.maths.ops import SumOverRanks
from lightrlhf.rewards.scorers import FunctionScorer, score_rollout
from lightrlhf.training.ranks import Ranks

RECENT, EARLIER = 4, 12  # steps of the two windows
DISTANCES = (0, 20)  # steps between them
KEPT = RECENT + EARLIER + max(DISTANCES)
Z = 4.0  # standard errors
EFFECT = 0.5  # standard deviations of single scores


# ------------------------------------------------------------------------------------------------------- statistics
class Moments(NamedTuple):
    """The scores of one step."""

    mean: float
    variance: float  # of single scores
    size: int


class Step(NamedTuple):
    """Reward and audit of one step."""

    reward: Moments
    audit: Moments


def change(earlier: Sequence[Moments], recent: Sequence[Moments]) -> float:
    """Difference of the two windows' means, recent - earlier; 0 where it may be noise or is small."""
    both = [*earlier, *recent]
    means = [[step.mean for step in window] for window in (earlier, recent)]
    squares = [(b - a) ** 2 for window in means for a, b in zip(window, window[1:])]
    noise = max(_mean([step.variance / step.size for step in both]), _mean(squares) / 2)
    error = math.sqrt(noise * (1 / len(earlier) + 1 / len(recent)))
    spread = math.sqrt(_mean([step.variance for step in both]))
    before, now = map(_mean, means)
    rounding = 1e-6 * max(abs(before), abs(now))
    return now - before if abs(now - before) > max(Z * error, EFFECT * spread, rounding) else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def diverges(history: Sequence[Step]) -> bool:
    """Whether the reward rises and the audit falls from an earlier window of steps to the last one."""
    recent = history[-RECENT:]
    for distance in DISTANCES:
        end = len(history) - RECENT - distance
        earlier = history[end - EARLIER : end]
        if end < EARLIER:
            break
        (rewards, audits), (new_rewards, new_audits) = zip(*earlier), zip(*recent)
        if change(audits, new_audits) < 0 < change(rewards, new_rewards):
            return True
    return False


class DivergenceMonitor:
    """The recent steps, and for how many there was no warning.

    A hack warns once: the next warning needs `KEPT` steps without one before it, so that no window reaches back.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        stored = state or {"history": [], "calm": KEPT}
        self.history = [Step(Moments(*reward), Moments(*audit)) for reward, audit in stored["history"]]
        self.calm: int = stored["calm"]  # steps in a row that were not warned of, at most KEPT

    def state(self) -> dict[str, Any]:
        """Plain values to store in a checkpoint."""
        return {"history": [[list(reward), list(audit)] for reward, audit in self.history], "calm": self.calm}

    def update(self, step: Step) -> tuple[bool, bool]:
        """Add a step, unless it has no scores; returns whether reward and audit diverge, and whether that is new."""
        if not (step.reward.size and step.audit.size):
            return False, False
        self.history = [*self.history[1 - KEPT :], step]
        is_apart = diverges(self.history)
        is_new = is_apart and self.calm >= KEPT
        self.calm = 0 if is_apart else min(self.calm + 1, KEPT)
        return is_apart, is_new


# -------------------------------------------------------------------------------------------------- in a training loop
class RewardAudit:
    """The audit of a run by `--audit_function`.

    state: of `state()`, from the checkpoint that the run is resumed from.
    Raises: UsageError when the function cannot be loaded.
    """

    def __init__(self, args: AuditArgs, ranks: Ranks, state: dict[str, Any] | None = None) -> None:
        assert args.audit_function is not None
        self.ranks, self.monitor = ranks, DivergenceMonitor(state)
        path = args.audit_function
        function = load_function(path, "--audit_function")
        timeout = args.reward_timeout or getattr(function, "timeout", 0.0)
        name = f"the audit {path}"
        self.scorer = FunctionScorer(function, name, timeout=timeout, path=path, takes_messages=True, ranks=ranks)

    def score(self, rollout: Rollout) -> Tensor:
        """Audit scores (B,) of a rollout's responses, NaN where missing."""
        return score_rollout(self.scorer, rollout)

    def compare(self, step: int, scores: Scores) -> dict[str, float]:
        """Compare reward and audit of a step over all ranks: its metrics. Prints a new warning."""
        assert scores.audit is not None
        reward, audit, rows = moments([scores.total, scores.audit, torch.zeros_like(scores.total)], self.ranks.sum)
        is_apart, is_new = self.monitor.update(Step(reward, audit))
        if is_new:
            self.ranks.print0(
                f"warning: up to step {step} the reward rose, to {reward.mean:.3g}, while the audit fell, to "
                f"{audit.mean:.3g}: the policy may exploit the reward; read its samples"
            )
        valid_ratio = audit.size / max(rows.size, 1)
        return {"audit/score": audit.mean, "audit/valid_ratio": valid_ratio, "audit/warning": float(is_apart)}

    def state(self) -> dict[str, Any]:
        """Plain values that a resumed run needs."""
        return self.monitor.state()


def moments(columns: Sequence[Tensor], sum_over_ranks: SumOverRanks) -> list[Moments]:
    """Mean, unbiased variance and number of the finite values of each column (B,) on all ranks; else NaN, 0, 0."""
    values = torch.stack([column.double() for column in columns], 1)  # (B, C)
    valid = values.isfinite()
    kept = torch.where(valid, values, torch.zeros_like(values))
    sums = sum_over_ranks(torch.stack([valid.sum(0).to(kept.dtype), kept.sum(0), kept.square().sum(0)]))  # (3, C)
    found = []
    for count, total, squares in sums.T.tolist():
        mean = total / count if count else math.nan
        variance = max(squares - count * mean**2, 0.0) / (count - 1) if count > 1 else 0.0
        found.append(Moments(mean, variance, int(count)))
    return found
