"""Properties of the maths on drawn inputs, 1,000 examples each; `LIGHTRLHF_EXAMPLES=10000` draws more.

A property holds for every input, so a wrong example is a counterexample, which hypothesis shrinks. One line a property.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from helpers.rollouts import advantages_of
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrlhf.data.batch import Batch, epoch_order, inference_batches, response_batch
from lightrlhf.maths import head as heads
from lightrlhf.maths import macro_actions as macro
from lightrlhf.maths import ops
from lightrlhf.models.packing import pack_texts
from lightrlhf.rewards.kl import AdaptiveKL
from lightrlhf.rewards.scorers import read_together

many = settings(max_examples=int(os.environ.get("LIGHTRLHF_EXAMPLES", "1000")), deadline=None)
SEED = st.integers(0, 2**31)
NUMBER = st.floats(-20, 20)
UNIT = st.floats(0, 1)
PROPERTIES = []


def holds(*strategies, **named):
    """Registers a property: a function of drawn values that asserts."""

    def register(function):
        PROPERTIES.append(pytest.param(many(given(*strategies, **named)(function)), id=function.__name__))
        return function

    return register


@pytest.mark.parametrize("check", PROPERTIES)
def test_hypothesis_property(check, case, request):
    try:
        check()
        seen = ""
    except AssertionError as counterexample:
        seen = " ".join([str(counterexample), *getattr(counterexample, "__notes__", [])])[:400].replace("\n", " ")
    case(request.node.callspec.id, not seen, seen)


def drawn(seed: int, rows: int = 3, width: int = 7):
    """Rewards, values and a mask with gaps, perhaps empty rows."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, width, generator=g, dtype=torch.float64) for _ in range(2))
    return rewards, values, torch.rand(rows, width, generator=g) < torch.rand(rows, 1, generator=g)


def close(a, b, tolerance: float = 1e-9) -> bool:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    return torch.allclose(a, b, atol=tolerance, rtol=tolerance)


def widened(tensor: torch.Tensor, left: int, right: int, fill=0) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (left, right), value=fill)


# ------------------------------------------------------------------------------------------------- masks and sums
@holds(SEED)
def positions_count_tokens(seed):
    mask = drawn(seed)[2]
    for row, kept in zip(ops.position_ids(mask), mask):
        assert row[kept].tolist() == list(range(int(kept.sum())))


@holds(SEED, st.integers(0, 5), st.integers(0, 5))
def positions_ignore_padding(seed, left, right):
    mask = drawn(seed)[2]
    found = ops.position_ids(widened(mask, left, right, False))[:, left : left + 7]
    assert torch.equal(found[mask], ops.position_ids(mask)[mask])


@holds(SEED, NUMBER)
def a_masked_mean_ignores_what_is_not_counted(seed, junk):
    values, _, mask = drawn(seed)
    other = torch.where(mask, values, torch.full_like(values, junk))
    assert torch.equal(ops.masked_mean(values, mask, 1), ops.masked_mean(other, mask, 1))
    nan = torch.where(mask, values, torch.full_like(values, math.nan))
    assert torch.isfinite(ops.masked_mean(nan, mask, 1)).all()


@holds(SEED, st.booleans())
def whitening_has_mean_zero_and_variance_one(seed, keep):
    values, _, mask = drawn(seed, 4, 9)
    found = ops.whiten(values, mask, keep_mean=keep)
    assert (found[~mask] == 0).all()
    if mask.sum() > 1:
        assert close(found[mask].mean(), values[mask].mean() if keep else torch.zeros((), dtype=torch.float64), 1e-9)
        variance = values[mask].var(correction=0)
        assert close(found[mask].var(correction=0), variance / (variance + 1e-8), 1e-6)


@holds(SEED, NUMBER, st.floats(0.1, 10))
def whitening_forgets_shift_and_scale(seed, shift, scale):
    values, _, mask = drawn(seed)
    if mask.sum() > 1 and values[mask].var() > 1e-2:
        assert close(ops.whiten(values * scale + shift, mask), ops.whiten(values, mask), 1e-4)


