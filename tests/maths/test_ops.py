"""Each formula against a float64 reference with plain loops from the paper it comes from, and its properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightrlhf.maths import ops
from lightrlhf.maths.student import interval

SEED = st.integers(0, 2**31)
NUMBER = st.floats(-20, 20)
UNIT = st.floats(0, 1)


def drawn(seed: int, rows: int = 3, width: int = 9) -> tuple[torch.Tensor, ...]:
    """Rewards, values and a mask with gaps; the last row has no action."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, width, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(rows, width, generator=g) < torch.rand(rows, 1, generator=g)
    mask[0, 0] = True
    mask[-1] = False
    return rewards, values, mask


def close(a, b, tolerance: float = 1e-9) -> bool:
    return torch.allclose(*(torch.as_tensor(x, dtype=torch.float64) for x in (a, b)), atol=tolerance, rtol=tolerance)


def widened(tensor: torch.Tensor, left: int, right: int, fill: float = 7) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (left, right), value=fill)


# ------------------------------------------------------------------------------------------------------- masks and sums
def test_positions_count_real_tokens_and_are_never_negative():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    assert ops.position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


@given(SEED)
def test_positions_count_tokens(seed):
    mask = drawn(seed)[2]
    for row, kept in zip(ops.position_ids(mask), mask):
        assert row[kept].tolist() == list(range(int(kept.sum())))


def test_masked_mean_of_nothing_is_zero_and_hidden_nans_do_not_count():
    values = torch.tensor([[1.0, math.nan, 3.0], [math.nan] * 3, [8.0, math.nan, math.nan]], requires_grad=True)
    mask = torch.tensor([[True, False, True], [False] * 3, [True, False, False]])
    rows = ops.masked_mean(values, mask, 1)
    assert rows.tolist() == [2.0, 0.0, 8.0]
    assert float(ops.masked_mean(values.detach(), mask)) == 4.0
    rows.sum().backward()
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("keep", [False, True])
@given(SEED)
def test_whitening_is_of_all_actions_together(keep, seed):
    values, _, mask = drawn(seed)
    kept = values[mask].tolist()
    mean = sum(kept) / len(kept)
    std = (sum((x - mean) ** 2 for x in kept) / len(kept) + 1e-8) ** 0.5
    found = ops.whiten(values, mask, keep_mean=keep)
    assert close(found[mask], [(x - mean) / std + (mean if keep else 0) for x in kept]) and not found[~mask].any()


@given(SEED, st.integers(1, 5))
def test_whitening_over_ranks_is_whitening_of_all(seed, cut):
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


# ----------------------------------------------------------------------------------------------------------- advantages
def gae_of(r: list[float], v: list[float], discounts: list[float], lambd: float) -> list[float]:
    """Schulman et al. 2016, eq. 16, the sum written out."""
    delta = [r[i] + discounts[i] * (v[i + 1] if i + 1 < len(v) else 0.0) - v[i] for i in range(len(r))]
    return [
        sum(delta[j] * lambd ** (j - i) * math.prod(discounts[i:j]) for j in range(i, len(r))) for i in range(len(r))
    ]


@pytest.mark.parametrize("gamma, lambd", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0), (0.0, 0.7)])
@given(SEED)
def test_advantages_are_the_sum_of_discounted_deltas_also_with_gaps(gamma, lambd, seed):
    rewards, values, mask = drawn(seed)
    advantages, returns = ops.gae(rewards, values, mask, gamma, lambd)
    for row in range(3):
        r, v = rewards[row][mask[row]].tolist(), values[row][mask[row]].tolist()
        expected = gae_of(r, v, [gamma] * len(r), lambd)
        assert close(advantages[row][mask[row]], expected)
        assert close(returns[row][mask[row]], [a + b for a, b in zip(expected, v)])
    assert not advantages[~mask].any() and not returns[~mask].any()


@given(SEED)
def test_a_discount_for_each_step(seed):
    rewards, values, mask = drawn(seed)
    discounts = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    advantages, _ = ops.gae(rewards, values, mask, discounts, 0.9)
    rows = [x[0][mask[0]].tolist() for x in (rewards, values, discounts)]
    assert close(advantages[0][mask[0]], gae_of(*rows, 0.9))


def test_advantages_of_episodes_are_those_along_each():
    lengths, (rewards, values) = [3, 1, 4], torch.randn(2, 8)
    episode = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
    advantages, returns = ops.episode_gae(rewards, values, episode, 0.9, 0.8)
    for i, n in enumerate(lengths):
        own = episode == i
        expected = gae_of(rewards[own].tolist(), values[own].tolist(), [0.9] * n, 0.8)
        assert close(advantages[own], expected, 1e-5) and close(returns[own], values[own] + advantages[own], 1e-5)


