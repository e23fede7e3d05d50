"""Draw the curves of one or more runs into a PNG.

One panel per metric, one colour per run, thin lines as logged and thick ones smoothed. With `--group_seeds True` one
colour per experiment name and settings: the mean over its seeds, in a band of one standard error on each side. It works
during a run. With `--responses_file` it draws files of `lightrlhf.generate` with rewards: the mean reward by
temperature, and the reward of the best of n, by n and by its KL, log n - (n-1)/n (Stiennon et al. 2020, appendix G.3;
an upper bound, exact where no two responses tie). Left out: interactive dashboards (the runs log to TensorBoard).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import Args, at_least, check_args, flag
from lightrlhf.cli.lists import paths
from lightrlhf.cli.parser import parse
from lightrlhf.data.responses import read_responses
from lightrlhf.storage.curves import Curve, columns, curves_of, join_columns, seed_groups
from lightrlhf.storage.destinations import check_output
from lightrlhf.storage.results import draw_curves, new_figure, save_figure, usual_metrics
from lightrlhf.storage.run_dir import labels, logged_metrics

PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".eps", ".webp", ".tif", ".tiff")


def check_picture(name: str, flag: str) -> None:
    """Raises: ValueError, before any work, when a picture cannot be written to a path."""
    path = Path(name)
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"{flag} {path} must end in one of {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path} lies in a folder that does not exist")
    check_output(path, flag)


@dataclass(frozen=True, kw_only=True)
class PlotArgs(Args):
    """Draw the curves of one or more runs."""

    experiment_dir: list[str] = flag([], split=paths, positional=True)
    """Experiment dirs."""
    responses_file: list[str] = flag([], split=paths)
    """Files of `lightrlhf.generate` with rewards, to draw by temperature and best of n."""
    metrics: list[str] | None = None
    """Metrics to draw. Default: the usual ones."""
    output_file: str | None = flag(None, check=check_picture)
    """PNG to write. Default: `curves.png` in the first experiment dir or next to the first file."""
    group_seeds: bool = False
    """Draw runs that differ only by seed as one line with a band; folders with the same seed are one run."""
    smoothing: int = at_least(1, 9)
    """Window of the moving average; 1 draws only the logged values."""

    def _check(self) -> None:
        if bool(self.experiment_dir) == bool(self.responses_file):
            raise ValueError("--experiment_dir or --responses_file needs at least one path, and not both")


def run(args: PlotArgs) -> str:
    """Draw curves; returns the path of the picture."""
    check_args(args, PlotArgs)
    if args.responses_file:
        output = Path(args.output_file or Path(args.responses_file[0]).parent / "curves.png")
        draw_best_of_n([read_sweep(name) for name in args.responses_file], output)
        print(f"wrote {output}")
        return str(output)
    by_folder = {folder: columns(logged_metrics(folder)) for folder in args.experiment_dir}
    logged = {name for run in by_folder.values() for name in run}
    names = args.metrics or usual_metrics(logged)
    if not names:
        raise UsageError(f"--experiment_dir {args.experiment_dir[0]} has no numeric metric")
    unknown = [name for name in names if name not in logged]
    if unknown:
        raise UsageError(f"--metrics {unknown[0]} was not logged; logged are: {', '.join(sorted(logged))}")
    output = Path(args.output_file or Path(args.experiment_dir[0]) / "curves.png")
    runs = {label: [by_folder[folder]] for label, folder in labels(args.experiment_dir).items()}
    if args.group_seeds:
        groups = seed_groups(args.experiment_dir)
        runs = {
            label: [join_columns([by_folder[folder] for folder in folders]) for folders in seeds.values()]
            for label, seeds in groups.items()
        }
    draw({name: curves_of(name, runs) for name in names}, output, args.smoothing)
    print(f"wrote {output}")
    return str(output)


def draw(panels: Mapping[str, Mapping[str, Curve]], output: Path, smoothing: int) -> None:
    """Write a figure with one panel per metric to `output`: curves by label, with bands over several seeds.

    Raises: UsageError when it cannot be written.
    """
    per_line = min(3, len(panels))
    lines = math.ceil(len(panels) / per_line)
    figure, axes = new_figure(4.6 * per_line, 2.9 * lines, lines, per_line)
    drawn = dict.fromkeys(label for curves in panels.values() for label in curves)
    colours = {label: f"C{number}" for number, label in enumerate(drawn)}
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, curves) in zip(axes, panels.items()):
        draw_curves(axis, curves, colours, smoothing)
        axis.set_title(name, fontsize=10)
    handles, texts = axes[0].get_legend_handles_labels()
    if len(colours) > 1:
        figure.legend(handles, texts, loc="lower center", ncol=min(4, len(colours)), fontsize=8)
    save_figure(figure, output, "--output_file", bottom=0.05 if len(colours) > 1 else 0)


# ---------------------------------------------------------------------------------------- temperatures and best of n
@dataclass(frozen=True)
class Sweep:
    """Rewards of one model at one temperature."""

    model: str
    temperature: float
    best: list[float]  # mean over prompts of the expected best of 1, 2, … K responses


def read_sweep(name: str) -> Sweep:
    """Rewards of a file, and the temperature in its `.args.json`. Raises: UsageError when it has none."""
    path = Path(name)
    rows = [row for row in read_responses(path, ("rewards",)) if row["rewards"] and None not in row["rewards"]]
    try:
        settings = json.loads(path.with_suffix(".args.json").read_text(encoding="utf-8"))
        temperature = float(settings["temperature"]) if settings["do_sample"] else 0.0
    except (OSError, ValueError, KeyError):
        raise UsageError(f"--responses_file {name}: {path.stem}.args.json has no temperature") from None
    if not rows:
        raise UsageError(f"--responses_file {name} has no row with valid rewards")
    most = min(len(row["rewards"]) for row in rows)
    best = [sum(best_of_n(row["rewards"], n) for row in rows) / len(rows) for n in range(1, most + 1)]
    return Sweep(path.stem, temperature, best)


def best_of_n(rewards: list[float], n: int) -> float:
    """Expected maximum of n of K rewards drawn without replacement, unbiased for the best of n new ones.

    The i-th smallest is the highest of C(i-1, n-1) of the C(K, n) subsets (Nakano et al. 2021, 2112.09332, section 3).
    """
    ways = [math.comb(i, n - 1) for i in range(len(rewards))]
    return sum(way * reward for way, reward in zip(ways, sorted(rewards))) / math.comb(len(rewards), n)


def best_of_n_kl(n: int) -> float:
    """KL of the best of n to the policy, in nats: log n - (n-1)/n."""
    return math.log(n) - (n - 1) / n


def draw_best_of_n(sweeps: list[Sweep], output: Path) -> None:
    """Draw reward by temperature, n, and KL of the best of n. Raises: UsageError when it cannot be written."""
    figure, axes = new_figure(13.5, 3.6, columns=3)
    for number, model in enumerate(dict.fromkeys(sweep.model for sweep in sweeps)):
        own = sorted((s for s in sweeps if s.model == model), key=lambda s: s.temperature)
        heats = [sweep.temperature for sweep in own]
        axes[0].plot(heats, [s.best[0] for s in own], "o-", color=f"C{number}", ms=3, label=model)
        if any(len(sweep.best) > 1 for sweep in own):
            highest = [sweep.best[-1] for sweep in own]
            axes[0].plot(heats, highest, "o--", color=f"C{number}", ms=3, label=f"{model}, best of all")
    for sweep in sweeps:
        counts = list(range(1, len(sweep.best) + 1))
        label = f"{sweep.model}, temperature {sweep.temperature:g}"
        axes[1].plot(counts, sweep.best, "o-", ms=3, label=label)
        axes[2].plot([best_of_n_kl(n) for n in counts], sweep.best, "o-", ms=3, label=label)
    names = ("temperature", "n, best of n", "KL of best of n to the policy, nats")
    for axis, name in zip(axes, names):
        axis.set_xlabel(name, fontsize=8)
        axis.set_ylabel("mean reward", fontsize=8)
        axis.grid(alpha=0.25)
    axes[0].legend(fontsize=7)
    axes[1].legend(fontsize=7)
    save_figure(figure, output, "--output_file")


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the path of the picture."""
    return run(parse(PlotArgs, argv))


if __name__ == "__main__":
    main()
