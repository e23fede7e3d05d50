"""Scores of models against formulas written out in float64, and what they must keep: RewardBench 2, pass@k, lengths."""

import itertools
import math
import random

import pytest
import torch

from lightrlhf.maths import bootstrap
from lightrlhf.maths.bootstrap import bootstrap_interval, resample
from lightrlhf.maths.length_control import length_controlled, length_controlled_win_rate
from lightrlhf.maths.ops import share_interval, wilson_interval
from lightrlhf.maths.passes import pass_at_k
from lightrlhf.maths.reward_bench import best_of_n, mean_interval, tied_scores, ties_score


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------------------- passes
@pytest.mark.parametrize(("n", "c"), [(n, c) for n in (1, 2, 5, 8) for c in range(n + 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, c):
    for k in range(1, n + 1):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-14)


def test_pass_at_k_of_many_samples_is_exact_and_does_not_overflow():
    exact = 1 - math.comb(9_990, 1_000) / math.comb(10_000, 1_000)  # whole numbers of thousands of digits
    assert pass_at_k(10_000, 10, 1_000) == pytest.approx(exact, rel=1e-12)
    assert pass_at_k(200, 0, 100) == 0 and pass_at_k(200, 101, 100) == 1


def test_pass_at_k_is_unbiased():
    """Its mean over binomial draws of n samples is 1 - (1 - p)^k, which 1 - (1 - c/n)^k is not."""
    n, p, k = 6, 0.3, 4
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-14)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_of_too_few_samples_is_refused(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, c, k)


# ------------------------------------------------------------------------------------------------------ RewardBench 2
def test_best_of_four_splits_equal_scores():
    assert best_of_n([2.0], [1.0, 0.0, -1.0]) == 1
    assert best_of_n([1.0], [2.0, 0.0, -1.0]) == 0
    assert best_of_n([1.0], [1.0, 0.0, -1.0]) == 1 / 2
    assert best_of_n([1.0], [1.0, 1.0, 1.0]) == 1 / 4
    assert best_of_n([1.0, 0.0], [1.0]) == 1 / 2


def test_best_of_four_by_chance_is_a_quarter():
    draw = random.Random(0)
    results = [best_of_n([draw.random()], [draw.random() for _ in range(3)]) for _ in range(20_000)]
    coarse = [best_of_n([draw.randrange(3)], [draw.randrange(3) for _ in range(3)]) for _ in range(20_000)]
    assert sum(results) / 20_000 == pytest.approx(0.25, abs=0.02)
    assert sum(coarse) / 20_000 == pytest.approx(0.25, abs=0.02)


def ties_by_hand(ref, tied) -> float:
    """The benchmark's score of the subset from scores by prompt: {prompt: (right, wrong)}, one number at a time."""
    gaps = {side: {p: min(r) - max(w) for p, (r, w) in rows.items()} for side, rows in (("ref", ref), ("tied", tied))}
    spreads = {p: max(r) - min(r) for p, (r, _) in tied.items()}
    both = [p for p in tied if p in ref]

    def mean(values):
        values = list(values)
        return sum(values) / len(values) if values else 0.0

    return (
        0.3 * mean(gap > 0 for gap in gaps["tied"].values())
        + 0.3 * mean(gap > 0 for gap in gaps["ref"].values())
        + 0.2 * mean(gaps["tied"][p] > spreads[p] for p in both)
        + 0.2 * mean(min(gaps["ref"][p], gaps["tied"][p]) > spreads[p] for p in both)
        + 0.01 * mean(math.tanh(min(gaps["ref"][p], gaps["tied"][p]) / spreads[p] - 1) for p in both if spreads[p] > 0)
    )


def ties_of(ref, tied, weights=None):
    prompts = sorted(ref.keys() | tied.keys())
    none = ([math.nan], [math.nan])
    ref_gap, tied_gap = ([tied_scores(*rows.get(p, none)).gap for p in prompts] for rows in (ref, tied))
    spread = [tied_scores(*tied.get(p, none)).spread for p in prompts]
    weights = torch.ones(1, len(prompts), dtype=torch.float64) if weights is None else weights
    return ties_score(f64(ref_gap), f64(tied_gap), f64(spread), weights)


