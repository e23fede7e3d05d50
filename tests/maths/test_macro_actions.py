"""Macro actions: segments tile the response, reduce and broadcast are adjoint, one token a segment is token PPO."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrlhf.maths import macro_actions as macro
from lightrlhf.maths.ops import gae

MASK = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 1, 1, 1, 0],
        [0, 1, 0, 0, 0, 0, 0, 0, 0, 0],  # one token
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # empty
        [0, 1, 1, 0, 0, 1, 1, 1, 0, 0],  # two turns
    ],
    dtype=torch.bool,
)


def masks():
    return st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4).map(torch.tensor)


def cuts(mask, seed):
    generator = torch.Generator().manual_seed(seed)
    yield from (macro.fixed_segments(mask, n) for n in (0, 1, 2, 5))
    yield macro.random_segments(mask, torch.rand(len(mask), 8, generator=generator))
    yield macro.perplexity(mask, torch.randn(mask.shape, generator=generator))


@settings(max_examples=40)
@given(masks(), st.integers(0, 1000))
def test_reduce_and_broadcast_are_adjoint(mask, seed):
    for segments in cuts(mask, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(segments.shape, generator=generator, dtype=torch.float64)
        y = torch.randn(len(segments), macro.num_segments(segments), generator=generator, dtype=torch.float64)
        left = (macro.reduce_sum(x, segments) * y).sum()
        assert float(left) == pytest.approx(float((x * macro.broadcast(y, segments)).sum()), abs=1e-12)


def test_fixed_by_hand():
    assert macro.fixed_segments(MASK, 3).tolist() == [
        [-1, -1, 0, 0, 0, 1, 1, 1, 2, -1],
        [-1, 0, -1, -1, -1, -1, -1, -1, -1, -1],
        [-1] * 10,
        [-1, 0, 0, -1, -1, 0, 1, 1, -1, -1],
    ]


def test_the_whole_response_is_one_segment_a_row():
    assert macro.fixed_segments(MASK, 0).amax(1).tolist() == [0, 0, -1, 0]


def test_randomized_by_hand():
    noise = torch.tensor([[0.9, 0.1, 0.5, 0.7]]).expand(4, -1)  # the order 3, 5, 10, 2
    assert macro.random_segments(MASK, noise)[0].tolist() == [-1, -1, 0, 0, 0, 1, 1, 1, 1, -1]
    long = torch.ones(1, 23, dtype=torch.bool)
    assert macro.random_segments(long, noise[:1])[0].bincount().tolist() == [3, 5, 10, 2, 3]  # the rest is one more


def test_randomized_rows_have_orders_of_their_own():
    long = torch.ones(16, 60, dtype=torch.bool)
    rows = macro.random_segments(long, torch.rand(16, 12, generator=torch.Generator().manual_seed(0)))
    assert len({tuple(row.tolist()) for row in rows}) > 10


def test_perplexity_by_hand():
    nll = torch.tensor([[9.0, 9.0, 1.0, 0.5, 2.0, 2.0, 3.0, 1.0, 1.5, 9.0]]).expand(4, -1)
    found = macro.perplexity(MASK, -nll)
    assert found[0].tolist() == [-1, -1, 0, 0, 1, 1, 2, 2, 3, -1]
    assert found[3].tolist() == [-1, 0, 0, -1, -1, 1, 2, 2, -1, -1]  # 9, 1 | 2, 3, 1: compared across the gap


def test_value_functions_by_hand():
    values = torch.arange(10.0).expand(4, -1)
    segments = macro.fixed_segments(MASK, 3)  # row 0: tokens 2 3 4 | 5 6 7 | 8; row 3: 1 2 5 | 6 7
    assert macro.value_equal(values, segments)[0].tolist() == [3, 6, 8]
    assert macro.value_equal(values, segments)[3].tolist() == pytest.approx([8 / 3, 6.5, 0])
    assert macro.value_unit(values, segments)[0].tolist() == [4, 7, 8]
    assert macro.value_first(values, segments)[0].tolist() == [2, 5, 8]
    position = (2 / 3 + 3 / 2 + 4) / (1 / 3 + 1 / 2 + 1)
    assert macro.value_position(values, segments)[0].tolist() == pytest.approx([position, position + 3, 8])
    early = (2 + 3 / 2 + 4 / 3) / (1 + 1 / 2 + 1 / 3)
    assert macro.value_position_first(values, segments)[0].tolist() == pytest.approx([early, early + 3, 8])


def test_a_segments_reward_is_summed_and_discounted_within():
    rewards = torch.ones(4, 10)
    found = macro.discounted_sum(rewards, macro.fixed_segments(MASK, 3), 0.5)
    assert found[0].tolist() == [1.75, 1.75, 1]
    assert found[2].tolist() == [0, 0, 0]


@settings(max_examples=40)
@given(masks(), st.integers(0, 1000))
def test_segments_tile_a_response_in_order_and_keep_sums_constants_and_bounds(mask, seed):
    values = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for segments in cuts(mask, seed):
        assert torch.equal(segments >= 0, mask)
        for row, kept in zip(segments, mask):
            steps = row[kept].diff()
            assert ((steps == 0) | (steps == 1)).all() and (not kept.any() or row[kept][0] == 0)
        assert torch.allclose(macro.reduce_sum(values, segments).sum(1), torch.where(mask, values, 0.0).sum(1))
        assert torch.equal(macro.lengths(segments).sum(1), mask.sum(1).float())
        there = macro.segment_mask(segments)
        for function in macro.VALUE_FUNCTIONS.values():
            assert torch.allclose(function(torch.full_like(values, 3.0), segments), there.double() * 3)
            found = function(values, segments)
            for row, m in there.nonzero().tolist():
                own = values[row, segments[row] == m]
                assert own.min() - 1e-9 <= found[row, m] <= own.max() + 1e-9


@settings(max_examples=40)
@given(masks(), st.integers(0, 6), st.integers(0, 4), st.integers(0, 4))
def test_segments_ignore_padding(mask, n, left, right):
    wide = macro.fixed_segments(torch.nn.functional.pad(mask, (left, right), value=False), n)
    assert torch.equal(wide[:, left : left + 12], macro.fixed_segments(mask, n))


@pytest.mark.parametrize("value_function", macro.VALUE_FUNCTIONS)
def test_one_token_a_segment_is_token_gae_bitwise(value_function):
    generator = torch.Generator().manual_seed(1)
    rewards, values = (torch.randn(MASK.shape, generator=generator) * MASK for _ in range(2))
    segments = macro.fixed_segments(MASK, 1)
    reduced = macro.VALUE_FUNCTIONS[value_function](values, segments)
    found = gae(macro.discounted_sum(rewards, segments, 0.97), reduced, macro.segment_mask(segments), 0.97, 0.9)
    for ours, expected in zip(found, gae(rewards, values, MASK, 0.97, 0.9)):
        assert torch.equal(macro.broadcast(ours, segments), expected)


def test_macro_gae_follows_the_papers_equations():
    """delta = R + gamma V' - V and A = delta + gamma lambda A' over segments, in float64 with plain loops."""
    gamma, lambd, n = 0.9, 0.8, 3
    generator = torch.Generator().manual_seed(2)
    rewards, values = (torch.randn(MASK.shape, generator=generator, dtype=torch.float64) * MASK for _ in range(2))
    segments = macro.fixed_segments(MASK, n)
    macro_rewards = macro.discounted_sum(rewards, segments, gamma)
    macro_values = macro.value_equal(values, segments)
    advantages, returns = gae(macro_rewards, macro_values, macro.segment_mask(segments), gamma, lambd)
    found = macro.broadcast(advantages, segments)
    for row in range(len(MASK)):
        places = MASK[row].nonzero()[:, 0].tolist()
        groups = [places[i : i + n] for i in range(0, len(places), n)]
        after_value = after_advantage = 0.0
        for group in reversed(groups):
            reward = sum(gamma**i * float(rewards[row, t]) for i, t in enumerate(group))
            value = sum(float(values[row, t]) for t in group) / len(group)
            after_advantage = reward + gamma * after_value - value + gamma * lambd * after_advantage
            after_value = value
            for t in group:
                assert math.isclose(float(found[row, t]), after_advantage, abs_tol=1e-12)