@holds(SEED, st.integers(1, 5))
def whitening_over_ranks_is_whitening_of_all(seed, cut):
    values, _, mask = drawn(seed, 6)
    parts = [(values[:cut], mask[:cut]), (values[cut:], mask[cut:])]
    count = torch.stack([mask.sum().double(), torch.where(mask, values, 0.0).sum()])
    mean = count[1] / count[0].clamp(min=1)
    square = torch.where(mask, values - mean, 0.0).pow(2).sum()
    found = []
    for part in parts:
        sums = iter([count, square])
        found.append(ops.whiten(*part, sum_over_ranks=lambda tensor, sums=sums: next(sums)))
    assert close(torch.cat(found), ops.whiten(values, mask))


# ------------------------------------------------------------------------------------------------------------- GAE
@holds(SEED, UNIT, UNIT)
def advantages_and_returns_differ_by_values(seed, gamma, lambd):
    rewards, values, mask = drawn(seed)
    advantages, returns = ops.gae(rewards, values, mask, gamma, lambd)
    assert close(returns[mask], (advantages + values)[mask]) and not advantages[~mask].any()


@holds(SEED, UNIT, UNIT, st.integers(0, 4), st.integers(0, 4))
def advantages_ignore_padding(seed, gamma, lambd, left, right):
    rewards, values, mask = drawn(seed)
    wide = ops.gae(
        widened(rewards, left, right, 7.0),
        widened(values, left, right, 7.0),
        widened(mask, left, right, False),
        gamma,
        lambd,
    )
    for one, other in zip(wide, ops.gae(rewards, values, mask, gamma, lambd)):
        assert torch.equal(one[:, left : left + 7], other)


@holds(SEED, UNIT, UNIT)
def advantages_ignore_gaps(seed, gamma, lambd):
    rewards, values, mask = drawn(seed)
    whole = ops.gae(rewards, values, mask, gamma, lambd)[0]
    for row in range(3):
        kept = mask[row]
        if kept.any():
            alone = ops.gae(rewards[row, kept][None], values[row, kept][None], kept[kept][None], gamma, lambd)[0]
            assert torch.equal(whole[row, kept], alone[0])


@holds(SEED, UNIT, UNIT, NUMBER, NUMBER)
def advantages_are_linear(seed, gamma, lambd, a, b):
    (r1, v1, mask), (r2, v2, _) = drawn(seed), drawn(seed + 1)
    both = ops.gae(a * r1 + b * r2, a * v1 + b * v2, mask, gamma, lambd)[0]
    assert close(both, a * ops.gae(r1, v1, mask, gamma, lambd)[0] + b * ops.gae(r2, v2, mask, gamma, lambd)[0], 1e-7)


@holds(SEED, UNIT)
def advantages_vanish_where_values_are_right(seed, gamma):
    rewards, _, mask = drawn(seed)
    _, returns = ops.gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    assert close(ops.gae(rewards, returns, mask, gamma, 0.7)[0], torch.zeros_like(rewards), 1e-9)


@holds(SEED, UNIT)
def lambda_one_has_returns_without_values(seed, gamma):
    rewards, values, mask = drawn(seed)
    plain = ops.gae(rewards, torch.zeros_like(values), mask, gamma, 1.0)[1]
    assert close(ops.gae(rewards, values, mask, gamma, 1.0)[1], plain, 1e-9)


@holds(SEED, UNIT, UNIT)
def later_rewards_move_no_later_advantage(seed, gamma, lambd):
    rewards, values, mask = drawn(seed)
    changed = rewards.clone()
    changed[:, 3] += 5
    one, other = (ops.gae(r, values, mask, gamma, lambd)[0] for r in (rewards, changed))
    assert torch.equal(one[:, 4:], other[:, 4:])


# ------------------------------------------------------------------------------------------------- surrogate and KL
@holds(NUMBER, st.floats(-3, 3), st.floats(0.01, 0.5))
def the_surrogate_is_at_most_the_plain_one(advantage, log_ratio, clip):
    x, a = torch.tensor(log_ratio, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64)
    assert ops.clipped_surrogate(x, a, clip) <= x.exp() * a + 1e-12


@holds(SEED, st.integers(1, 3))
def sums_over_micro_batches_are_the_sum_over_all(seed, size):
    new, old, mask = drawn(seed)
    advantages = drawn(seed + 1)[0]
    whole = ops.policy_loss(new, old, advantages, mask, 0.2)
    parts = zip(*(tensor.split(size) for tensor in (new, old, advantages, mask)))
    assert close(sum(ops.policy_loss(*part, 0.2) for part in parts), whole)