def drawn_ties(seed: int, coarse: bool):
    draw = random.Random(seed)
    number = (lambda: float(draw.randrange(4))) if coarse else draw.random
    ref = {p: ([number() + 0.5], [number() for _ in range(4)]) for p in range(9)}
    tied = {p: ([number() + 0.5 for _ in range(3)], [number() for _ in range(4)]) for p in range(2, 12)}
    return ref, tied


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_score_of_ties_equals_its_formula(seed, coarse):
    ref, tied = drawn_ties(seed, coarse)
    assert float(ties_of(ref, tied).total) == pytest.approx(ties_by_hand(ref, tied), abs=1e-12)


def test_the_terms_of_ties_on_three_prompts():
    ref = {0: ([3.0], [0.0]), 1: ([1.0], [0.0]), 2: ([0.0], [1.0])}
    tied = {0: ([2.0, 3.0], [0.0]), 1: ([2.0, 3.0], [0.0]), 2: ([1.0, 1.0], [0.0])}
    found = ties_of(ref, tied)
    assert [float(term) for term in found[:4]] == pytest.approx([1, 2 / 3, 1, 1 / 3])
    margins = [math.tanh(2 / 1 - 1), math.tanh(1 / 1 - 1)]  # the third has no spread to divide by
    assert float(found.margin) == pytest.approx(sum(margins) / 2)


def test_the_score_of_ties_does_not_depend_on_the_scale_of_the_scores():
    ref, tied = drawn_ties(0, False)
    changed = [{p: tuple([5 * x - 3 for x in side] for side in row) for p, row in rows.items()} for rows in (ref, tied)]
    assert float(ties_of(*changed).total) == pytest.approx(float(ties_of(ref, tied).total))


def test_a_resample_of_ties_is_the_score_of_its_prompts():
    ref, tied = drawn_ties(3, False)
    prompts = sorted(ref.keys() | tied.keys())
    counts = [p % 3 for p in prompts]
    copies = [
        {(p, copy): row for p, row in rows.items() for copy in range(counts[prompts.index(p)])} for rows in (ref, tied)
    ]
    assert float(ties_of(ref, tied, f64([counts])).total) == pytest.approx(ties_by_hand(*copies), abs=1e-12)


def test_the_interval_of_a_mean_of_subsets_covers_it():
    """Of equal subsets it is theirs, narrower by the root of their number; drawn again it covers the truth."""
    mean, (low, high) = mean_interval([0.5] * 4, [(0.3, 0.8)] * 4)
    assert (mean, low, high) == pytest.approx((0.5, 0.4, 0.65))
    draw, rates, covered = random.Random(1), (0.9, 0.5, 0.97), 0
    for _ in range(1000):
        shares = [[float(draw.random() < rate) for _ in range(60)] for rate in rates]
        means, intervals = [sum(one) / 60 for one in shares], [share_interval(one) for one in shares]
        low, high = mean_interval(means, intervals)[1]
        covered += low <= sum(rates) / 3 <= high
    assert 930 <= covered <= 985


