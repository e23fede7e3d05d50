"""Each formula against a float64 reference written with plain loops from the paper it comes from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrlhf.maths import ops


def masks(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Random masks with gaps; each row has at least one True but the last, which has none."""
    mask = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:, 1] = True
    mask[-1] = False
    return mask


def gae_by_hand(rewards, values, mask, gamma, lambd):
    """Schulman et al. 2016, eq. 16: A_t = sum_l (gamma lambda)^l delta_{t+l}, eq. 12 for delta, over the actions."""
    advantages = torch.zeros_like(rewards)
    returns = torch.zeros_like(rewards)
    for b in range(rewards.shape[0]):
        steps = [t for t in range(rewards.shape[1]) if mask[b, t]]
        v = [float(values[b, t]) for t in steps] + [0.0]
        r = [float(rewards[b, t]) for t in steps]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(steps))]
        for i, t in enumerate(steps):
            advantages[b, t] = sum((gamma * lambd) ** (j - i) * delta[j] for j in range(i, len(steps)))
            returns[b, t] = advantages[b, t] + v[i]
    return advantages, returns


@pytest.mark.parametrize("gamma, lambd", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_gae_is_the_sum_of_discounted_deltas_also_with_gaps(gamma, lambd):
    rewards, values = torch.randn(4, 9, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    mask = masks(4, 9)
    advantages, returns = ops.gae(rewards, values, mask, gamma, lambd)
    expected, expected_returns = gae_by_hand(rewards, values, mask, gamma, lambd)
    assert torch.allclose(advantages, expected, atol=1e-12)
    assert torch.allclose(returns, expected_returns, atol=1e-12)


def test_gae_with_lambda_one_is_the_return_less_the_value():
    rewards, values = torch.randn(2, 5), torch.randn(2, 5)
    mask = torch.ones(2, 5, dtype=torch.bool)
    advantages, returns = ops.gae(rewards, values, mask, 1.0, 1.0)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    assert torch.allclose(returns, to_go, atol=1e-5)
    assert torch.allclose(advantages, to_go - values, atol=1e-5)


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(2, 8), st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**6))
def test_gae_never_looks_at_positions_that_are_no_actions(rows, width, gamma, lambd, seed):
    torch.manual_seed(seed)
    rewards, values = torch.randn(rows, width), torch.randn(rows, width)
    mask = masks(rows, width, seed)
    noise = torch.where(mask, 0.0, 1e3)
    one = ops.gae(rewards, values, mask, gamma, lambd)
    other = ops.gae(rewards + noise, values - noise, mask, gamma, lambd)
    for a, b in zip(one, other):
        assert torch.equal(a, b)
        assert (a[~mask] == 0).all()


