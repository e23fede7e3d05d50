"""Means over seeds with 95% intervals, and the claims that they decide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightrlhf.maths.student import interval
from lightrlhf.storage.checkpoint import write_text


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