# ---------------------------------------------------------------------------------------------------------- lengths
def drawn_verdicts(seed: int, phi: float, theta: float = 0.4, n: int = 300):
    """Verdicts of a judge with a preference phi for long answers, and the two lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 100, (n, 2), generator=generator).double()
    difference = lengths[:, 0] - lengths[:, 1]
    chance = (theta + phi * (difference / difference.std(correction=0)).tanh()).sigmoid()
    return (torch.rand(n, generator=generator) < chance).double(), lengths


def rate_of(scores, lengths) -> float:
    return float(length_controlled(scores, lengths, torch.ones(1, len(scores), dtype=torch.float64)))


@pytest.mark.parametrize("phi", [0.0, 1.5, -1.0])
def test_the_length_controlled_rate_is_at_the_maximum_of_its_likelihood(phi):
    """Plain gradient ascent on the penalised likelihood of the same model, in float64."""
    scores, lengths = drawn_verdicts(0, phi)
    difference = lengths[:, 0] - lengths[:, 1]
    feature = (difference / difference.var(correction=0).sqrt()).tanh()
    theta, slope = 0.0, 0.0
    for _ in range(3000):
        error = scores - (theta + slope * feature).sigmoid()
        theta += 0.01 * (float(error.sum()) - 1e-3 * theta)
        slope += 0.01 * (float((error * feature).sum()) - 0.1 * slope)
    assert rate_of(scores, lengths) == pytest.approx(1 / (1 + math.exp(-theta)), abs=1e-9)


def test_swapping_the_two_responses_swaps_the_rate():
    scores, lengths = drawn_verdicts(1, 1.0)
    assert rate_of(1 - scores, lengths.flip(1)) == pytest.approx(1 - rate_of(scores, lengths), abs=1e-12)
    groups = list(range(len(scores)))
    ours, theirs = lengths.long().T.tolist()
    _, (low, high) = length_controlled_win_rate(scores.tolist(), [ours, theirs], groups, 0)
    _, swapped = length_controlled_win_rate((1 - scores).tolist(), [theirs, ours], groups, 0)
    assert swapped == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_without_an_effect_of_length_it_is_the_plain_rate():
    lengths = torch.tensor([[10.0, 20.0], [20.0, 10.0]] * 50).double()
    scores = f64([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0] * 12 + [0.5] * 4)  # each verdict on both sides
    assert rate_of(scores, lengths) == pytest.approx(float(scores.mean()), abs=1e-4)
    assert rate_of(scores, torch.full((100, 2), 7.0).double()) == pytest.approx(float(scores.mean()), abs=1e-4)


def test_a_judge_that_only_prefers_length_leaves_a_half():
    """Of 300 answers two thirds are the longer ones and win: the plain rate is 2/3."""
    generator = torch.Generator().manual_seed(2)
    long = 50 + torch.randint(1, 60, (300,), generator=generator).double()
    first_is_long = torch.arange(300) % 3 > 0
    lengths = torch.where(
        first_is_long[:, None], torch.stack([long, 100 - long], 1), torch.stack([100 - long, long], 1)
    )
    scores = first_is_long.double()
    assert float(scores.mean()) == pytest.approx(2 / 3, abs=0.01)
    assert rate_of(scores, lengths) == pytest.approx(0.5, abs=0.1)
    chance = (2 * ((lengths[:, 0] - lengths[:, 1]) / 60).tanh()).sigmoid()  # the same preference, not without noise
    assert rate_of(chance, lengths) == pytest.approx(0.5, abs=0.01)


def test_length_control_takes_out_what_length_explains():
    """Verdicts drawn from the model itself: at equal lengths A wins 60%, but its answers are longer and win more."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.stack([50 + 40 * torch.rand(4000, generator=generator), torch.full((4000,), 50.0)], 1).double()
    difference = lengths[:, 0] - lengths[:, 1]
    theta = torch.tensor(0.6).logit()
    chance = (theta + 1.5 * (difference / difference.std(correction=0)).tanh()).sigmoid()
    scores = (torch.rand(4000, generator=generator) < chance).double()
    plain = float(scores.mean())
    found = rate_of(scores, lengths)
    assert plain > 0.75 and found == pytest.approx(0.6, abs=0.05)
    same = torch.full((4000, 2), 7.0, dtype=torch.float64)
    assert rate_of(scores, same) == pytest.approx(plain, abs=1e-3)


def test_verdicts_on_one_prompt_are_drawn_together():
    (weights,) = resample(["a", "b", "a", "c"], seed=0)
    assert weights.shape == (1001, 4) and weights[0].tolist() == [1, 1, 1, 1]
    assert torch.equal(weights[:, 0], weights[:, 2])
    assert (weights[1:, 0] + weights[1:, 1] + weights[1:, 3]).tolist() == [3] * 1000


def test_resamples_of_many_rows_come_in_blocks_of_the_same_draws(monkeypatch):
    (whole,) = resample(range(30), seed=1)
    monkeypatch.setattr(bootstrap, "BLOCK", 30 * 7)
    blocks = list(resample(range(30), seed=1))
    assert len(blocks) == 143 and max(map(len, blocks)) == 8 and torch.equal(torch.cat(blocks), whole)


def test_the_interval_of_equal_rates_is_wilsons():
    assert bootstrap_interval(torch.ones(11, dtype=torch.float64), 7) == wilson_interval(7, 7)
    low, high = bootstrap_interval(f64([0.5, *[0.1] * 50, *[0.9] * 50]), 1000)
    assert (low, high) == pytest.approx((0.1, 0.9))
