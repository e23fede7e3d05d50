"""What do labels, rejection sampling and GRPO teach a small model? Six tasks of reasoning-gym, held-out items.

One model of 0.7M parameters, trained here from nothing, is the base of all runs. It learns to read the six tasks'
questions, and the format of answers, from other ranges of them (`BASE`), none of which contains a question of `TASKS`;
besides, held-out questions are held out by their hash for any range (`datasets_prep.reasoning_gym`). From it, with the
same training prompts in the same order:

    SFT    one pass over the prompts with their right answers: as many labelled samples as GRPO has prompts
    RAFT   in `ITERATIONS` parts of the prompts: K samples each, fine-tuning on the first right one, the others left out
    GRPO   `lightrlhf.grpo`, K samples a prompt, once each

RAFT and GRPO see no answer, only whether the task's scorer pays a response in full (`solved`): the scorers' partial pay
goes to any text that contains the answer. Measured: the share of held-out items that a greedy response solves.

Everything above and below was written down before any of the runs; the learning rates are the best of three for each
method on seed 0, which is none of the ten, and the task chain_sum (`--trials True`). Prints a table and the claims that
held. Finished runs are kept: the same command resumes after a kill, and `--seeds 11 12` adds two to those that are
there.

    python -m examples.experiments.reasoning
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.experiments.reasoning_tasks import (
    BASE,
    CPU,
    GRPO,
    LONGEST,
    PHRASES,
    PROMPTS,
    SFT,
    SIZES,
    STEPS,
    TASKS,
    K,
    write_data,
)
from examples.experiments.records import TEN, common_seeds, made_by, now, results, spent
from examples.experiments.small_models import phrase_tokenizer, write_model
from examples.experiments.stats import interval, paired, report_claims, shown, shown_gap
from examples.experiments.verified import Shape, curve_of, run_raft, sampled, scores_of
from lightrlhf import grpo, sft
from lightrlhf.cli.calls import call
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, flag, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import Row
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.jsonl import JsonlWriter
from lightrlhf.storage.results import label, panels, print_table, save_figure

NUM_TRAIN, NUM_BASE = 4000, 6000  # items of a task, and of a range of the base
ITERATIONS = 8  # parts of RAFT
BASE_SFT = CPU | {
    "max_steps": 1000,
    "learning_rate": 2e-3,
    "mini_batch_size": 128,
    "micro_batch_size": 64,
    "log_interval": 50,
}
RATES = (3e-5, 1e-4, 3e-4)  # of the trials; 3e-4 was the best of (3e-4, 1e-3, 3e-3) for all three at 64 steps
RAFT = CPU | {"learning_rate": 3e-4, "epochs": 1, "mini_batch_size": 16, "micro_batch_size": 16, "log_interval": 4}
TRIED = "chain_sum"  # the task of the trials, on seed 0
ARMS = {"SFT": SFT, "RAFT": RAFT, "GRPO": GRPO}
GOAL, LOW = 0.9, 0.5  # hoped for on three tasks: GRPO above the first from a base below the second
SMOKE = {"max_steps": 1}
Job = tuple[str, str, int]  # task, arm, seed
SHAPE = Shape(STEPS * PROMPTS, ITERATIONS, K, LONGEST)


@dataclass(frozen=True, kw_only=True)
class ReasoningArgs(Args):
    """Compare SFT, RAFT and GRPO on six tasks with verifiers."""

    output_dir: str = "reasoning"
    """Folder for data, logs and results; finished runs in it are kept."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 10 by default."""
    tasks: list[str] | None = flag(None, choices=TASKS)
    """Tasks to run; all six by default."""
    trials: bool = False
    """Run the trials of learning rates on seed 0 instead."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(ReasoningArgs, argv)
    torch.set_num_threads(1)
    folder = Path(args.output_dir)
    tasks, seeds = [TRIED] if args.trials else args.tasks or list(TASKS), args.seeds or TEN
    base = write_base(folder, tasks, args.smoke)
    settings = {"tasks": TASKS, "base": BASE, "sizes": SIZES, "base_sft": BASE_SFT, "k": K, "smoke": args.smoke}
    if args.trials:
        with JsonlWriter(folder / "trials.jsonl", settings | {"rates": list(RATES)}) as writer:
            show_trials(run_trials(folder, base, writer, args.smoke))
        return {}
    jobs: list[Job] = [(task, "base", 0) for task in tasks]
    jobs += [(task, arm, seed) for task in tasks for seed in seeds for arm in ARMS]
    with results("reasoning", folder, settings | {"arms": ARMS, "iterations": ITERATIONS}) as writer:
        done = {(row["task"], row["arm"], row["seed"]) for row in writer.rows}
        for job in jobs:
            if job not in done:
                writer.append(run_job(folder, base, job, ARMS, args.smoke))
        rows = [row for row in writer.rows if row["task"] in tasks]
    seeds = sorted(set.intersection(*(set(common_seeds(rows_of(rows, task), ARMS)) for task in tasks)))
    rows = [row for row in rows if row["arm"] == "base" or row["seed"] in seeds]
    claims = show_results(rows, tasks, len(seeds))
    draw(rows, tasks, folder / "reasoning.png")
    report_claims(claims, folder)
    return claims


# ------------------------------------------------------------------------------------------------------------- base
def write_base(folder: Path, tasks: Sequence[str], smoke: bool) -> str:
    """Prepare the tasks and the base model, trained once; returns its experiment dir."""
    tokenizer = phrase_tokenizer(PHRASES)
    model = write_model(folder / "model", 0, tokenizer, SIZES)
    num_train, num_base = (64, 64) if smoke else (NUM_TRAIN, NUM_BASE)
    for task in tasks:
        write_data(folder / "data" / task, task, TASKS[task], num_train, model)
    runs = [args.parent for args in (folder / "logs" / "base").rglob("args.json") if checkpoints(args.parent)]
    if runs:
        return str(runs[-1])
    ranges = [(task, i, options) for task in (tasks if smoke else BASE) for i, options in enumerate(BASE[task])]
    sets = [write_data(folder / "base" / f"{task}-{i}", task, options, num_base, model) for task, i, options in ranges]
    where = {"data_dir": sets, "log_dir": folder / "logs", "experiment_name": "base", "model_name": model}
    flags = BASE_SFT | {"save_interval": BASE_SFT["max_steps"]} | (SMOKE if smoke else {})
    return call(sft, **where, data_weights=[1.0] * len(sets), seed=1, **flags)


# ------------------------------------------------------------------------------------------------------------- arms
def run_job(folder: Path, base: str, job: Job, arms: dict[str, dict[str, Any]], smoke: bool) -> Row:
    """Train an arm on a task; returns its curve and the share of held-out items that it solves."""
    task, arm, seed = job
    data, work = str(folder / "data" / task), folder / "runs" / f"{task}-{arm}-{seed}"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    began = now()
    curve: list[Row] = []
    flags = dict(arms.get(arm, {}))
    if smoke:
        flags |= SMOKE
    where = {"data_dir": data, "log_dir": work, "seed": seed}
    if arm == "base":
        policy = base
    elif arm == "RAFT":
        policy, curve = run_raft(work, base, data, seed, flags, SHAPE)
    elif arm == "SFT":
        policy = call(sft, model_name=base, **where, **flags)
        curve = curve_of(policy, "train/loss")
    else:
        policy = call(grpo, model_name=base, **where, **flags)
        curve = curve_of(policy, "objective/score")
    seconds = spent(began)
    greedy = {"do_sample": False, "num_prompts": 4 if smoke else None}
    answers = sampled(policy, work / "test.jsonl", SHAPE, data_dir=data, split="test", **greedy)
    right = [score for row in answers for score in scores_of(row)]
    shutil.rmtree(work)  # some megabytes, and all that is used of it is here
    result = {"task": task, "arm": arm, "seed": seed, "accuracy": sum(right) / len(right), "items": len(right)}
    return result | {"curve": curve, "settings": flags} | seconds | made_by()


def run_trials(folder: Path, base: str, writer: JsonlWriter, smoke: bool) -> list[Row]:
    """Each arm at each learning rate."""
    done = {(row["arm"], row["settings"]["learning_rate"]) for row in writer.rows}
    for arm, flags in ARMS.items():
        for rate in RATES:
            if (arm, rate) not in done:
                arms = {arm: flags | {"learning_rate": rate}}
                writer.append(run_job(folder, base, (TRIED, arm, 0), arms, smoke))
    return writer.rows


# ---------------------------------------------------------------------------------------------------------- results
def rows_of(rows: Sequence[Row], task: str) -> list[Row]:
    return [row for row in rows if row["task"] == task]


def show_trials(rows: Sequence[Row]) -> None:
    """Print the accuracy of each trial."""
    table = [(row["arm"], f"{row['settings']['learning_rate']:g}", f"{row['accuracy']:.3f}") for row in rows]
    print_table(f"trials on {TRIED}, seed 0", ("arm", "learning rate", "accuracy"), table)


def show_results(rows: Sequence[Row], tasks: Sequence[str], num_seeds: int) -> dict[str, bool]:
    """Print the table; returns which claims hold."""
    found = {(task, arm): [] for task in tasks for arm in ("base", *ARMS)}
    for row in sorted(rows, key=lambda row: row["seed"]):
        found[row["task"], row["arm"]].append(row["accuracy"])
    table = []
    for task in tasks:
        cells = [shown(found[task, arm]) for arm in ("base", *ARMS)]
        table.append((task, *cells, shown_gap(paired(found[task, "GRPO"], found[task, "RAFT"]))))
    headings = ("task", "base", *ARMS, "GRPO minus RAFT")
    print_table(f"held-out items solved: mean over {num_seeds} seeds [95% interval]", headings, table, width=140)
    seconds = {arm: [row["seconds"] for row in rows if row["arm"] == arm] for arm in ARMS}
    print("  seconds of a run:", *(f"{arm} {sum(each) / len(each):.0f}," for arm, each in seconds.items()))
    solved_by_grpo = [
        task for task in tasks if found[task, "base"][0] < LOW and interval(found[task, "GRPO"])[0] > GOAL
    ]
    claims = {f"GRPO above {GOAL} from below {LOW} on three tasks": len(solved_by_grpo) >= 3}
    for arm in ("SFT", "RAFT"):
        better = sum(paired(found[task, "GRPO"], found[task, arm])[1] > 0 for task in tasks)
        claims[f"GRPO > {arm} on most tasks"] = 2 * better > len(tasks)
    return claims


def draw(rows: Sequence[Row], tasks: Sequence[str], output: Path) -> None:
    """Draw the share of right samples in training over the prompts seen, one panel a task."""
    figure, axes = panels(list(tasks), lines=2 if len(tasks) > 3 else 1)
    for axis, task in zip(axes, tasks):
        for number, (arm, prompts) in enumerate((("RAFT", STEPS * PROMPTS // ITERATIONS), ("GRPO", PROMPTS))):
            curves = [row["curve"] for row in rows if (row["task"], row["arm"]) == (task, arm)]
            points = [[point["value"] for point in step] for step in zip(*curves)]
            steps = [point["step"] * prompts for point in curves[0]]
            for curve in curves:
                axis.plot(steps, [point["value"] for point in curve], color=f"C{number}", alpha=0.25, lw=1)
            axis.plot(steps, [sum(point) / len(point) for point in points], color=f"C{number}", label=arm)
        label(axis, "prompts", "right samples")
    save_figure(figure, output)


if __name__ == "__main__":
    main()
