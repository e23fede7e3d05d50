"""Draw the curves of one or more runs into a PNG.

One panel per metric, one colour per run, thin lines as logged and thick ones smoothed. Reads `metrics.jsonl` only, so
it works while a run goes on. Left out: interactive dashboards (the runs log to TensorBoard).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrlhf.common.args import UsageError, check_at_least, one_line_errors, parse

PREFERRED = (
    "train/loss",
    "val/loss",
    "rewards/accuracies",
    "val/rewards/accuracies",
    "objective/score",
    "objective/kl",
    "objective/entropy",
    "completions/mean_length",
    "completions/truncated_ratio",
    "policy/clipfrac",
    "value/explained_variance",
    "val/score",
)


@dataclass(frozen=True, kw_only=True)
class PlotArgs:
    """Draw the curves of one or more runs."""

    experiment_dir: list[str]
    """Experiment dirs."""
    metrics: list[str] | None = None
    """Metric names to draw; a choice of the usual ones when not given."""
    output: str | None = None
    """PNG to write; `curves.png` in the first experiment dir when not given."""
    smoothing: int = 9
    """Points in the moving average of the thick line; 1 draws what was logged."""

    def __post_init__(self) -> None:
        check_at_least(self, "smoothing", 1)
        if not self.experiment_dir:
            raise ValueError("--experiment_dir needs at least one experiment dir")


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the path of the picture."""
    args = parse(PlotArgs, argv)
    runs = {label: read_metrics(folder) for label, folder in labels(args.experiment_dir).items()}
    logged = {name for rows in runs.values() for row in rows for name in row if name != "step"}
    names = args.metrics or [name for name in PREFERRED if name in logged] or sorted(logged)
    unknown = [name for name in names if name not in logged]
    if unknown:
        raise UsageError(f"--metrics {unknown[0]} was not logged; there are: {', '.join(sorted(logged))}")
    output = Path(args.output or Path(args.experiment_dir[0]) / "curves.png")
    draw(runs, names, output, args.smoothing)
    print(f"wrote {output}")
    return str(output)


def read_metrics(experiment_dir: str) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl`. Raises: UsageError when there is none."""
    path = Path(experiment_dir) / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        raise UsageError(f"--experiment_dir {experiment_dir} has no metrics.jsonl") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):  # the last line may be in the middle of being written
                raise UsageError(f"{path} line {number} is not JSON") from None
    if not rows:
        raise UsageError(f"{path} holds no metrics yet")
    return rows


def labels(folders: list[str]) -> dict[str, str]:
    """A short distinct name per experiment dir: experiment name, its time where names repeat, else the whole path."""
    names = {}
    for folder in folders:
        path = Path(folder)
        try:
            name = json.loads((path / "args.json").read_text(encoding="utf-8"))["experiment_name"]
        except (OSError, ValueError, KeyError):
            name = path.name
        shortest = [label for label in (name, f"{name} {path.name}") if label not in names]
        names[shortest[0] if shortest else folder] = folder  # the same folder given twice is one run
    return names


def smooth(values: list[float], width: int) -> list[float]:
    """Centred moving average that narrows towards both ends."""
    out = []
    for i in range(len(values)):
        half = min(width // 2, i, len(values) - 1 - i)
        out.append(sum(values[i - half : i + half + 1]) / (2 * half + 1))
    return out


def draw(runs: dict[str, list[dict[str, Any]]], names: list[str], output: Path, smoothing: int) -> None:
    """One panel per metric, written to `output`. Raises: UsageError when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 2.9 * lines), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names):
        for index, (label, rows) in enumerate(runs.items()):
            points = [(row["step"], row[name]) for row in rows if name in row]
            if not points:
                continue
            steps, values = (list(part) for part in zip(*points))
            colour = f"C{index}"
            few = len(points) < 3 * smoothing
            axis.plot(steps, values, color=colour, alpha=1.0 if few else 0.3, lw=1.2, marker="o" if few else None, ms=3)
            axis.plot(steps, values if few else smooth(values, smoothing), color=colour, lw=1.8, label=label)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
    handles, texts = axes.flat[0].get_legend_handles_labels()
    if len(runs) > 1:
        figure.legend(handles, texts, loc="lower center", ncol=min(4, len(runs)), fontsize=8)
    figure.tight_layout(rect=(0, 0.05 if len(runs) > 1 else 0, 1, 1))
    try:
        figure.savefig(output, dpi=130)
    except OSError as problem:
        raise UsageError(f"--output {output} cannot be written: {problem.strerror}") from None
    finally:
        plt.close(figure)


if __name__ == "__main__":
    main()
