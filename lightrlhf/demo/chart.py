"""A chart of curves as HTML: SVG that any browser draws, with the numbers that `assets/runs.js` reads at the mouse.

Lines and bands are stretched with the page; texts are HTML beside them, so they keep their size on a phone. Each line
has a colour and from the seventh on dashes, too; `assets/runs.css` has the colours for light and dark pages.
Left out: logarithmic axes, zooming (choose fewer runs), and two metrics in one chart.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightrlhf.storage.curves import Floats, Steps, smooth, thin

MAX_POINTS = 1000  # of a line
COLOURS = 6
SIZE = 1000  # of the drawing, whatever its size on the page
LABEL_GAP = 125  # between the names at the ends of two lines


class Drawn(NamedTuple):
    """A line of the chart: (N,) each."""

    label: str
    runs: list[str]  # of which samples are shown at its points
    places: Floats  # on the horizontal axis
    steps: Steps
    values: Floats
    errors: Floats
    seeds: Steps
    warned: list[tuple[float, float]]  # ranges of places


class Frame(NamedTuple):
    """The part of the plane that the chart shows."""

    left: float
    right: float
    low: float
    high: float

    def x(self, places: Floats | float) -> Floats:
        """Places on the drawing."""
        return np.round(SIZE * (np.asarray(places) - self.left) / (self.right - self.left), 1)

    def y(self, values: Floats | float) -> Floats:
        """Heights on the drawing, downwards."""
        return np.round(SIZE * (self.high - np.asarray(values)) / (self.high - self.low), 1)


def chart(metric: str, axis: str, lines: Sequence[Drawn], width: int) -> str:
    """A figure of curves, smoothed by a moving average of `width` points over thin lines as logged."""
    if not lines:
        return "<p class='no-curves'>No chosen run has logged this yet.</p>"
    smoothed = [
        line._replace(values=smooth(line.values, width), errors=smooth(line.errors, width)) if width > 1 else line
        for line in lines
    ]
    averaged = f", moving average of {width} points over thin lines as logged" if width > 1 else ""
    frame = frame_of([*lines, *smoothed])
    parts = [
        f'<figure class="curves" data-lines="{html.escape(json.dumps([points(line, frame) for line in smoothed]))}">',
        f"<figcaption><strong>{html.escape(metric)}</strong> by {axis}{averaged}{legend(lines)}</figcaption>",
        '<div class="plot" tabindex="0" role="group" aria-label="Curves. Left and right arrows go to the points of a '
        'line, up and down to other lines, Enter keeps the samples of a point.">',
        f'<svg role="img" aria-label="{html.escape(described(metric, axis, lines))}" viewBox="0 0 {SIZE} {SIZE}" '
        'preserveAspectRatio="none">',
        *(f'<line class="grid" x1="0" x2="{SIZE}" y1="{frame.y(v)}" y2="{frame.y(v)}"/>' for v in y_ticks(frame)),
        *(warning(line, number, frame) for number, line in enumerate(lines)),
        *(band(line, number, frame) for number, line in enumerate(smoothed)),
        *(path("logged", line, number, frame) for number, line in enumerate(lines) if width > 1),
        *(path("line", line, number, frame) for number, line in enumerate(smoothed)),
        "</svg>",
        *(f'<span class="y tick" style="top:{frame.y(v) / 10:.2f}%">{v:g}</span>' for v in y_ticks(frame)),
        *(f'<span class="x tick" style="left:{frame.x(v) / 10:.2f}%">{v:g}</span>' for v in x_ticks(frame)),
        *end_names(smoothed, frame),
        '<span class="cursor" hidden></span><span class="point" hidden></span></div>',
        '<p class="readout" role="status">Point at a curve, tap it or use the arrow keys to read its values and the '
        "samples logged there; a click keeps them.</p></figure>",
    ]
    return "".join(parts)


def frame_of(lines: Sequence[Drawn]) -> Frame:
    """The frame of all points and bands; wider than zero."""
    places = np.concatenate([line.places for line in lines])
    values = np.concatenate([line.values + sign * line.errors for line in lines for sign in (-1, 1)])
    low, high = float(values.min()), float(values.max())
    margin = 0.04 * (high - low) or max(abs(high) * 0.1, 1e-9)
    left, right = float(places.min()), float(places.max())
    if left == right:  # a single point is in the middle
        left, right = left - 1, right + 1
    return Frame(left, right, low - margin, high + margin)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two others, about `count` of them: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [float(f"{number * step:.6g}") for number in range(first, last + 1)]


def x_ticks(frame: Frame) -> list[float]:
    return ticks(frame.left, frame.right, 5)


def y_ticks(frame: Frame) -> list[float]:
    return ticks(frame.low, frame.high, 5)


# -------------------------------------------------------------------------------------------------------------- parts
def style(number: int) -> str:
    """Classes of a line's colour and dashes."""
    return f"colour-{number % COLOURS} dashes-{number // COLOURS % 3}"