@given(SEED, UNIT, UNIT)
def test_gae_over_rows_is_gae_along_each_episode(seed, gamma, lambd):
    """Rows of three episodes in turn, with gaps; the last row of one has no action."""
    rewards, values, mask = drawn(seed, rows=7)
    episode, last = torch.tensor([4, 1, 4, 1, 1, 9, 4]), torch.tensor([0, 0, 0, 0, 0.5, -0.3, 0.7]).double()
    advantages, returns = ops.gae_over_rows(rewards, values, mask, episode, gamma, lambd, last)
    for number in (1, 4, 9):
        rows = episode == number
        own = mask & rows[:, None]
        r, v = rewards[own].tolist(), values[own].tolist()
        if r:
            r[-1] += gamma * float(last[rows].sum())
            expected = gae_of(r, v, [gamma] * len(r), lambd)
            assert close(advantages[own], expected) and close(returns[own] - values[own], expected)
    assert not advantages[~mask].any() and not returns[~mask].any()


@given(SEED, UNIT, UNIT, st.integers(0, 4), st.integers(0, 4))
def test_advantages_ignore_padding(seed, gamma, lambd, left, right):
    *tensors, mask = drawn(seed)
    wide = [widened(x, left, right) for x in tensors]
    wide = ops.gae(*wide, widened(mask, left, right, False), gamma, lambd)
    for one, other in zip(wide, ops.gae(*tensors, mask, gamma, lambd)):
        assert torch.equal(one[:, left : left + 9], other)


@given(SEED, UNIT, UNIT)
def test_advantages_ignore_gaps(seed, gamma, lambd):
    rewards, values, mask = drawn(seed)
    whole = ops.gae(rewards, values, mask, gamma, lambd)[0]
    for row in range(3):
        kept = mask[row]
        if kept.any():
            alone = ops.gae(rewards[row, kept][None], values[row, kept][None], kept[kept][None], gamma, lambd)[0]
            assert torch.equal(whole[row, kept], alone[0])


@given(SEED, UNIT, UNIT, NUMBER, NUMBER)
def test_advantages_are_linear(seed, gamma, lambd, a, b):
    (r1, v1, mask), (r2, v2, _) = drawn(seed), drawn(seed + 1)
    both = ops.gae(a * r1 + b * r2, a * v1 + b * v2, mask, gamma, lambd)[0]
    assert close(both, a * ops.gae(r1, v1, mask, gamma, lambd)[0] + b * ops.gae(r2, v2, mask, gamma, lambd)[0], 1e-7)


@given(SEED, UNIT)
def test_advantages_vanish_where_values_are_right(seed, gamma):
    rewards, _, mask = drawn(seed)
    _, returns = ops.gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    assert close(ops.gae(rewards, returns, mask, gamma, 0.7)[0], torch.zeros_like(rewards), 1e-9)


@given(SEED, UNIT, UNIT)
def test_later_rewards_move_no_later_advantage(seed, gamma, lambd):
    rewards, values, mask = drawn(seed)
    changed = rewards.clone()
    changed[:, 3] += 5
    one, other = (ops.gae(r, values, mask, gamma, lambd)[0] for r in (rewards, changed))
    assert torch.equal(one[:, 4:], other[:, 4:])


# ----------------------------------------------------------------------------------------------------- surrogate and KL
@given(SEED, st.integers(0, 4), st.integers(0, 4), st.integers(1, 3))
def test_the_policy_loss_ignores_padding_and_is_a_sum_over_micro_batches(seed, left, right, size):
    new, old, mask = drawn(seed)
    tensors = [new, old, drawn(seed + 1)[0]]
    whole = ops.policy_loss(*tensors, mask, 0.2)
    wide = [widened(x, left, right) for x in tensors]
    assert close(ops.policy_loss(*wide, widened(mask, left, right, False), 0.2), whole)
    parts = zip(*(tensor.split(size) for tensor in (*tensors, mask)))
    assert close(sum(ops.policy_loss(*part, 0.2) for part in parts), whole)


def test_the_clipped_surrogate_by_hand():
    """Far from 1 the ratio counts where it makes the objective worse, else the nearest bound."""
    ratio = torch.tensor([3.0, 3.0, 0.1, 0.1, 1.1, 0.9])
    found = ops.clipped_surrogate(ratio.log(), torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0]), 0.2)
    assert torch.allclose(found, torch.tensor([2.4, -6.0, 0.2, -1.6, 2.2, -1.8]))


def test_kl_estimators_are_what_their_names_say():
    """Schulman 2020, with r = pi / ref by the sampled tokens: k1 = log r, k2 = log(r)^2 / 2, k3 = 1/r - 1 + log r."""
    pi, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    for name, formula in {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(-x) - 1 + x}.items():
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


# ----------------------------------------------------------------------------------------------------------- statistics
@given(SEED)
def test_explained_variance_is_the_share_that_the_error_leaves(seed):
    returns, values, mask = drawn(seed)
    error, kept = (returns - values)[mask], returns[mask]
    found = float(ops.explained_variance(values, returns, mask))
    if len(kept) > 1:
        assert found == pytest.approx(1 - float(error.var(correction=0) / kept.var(correction=0)), rel=1e-6)
    assert float(ops.explained_variance(values, returns, torch.zeros_like(mask))) == 0  # nothing counted, no NaN


