"""Figures of several titled panels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightrlhf.storage.results import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def panels(titles: Sequence[str], lines: int = 1, width: float = 5.0, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, one per title; `width` and `height` of a panel in inches."""
    columns = max(-(-len(titles) // lines), 1)
    figure, axes = new_figure(width * columns, height * lines, lines, columns)
    for axis, title in zip(axes, titles):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
    return figure, axes


def label(axis: Axes, x: str, y: str = "") -> None:
    """Set axis labels and a legend."""
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.legend(fontsize=8)
