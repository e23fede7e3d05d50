"""Quantiles of the normal distribution and of Student's t, and the interval of a mean over a few seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

Z = NormalDist().inv_cdf(0.975)  # 1.96
FEW = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5%, for 1 to 9 degrees of freedom


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): the 95% interval of the mean by Student's t; infinite for a single value."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, float("-inf"), float("inf")
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    half = quantile(count - 1) * (variance / count) ** 0.5
    return mean, mean - half, mean + half


def quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's t; from ten degrees of freedom on by its expansion, to 2e-4.

    Abramowitz and Stegun 1964, 26.7.5.
    """
    if freedom <= len(FEW):
        return FEW[freedom - 1]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3
