"""Advantages of groups and of episodes, against formulas written out."""

from __future__ import annotations

import pytest
import torch

from lightrlhf.maths.ops import episode_gae, group_advantages


def test_group_advantages_equal_a_float64_reference():
    returns = torch.randn(12, dtype=torch.float64)
    advantages = group_advantages(returns, 4)
    for start in range(0, 12, 4):
        group = returns[start : start + 4].tolist()
        mean = sum(group) / 4
        deviation = (sum((one - mean) ** 2 for one in group) / 4) ** 0.5
        expected = [(one - mean) / (deviation + 1e-6) for one in group]
        assert advantages[start : start + 4].tolist() == pytest.approx(expected, abs=1e-12)


def test_equal_returns_have_no_advantage():
    assert group_advantages(torch.tensor([0.3, 0.3, 0.3]), 3).tolist() == [0, 0, 0]


def test_episode_gae_equals_the_recursion_along_each_episode():
    lengths, gamma, lambd = [3, 1, 2], 0.9, 0.8
    episode = torch.tensor([index for index, length in enumerate(lengths) for _ in range(length)])
    rewards, values = torch.randn(2, 6)
    advantages, returns = episode_gae(rewards, values, episode, gamma, lambd)
    for index in range(3):
        rows = (episode == index).nonzero()[:, 0].tolist()
        following, carried = 0.0, 0.0
        for row in reversed(rows):
            carried = float(rewards[row]) + gamma * following - float(values[row]) + gamma * lambd * carried
            following = float(values[row])
            assert float(advantages[row]) == pytest.approx(carried, abs=1e-6)
            assert float(returns[row]) == pytest.approx(carried + following, abs=1e-6)
