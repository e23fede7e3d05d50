"""Results of the tools: tables in the terminal, pictures, and files in an experiment dir."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.curves import Curve, smooth
from lightrlhf.storage.destinations import check_output
from lightrlhf.storage.jsonl import Row, as_jsonl, read_settings, to_json, write_jsonl
from lightrlhf.storage.locks import lock_folder
from lightrlhf.storage.run_dir import is_experiment_dir
from lightrlhf.storage.seals import sha256
from lightrlhf.storage.shards import WHOLE, Shard
from lightrlhf.storage.writing import replacing, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Item = TypeVar("Item")
USUAL_METRICS = (  # the metrics to look at first: the bar and the demo's curve show the first ones logged
    "objective/score",
    "objective/kl",
    "rewards/accuracies",
    "train/loss",
    "val/loss",
    "val/rewards/accuracies",
    "val/score",
    "val/gold",
    "audit/score",
    "objective/zero_std_ratio",
    "objective/entropy",
    "completions/mean_length",
    "completions/truncated_ratio",
    "policy/clipfrac",
    "value/explained_variance",
)


def usual_metrics(logged: Set[str]) -> list[str]:
    """The usual metrics among these names, in their order; all names if there are no usual ones."""
    return [name for name in USUAL_METRICS if name in logged] or sorted(logged)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str] | None], width: int | None = None
) -> None:
    """Print a table: first column to the left, numbers to the right; a row None draws a line.

    width: columns of the terminal, when the table needs more than it has.
    """
    from rich.console import Console
    from rich.table import Table

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # for `one_line_errors`; rich would end the program as failed

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    Terminal(width=width).print(table)


def cell(row: Mapping[str, Any], name: str) -> str:
    """A value of a row of results, followed by its 95% interval where `{name}_interval` has one; empty if missing."""
    value, interval = row.get(name, ""), row.get(f"{name}_interval")
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def in_words(seconds: float) -> str:
    """A time as people say it."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"about {seconds / length:.1f} {unit}"
    return f"about {seconds:.1f} s"


def show_trial(row: Mapping[str, Any], done: int, total: int, what: str, seconds: float, output: Path | str) -> None:
    """Print what the dry run of a tool made: its first row without token ids, and what all rows would take.

    done, total: numbers of rows, of `what` in words; seconds: that `done` of them took; output: not written.
    """
    show_row(row)
    whole = in_words(seconds * total / max(done, 1))
    print(f"\nthe first {done:,} of {total:,} {what} took {seconds:.1f} s, all of them {whole}")
    print(f"nothing was written; leave --dry_run out to write {output}", flush=True)


def try_first(
    work: Callable[[Sequence[Item]], Iterable[Row]],
    tried: Sequence[Item],
    total: int,
    what: str,
    output: Path | str,
    shard: Shard = WHOLE,
) -> list[Row]:
    """Do the first items of a tool's work, and print the first row and what all would take; returns the rows.

    total, what: number and kind of all items; shard: of a rank that shares them with others, which all do the same.
    """
    started = time.perf_counter()
    rows = list(work(tried))
    seconds = (time.perf_counter() - started) / shard.world_size
    if shard.rank == 0:
        show_trial(rows[0], len(tried), total, what, seconds, output)
    return rows


def show_row(row: Mapping[str, Any]) -> None:
    """Print the columns of a row below each other, but for token ids; of a list its items."""
    for name, value in row.items():
        if name.endswith("_ids"):
            continue
        items = value if isinstance(value, list) else [value]
        for number, item in enumerate(items, start=1):
            label = f"{name} {number}" if isinstance(value, list) else name
            print(f"{label}: {item if isinstance(item, str) else json.dumps(item, ensure_ascii=False, default=str)}")


def new_figure(width: float, height: float, lines: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches that needs no display, and its axes line by line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, list(figure.subplots(lines, columns, squeeze=False).flat)


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


def draw_curves(axis: Axes, curves: Mapping[str, Curve], colours: Mapping[str, str], smoothing: int) -> None:
    """Draw curves by label into an axis: as logged and smoothed, with bands of a standard error over several seeds.

    smoothing: points in the moving average; curves of few points are drawn as they are, with markers.
    """
    for name, curve in curves.items():
        steps, values, band, colour = curve.steps, curve.means, curve.errors, colours[name]
        few = len(steps) < 3 * smoothing
        axis.plot(steps, values, color=colour, alpha=1.0 if few else 0.3, lw=1.2, marker="o" if few else None, ms=3)
        if not few:
            values, band = smooth(values, smoothing), smooth(band, smoothing)
        axis.plot(steps, values, color=colour, lw=1.8, label=name)
        if (curve.seeds > 1).any():
            axis.fill_between(steps, values - band, values + band, color=colour, alpha=0.2, lw=0)
    axis.set_xlabel("step", fontsize=8)
    axis.locator_params("x", integer=True)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)


