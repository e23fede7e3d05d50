"""Means over seeds with 95% intervals, times that are cut off at a limit, and the claims that they decide.

Times until something is reached are cut off (censored) where a run ends before. Two readings of them know that: the
mean of the times *restricted* to the limit (Irwin 1949; Royston and Parmar 2013), which needs no value for what was not
seen and has a paired interval, and the log-rank test (Mantel 1966), which uses only the order of the times. scipy has
the second (`scipy.stats.logrank`); it is no requirement of this library, and one formula is no reason to make it one.

Left out: times cut off at different limits, of which the first reading would need the curve of Kaplan and Meier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import variance

from lightrlhf.maths.student import interval
from lightrlhf.storage.writing import write_text


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Interval of the mean of ours - theirs, seed by seed."""
    return interval([one - other for one, other in zip(ours, theirs, strict=True)])


def pairing(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Variance of a difference paired by seed over the one of arms with seeds of their own, with a 95% interval.

    The interval is the jackknife's of the logarithm (Efron and Stein 1981). So many times fewer seeds are needed.
    """

    def log_ratio(pairs: Sequence[tuple[float, float]]) -> float:
        one, other = zip(*pairs)
        of_difference = variance([a - b for a, b in pairs])
        return math.log(of_difference / (variance(one) + variance(other)))

    pairs = list(zip(ours, theirs, strict=True))
    n, whole = len(pairs), log_ratio(pairs)
    without = [log_ratio([*pairs[:i], *pairs[i + 1 :]]) for i in range(n)]
    _, low, high = interval([n * whole - (n - 1) * one for one in without])
    middle = (low + high) / 2
    return math.exp(whole), math.exp(whole + low - middle), math.exp(whole + high - middle)


def restricted(times: Sequence[float | None], limit: float) -> list[float]:
    """Times restricted to a limit: None, one that was not reached within it, counts as the limit.

    Their mean is the restricted mean, exact where all runs last until the limit.
    """
    return [limit if time is None else min(time, limit) for time in times]


def log_rank(ours: Sequence[float | None], theirs: Sequence[float | None]) -> tuple[float, float]:
    """(chi square with one degree of freedom, p) of the log-rank test of two groups; None: not reached at the end.

    Times that are equal are one event with the hypergeometric variance. The groups are taken as independent, so of
    paired seeds the test says less than the paired interval.
    """
    everyone, difference, variance = [*ours, *theirs], 0.0, 0.0
    for event in sorted({time for time in everyone if time is not None}):
        ours_left, left = (sum(time is None or time >= event for time in group) for group in (ours, everyone))
        events, share = everyone.count(event), ours_left / left
        difference += list(ours).count(event) - events * share
        if left > 1:
            variance += events * share * (1 - share) * (left - events) / (left - 1)
    chi_square = difference**2 / variance if variance else 0.0
    return chi_square, math.erfc(math.sqrt(chi_square / 2))


def shown(values: Sequence[float], digits: int = 3) -> str:
    """`mean [low, high]`; the mean alone for a single value."""
    mean, low, high = interval(values)
    bounds = f" [{low:.{digits}f}, {high:.{digits}f}]" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{bounds}"


def shown_gap(gap: tuple[float, float, float], digits: int = 3) -> str:
    """A signed `mean [low, high]`."""
    return "{:+.{d}f} [{:+.{d}f}, {:+.{d}f}]".format(*gap, d=digits)


def report_claims(claims: dict[str, bool], folder: Path) -> None:
    """Print which claims held as one line, and write it to `claims.txt`."""
    line = "; ".join(f"{claim}: {'held' if held else 'did NOT hold'}" for claim, held in claims.items())
    print(f"claims: {line}")
    write_text(folder / "claims.txt", line + "\n")