def shown(line: Drawn) -> Drawn:
    """At most `MAX_POINTS` of a line's points."""
    kept = thin(line.values, MAX_POINTS)
    return line._replace(
        **{name: getattr(line, name)[kept] for name in ("places", "steps", "values", "errors", "seeds")}
    )


def coordinates(places: Floats, heights: Floats) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in zip(places, heights))


def path(kind: str, line: Drawn, number: int, frame: Frame) -> str:
    """The line itself; of a single point a dot."""
    line = shown(line)
    places = frame.x(line.places)
    if len(places) == 1:  # a wide stroke with a round cap
        kind += " dot"
        places = np.repeat(places, 2)
        line = line._replace(values=np.repeat(line.values, 2))
    return f'<polyline class="{kind} {style(number)}" points="{coordinates(places, frame.y(line.values))}"/>'


def band(line: Drawn, number: int, frame: Frame) -> str:
    """One standard error on each side; nothing for a line of one seed."""
    if not line.errors.any():
        return ""
    line = shown(line)
    places = np.concatenate([line.places, line.places[::-1]])
    heights = np.concatenate([line.values + line.errors, (line.values - line.errors)[::-1]])
    return f'<polygon class="band {style(number)}" points="{coordinates(frame.x(places), frame.y(heights))}"/>'


def warning(line: Drawn, number: int, frame: Frame) -> str:
    """Shaded ranges in which the audit warned."""
    parts = []
    for start, end in line.warned:
        left, right = (float(frame.x(place)) for place in (start, end))
        parts.append(
            f'<rect class="warned {style(number)}" x="{left - 2:g}" width="{right - left + 4:g}" y="0" height="{SIZE}">'
            f"<title>the audit of {html.escape(line.label)} warned</title></rect>"
        )
    return "".join(parts)


def legend(lines: Sequence[Drawn]) -> str:
    """Names with colours, what bands are, and what is shaded."""
    parts = []
    for number, line in enumerate(lines):
        seeds = int(line.seeds.max())
        told = f" <small>mean of {seeds} seeds ± one standard error</small>" if seeds > 1 else ""
        parts.append(
            f'<li><svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><polyline class="line {style(number)}" '
            f'points="2,4 22,4"/></svg>{html.escape(line.label)}{told}</li>'
        )
    if any(line.warned for line in lines):
        parts.append('<li><span class="shade" aria-hidden="true"></span>shaded: the audit warned</li>')
    return f'<ul class="names">{"".join(parts)}</ul>'


def end_names(lines: Sequence[Drawn], frame: Frame) -> list[str]:
    """Names at the ends of the lines, moved apart where they would cover each other; none of more than fit."""
    if len(lines) > SIZE // LABEL_GAP:
        return []
    order = sorted(range(len(lines)), key=lambda number: float(frame.y(lines[number].values[-1])))
    heights: list[float] = []
    for number in order:
        height = float(frame.y(lines[number].values[-1]))
        heights.append(max(height, heights[-1] + LABEL_GAP) if heights else height)
    over: float = SIZE
    for place in reversed(range(len(heights))):
        heights[place] = min(heights[place], over)
        over = heights[place] - LABEL_GAP
    return [
        f'<span class="end {style(number)}" aria-hidden="true" style="top:{height / 10:.2f}%">'
        f"{html.escape(lines[number].label)}</span>"
        for number, height in zip(order, heights)
    ]


def described(metric: str, axis: str, lines: Sequence[Drawn]) -> str:
    """The chart as a text."""
    told = [
        f"{line.label} from {line.values[0]:.4g} at step {line.steps[0]} to {line.values[-1]:.4g} at step "
        f"{line.steps[-1]}" + (", with warnings of the audit" if line.warned else "")
        for line in lines
    ]
    return f"{metric} by {axis}: {'; '.join(told)}"


def points(line: Drawn, frame: Frame) -> dict[str, object]:
    """What the script needs to name the point under the mouse."""
    line = shown(line)
    return {
        "label": line.label,
        "runs": line.runs,
        "x": frame.x(line.places).tolist(),
        "y": frame.y(line.values).tolist(),
        "steps": line.steps.tolist(),
        "values": [f"{value:.4g}" for value in line.values],
        "errors": [f"{error:.2g}" if seeds > 1 else "" for error, seeds in zip(line.errors, line.seeds)],
    }