def test_whitening_is_over_the_whole_rollout_and_keeps_good_above_bad():
    advantages = torch.tensor([[5.0, 5.0, 5.0], [-5.0, -5.0, -5.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    white = ops.whiten(advantages, mask)
    assert white[0].mean() > 0.5 and white[1, :2].mean() < -0.5  # per sequence both would be 0
    assert white[1, 2] == 0
    assert abs(float(white[mask].mean())) < 1e-6
    assert abs(float(white[mask].var(correction=0)) - 1) < 1e-4


def test_whitening_with_keep_mean_only_scales():
    values = torch.randn(3, 4) + 7
    mask = torch.ones(3, 4, dtype=torch.bool)
    white = ops.whiten(values, mask, keep_mean=True)
    assert torch.allclose(white.mean(), values.mean(), atol=1e-5)
    assert abs(float(white.std(correction=0)) - 1) < 1e-4


def test_whitening_in_two_shares_equals_whitening_at_once():
    """What two ranks do, played by hand: each sum over ranks adds what the other one would give."""
    values = torch.randn(6, 5, dtype=torch.float64)
    mask = masks(6, 5)
    whole = ops.whiten(values, mask)
    mean = values[mask].mean()
    shares = [slice(0, 2), slice(2, 6)]
    for share in shares:
        totals = iter(
            [
                torch.stack([mask.sum().double(), values[mask].sum()]),
                (values - mean)[mask].pow(2).sum(),
            ]
        )
        part = ops.whiten(values[share], mask[share], sum_over_ranks=lambda _, totals=totals: next(totals))
        assert torch.allclose(part, whole[share], atol=1e-12)


def test_masked_mean_of_nothing_is_zero_and_hidden_nans_do_not_count():
    values = torch.tensor([[1.0, math.nan, 3.0], [math.nan, math.nan, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    rows = ops.masked_mean(values, mask, 1)
    assert rows.tolist() == [2.0, 0.0]
    assert float(ops.masked_mean(values.detach(), mask)) == 2.0
    rows.sum().backward()
    assert torch.isfinite(values.grad).all()


def test_positions_count_real_tokens_and_are_never_negative():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    assert ops.position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


def test_the_clipped_surrogate_by_hand():
    """Far from 1 the ratio counts where it makes the objective worse, else the nearest bound."""
    ratio = torch.tensor([3.0, 3.0, 0.1, 0.1, 1.1, 0.9])
    found = ops.clipped_surrogate(ratio.log(), torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0]), 0.2)
    assert torch.allclose(found, torch.tensor([2.4, -6.0, 0.2, -1.6, 2.2, -1.8]))


def test_kl_estimators_are_what_their_names_say():
    """Schulman 2020, with r = pi / ref by the sampled tokens: k1 = log r, k2 = log(r)^2 / 2, k3 = 1/r - 1 + log r."""
    pi, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    for name, formula in {
        "k1": lambda x: x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(-x) - 1 + x,
    }.items():
        expected = [formula(float(a - b)) for a, b in zip(pi, ref)]
        assert ops.KL_ESTIMATORS[name](pi, ref).tolist() == pytest.approx(expected, abs=1e-6)


def test_k1_and_k3_are_unbiased_and_the_gradient_of_k2_is_that_of_the_kl():
    logits, ref_logits = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    logits.requires_grad_()
    logprobs, ref = logits.log_softmax(0), ref_logits.log_softmax(0)
    probs = logprobs.exp()
    kl = (probs * (logprobs - ref)).sum()
    for name in ("k1", "k3"):
        assert float((probs * ops.KL_ESTIMATORS[name](logprobs, ref)).sum()) == pytest.approx(float(kl), abs=1e-12)
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (found,) = torch.autograd.grad((probs.detach() * ops.kl_k2(logprobs, ref)).sum(), logits)
    assert torch.allclose(found, expected, atol=1e-12)


def test_preference_loss_and_its_gradient_are_bradley_terry():
    chosen = torch.randn(5, dtype=torch.float64, requires_grad=True)
    rejected = torch.randn(5, dtype=torch.float64, requires_grad=True)
    loss = ops.preference_loss(chosen, rejected)
    loss.sum().backward()
    for i in range(5):
        margin = float(chosen[i] - rejected[i])
        assert float(loss[i]) == pytest.approx(math.log(1 + math.exp(-margin)), abs=1e-12)
        assert float(chosen.grad[i]) == pytest.approx(-1 / (1 + math.exp(margin)), abs=1e-12)
        assert float(rejected.grad[i]) == pytest.approx(1 / (1 + math.exp(margin)), abs=1e-12)


def test_preference_loss_stays_finite_at_large_margins():
    loss = ops.preference_loss(torch.tensor([1e4, -1e4]), torch.tensor([-1e4, 1e4]))
    assert loss.tolist() == [0.0, 2e4]


def test_explained_variance_is_one_when_perfect_and_zero_for_a_constant():
    returns, mask = torch.randn(3, 4), masks(3, 4)
    assert float(ops.explained_variance(returns, returns, mask)) == pytest.approx(1)
    assert float(ops.explained_variance(torch.zeros(3, 4), returns, mask)) == pytest.approx(0, abs=1e-6)
    assert float(ops.explained_variance(returns, returns, torch.zeros_like(mask))) == 0  # nothing counted, no NaN


@settings(max_examples=60)
@given(st.integers(1, 400), st.data())
def test_wilson_interval_holds_the_share_and_stays_in_the_unit_interval(trials, data):
    successes = data.draw(st.integers(0, trials))
    low, high = ops.wilson_interval(successes, trials)
    assert 0 <= low <= successes / trials + 1e-9 and successes / trials - 1e-9 <= high <= 1


def test_the_win_rate_counts_wins_and_half_of_the_ties():
    share, interval = ops.win_rate([(2.0, 1.0), (3.0, 1.0), (1.0, 1.0), (0.0, 1.0)])
    assert share == 0.625 and interval == ops.wilson_interval(2.5, 4)
    assert ops.win_rate([])[0] == 0


def test_wilson_interval_of_known_numbers():
    """Newcombe 1998, table I: 81 of 263 has (0.2553, 0.3662); 0 of 20 has (0, 0.1611)."""
    assert ops.wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert ops.wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert ops.wilson_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("wins", "quantile"), [((80, 90), 12.7062), ((88, 100, 104), 4.30265), ((88, 108) * 5, 2.26216)]
)
def test_the_interval_of_a_share_has_student_s_t_of_its_groups(wins, quantile):
    """Groups of 200 values. Quantiles of 1, 2 and 9 degrees of freedom: Abramowitz and Stegun 1964, table 26.10."""
    size, count, z = 200, 200 * len(wins), 1.959964
    values = [float(i < number) for number in wins for i in range(size)]
    share = sum(wins) / count
    variance = sum((number - share * size) ** 2 for number in wins) * len(wins) / (len(wins) - 1) / count**2
    trials = share * (1 - share) / variance * (z / quantile) ** 2
    assert len(wins) + 1 < trials < count - 1  # neither bound is met
    found = ops.share_interval(values, [group for group in range(len(wins)) for _ in range(size)])
    assert found == pytest.approx(ops.wilson_interval(share * trials, trials), abs=1e-4)


def test_episode_gae_equals_the_recursion_along_each_episode():
    lengths, gamma, lambd = [3, 1, 2], 0.9, 0.8
    episode = torch.tensor([index for index, length in enumerate(lengths) for _ in range(length)])
    rewards, values = torch.randn(2, 6)
    advantages, returns = ops.episode_gae(rewards, values, episode, gamma, lambd)
    for index in range(3):
        rows = (episode == index).nonzero()[:, 0].tolist()
        following, carried = 0.0, 0.0
        for row in reversed(rows):
            carried = float(rewards[row]) + gamma * following - float(values[row]) + gamma * lambd * carried
            following = float(values[row])
            assert float(advantages[row]) == pytest.approx(carried, abs=1e-6)
            assert float(returns[row]) == pytest.approx(carried + following, abs=1e-6)
