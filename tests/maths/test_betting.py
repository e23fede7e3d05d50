"""E-values by betting: by hand, and how often they are wrong where nothing differs."""

import math

import pytest
import torch

from lightrlhf.maths.betting import e_values, log_wealth

ENOUGH = 20.0  # one comparison in twenty may be wrong


def test_the_wealth_by_hand():
    wealth = log_wealth(torch.tensor([1.0, 1.0, -0.5])).exp()
    third = 1 - 0.5 * 0.5  # mean 1 over second moment 1 is above the largest stake
    assert wealth.tolist() == pytest.approx([1.0, 1.5, 1.5 * third], rel=1e-12)
    slow = log_wealth(torch.tensor([0.2, 0.4], dtype=torch.float64)).exp()
    assert slow.tolist() == pytest.approx([1.0, 1 + 0.2 / ((0.04 + 1) / 2) * 0.4], rel=1e-12)


def test_either_side_and_no_side():
    assert e_values(torch.zeros(0)) == e_values(torch.zeros(9)) == (0.5, 0.5)
    better, worse = e_values(torch.ones(40))
    assert better == pytest.approx(0.5 * 1.5**39, rel=1e-9) and worse == 0.5
    assert e_values(-torch.ones(40)) == (worse, better)
    assert math.isfinite(e_values(torch.ones(10_000))[0])


def differences(kind: str, rows: int, generator: torch.Generator) -> torch.Tensor:
    """1,000 comparisons without a difference: (1000, rows)."""
    coins = torch.rand(1000, rows, generator=generator)
    if kind == "wins, ties and losses":
        return (coins < 0.35).float() - (coins > 0.65).float()
    if kind == "small":
        return 0.2 * torch.randn(1000, rows, generator=generator).clamp(-5, 5)
    if kind == "skewed":  # rare large wins, frequent small losses
        return torch.where(coins < 0.1, 0.9, -0.1)
    return torch.where(coins < 0.5, 0.5, -0.5)  # curves of means that cross again and again


@pytest.mark.parametrize("kind", ["wins, ties and losses", "small", "skewed", "coins"])
def test_few_verdicts_are_wrong_though_every_row_is_looked_at(kind):
    x = differences(kind, 1000, torch.Generator().manual_seed(3))
    largest = torch.maximum(log_wealth(x).amax(-1), log_wealth(-x).amax(-1)).exp() / 2
    assert (largest >= ENOUGH).float().mean() <= 0.05


def test_few_verdicts_are_wrong_about_a_leader_that_is_chosen_on_the_way():
    """Five equal arms; after each row every arm is compared with whichever leads."""
    arms = torch.rand(1000, 5, 400, generator=torch.Generator().manual_seed(4)).round()  # scores, 0 or 1
    pairs = [(a, b) for a in range(5) for b in range(a)]
    ever = torch.zeros(1000, dtype=torch.bool)
    for a, b in pairs:
        for x in (arms[:, a] - arms[:, b], arms[:, b] - arms[:, a]):
            ever |= log_wealth(x).amax(-1) >= math.log(2 * ENOUGH * len(pairs))
    assert ever.float().mean() <= 0.05


def test_a_difference_is_found():
    coins = torch.rand(200, 1000, generator=torch.Generator().manual_seed(5))
    x = (coins < 0.45).float() - (coins > 0.65).float()  # wins 45%, losses 35%
    assert (log_wealth(x).amax(-1) >= math.log(2 * ENOUGH)).float().mean() > 0.5
