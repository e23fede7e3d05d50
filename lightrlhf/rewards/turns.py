"""Rewards of turns; credit by turn: a turn's actions are credited with the rewards that follow, not with those before.

With groups the return of turn t of episode i is its score without what the environment gave for earlier turns. Its
baseline is made of the returns of all members of the group from turn t on, 0 of those that have ended:

    A_it = G_it - mean of G_jt over the others j        G_it = sum of r_is over s >= t

which with `rloo` has the gradient of the mean reward (enumerated in tests/programs/test_agents.py). Rewards that are
centred among those that reached the turn, and then summed, have the wrong sign on going on.

Left out: a discount of groups' returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrlhf.data.batch import Rollout
from lightrlhf.data.scores import Scores
from lightrlhf.maths.groups import ADVANTAGES, group_advantages, group_moments
from lightrlhf.maths.ops import SumOverRanks


def advantages(
    rollout: Rollout, scores: Scores, total: Tensor, name: str, num_turns: int, sum_over_ranks: SumOverRanks
) -> Tensor:
    """Advantages of a rollout of episodes by a name of `ADVANTAGES`: (B, T-1), at actions.

    total: (B,) scores, NaN where missing; num_turns: at most, of an episode. Each group is divided by its largest
    deviation of a turn, so turns keep their proportions, and equal scores with unequal returns are not divided by 0.
    """
    assert rollout.turn is not None
    returns = returns_to_go(rollout, scores, total, num_turns).unbind(1)  # (B,) each
    by_turn = [group_moments(rollout.once(one), rollout.group, rollout.num_groups, sum_over_ranks) for one in returns]
    std = torch.stack([one.std for one in by_turn]).amax(0)
    batch_std = torch.stack([one.batch_std for one in by_turn]).amax(0)
    columns = [
        group_advantages(values, moments._replace(std=std, batch_std=batch_std), ADVANTAGES[name])
        for values, moments in zip(returns, by_turn)
    ]
    return torch.stack(columns, 1).gather(1, rollout.turn)


def turn_rewards(rollout: Rollout, scores: Scores, total: Tensor, num_turns: int, credit: str = "turn") -> Tensor:
    """The parts of the scores that lie on each turn: (B, num_turns); of responses (B, 1).

    By `turn` what the environment gave for it, and on the last one the rest, an outcome too; by `episode` the last turn
    has all. total: (B,) scores, NaN where missing.
    """
    if rollout.turn is None:
        return torch.where(rollout.ends() | total.isnan(), total, 0.0)[:, None]
    weight = float(scores.weights[-1]) if credit == "turn" else 0.0  # of the environment, which comes last
    rewards = torch.zeros(len(rollout), num_turns)
    for row, columns in enumerate(rollout.columns):
        facts = columns["episode"]
        earlier = weight * torch.tensor(facts["rewards"][: facts["turns"] - 1])
        rewards[row, : len(earlier)] = earlier
        rewards[row, facts["turns"] - 1] = total[row] - earlier.sum()
    return torch.where(total.isnan()[:, None], total[:, None], rewards)


def last_turns(rollout: Rollout, num_turns: int) -> Tensor:
    """Whether a turn is the last of each row's episode: (B, num_turns) bool; of responses (B, 1)."""
    if rollout.turn is None:
        return torch.ones(len(rollout), 1, dtype=torch.bool)
    counts = torch.tensor([columns["episode"]["turns"] for columns in rollout.columns])  # (B,)
    return torch.arange(1, num_turns + 1) == counts[:, None]


def unfinished(rollout: Rollout) -> Tensor:
    """Responses that were stopped by length, and episodes that were, or that a limit cut: (B,) bool."""
    if rollout.turn is None:
        return rollout.truncated
    return rollout.truncated | torch.tensor(
        [columns["episode"]["cut"] for columns in rollout.columns], dtype=torch.bool
    )


def returns_to_go(rollout: Rollout, scores: Scores, total: Tensor, num_turns: int) -> Tensor:
    """Scores without the environment's rewards before each turn, 0 of turns after the end: (B, num_turns)."""
    weight = float(scores.weights[-1])  # of the environment, which comes last
    returns = torch.zeros(len(rollout), num_turns)
    for row, columns in enumerate(rollout.columns):
        facts = columns["episode"]
        earned = 0.0
        for turn in range(facts["turns"]):
            returns[row, turn] = total[row] - weight * earned
            earned += facts["rewards"][turn] if turn < len(facts["rewards"]) else 0.0
    return torch.where(total.isnan()[:, None], total[:, None], returns)
