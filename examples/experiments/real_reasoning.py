"""What does RL add to SFT on a real model's own right answers? Two tasks of reasoning-gym, held-out items, over seeds.

SmolLM2-135M-Instruct (see `real_model`) first learns the form of short answers by SFT on 32 items of each of eight
tasks (`CANDIDATES`), 32 steps, one run for all that follows: the base. From it, on the same prompts in the same order:

    RAFT   in 4 parts of the prompts: 8 samples each, fine-tuning on the first right one, the others left out
    GRPO   `lightrlhf.grpo`: 48 steps of 8 prompts, 8 samples each, once

Both draw 3,072 samples of at most 16 tokens, and see of the answers only whether the task's scorer pays a response in
full (`verified.solved`). Learning rate 2e-4 for all of them, the usual one of LoRA; no rate was tried. Test items are
held out by the hash of their question for any seed and size. Measured on 200 of them: the share that a greedy response
solves, pass@1 (mean of 8 samples at temperature 1) and pass@8 (any of the 8 right); on 100 the KL to the base, nats a
response. Claims, by the 95% interval of a paired difference over seeds: each arm above the base, GRPO above RAFT, in
greedy accuracy, and in pass@1 and pass@8 the same: 18 comparisons, not adjusted. An arm takes more than ten minutes:
five seeds, 1 to 5 (three until the first two had been run).

The two tasks are the two of `CANDIDATES` whose training items of another seed the base solves nearest to 40% of the
time (64 items, 4 samples each, `--trials True`), where that is between 10% and 70%; the choice is `TASKS`, committed
before any run of an arm.

`--gsm8k_file` instead measures the instruct model on 200 of GSM8K's training problems (greedy, 256 tokens).

    python -m examples.experiments.real_reasoning
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from datasets_prep.gsm8k import prepare_data as gsm8k
from examples.experiments.real_model import ENOUGH, in_own_process, seconds_of, trained
from examples.experiments.real_tasks import (
    CANDIDATES,
    FORMAT,
    GRPO,
    MEASURES,
    SHAPE,
    TRAIN,
    RealArgs,
    mean,
    mean_length,
    measures,
    write_base,
    write_data,
)
from examples.experiments.records import FIVE, results
from examples.experiments.stats import paired, report_claims, shown, shown_gap
from examples.experiments.verified import Shape, curve_of, run_raft, sampled, scores_of
from lightrlhf import grpo
from lightrlhf.cli.calls import call
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import flag, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import load_split
from lightrlhf.maths.ops import wilson_interval
from lightrlhf.rewards.verifiers import numeric_answer
from lightrlhf.storage.jsonl import JsonlWriter
from lightrlhf.storage.results import print_table

TASKS = ["letter_counting", "gcd"]  # .246 and .129 in the trials, the only two between 10% and 70%
NUM_TRIED = 64  # items of a candidate in the trials
RAFT = TRAIN | {"epochs": 1, "mini_batch_size": 16, "micro_batch_size": 16, "save_interval": 1000}
ARMS = ("base", "RAFT", "GRPO")
COMMONEST = "commonest response"  # its share of the samples; rows of before the first seed was read have none
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RealReasoningArgs(RealArgs):
    """Compare GRPO with RAFT on a real pretrained model."""

    output_dir: str = "real_reasoning"
    """Folder for data, logs and results; finished arms in it are kept, and begun ones gone on with."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 5 by default."""
    tasks: list[str] | None = flag(None, choices=CANDIDATES)
    """Tasks to run; the two chosen ones by default."""
    trials: bool = False
    """Measure how often the base solves training items of each candidate instead."""
    gsm8k_file: str | None = None
    """GSM8K's problems as JSON lines; measure the instruct model on 200 of them instead."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(RealReasoningArgs, argv)
    folder, seeds, tasks = Path(args.output_dir).resolve(), args.seeds or FIVE, args.tasks or TASKS
    settings: Row = {"model": args.model_name, "precision": args.precision, "smoke": args.smoke}
    if args.gsm8k_file:
        with JsonlWriter(folder / "gsm8k.jsonl", settings) as writer:
            if not writer.rows:
                writer.append(in_own_process(run_gsm8k, folder, args))
            show_gsm8k(writer.rows[0])
        return {}
    settings |= {"candidates": CANDIDATES, "format": FORMAT}
    base = write_base(folder, args)
    if args.trials:
        with JsonlWriter(folder / "trials.jsonl", settings) as writer:
            done = {row["task"] for row in writer.rows}
            for task in CANDIDATES:
                if task not in done:
                    writer.append(in_own_process(try_task, folder, args, base, task))
            show_trials(writer.rows)
        return {}
    arms = {"raft": RAFT, "grpo": GRPO, "shape": SHAPE._asdict()}
    jobs = [(task, "base", 0) for task in tasks]
    jobs += [(task, arm, seed) for seed in seeds for task in tasks for arm in ARMS[1:]]
    with results("real_reasoning", folder, settings | arms) as writer:
        done = {(row["task"], row["arm"], row["seed"]) for row in writer.rows}
        for job in jobs:
            if job not in done:
                writer.append(in_own_process(run_arm, folder, args, base, *job))
                shutil.rmtree(work_of(folder, *job), ignore_errors=True)  # gigabytes; its row has all that is used
        rows = [row for row in writer.rows if row["task"] in tasks]
    show_constants(folder, tasks)
    claims = show_results(rows, tasks)
    report_claims(claims, folder)
    return claims


# ------------------------------------------------------------------------------------------------------------- arms
def try_task(folder: Path, args: RealReasoningArgs, base: str, task: str) -> Row:
    """How often the base solves training items of a task that no run sees."""
    data = write_data(folder / "data" / f"{task}-tried", args, [task], NUM_TRIED, seed=3)
    output, few = folder / "trials" / f"{task}.jsonl", 4 if args.smoke else NUM_TRIED
    flags = {"data_dir": data, "split": "train", "num_prompts": few, "num_generations": 4, "seed": 3}
    rows = sampled(base, output, SHAPE, **flags)
    scores = [score for row in rows for score in scores_of(row)]
    return {"task": task, "pass_1": sum(scores) / len(scores), "length": mean_length(rows)}


def run_arm(folder: Path, args: RealReasoningArgs, base: str, task: str, arm: str, seed: int) -> Row:
    """Train an arm on a task, and measure it on held-out items."""
    torch.set_num_threads(1)
    work = work_of(folder, task, arm, seed)
    num_train = 16 if args.smoke else SHAPE.prompts
    data = write_data(folder / "data" / task, args, [task], num_train, seed=1)
    policy, curve, seconds = base, [], 0.0
    few = {"max_steps": 1, "epochs": None} if args.smoke else {}
    flags: Row = {"seed": seed, "precision": args.precision}
    if arm == "RAFT":
        shape = Shape(8, 1, 2, SHAPE.longest) if args.smoke else SHAPE
        policy, curve = run_raft(work, base, data, seed, RAFT | {"precision": args.precision} | few, shape)
        seconds = sum(part["seconds"] for part in curve)
    elif arm == "GRPO":
        policy = trained(work, grpo, model_name=base, data_dir=data, **GRPO | flags | few)
        curve, seconds = curve_of(policy, "objective/score"), seconds_of(policy)
    row = {"task": task, "arm": arm, "seed": seed, "seconds": round(seconds, 1)}
    return row | measures(work, args, policy, base, data, num_train) | {"curve": curve}


def work_of(folder: Path, task: str, arm: str, seed: int) -> Path:
    """Folder of an arm until its row is written."""
    return folder / "runs" / f"{task}-{arm}-{seed}"


def run_gsm8k(folder: Path, args: RealReasoningArgs) -> Row:
    """Share of GSM8K's problems whose last number is right in a greedy response of the instruct model."""
    data = folder / "data" / "gsm8k"
    if not (data / "args.json").is_file():
        where = {"dataset_name": args.gsm8k_file, "destination_dir": data, "tokenizer_name": args.model_name}
        call(gsm8k, **where, dataset_config="null", stage="prompts", num_proc=1)
    few = 2 if args.smoke else 200
    shape = SHAPE._replace(longest=16 if args.smoke else 256)
    where = {"data_dir": str(data), "split": "train", "num_prompts": few, "do_sample": False}
    rows = sampled(args.model_name, folder / "gsm8k" / "greedy.jsonl", shape, **where)
    scores = [numeric_answer([""], row["responses"][:1], answer=[row["answer"]])[0] for row in rows]
    right, truncated = sum(score or 0.0 for score in scores), sum(row["truncated"][0] for row in rows)
    return {"right": right, "items": len(rows), "truncated": truncated, "length": mean_length(rows)}


