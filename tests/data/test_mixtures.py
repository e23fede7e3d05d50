"""Orders of several sets: each has its share, and each row comes as often as the others of its set."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightrlhf.data.mixtures import interleave, mixed_order, mixed_shares

MIXTURES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 10)), min_size=2, max_size=4)


def set_of(sizes, index: int) -> int:
    return next(number for number in range(len(sizes)) if index < sum(sizes[: number + 1]))


@given(MIXTURES, st.integers(0, 99), st.integers(0, 5))
def test_an_epoch_has_each_sets_share(mixture, seed, epoch):
    sizes, weights = map(tuple, zip(*mixture))
    order, shares = mixed_order(sizes, weights, seed, epoch).tolist(), mixed_shares(sizes, weights)
    assert len(order) == sum(shares) == sum(sizes)
    counts = Counter(set_of(sizes, index) for index in order)
    assert [counts[number] for number in range(len(sizes))] == shares
    for share, weight in zip(shares, weights):
        assert abs(share - sum(sizes) * weight / sum(weights)) < 1


@given(MIXTURES, st.integers(0, 99))
def test_no_row_comes_a_second_time_before_all_others_of_its_set(mixture, seed):
    sizes, weights = map(tuple, zip(*mixture))
    drawn = Counter(index for epoch in range(4) for index in mixed_order(sizes, weights, seed, epoch).tolist())
    start = 0
    for size in sizes:
        times = [drawn[index] for index in range(start, start + size)]
        assert max(times) - min(times) <= 1
        start += size


def test_the_order_depends_on_seed_and_epoch_and_is_mixed():
    sizes, weights = (60, 20), (1.0, 1.0)
    orders = [mixed_order(sizes, weights, *key).tolist() for key in ((1, 0), (1, 0), (1, 1), (2, 0))]
    assert orders[0] == orders[1] and orders[0] != orders[2] != orders[3] != orders[0]
    for quarter in range(4):  # each about half of one set
        few = sum(index >= 60 for index in orders[0][20 * quarter : 20 * quarter + 20])
        assert 4 <= few <= 16


def test_a_share_is_rounded_to_the_largest_rest():
    assert mixed_shares((60, 20), (3, 1)) == [60, 20]
    assert mixed_shares((5, 5), (1, 2)) == [3, 7]
    assert mixed_shares((2, 2, 3), (1, 1, 1)) == [3, 2, 2]


@given(st.lists(st.lists(st.integers(), min_size=0, max_size=30), min_size=1, max_size=4))
def test_interleaved_rows_are_all_rows_and_spread_evenly(sets):
    labelled = [[(number, i) for i in range(len(rows))] for number, rows in enumerate(sets)]
    found = interleave(labelled)
    assert sorted(found) == sorted(row for rows in labelled for row in rows)
    for number, rows in enumerate(labelled):
        assert [row for row in found if row[0] == number] == rows
        for end in range(len(found) + 1):
            expected = end * len(rows) / max(len(found), 1)
            assert abs(sum(row[0] == number for row in found[:end]) - expected) <= len(sets)


@pytest.mark.parametrize("rows", [[], [1, 2, 3]])
def test_one_set_stays_as_it_is(rows):
    assert list(interleave([rows])) == rows