def save_figure(figure: Figure, path: Path, flag: str = "", bottom: float = 0.0) -> None:
    """Write a figure as PNG, its axes above `bottom`, a fraction of the height.

    Raises: RunFailure naming `flag` and the path when it cannot be written.
    """
    figure.tight_layout(rect=(0, bottom, 1, 1))
    with replacing(path, f"{flag} {path}".strip()) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix[1:] or "png")


def check_results(experiment_dirs: Iterable[str], name: str) -> None:
    """Raises: ValueError, before any work, where the results of an evaluation cannot be written."""
    for directory in filter(is_experiment_dir, experiment_dirs):
        check_output(Path(directory, "eval", f"{name}.json"), "--experiment_dir")


def write_results(
    experiment_dir: Path,
    name: str,
    row: Mapping[str, Any],
    records: Iterable[Mapping[str, Any]],
    flags: Mapping[str, Any],
) -> str:
    """Write the results to `eval/{name}.json`, one record per line to `eval/{name}.jsonl`, and the flags next to them.

    records: read twice. Different results of an earlier call are kept: the new files are then named by the changed
    settings, such as `test-seed=7.json`, and a line says so. Returns the name. In a dry run, the first record is
    printed instead.
    Raises: RunFailure when they cannot be written.
    """
    if flags.get("dry_run"):
        first = next(iter(records), {})
        print(f"\nfirst record of {row['model']}:")
        show_row(first)
        return name
    folder, given = experiment_dir / "eval", json.loads(json.dumps(flags))
    if existing := checkpoints(experiment_dir):
        given["checkpoint"] = existing[-1].name  # which was evaluated
    result = to_json(row, indent=1)
    contents = {".json": [result], ".jsonl": (as_jsonl([dict(record)]) for record in records)}
    with lock_folder(folder, wait=True):  # two evaluations at once do not mix the files
        chosen, note = free_name(folder, name, {suffix: hash_of(texts) for suffix, texts in contents.items()}, given)
        write_jsonl(folder / f"{chosen}.jsonl", map(dict, records), settings=given)
        write_text(folder / f"{chosen}.json", result)
    if note:
        print(note)
    return chosen


def hash_of(texts: Iterable[str]) -> str:
    """SHA-256 of texts one after the other, in hexadecimal."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8"))
    return digest.hexdigest()


def free_name(folder: Path, name: str, files: Mapping[str, str], flags: Mapping[str, Any]) -> tuple[str, str]:
    """A name that no other results use, and a note if it differs from `name`; files: hashes of contents by suffix."""

    def may_be_written(one: str) -> bool:
        known = {suffix: folder / f"{one}{suffix}" for suffix in files if (folder / f"{one}{suffix}").exists()}
        is_whole = ".json" in known  # it is written last
        return not is_whole or all(sha256(path) == files[suffix] for suffix, path in known.items())

    if may_be_written(name):
        return name, ""
    try:
        earlier = read_settings(folder / f"{name}.jsonl")
    except UsageError:  # there are none
        earlier = {}
    changed = [flag for flag in flags if flag in earlier and earlier[flag] != flags[flag]]
    more = [f"and-{len(changed) - 3}-more"] if len(changed) > 3 else []
    first = "-".join([name, *(short_setting(flag, flags[flag]) for flag in changed[:3]), *more])
    chosen = next(one for n in count(1) if may_be_written(one := f"{first}-{n}" if n > 1 else first))
    names = {flag: flag if flag == "checkpoint" else f"--{flag}" for flag in changed}
    values = (f"{shown} {json.dumps(earlier[flag])}, now {json.dumps(flags[flag])}" for flag, shown in names.items())
    why = f"had {'; '.join(values)}" if changed else "had the same settings"
    return chosen, f"wrote {folder / chosen}.json: {folder / name}.json has other results and stays; it {why}"


def short_setting(flag: str, value: Any) -> str:
    """A setting as part of a file's name; only the flag for long values and paths."""
    text = str(value).lower()
    return f"{flag}={text}" if re.fullmatch(r"[\w.+-]{1,24}", text) else flag
