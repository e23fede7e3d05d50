"""Group advantages against formulas written out in float64, from the papers."""

import math
import statistics

import pytest
import torch

from lightrlhf.maths.groups import (
    ADVANTAGES,
    EPS,
    centre,
    group_advantages,
    group_moments,
    raw,
    standardise,
    table_advantages,
)

GROUP = torch.tensor([2, 0, 0, 1, 2, 0, 1, 2, 2, 1, 3])  # sizes 3, 3, 4 and 1, rows in no order
SCORES = torch.tensor([0.5, 1.0, 0.25, 2.0, math.nan, 0.75, 2.0, 1.5, 0.0, 2.0, 0.3], dtype=torch.float64)


def expected_advantages(name: str) -> list[float]:
    """From the formulas, a row at a time."""
    scored = [score for score in SCORES.tolist() if not math.isnan(score)]
    results = []
    for row, score in enumerate(SCORES.tolist()):
        mates = [r for r in range(len(SCORES)) if GROUP[r] == GROUP[row] and not math.isnan(SCORES[r])]
        values = [float(SCORES[r]) for r in mates]
        if math.isnan(score) or (len(values) < 2 and name != "none"):
            results.append(0.0)
            continue
        mean = sum(values) / len(values)
        baseline = {"none": 0.0, "rloo": (sum(values) - score) / max(len(values) - 1, 1)}.get(name, mean)
        divisor = {"maxrl": mean + EPS, "batch_std": statistics.stdev(scored) + EPS}.get(name, 1.0)
        divisor = statistics.stdev(values) + EPS if name == "std" else divisor
        results.append((score - baseline) / divisor)
    return results


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_a_float64_reference(name):
    advantages = group_advantages(SCORES, group_moments(SCORES, GROUP, 4), ADVANTAGES[name])
    assert advantages.tolist() == pytest.approx(expected_advantages(name), abs=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_split_over_ranks_has_the_statistics_of_the_whole_group(name):
    totals: list[torch.Tensor] = []
    whole = group_advantages(
        SCORES, group_moments(SCORES, GROUP, 4, lambda sums: totals.append(sums) or sums), ADVANTAGES[name]
    )
    summed = [torch.zeros_like(total) for total in totals]
    for part in (slice(0, 4), slice(4, 9), slice(9, 11)):
        calls = iter(range(len(totals)))

        def reduce(local: torch.Tensor, calls=calls) -> torch.Tensor:
            number = next(calls)
            summed[number] += local
            return totals[number]

        moments = group_moments(SCORES[part], GROUP[part], 4, reduce)
        assert group_advantages(SCORES[part], moments, ADVANTAGES[name]).tolist() == whole[part].tolist()
    for local, total in zip(summed, totals):
        assert torch.allclose(local, total, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"none"}))
def test_equal_scores_have_no_advantage_at_all(name):
    scores = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 0.7])  # float32, in which a mean of .1 need not be .1
    moments = group_moments(scores, torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    assert not moments.informative.any()
    assert group_advantages(scores, moments, ADVANTAGES[name]).tolist() == [0.0] * 6


def test_no_score_at_all_is_no_advantage():
    scores = torch.full((4,), math.nan)
    for estimator in ADVANTAGES.values():
        assert (
            group_advantages(scores, group_moments(scores, torch.tensor([0, 0, 1, 1]), 2), estimator).tolist()
            == [0] * 4
        )


def test_an_unscored_row_is_in_no_baseline():
    scores, group = torch.tensor([1.0, 0.0, math.nan]), torch.tensor([0, 0, 0])
    moments = group_moments(scores, group, 1)
    assert group_advantages(scores, moments, centre).tolist() == [0.5, -0.5, 0.0]
    assert moments.size.tolist() == [2.0, 2.0, 2.0]


def test_a_single_response_has_no_baseline_but_may_have_a_return():
    scores = torch.tensor([2.0, 3.0])
    moments = group_moments(scores, torch.tensor([0, 1]), 2)
    assert group_advantages(scores, moments, standardise).tolist() == [0.0, 0.0]
    assert group_advantages(scores, moments, raw).tolist() == [2.0, 3.0]


def test_a_function_gets_tables_of_scored_rows():
    """One of the groups of each size; the expected medians are of the scores that a group has."""
    tables = []

    def median(scores: torch.Tensor) -> torch.Tensor:
        tables.append(scores.tolist())
        return scores - scores.median(-1, keepdim=True).values

    found = table_advantages(SCORES, GROUP, median)
    assert tables == [[[0.5, 1.5, 0.0], [1.0, 0.25, 0.75], [2.0, 2.0, 2.0]]]  # NaN is in none, nor a group of one
    assert found.tolist() == [0.0, 0.25, -0.5, 0.0, 0.0, 0.0, 0.0, 1.0, -0.5, 0.0, 0.0]
    part = torch.tensor([0, 1, 2, 5, 7])  # two rows of group 2, three of group 0
    assert table_advantages(SCORES[part], GROUP[part], median).tolist() == [0.0, 0.25, -0.5, 0.0, 1.0]
    assert tables[1:] == [[[0.5, 1.5]], [[1.0, 0.25, 0.75]]]
    assert not table_advantages(torch.full((2,), math.nan), GROUP[:2], median).any()
