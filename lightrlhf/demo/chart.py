"""A chart of curves as HTML: SVG that any browser draws, with the numbers that `assets/runs.js` reads at the mouse.

Lines and bands are stretched with the page; texts are HTML beside them, so they keep their size on a phone. Each line
has a colour and from the seventh on dashes, too; `assets/runs.css` has the colours for light and dark pages.
Gradio's `LinePlot` has no bands, no shaded ranges and no keys to move along a curve.
Left out: logarithmic axes, zooming (choose fewer runs), and two metrics in one chart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from lightrlhf.demo.markup import tag
from lightrlhf.storage.curves import Floats, Steps, smooth, thin

MAX_POINTS = 1000  # of a line
COLOURS = 6
SIZE = 1000  # of the drawing, whatever its size on the page
LABEL_GAP = 125  # between the names at the ends of two lines
KEYS = (
    "Curves. Left and right arrows go to the points of a line, up and down to other lines, Enter keeps the samples of "
    "a point."
)
HINT = (
    "Point at a curve, tap it or use the arrow keys to read its values and the samples logged there; a click keeps "
    "them."
)


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

    def thin(self) -> Drawn:
        """At most `MAX_POINTS` of its points."""
        kept = thin(self.values, MAX_POINTS)
        names = ("places", "steps", "values", "errors", "seeds")
        return self._replace(**{name: getattr(self, name)[kept] for name in names})


class Frame(NamedTuple):
    """The part of the plane that the chart shows."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def around(cls, lines: Sequence[Drawn]) -> Frame:
        """The frame of all points and bands; wider than zero."""
        places = np.concatenate([line.places for line in lines])
        values = np.concatenate([line.values + sign * line.errors for line in lines for sign in (-1, 1)])
        low, high = float(values.min()), float(values.max())
        margin = 0.04 * (high - low) or max(abs(high) * 0.1, 1e-9)
        side = float(places.min() == places.max())  # a single point is in the middle
        return cls(float(places.min()) - side, float(places.max()) + side, low - margin, high + margin)

    def x(self, places: Floats | float) -> Floats:
        """Places on the drawing."""
        return np.round(SIZE * (np.asarray(places) - self.left) / (self.right - self.left), 1)

    def y(self, values: Floats | float) -> Floats:
        """Heights on the drawing, downwards."""
        return np.round(SIZE * (self.high - np.asarray(values)) / (self.high - self.low), 1)

    def points(self, places: Floats, values: Floats) -> str:
        """Points of an SVG shape."""
        return " ".join(f"{x:g},{y:g}" for x, y in zip(self.x(places), self.y(values)))