@holds(SEED, st.integers(0, 4), st.integers(0, 4))
def a_loss_ignores_padding(seed, left, right):
    new, old, mask = drawn(seed)
    advantages = drawn(seed + 1)[0]
    wide = [widened(tensor, left, right, 3.0) for tensor in (new, old, advantages)]
    found = ops.policy_loss(*wide, widened(mask, left, right, False), 0.2)
    assert close(found, ops.policy_loss(new, old, advantages, mask, 0.2))


@holds(NUMBER, NUMBER)
def kl_estimators_agree_in_sign_and_order(logp, ref):
    p, q = (torch.tensor(x, dtype=torch.float64) for x in (logp, ref))
    assert ops.kl_k1(p, q) == -ops.kl_k1(q, p) and ops.kl_k2(p, q) == ops.kl_k2(q, p)
    assert ops.kl_k3(p, q) >= max(0.0, float(ops.kl_k1(p, q)) - 1) - 1e-9
    assert ops.kl_k3(p, p) == ops.kl_k2(p, p) == ops.kl_k1(p, p) == 0


@holds(st.floats(1e-4, 1), st.floats(-50, 50), st.floats(0.1, 20), st.integers(0, 10_000))
def the_kl_weight_moves_towards_its_target(value, kl, target, count):
    weight = AdaptiveKL(value, target)
    weight.update(kl, count)
    assert weight.value > 0 and abs(weight.value / value - 1) <= 0.2 * count / 10_000 + 1e-12
    assert (weight.value >= value) if kl >= target else (weight.value <= value)


