"""The output of a run: a banner when it begins, a table when it ends. Printed by the first rank alone.

Left out: shares of the peak by kind of tensor (see `lightrlhf.estimate`), and tables while a run is in progress (the
bar has the newest values, `lightrlhf.plot` the curves).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from lightrlhf.cli.errors import list_names
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.cli.groups.evaluation import best_metric
from lightrlhf.models.names import starting_model
from lightrlhf.storage.checkpoint import BEST, checkpoints
from lightrlhf.storage.curves import Column, column, columns
from lightrlhf.storage.results import print_table, usual_metrics
from lightrlhf.storage.run_dir import is_stage, read_arg, read_logged
from lightrlhf.training.best import Best
from lightrlhf.training.next_steps import print_next
from lightrlhf.training.order import Order
from lightrlhf.training.progress import Progress

Metrics = Mapping[str, Column]  # of `metrics.jsonl`, by name


@runtime_checkable
class GroupsArgs(Protocol):
    """Flags of a program that samples several responses to a prompt."""

    num_generations: int


def lines(fields: Mapping[str, str]) -> str:
    """One line per field, the values below each other; never wrapped, so that paths can be copied."""
    return "\n".join(f"{name:<10} {text}" for name, text in fields.items() if text)


def run_banner(
    args: TrainArgs,
    given: Iterable[str],
    sizes: Mapping[str, tuple[int, int]],
    order: Order,
    progress: Progress,
    best: Best,
    directory: Path,
) -> str:
    """Start-up summary: model, data, device, steps; of an iteration's training only its model and its steps.

    A resumed run that has nothing left to do says why.
    given, sizes: see `describe_model`; directory: the experiment dir, in a dry run maybe the folder above it.
    """
    ranks = order.ranks
    resumed_at = progress.step if args.resume_from else None
    samples = args.num_generations if isinstance(args, GroupsArgs) else 1
    fields = {
        "model": describe_model(args, given, sizes),
        "data": order.data if order.ends else f"{order.data}, {order.num_rows:,} rows",  # several sets have theirs
        "device": describe_device(ranks.device, args, ranks.num_processes),
        "steps": describe_steps(progress.num_steps, order.batch_size, ranks.world_size, samples, resumed_at),
        "results": describe_results(args, directory) if args.dry_run else str(directory),
    }
    own = ("model", "steps") if is_stage(directory) else fields
    text = lines({name: fields[name] for name in own})
    if args.resume_from and progress.step >= progress.num_steps:
        text += f"\nthis run has done its {progress.step} steps; raise --max_steps or --epochs to go on"
    elif progress.is_last:
        flag = f"--early_stop_patience {best.patience}"
        text += f"\n{flag} ended this run at step {progress.step}; raise it to go on"
    return text


def describe_results(args: TrainArgs, place: Path) -> str:
    """The line on results in a dry run; place: the experiment dir that there is not, or the folder above it."""
    return f"nothing is written in a dry run; else {'' if args.output_dir else 'below '}{place}"


def print_end(program: str, directory: Path, best: Best, memory: float, seconds: float) -> None:
    """Print what a run that has ended gave, and what to type next; of an iteration's training neither table nor that.

    See `print_summary`.
    """
    if not is_stage(directory):
        logged = columns(read_logged(directory / "metrics.jsonl"))
        print_summary(f"lightrlhf.{program}", directory, logged, memory)
    if best.step is not None:
        link = directory / BEST
        print(f"{best}: {link if link.exists() else 'its checkpoint was deleted'}")
    print(f"finished in {seconds:.0f} s: {directory}", flush=True)
    if not is_stage(directory):
        print_next(program, directory)


def describe_model(args: TrainArgs, given: Iterable[str], sizes: Mapping[str, tuple[int, int]]) -> str:
    """The model a run starts from, and of each part that is trained the parameters and how many of them are.

    given: names of the objects that `train` was called with; sizes: see `count_parameters`.
    """
    name = "given from Python" if "policy" in given else starting_model(args)[0]
    parts = [f"{part}: {total:,} parameters, {trained:,} trainable" for part, (total, trained) in sizes.items()]
    return "; ".join(filter(None, [name, *parts]))


def describe_device(device: torch.device, args: TrainArgs, ranks: int) -> str:
    """Device, how many of them and by which strategy, and precision."""
    name = f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
    strategy = "" if args.strategy == "auto" else f", {args.strategy}"
    return f"{name}, {ranks} {'ranks' if ranks > 1 else 'rank'}{strategy}, precision {args.precision}"


def describe_steps(num_steps: int, batch_size: int, ranks: int, samples: int, resumed_at: int | None) -> str:
    """Number of steps, rows of each over all ranks (batch_size: of one rank), and samples of each row."""
    text = f"{num_steps:,} of {batch_size * ranks:,} rows"
    text += f" ({batch_size:,} on each rank)" if ranks > 1 else ""
    text += f", {samples} samples of each" if samples > 1 else ""
    return text + ("" if resumed_at is None else f"; resumes at step {resumed_at:,}")


def metric_cells(logged: Metrics, names: Iterable[str]) -> list[list[str]]:
    """First, last and best value of metrics of `metrics.jsonl`, and the step of the best.

    The best is left out where the metric's name does not say which value is better.
    """
    cells = []
    for name in names:
        if name not in logged:
            continue
        steps, values = logged[name]
        best = step = ""
        try:
            at = values.argmin() if best_metric(name)[1] else values.argmax()
            best, step = f"{values[at]:.4g}", f"{steps[at]:,}"
        except ValueError:  # neither is better
            pass
        cells.append([name, f"{values[0]:.4g}", f"{values[-1]:.4g}", best, step])
    return cells


def mean_speed(logged: Metrics) -> str:
    """Mean of the logged tokens or decisions per second, in words; empty when none was logged."""
    for name, unit in (("time/tokens_per_second", "tokens"), ("time/steps_per_second", "decisions")):
        if name in logged:
            return f"{logged[name].values.mean():,.0f} {unit} per second of training"
    return ""


def describe_audit(logged: Metrics) -> str:
    """How many responses the audit scored and how often it warned, in words; empty without an audit."""
    if "audit/valid_ratio" not in logged:
        return ""
    scored = logged["audit/valid_ratio"].values.mean()
    steps, flags = logged.get("audit/warning", column({}))
    warned = [f"{step:,}" for step in steps[flags > 0].tolist()]
    warning = f"warned at steps {list_names(warned)}" if warned else "no warning"
    return f"scored {scored:.0%} of the responses; {warning}"


def describe_groups(logged: Metrics) -> str:
    """That no group of a prompt's responses had two different rewards, with what to do; else empty."""
    if "objective/zero_std_ratio" not in logged or logged["objective/zero_std_ratio"].values.min() < 1:
        return ""
    count = len(logged["objective/zero_std_ratio"].values)
    return (
        f"equal rewards in each, in all {count:,} steps logged: they taught nothing; read the responses, and give "
        "easier or harder prompts, SFT before, or another reward"
    )


def print_summary(
    title: str, directory: Path, logged: Metrics, memory: float = 0.0, names: Iterable[str] | None = None
) -> None:
    """Print the table of a run that has ended, its audit, equal groups, speed, most memory of a rank (GiB) and newest
    checkpoint.

    names: metrics of the table; the usual ones when not given, and no table without values.
    """
    usual = usual_metrics({name for name in logged if not name.startswith("time/")})
    if cells := metric_cells(logged, usual if names is None else names):
        print_table(title, ("metric", "first", "last", "best", "at step"), cells)
    newest = checkpoints(directory)[-1:]
    groups = describe_groups(logged) if read_arg(str(directory), "num_generations") != 1 else ""
    fields = {"audit": describe_audit(logged), "groups": groups, "speed": mean_speed(logged)}
    fields["memory"] = f"{memory:.2f} GiB at most" if memory else ""
    print(lines(fields | {"checkpoint": str(newest[0]) if newest else ""}), flush=True)
