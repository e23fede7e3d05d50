"""Intervals of Student's t against its tabulated quantiles."""

import pytest

from lightrlhf.maths.student import interval, quantile

TABULATED = {1: 12.706, 9: 2.262, 10: 2.228, 11: 2.201, 19: 2.093, 29: 2.045, 99: 1.984}  # 97.5%, by degrees of freedom


@pytest.mark.parametrize("freedom", TABULATED)
def test_quantiles_are_those_of_tables(freedom):
    assert quantile(freedom) == pytest.approx(TABULATED[freedom], abs=7e-4)


def test_an_interval_of_more_than_ten_values():
    values = [float(number) for number in range(20)]  # mean 9.5, variance 35, standard error sqrt(1.75)
    assert interval(values) == pytest.approx((9.5, 9.5 - 2.09302 * 1.75**0.5, 9.5 + 2.09302 * 1.75**0.5), abs=1e-4)
    assert interval([3.0]) == (3.0, float("-inf"), float("inf"))