# ---------------------------------------------------------------------------------------------------------- results
def show_trials(rows: Sequence[Row]) -> None:
    """Print how often the base solves each candidate, nearest to 40% first."""
    ordered = sorted(rows, key=lambda row: abs(row["pass_1"] - 0.4))
    table = [(row["task"], f"{row['pass_1']:.3f}", f"{row['length']:.1f}") for row in ordered]
    print_table("training items of another seed that the base solves", ("task", "pass@1", "tokens"), table)


def show_gsm8k(row: Row) -> None:
    """Print the accuracy on GSM8K with its interval."""
    low, high = wilson_interval(row["right"], row["items"])
    share = row["right"] / row["items"]
    print(f"GSM8K: {share:.3f} [{low:.3f}, {high:.3f}] of {row['items']}, {row['truncated']} truncated")
    hours = f"{row['cpu_seconds'] / 3600:.2f} h of a core, {row['peak_gib']} GiB"
    print(f"  {row['length']:.0f} tokens a response, {hours}")


def show_constants(folder: Path, tasks: Sequence[str]) -> None:
    """Print what one answer to every item is worth: the share of test items with the commonest training answer.

    Added after the first seed, whose policies gave one answer to all of letter_counting.
    """
    for task in tasks:
        train, test = (
            [row["columns"]["answer"] for row in load_split(folder / "data" / task, "prompts", split)]
            for split in ("train", "test")
        )
        answer = Counter(train).most_common(1)[0][0]
        print(f"  {task}: always {answer!r} is right for {test.count(answer) / len(test):.3f} of the test items")