def chart(metric: str, axis: str, lines: Sequence[Drawn], width: int) -> Markup:
    """A figure of curves, smoothed by a moving average of `width` points over thin lines as logged."""
    if not lines:
        return tag("p", "No chosen run has logged this yet.", class_="no-curves")
    smoothed = [line._replace(values=smooth(line.values, width), errors=smooth(line.errors, width)) for line in lines]
    frame = Frame.around([*lines, *smoothed])
    drawn = list(enumerate(line.thin() for line in smoothed))
    shapes = [warning(line, number, frame) + band(line, number, frame) for number, line in drawn]
    if width > 1:
        shapes += [path("logged", line.thin(), number, frame) for number, line in enumerate(lines)]
    shapes += [path("line", line, number, frame) for number, line in drawn]
    across, up = ticks(frame.left, frame.right, 5), ticks(frame.low, frame.high, 5)
    grid = [tag("line", class_="grid", x1=0, x2=SIZE, y1=frame.y(v), y2=frame.y(v)) for v in up]
    size = {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none"}
    texts = [tag("span", f"{v:g}", class_="y tick", style=f"top:{frame.y(v) / 10:.2f}%") for v in up]
    texts += [tag("span", f"{v:g}", class_="x tick", style=f"left:{frame.x(v) / 10:.2f}%") for v in across]
    texts += end_names(smoothed, frame) + [tag("span", class_=kind, hidden="") for kind in ("cursor", "point")]
    svg = tag("svg", *grid, *shapes, role="img", aria_label=describe(metric, axis, lines), **size)
    averaged = f", moving average of {width} points over thin lines as logged" if width > 1 else ""
    caption = tag("figcaption", tag("strong", metric), f" by {axis}{averaged}", legend(lines))
    plot = tag("div", svg, *texts, class_="plot", tabindex=0, role="group", aria_label=KEYS)
    data = json.dumps([points(line, frame) for _, line in drawn])
    readout = tag("p", HINT, class_="readout", role="status")
    return tag("figure", caption, plot, readout, class_="curves", data_lines=data)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between two others, about `count` of them: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [float(f"{number * step:.6g}") for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


# -------------------------------------------------------------------------------------------------------------- parts
def style(kind: str, number: int) -> str:
    """Classes of a part of a line: its kind, colour and dashes."""
    return f"{kind} colour-{number % COLOURS} dashes-{number // COLOURS % 3}"


def path(kind: str, line: Drawn, number: int, frame: Frame) -> Markup:
    """The line itself; of a single point a dot, which is a wide stroke with a round cap."""
    is_dot = len(line.places) == 1
    places, values = (np.repeat(one, 1 + is_dot) for one in (line.places, line.values))
    return tag("polyline", class_=style(kind + " dot" * is_dot, number), points=frame.points(places, values))


def band(line: Drawn, number: int, frame: Frame) -> Markup:
    """One standard error on each side; nothing for a line of one seed."""
    if not line.errors.any():
        return Markup()
    places = np.concatenate([line.places, line.places[::-1]])
    values = np.concatenate([line.values + line.errors, (line.values - line.errors)[::-1]])
    return tag("polygon", class_=style("band", number), points=frame.points(places, values))


def warning(line: Drawn, number: int, frame: Frame) -> Markup:
    """Shaded ranges in which the audit warned."""
    parts, title = Markup(), tag("title", f"the audit of {line.label} warned")
    for ends in line.warned:
        left, right = (float(frame.x(place)) for place in ends)
        size = {"x": f"{left - 2:g}", "width": f"{right - left + 4:g}", "y": 0, "height": SIZE}
        parts += tag("rect", title, class_=style("warned", number), **size)
    return parts


def legend(lines: Sequence[Drawn]) -> Markup:
    """Names with colours, what bands are, and what is shaded."""
    parts = []
    for number, line in enumerate(lines):
        stroke = tag("polyline", class_=style("line", number), points="2,4 22,4")
        swatch = tag("svg", stroke, class_="swatch", viewBox="0 0 24 8", aria_hidden="true")
        seeds = int(line.seeds.max())
        mean = [" ", tag("small", f"mean of {seeds} seeds ± one standard error")] if seeds > 1 else []
        parts.append(tag("li", swatch, line.label, *mean))
    if any(line.warned for line in lines):
        parts.append(tag("li", tag("span", class_="shade", aria_hidden="true"), "shaded: the audit warned"))
    return tag("ul", *parts, class_="names")


def end_names(lines: Sequence[Drawn], frame: Frame) -> list[Markup]:
    """Names at the ends of the lines, moved apart where they would cover each other; none if there are too many."""
    if len(lines) > SIZE // LABEL_GAP:
        return []
    heights: list[float] = []
    for height, _ in (order := sorted((float(frame.y(line.values[-1])), i) for i, line in enumerate(lines))):
        heights.append(max(height, heights[-1] + LABEL_GAP) if heights else height)
    limit: float = SIZE
    for place in reversed(range(len(heights))):
        heights[place] = min(heights[place], limit)
        limit = heights[place] - LABEL_GAP
    return [
        tag("span", lines[i].label, class_=style("end", i), aria_hidden="true", style=f"top:{height / 10:.2f}%")
        for (_, i), height in zip(order, heights)
    ]


def describe(metric: str, axis: str, lines: Sequence[Drawn]) -> str:
    """The chart as a text."""
    texts = [
        f"{line.label} from {line.values[0]:.4g} at step {line.steps[0]} to {line.values[-1]:.4g} at step "
        f"{line.steps[-1]}" + (", with warnings of the audit" if line.warned else "")
        for line in lines
    ]
    return f"{metric} by {axis}: {'; '.join(texts)}"


def points(line: Drawn, frame: Frame) -> dict[str, object]:
    """What the script needs to name the point under the mouse."""
    return {
        "label": line.label,
        "runs": line.runs,
        "x": frame.x(line.places).tolist(),
        "y": frame.y(line.values).tolist(),
        "steps": line.steps.tolist(),
        "values": [f"{value:.4g}" for value in line.values],
        "errors": [f"{error:.2g}" if seeds > 1 else "" for error, seeds in zip(line.errors, line.seeds)],
    }
