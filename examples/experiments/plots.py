"""Figures of several panels, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def panels(titles: Sequence[str], rows: int = 1, width: float = 5.0, height: float = 3.8) -> tuple[Any, list[Any]]:
    """A figure and its axes, one for each title; `width` and `height` of a panel in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = max(-(-len(titles) // rows), 1)
    figure, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    for axis, title in zip(axes.flat, titles):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
    return figure, list(axes.flat)


def label(axis: Any, x: str, y: str = "") -> None:
    """Axis labels and the legend of a panel."""
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.legend(fontsize=8)


def save(figure: Any, output: Path) -> Path:
    """Write the figure; returns the file."""
    from matplotlib import pyplot as plt

    figure.tight_layout()
    figure.savefig(output, dpi=110)
    plt.close(figure)
    return output