# ----------------------------------------------------------------------------------------------- group advantages
@holds(SEED, st.integers(2, 5), NUMBER, st.floats(0.5, 10))
def group_advantages_forget_shift_and_scale(seed, size, shift, scale):
    returns = torch.randn(3 * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    one = advantages_of(returns, size)
    if returns.view(3, -1).std(1).min() > 0.1:
        assert close(advantages_of(returns * scale + shift, size), one, 1e-3)
    assert close(one.view(3, -1).sum(1), torch.zeros(3, dtype=torch.float64), 1e-9)


@holds(NUMBER, st.integers(1, 6))
def equal_returns_have_no_advantage(value, size):
    assert close(advantages_of(torch.full((2 * size,), value, dtype=torch.float64), size), 0.0, 1e-6)


@holds(SEED, st.integers(2, 4))
def group_advantages_follow_their_rows(seed, size):
    returns = torch.randn(2 * size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    swapped = returns.view(2, size).flip(0).flatten()
    found = advantages_of(swapped, size).view(2, size).flip(0).flatten()
    assert close(found, advantages_of(returns, size))


# ------------------------------------------------------------------------------------------------- macro actions
def segmentations(mask, seed, n):
    g = torch.Generator().manual_seed(seed)
    yield macro.fixed(mask, n)
    yield macro.randomized(mask, torch.rand(len(mask), 8, generator=g))
    yield macro.perplexity(mask, torch.randn(mask.shape, generator=g))


@holds(SEED, st.integers(0, 6))
def segments_tile_a_response_in_order(seed, n):
    mask = drawn(seed, 3, 15)[2]
    for segments in segmentations(mask, seed, n):
        assert torch.equal(segments >= 0, mask)
        for row, kept in zip(segments, mask):
            steps = row[kept].diff()
            assert ((steps == 0) | (steps == 1)).all() and (not kept.any() or row[kept][0] == 0)


@holds(SEED, st.integers(0, 6))
def sums_over_segments_keep_the_total(seed, n):
    values, _, mask = drawn(seed, 3, 15)
    for segments in segmentations(mask, seed, n):
        assert close(macro.reduce_sum(values, segments).sum(1), torch.where(mask, values, 0.0).sum(1))
        assert torch.equal(macro.lengths(segments).sum(1), mask.sum(1).float())


@holds(SEED, st.integers(0, 6), NUMBER)
def every_value_function_keeps_a_constant(seed, n, constant):
    mask = drawn(seed, 3, 15)[2]
    for segments in segmentations(mask, seed, n):
        there = macro.segment_mask(segments)
        for function in macro.VALUE_FUNCTIONS.values():
            found = function(torch.full(mask.shape, constant, dtype=torch.float64), segments)
            assert close(found, there.double() * constant, 1e-9)


@holds(SEED, st.integers(0, 6))
def a_segments_value_lies_between_its_tokens(seed, n):
    values, _, mask = drawn(seed, 3, 15)
    for segments in segmentations(mask, seed, n):
        for function in macro.VALUE_FUNCTIONS.values():
            found = function(values, segments)
            for row in range(3):
                for m in range(int(segments[row].max()) + 1):
                    own = values[row, segments[row] == m]
                    assert own.min() - 1e-9 <= found[row, m] <= own.max() + 1e-9


@holds(SEED, UNIT, UNIT, st.sampled_from(sorted(macro.VALUE_FUNCTIONS)))
def one_token_a_segment_is_token_gae(seed, gamma, lambd, name):
    rewards, values, mask = drawn(seed)
    segments = macro.fixed(mask, 1)
    reduced = macro.VALUE_FUNCTIONS[name](values, segments)
    found = ops.gae(macro.discounted_sum(rewards, segments, gamma), reduced, macro.segment_mask(segments), gamma, lambd)
    for one, other in zip(found, ops.gae(rewards, values, mask, gamma, lambd)):
        assert close(macro.broadcast(one, segments), other)


@holds(SEED, st.integers(0, 6), st.integers(0, 4), st.integers(0, 4))
def segments_ignore_padding(seed, n, left, right):
    mask = drawn(seed, 3, 15)[2]
    wide = macro.fixed(widened(mask, left, right, False), n)
    assert torch.equal(wide[:, left : left + 15], macro.fixed(mask, n))


@holds(st.lists(NUMBER, min_size=2, max_size=2), NUMBER)
def bradley_terry_forgets_a_shift(scores, shift):
    a, b = (torch.tensor(x, dtype=torch.float64) for x in scores)
    assert close(ops.preference_loss(a + shift, b + shift), ops.preference_loss(a, b), 1e-7)
    assert close((-ops.preference_loss(a, b)).exp() + (-ops.preference_loss(b, a)).exp(), 1.0)


# --------------------------------------------------------------------------------------------- packing and batches
ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6)


def batch_of(rows) -> Batch:
    prompts = [[100 * i + t for t in range(p)] for i, (p, _) in enumerate(rows, start=1)]
    return response_batch(prompts, [[100 * i + 50 + t for t in range(r)] for i, (_, r) in enumerate(rows, start=1)], 0)


@holds(ROWS)
def every_response_token_is_one_action(rows):
    batch = batch_of(rows)
    assert batch.action_mask.sum(1).tolist() == [r for _, r in rows]
    assert not (batch.action_mask & ~batch.attention_mask[:, 1:]).any()


@holds(ROWS, st.integers(1, 6))
def selecting_rows_cuts_padding_alone(rows, count):
    batch = batch_of(rows)
    part = batch.select(torch.arange(min(count, len(rows))))
    for i in range(len(part)):
        kept = batch.input_ids[i][batch.attention_mask[i]]
        assert torch.equal(part.input_ids[i][part.attention_mask[i]], kept)
        assert part.action_mask[i].sum() == batch.action_mask[i].sum()


@holds(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 16))
def passes_hold_every_row_once(lengths, size):
    parts = [part.tolist() for part in inference_batches(torch.tensor(lengths), size)]
    assert sorted(i for part in parts for i in part) == list(range(len(lengths))) and max(map(len, parts)) <= size


@holds(st.integers(1, 60), st.integers(0, 999), st.integers(0, 9))
def an_epoch_is_a_permutation(count, seed, epoch):
    assert sorted(epoch_order(count, seed, epoch)) == list(range(count))


