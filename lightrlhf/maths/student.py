"""The mean over a few seeds, and its interval by Student's t.

Left out: quantiles for more than ten values, which take that of ten and so have a slightly wider interval.
"""

from __future__ import annotations

from collections.abc import Sequence

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5%, for 1 to 9 degrees of freedom


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): the 95% interval of the mean by Student's t; infinite for a single value."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, float("-inf"), float("inf")
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    half = T_QUANTILES[min(count - 1, len(T_QUANTILES)) - 1] * (variance / count) ** 0.5
    return mean, mean - half, mean + half