def wilson_by_bisection(share: float, n: float, side: int) -> float:
    """The p where |share - p| = z sqrt(p (1-p) / n), below or above the share."""
    low, high = (0.0, share) if side < 0 else (share, 1.0)
    for _ in range(200):
        p = (low + high) / 2
        inside = abs(share - p) <= 1.959963984540054 * (p * (1 - p) / n) ** 0.5
        if side < 0:
            low, high = (low, p) if inside else (p, high)
        else:
            low, high = (p, high) if inside else (low, p)
    return (low + high) / 2


def test_wilsons_interval_solves_its_equation():
    shares = [(0, 3), (3, 3), (1.5, 3), (0, 20), (1, 7), (81, 263), (15, 148), (30, 50), (49.5, 50), (1000, 1000)]
    for wins, n in shares:
        expected = [wilson_by_bisection(wins / n, n, side) for side in (-1, 1)]
        assert ops.wilson_interval(wins, n) == pytest.approx(expected, abs=1e-7), (wins, n)
    assert ops.wilson_interval(0, 0) == (0.0, 1.0)


def test_the_win_rate_counts_wins_and_half_of_the_ties_of_pairs_with_two_numbers():
    share, interval = ops.win_rate([(2.0, 1.0), (3.0, 1.0), (1.0, 1.0), (0.0, 1.0), (math.nan, 1.0), (None, 1.0)])
    assert share == 0.625 and interval == ops.wilson_interval(2.5, 4)
    assert ops.win_rate([])[0] == 0


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


SHARES = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 5)), min_size=1, max_size=30)


@given(SHARES)
def test_an_interval_holds_its_share_and_stays_within_bounds(rows):
    values, groups = [value for value, _ in rows], [group for _, group in rows]
    low, high = ops.share_interval(values, groups)
    mean = sum(values) / len(values)
    assert 0 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1 and high - low > 0.01


@given(SHARES)
def test_groups_make_an_interval_no_narrower(rows):
    values, groups = [value for value, _ in rows], [group for _, group in rows]
    low, high = ops.share_interval(values, groups)
    plain = ops.share_interval(values)
    assert low <= plain[0] + 1e-9 and high >= plain[1] - 1e-9
    assert plain == ops.wilson_interval(sum(values), len(values))


@given(SHARES)
def test_an_interval_mirrors_its_share(rows):
    values, groups = [value for value, _ in rows], [group for _, group in rows]
    low, high = ops.share_interval(values, groups)
    other = ops.share_interval([1 - value for value in values], groups)
    assert close((1 - high, 1 - low), other, 1e-9)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=30), st.integers(1, 5))
def test_copies_of_a_value_in_its_group_say_nothing_more(values, copies):
    """Of wins and losses; ties, which vary less, may count as more than their groups."""
    groups = list(range(len(values)))
    assert close(ops.share_interval(values * copies, groups * copies), ops.share_interval(values, groups))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.integers(1, 3))
def test_the_interval_of_numbers_is_student_s_over_their_groups(values, copies):
    found = ops.grouped_interval(values * copies, [*range(len(values))] * copies)
    assert close(found, interval(values)[1:], 1e-6)
    assert ops.grouped_interval(values, [0] * len(values)) == (-math.inf, math.inf)


def test_the_interval_of_numbers_in_groups_of_several_sizes_covers():
    """1,000 draws, nominal 95%; as if values were independent it covers 60%."""
    groups = [group for group in range(30) for _ in range(1 + group % 4)]
    generator, covered = torch.Generator().manual_seed(0), 0
    for _ in range(1000):
        effects, noise = (torch.randn(size, generator=generator) for size in (30, len(groups)))
        low, high = ops.grouped_interval((3 * effects[groups] + noise).tolist(), groups)
        covered += low <= 0 <= high
    assert 0.92 <= covered / 1000 <= 0.98


@given(st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=20))
def test_win_rates_of_both_sides_add_to_one(pairs):
    rate, _ = ops.win_rate(pairs)
    assert math.isclose(rate + ops.win_rate([(b, a) for a, b in pairs])[0], 1.0)
    assert ops.win_rate([*pairs, (math.nan, 1.0), (None, None)]) == ops.win_rate(pairs)


@pytest.mark.slow
@pytest.mark.parametrize("problems", [5, 10, 20, 50, 164])
@pytest.mark.parametrize("programs", [1, 4, 16])
def test_the_interval_of_pass_at_1_covers(problems, programs):
    """1,000 draws of problems with a share of correct programs from a Beta distribution; nominal 95%, at least 89%.

    As if programs were independent, 16 a problem, the interval covers 46% to 66%.
    """
    for a, b in ((0.3, 0.3), (1.0, 1.0), (5.0, 5.0), (0.5, 1.0)):
        torch.manual_seed(problems * 100 + programs)
        chances = torch.distributions.Beta(a, b).sample((1000, problems)).double()
        passed = torch.distributions.Binomial(programs, chances).sample()
        groups = [i for i in range(problems) for _ in range(programs)]
        covered = 0
        for row in passed.tolist():
            values = [float(i < count) for count in row for i in range(programs)]
            low, high = ops.share_interval(values, groups)
            covered += low <= a / (a + b) <= high
        assert covered / 1000 >= 0.89, (a, b)
