"""Results of a sweep: means over seeds, a table, and a picture.

A row of a run has its combination, seed, status (`finished` counts), the final and best value of the metric, and the
seconds that it took. Left out: tests of which combination is better.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightrlhf.cli.sweep_file import Sweep, text_of
from lightrlhf.maths.student import interval
from lightrlhf.storage.curves import columns, curves_of, differences
from lightrlhf.storage.results import draw_curves, new_figure, print_table, save_figure
from lightrlhf.storage.run_dir import read_logged

PICTURE = "sweep.png"
SMOOTHING = 9  # points in the moving average of long curves, as in `lightrlhf.plot`
COLOURS = [f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9)]  # of combinations in no order, without grey
GREY = "0.65"  # of those after the best nine
MOST_IN_LEGEND = 12
TICKS = 8  # parts of the axis of values; one of a part has a tick
LOG_FROM = 5  # ratio of the largest to the smallest value from which their axis is logarithmic

Rows = Sequence[Mapping[str, Any]]
Result = dict[str, Any]


def summarise(sweep: Sweep, rows: Rows) -> list[Result]:
    """One row of results per combination, the best final value first, those without a finished run last.

    `final`, `best` and `seconds` are means over the finished seeds, the first two with 95% intervals as
    `final_interval` and `best_interval`, None for one seed; `values` has the flags in which combinations differ.
    `to_first` is the mean difference to the first combination's final value, paired by seed, since runs of one seed
    share prompts and noise; it is missing where no seed finished both.
    """
    apart = differences([one.values for one in sweep.combinations])
    results: list[Result] = []
    finals: dict[str, dict[int, float]] = {}
    for number, one in enumerate(sweep.combinations):
        own = [row for row in rows if row["combination"] == one.name and row["status"] == "finished"]
        values = {name: found[number] for name, found in apart.items()}
        result: Result = {"combination": one.name, "values": values, "seeds": len(own)}
        for name in ("final", "best") if own else ():
            mean, *bounds = interval([row[name] for row in own])
            result |= {name: mean, f"{name}_interval": bounds if len(own) > 1 else None}
        if own:
            result["seconds"] = statistics.fmean(row["seconds"] for row in own)
        finals[one.name] = {row["seed"]: row["final"] for row in own}
        results.append(result)
    sign = 1 if sweep.lower_is_better else -1
    results.sort(key=lambda result: (not result["seeds"], sign * result.get("final", 0.0)))
    first = finals[results[0]["combination"]]
    for result in results[1:]:
        finished = finals[result["combination"]]
        gaps = [finished[seed] - first[seed] for seed in first if seed in finished]
        if gaps:
            mean, *bounds = interval(gaps)
            result |= {"to_first": mean, "to_first_interval": bounds if len(gaps) > 1 else None}
    return results


def show(sweep: Sweep, results: Sequence[Result]) -> None:
    """Print the table, and how to read it."""
    flags, count = list(results[0]["values"]), len(sweep.seeds)
    best = "lowest" if sweep.lower_is_better else "highest"
    table = []
    for one in results:
        seeds = str(count) if one["seeds"] == count else f"{one['seeds']} of {count}"
        seconds = f"{one['seconds']:.0f}" if one["seeds"] else ""
        values = [text_of(one["values"][flag]) for flag in flags] or [sweep.program]
        table.append([*values, _cell(one, "final"), _cell(one, "to_first"), _cell(one, "best"), seeds, seconds])
    measured = [f"final {sweep.metric}", "minus the first, by seed", f"{best} {sweep.metric}"]
    titles = [*(flags or ["program"]), *measured, "seeds", "seconds"]
    width = sum(3 + max(map(len, column)) for column in zip(titles, *table)) + 1
    print_table(f"lightrlhf.{sweep.program}: means over seeds [95% intervals]", titles, table, max(80, width))
    print(f"final: the last value of a run, which rows are sorted by; {best}: of all its values, which is optimistic")
    if len(results) > 1:
        print(
            f"note: the first of {len(results)} combinations was chosen by the values shown here, which makes its own "
            "optimistic; measure it again, with other seeds or on the test split"
        )


def _cell(result: Result, name: str) -> str:
    if name not in result:
        return ""
    bounds = result[f"{name}_interval"]
    return f"{result[name]:.4g}" + (f" [{bounds[0]:.4g}, {bounds[1]:.4g}]" if bounds else "")


# ------------------------------------------------------------------------------------------------------------- picture
def draw(sweep: Sweep, rows: Rows, results: Sequence[Result], folder: Path) -> None:
    """Draw the metric by step and its final value by combination, over the finished runs, of which there must be some.

    Means with standard errors over seeds. Where one flag is varied and is a number, it is the axis of the final values.
    Raises: RunFailure when the picture cannot be written.
    """
    shown = [one for one in results if one["seeds"]]
    numbers = [value for one in shown for value in one["values"].values() if type(value) in (int, float)]
    by_number = len(numbers) == len(shown) and all(len(one["values"]) == 1 for one in shown)
    if by_number:
        shown = [one for _, one in sorted(zip(numbers, shown), key=lambda pair: pair[0])]
    labels = {one["combination"]: _label(one["values"]) or sweep.program for one in shown}
    runs: dict[str, list[Any]] = {label: [] for label in labels.values()}
    finals: dict[str, list[float]] = {label: [] for label in labels.values()}
    for row in rows:
        if row["status"] == "finished":
            runs[labels[row["combination"]]].append(columns(read_logged(folder / row["run"] / "metrics.jsonl")))
            finals[labels[row["combination"]]].append(row["final"])
    colours = _colours(list(runs), by_number)
    better = "lower is better" if sweep.lower_is_better else "higher is better"
    figure, (by_step, by_value) = new_figure(12, 4.4 if by_number else max(3.2, 1.8 + 0.32 * len(runs)), columns=2)
    draw_curves(by_step, curves_of(sweep.metric, runs), colours, SMOOTHING)
    by_step.set_title("by step: mean and standard error over seeds", fontsize=10)
    by_step.set_ylabel(f"{sweep.metric} ({better})", fontsize=8)
    if by_number and len(runs) <= MOST_IN_LEGEND:
        by_step.legend(fontsize=8)
    places = sorted(numbers) if by_number else range(len(runs))
    _draw_finals(by_value, finals, places, colours, upright=by_number)
    by_value.set_title("final values: seeds (small), mean and standard error", fontsize=10)
    if by_number:
        by_value.set_xlabel(next(iter(shown[0]["values"])), fontsize=8)
        by_value.set_ylabel(f"final {sweep.metric} ({better})", fontsize=8)
        is_log = min(numbers) > 0 and max(numbers) / min(numbers) >= LOG_FROM
        if is_log:
            by_value.set_xscale("log")
        ticks = _ticks(sorted(numbers), math.log if is_log else float)
        by_value.set_xticks(ticks, list(map(text_of, ticks)))
        by_value.minorticks_off()
    else:
        by_value.set_xlabel(f"final {sweep.metric} ({better})", fontsize=8)
        by_value.set_yticks(range(len(runs)), list(runs))
        by_value.invert_yaxis()
        for text, colour in zip(by_value.get_yticklabels(), colours.values()):
            text.set_color(colour)
    save_figure(figure, folder / PICTURE)


def _label(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {text_of(value)}" for name, value in values.items())


def _colours(labels: Sequence[str], in_order: bool) -> dict[str, Any]:
    """Colours by label: a scale for numbers in order, else some that are easily told apart, and grey."""
    from matplotlib import colormaps

    if in_order:
        return {
            label: colormaps["viridis"](0.9 * place / max(len(labels) - 1, 1)) for place, label in enumerate(labels)
        }
    return dict(zip(labels, itertools.chain(COLOURS, itertools.repeat(GREY))))


def _ticks(numbers: Sequence[float], scale: Callable[[float], float]) -> list[float]:
    """Select tick positions, from ascending numbers, that leave room for their labels."""
    apart, ticks = (scale(numbers[-1]) - scale(numbers[0])) / TICKS, [numbers[0]]
    for number in numbers:
        if scale(number) - scale(ticks[-1]) > apart:
            ticks.append(number)
    return ticks


def _draw_finals(
    axis: Any, finals: Mapping[str, Sequence[float]], places: Sequence[float], colours: Mapping[str, Any], upright: bool
) -> None:
    """Draw the values of seeds, their mean and its standard error at each place: upwards, else to the right."""
    means = [statistics.fmean(values) for values in finals.values()]
    if upright:
        axis.plot(places, means, color="0.7", lw=1, zorder=1)
    for place, mean, (label, values) in zip(places, means, finals.items()):
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        beside = [place] * len(values)
        seeds, centre = ((beside, values), (place, mean)) if upright else ((values, beside), (mean, place))
        axis.plot(*seeds, "o", color=colours[label], ms=3, alpha=0.5)
        bar = {"yerr" if upright else "xerr": error} if len(values) > 1 else {}
        axis.errorbar(*centre, **bar, fmt="D", color=colours[label], ms=6, capsize=4, lw=1.5)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