@holds(
    SEED,
    st.integers(1, 9),
    st.integers(0, 4),
    st.integers(1, 6),
    st.sampled_from([1, 8, 4096]),
    st.booleans(),
    st.sampled_from([None, 16]),
)
def a_packed_row_shows_each_text_itself_alone(seed, common, more, count, hidden_size, is_grouped, most_columns):
    """Each token of each text stands in the packed row, at its own position, and sees its own text up to itself."""
    g = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, 4, (common + i,), generator=g).tolist() for i in range(2)]
    ends = [torch.randint(1, 4, (1 + more * (i % 3),), generator=g).tolist() for i in range(count + 2)]
    group = torch.randint(0, 2, (count + 2,), generator=g)
    batch = response_batch([prompts[i] for i in group], ends, 0)
    packed = pack_texts(batch.input_ids, batch.attention_mask, group if is_grouped else None, hidden_size, most_columns)
    if packed is None:
        return
    assert packed.input_ids.shape[1] <= (most_columns or 10**9)
    for i, (ids, kept) in enumerate(zip(batch.input_ids, batch.attention_mask)):
        own, row = packed.columns[i][kept], packed.rows[i]
        assert torch.equal(packed.input_ids[row, own], ids[kept])
        assert packed.positions[row, own].tolist() == list(range(len(own)))
        for t, column in enumerate(own.tolist()):
            assert packed.visible[row, column].nonzero()[:, 0].tolist() == own[: t + 1].tolist()


# ----------------------------------------------------------------------------------------------------- statistics
SHARES = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 5)), min_size=1, max_size=30)


@holds(SHARES)
def an_interval_holds_its_share_and_stays_within_bounds(rows):
    values, groups = [value for value, _ in rows], [group for _, group in rows]
    low, high = ops.share_interval(values, groups)
    mean = sum(values) / len(values)
    assert 0 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1 and high - low > 0.01


@holds(SHARES)
def groups_make_an_interval_no_narrower(rows):
    values, groups = [value for value, _ in rows], [group for _, group in rows]
    low, high = ops.share_interval(values, groups)
    plain = ops.share_interval(values)
    assert low <= plain[0] + 1e-9 and high >= plain[1] - 1e-9
    assert plain == ops.wilson_interval(sum(values), len(values))


@holds(SHARES)
def an_interval_mirrors_its_share(rows):
    values, groups = [value for value, _ in rows], [group for _, group in rows]
    low, high = ops.share_interval(values, groups)
    other = ops.share_interval([1 - value for value in values], groups)
    assert close((1 - high, 1 - low), other, 1e-9)


@holds(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=30), st.integers(1, 5))
def copies_of_a_value_in_its_group_say_nothing_more(values, copies):
    """Of wins and losses; ties, which vary less, may count as more than their groups."""
    groups = list(range(len(values)))
    assert close(ops.share_interval(values * copies, groups * copies), ops.share_interval(values, groups))


@holds(st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=20))
def win_rates_of_both_sides_add_to_one(pairs):
    rate, _ = ops.win_rate(pairs)
    assert math.isclose(rate + ops.win_rate([(b, a) for a, b in pairs])[0], 1.0)
    assert ops.win_rate([*pairs, (math.nan, 1.0), (None, None)]) == ops.win_rate(pairs)


@holds(SEED)
def explained_variance_is_at_most_one_and_one_where_exact(seed):
    returns, values, mask = drawn(seed)
    assert ops.explained_variance(values, returns, mask) <= 1 + 1e-9
    if mask.sum() > 1:
        assert close(ops.explained_variance(returns, returns, mask), 1.0, 1e-9)


@holds(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))), st.lists(st.integers(1, 9), min_size=5, max_size=5))
def responses_kept_together_were_all_compared(there, lengths):
    kept = read_together(there, lengths)
    assert len(kept) != 1 and all((a, b) in there for a in kept for b in kept if a != b)


@holds(SEED, st.integers(1, 9), st.floats(0.3, 3))
def log_probabilities_do_not_depend_on_chunks(seed, chunk, temperature):
    g = torch.Generator().manual_seed(seed)
    logits, targets = torch.randn(6, 5, generator=g), torch.randint(5, (6,), generator=g)
    one, other = (heads.head_logprobs(logits, lambda h: h, targets, temperature, True, True, n) for n in (chunk, 4096))
    assert all(close(a, b, 1e-6) for a, b in zip(one, other))
    assert (one[0] <= 1e-6).all() and (one[1] <= math.log(5) + 1e-5).all() and (one[1] >= -1e-6).all()


assert len(PROPERTIES) >= 40, len(PROPERTIES)