def show_results(rows: Sequence[Row], tasks: Sequence[str]) -> dict[str, bool]:
    """Print the tables; returns which claims hold, of tasks with enough seeds that every arm has."""
    claims: dict[str, bool] = {}
    for task in tasks:
        by_arm = {arm: {row["seed"]: row for row in rows if (row["task"], row["arm"]) == (task, arm)} for arm in ARMS}
        seeds = sorted(by_arm["RAFT"].keys() & by_arm["GRPO"].keys())
        if not seeds:
            continue
        found = {arm: [by_arm[arm][0 if arm == "base" else seed] for seed in seeds] for arm in ARMS}
        table = []
        for arm, own in found.items():
            shown_of = own[:1] if arm == "base" else own
            cells = [shown([row[name] for row in shown_of], 1 if name == "length" else 3) for name in MEASURES]
            same = [row["commonest"] for row in shown_of if "commonest" in row]
            cells.append(shown(same) if same else "")
            hours = (mean([row[f"{kind}_seconds"] for row in shown_of]) / 3600 for kind in ("cpu", "wall"))
            cells += [f"{hour:.2f}" for hour in hours]
            table.append((arm, *cells, f"{max(row['peak_gib'] for row in shown_of):.1f}"))
        title = f"{task}, {found['base'][0]['items']} held-out items: mean over {len(seeds)} seeds [95% interval]"
        headings = ("", *MEASURES.values(), COMMONEST, "hours of a core", "hours of the clock", "peak GiB")
        print_table(title, headings, table, width=170)
        for one, other in (("RAFT", "base"), ("GRPO", "base"), ("GRPO", "RAFT")):
            for name in ("greedy", "pass_1", "pass_8"):
                gap = paired([row[name] for row in found[one]], [row[name] for row in found[other]])
                print(f"  {MEASURES[name]}, {one} minus {other}: {shown_gap(gap)}")
                if len(seeds) >= ENOUGH:
                    claims[f"{task}, {MEASURES[name]}: {one} > {other}"] = gap[1] > 0
    return claims


if __name__ == "__main__":
    main()
