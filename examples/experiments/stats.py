"""Means over seeds with 95% intervals, and the claims that they decide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightrlhf.storage.checkpoint import write_text

# 97.5% quantiles of Student's t for 1 to 9 degrees of freedom; more seeds take the last, which widens the interval.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high): the 95% interval of the mean by Student's t; infinite for a single value."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, float("-inf"), float("inf")
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    half = T_QUANTILES[min(count - 1, len(T_QUANTILES)) - 1] * (variance / count) ** 0.5
    return mean, mean - half, mean + half


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Interval of the mean of ours - theirs, seed by seed."""
    return interval([one - other for one, other in zip(ours, theirs, strict=True)])


def shown(values: Sequence[float], digits: int = 3) -> str:
    """`mean [low, high]`; the mean alone for a single value."""
    mean, low, high = interval(values)
    bounds = f" [{low:.{digits}f}, {high:.{digits}f}]" if len(values) > 1 else ""
    return f"{mean:.{digits}f}{bounds}"


def shown_gap(gap: tuple[float, float, float]) -> str:
    """A signed `mean [low, high]`."""
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*gap)


def report_claims(claims: dict[str, bool], folder: Path) -> None:
    """Print which claims held as one line, and write it to `claims.txt`."""
    line = "; ".join(f"{claim}: {'held' if held else 'did NOT hold'}" for claim, held in claims.items())
    print(f"claims: {line}")
    write_text(folder / "claims.txt", line + "\n")
