"""A policy that teaches itself with a hint, beside GRPO, on two tasks of reasoning-gym, over seeds.

The hint is a step of the way, never the answer: of `chain_sum` the sum of all terms but the last, of `count_bits` the
binary digits. One model of 0.7M parameters, made here from nothing, is the base of all runs: SFT on other ranges of the
two tasks, half of it with hints, so that it reads them; none of the ranges contains a question of `TASKS`. From it:

    hint     `lightrlhf.distill --privileged_column`: the base with the hint teaches the policy without it
    GRPO     `lightrlhf.grpo`, paid where the task's scorer pays in full; it sees no hint
    labels   SFT on the right answers to the same prompts, once each, as a bound: the others see no answer

`hint` and `GRPO` draw the same 16,384 samples, eight to each of 32 prompts in 64 steps. The learning rate of each arm
is the best of three on seed 0 and chain_sum, by the share of validation items that a greedy response solves, and is
used for both tasks. Read on the test items (250 and 179) without hints: the share that a greedy response solves; for
`hint`, in nats a response, KL(policy || teacher) on the policy's samples and KL(teacher || policy) on the teacher's.
The share that the base solves with hints is the teacher's.

Written down before the runs: on each task the hint is better than the base, and than GRPO at equal samples (95%
intervals of differences over three seeds, not adjusted). Results are stored as they come: the same command resumes
after a kill, and `--seeds 4 5` adds two to those there.

    python -m examples.experiments.hinted_reasoning
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from examples.experiments.log_ratio import log_ratio
from examples.experiments.reasoning_tasks import BASE, CPU, GRPO, LONGEST, PHRASES, SFT, SIZES, TASKS, write_data
from examples.experiments.records import Row, best_rate, common_seeds, made_by, now, results, spent
from examples.experiments.small_models import phrase_tokenizer, write_model
from examples.experiments.stats import paired, report_claims, shown, shown_gap
from examples.experiments.verified import Shape, sampled, scores_of
from examples.programs import logged, made
from lightrlhf import distill, grpo, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import IGNORE_INDEX, SPLITS, load_split, save_split
from lightrlhf.data.tokens import encode_prompt, encode_response
from lightrlhf.models.tokenizer import load_tokenizer, store_tokenizer

HINT, COLUMN = "\nHint: ", "hinted"
NUM_TRAIN, NUM_BASE = 2048, 6000  # items of a task, and of a range of the base
STEPS, SEEDS = 64, (1, 2, 3)
RATES = [3e-5, 1e-4, 3e-4]
TRIED = "chain_sum"  # the task of the trials
BASE_SFT = CPU | {"max_steps": 800, "learning_rate": 2e-3, "mini_batch_size": 128, "micro_batch_size": 128}
STEP = {"max_steps": STEPS, "save_interval": STEPS}
RL = {name: value for name, value in GRPO.items() if name not in ("learning_rate", "reward_function")} | STEP
ARMS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "hint": (distill, RL | {"privileged_column": COLUMN}),
    "GRPO": (grpo, RL | {"reward_function": GRPO["reward_function"]}),
    "labels": (sft, {name: value for name, value in SFT.items() if name != "learning_rate"} | STEP),
}
SHAPE = Shape(STEPS * 32, 1, 1, LONGEST)
KLS = {"kl": "KL(policy || teacher)", "kl_of_teacher": "KL(teacher || policy)"}


@dataclass(frozen=True, kw_only=True)
class HintedReasoningArgs(Args):
    """Compare distillation by a hint with GRPO on two tasks with verifiers."""

    output_dir: str = "hinted_reasoning"
    """Folder for data, logs and results; finished runs in it are kept."""
    tasks: list[str] | None = flag(None, choices=("chain_sum", "count_bits"))
    """Tasks to run; both by default."""
    seeds: list[int] | None = at_least(1, None, remedy="learning rates are chosen on seed 0")
    """Seeds to run; 1 to 3 by default."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(HintedReasoningArgs, argv)
    torch.set_num_threads(1)
    folder = Path(args.output_dir).resolve()
    tasks, seeds = args.tasks or ["chain_sum", "count_bits"], args.seeds or list(SEEDS)
    settings = {"arms": {name: flags for name, (_, flags) in ARMS.items()}, "rates": RATES, "base_sft": BASE_SFT}
    settings |= {"tasks": {task: [TASKS[task], *BASE[task]] for task in ("chain_sum", "count_bits")}, "sizes": SIZES}
    settings |= {"num_train": NUM_TRAIN, "num_base": NUM_BASE, "smoke": args.smoke}
    base = write_base(folder, args.smoke)
    jobs = [(TRIED, arm, 0, rate) for arm in ARMS for rate in (RATES[:1] if args.smoke else RATES)]
    jobs += [(task, "base", 0, 0.0) for task in tasks]
    jobs += [(task, arm, seed, None) for seed in seeds for task in tasks for arm in ARMS]
    with results("hinted_reasoning", folder, settings) as writer:
        for task, arm, seed, tried in jobs:
            own = [row for row in writer.rows if row["arm"] == arm]
            done = [row for row in own if (row["task"], row["seed"]) == (task, seed)]
            if not any(tried in (None, row["learning_rate"]) for row in done):
                rate = best_rate(row for row in own if not row["seed"]) if tried is None else tried
                writer.append(run_job(folder, base, (task, arm, seed), rate, args.smoke))
        rows = writer.rows
    claims = show_results(rows, tasks)
    report_claims(claims, folder)
    return claims


# ------------------------------------------------------------------------------------------------------------- hints
def hint_of(task: str, question: str) -> str:
    """A step of the way to the answer."""
    if task == "count_bits":
        return f"{int(re.findall(r'[0-9]+', question)[-1]):b}"
    first, *others = re.findall(r"[+-]? ?[0-9]+", question.partition(": ")[2])
    terms = [int(term.replace(" ", "")) for term in (first, *others)]
    return f"{sum(terms[:-1])} {others[-1]}"


def write_hints(folder: Path, task: str) -> None:
    """Write a prepared task twice more: `taught`, prompts with their hinted messages, and `hinted`, with hints."""
    tokenizer = load_tokenizer(folder, None)
    for split in SPLITS:
        taught, hinted, shown_rows = [], [], []
        for row in load_split(folder, "prompts", split):
            columns = row["columns"]
            question = json.loads(columns["entry"])["question"]
            words = [{"role": "user", "content": question + HINT + hint_of(task, question)}]
            prompt, answer = encode_prompt(tokenizer, words), encode_response(tokenizer, columns["answer"], words)
            taught.append({**row, "columns": {**columns, COLUMN: words}})
            hinted.append({**row, "prompt_len": len(prompt), "input_ids": prompt})
            targets = torch.tensor([IGNORE_INDEX] * len(prompt) + answer)
            shown_rows.append({"prompt_len": len(prompt), "input_ids": prompt + answer, "targets": targets})
        save_split(folder / "taught", "prompts", split, taught)
        save_split(folder / "hinted", "prompts", split, hinted)
        save_split(folder / "hinted", "finetune", split, shown_rows)
    for name in ("taught", "hinted"):
        store_tokenizer(tokenizer, folder / name)


def write_base(folder: Path, smoke: bool) -> str:
    """Prepare the tasks and train the base model, once; returns its experiment dir."""
    num_train, num_base = (64, 64) if smoke else (NUM_TRAIN, NUM_BASE)
    steps = {"max_steps": 1} if smoke else {}

    def train() -> str:
        model = write_model(folder / "model", 0, phrase_tokenizer([*PHRASES, HINT]), SIZES)
        sets = []
        for task in ("chain_sum", "count_bits"):
            write_hints(Path(write_data(folder / "data" / task, task, TASKS[task], num_train, model)), task)
            for i, options in enumerate(BASE[task]):
                own = write_data(folder / "base" / f"{task}-{i}", task, options, num_base, model)
                write_hints(Path(own), task)
                sets += [own, f"{own}/hinted"]
        where = {"data_dir": sets, "log_dir": folder / "logs", "experiment_name": "base", "model_name": model}
        return logged(folder / "output.txt", sft, **where, data_weights=[1.0] * len(sets), seed=1, **BASE_SFT | steps)

    return made(folder / "base.txt", train)


# -------------------------------------------------------------------------------------------------------------- arms
def run_job(folder: Path, base: str, job: tuple[str, str, int], rate: float, smoke: bool) -> Row:
    """Train an arm on a task; returns what is read of it, of a trial on validation items."""
    task, arm, seed = job
    data, work = folder / "data" / task, folder / "runs" / f"{task}-{arm}-{seed}"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    began, policy = now(), base
    if arm in ARMS:
        program, flags = ARMS[arm]
        where = {"data_dir": data if arm == "labels" else data / "taught", "log_dir": work, "seed": seed}
        few = {"max_steps": 1} if smoke else {}
        policy = logged(folder / "output.txt", program, model_name=base, learning_rate=rate, **where, **flags | few)
    row = {"task": task, "arm": arm, "seed": seed, "learning_rate": rate} | spent(began)
    is_trial = arm in ARMS and not seed
    row["score" if is_trial else "accuracy"] = solved_by(folder, policy, data / "taught", is_trial, smoke)
    if arm == "base":
        row["with_hints"] = solved_by(folder, base, data / "hinted", False, smoke)
    elif not is_trial:
        row |= kls(folder, policy, base, data, smoke)
    shutil.rmtree(work, ignore_errors=True)  # megabytes, and all that is used of them is here
    read = ", ".join(f"{name} {row[name]:.3f}" for name in ("score", "accuracy", "with_hints", *KLS) if name in row)
    print(f"{task}, {arm}, seed {seed}, rate {rate:g}: {read}", flush=True)
    return row | made_by()


def answers(folder: Path, policy: str, data: Path, smoke: bool, **flags: Any) -> list[Row]:
    """Responses to held-out prompts."""
    output = folder / "answers.jsonl"
    output.unlink(missing_ok=True)
    return sampled(policy, str(output), SHAPE, data_dir=str(data), num_prompts=4 if smoke else None, **flags)


def solved_by(folder: Path, policy: str, data: Path, is_trial: bool, smoke: bool) -> float:
    """Share of held-out items that a greedy response solves."""
    split = "validation" if is_trial else "test"
    rows = answers(folder, policy, data, smoke, split=split, do_sample=False)
    return sum(score for row in rows for score in scores_of(row)) / len(rows)


def kls(folder: Path, policy: str, base: str, data: Path, smoke: bool) -> Row:
    """Log-ratios of the policy without hints and the base with them, each on its own samples, in nats a response."""
    rows = zip(*(load_split(data / name, "prompts", "test") for name in ("taught", "hinted")), strict=True)
    pairs = [tuple(tuple(torch.as_tensor(row["input_ids"]).tolist()) for row in pair) for pair in rows]
    found = {}
    for name, models, other, where in (
        ("kl", (policy, base), dict(pairs), "taught"),
        ("kl_of_teacher", (base, policy), {hinted: plain for plain, hinted in pairs}, "hinted"),
    ):
        said = answers(folder, models[0], data / where, smoke, split="test")
        own = [(row["prompt_ids"], row["response_ids"][0]) for row in said]
        others = [(other[tuple(prompt)], response) for prompt, response in own]
        found[name] = log_ratio((models[0], own), (models[1], others))
    return found


# ---------------------------------------------------------------------------------------------------------- results
def show_results(rows: Sequence[Row], tasks: Sequence[str]) -> dict[str, bool]:
    """Print the tables; returns which claims hold."""
    claims: dict[str, bool] = {}
    for task in tasks:
        own = [row for row in rows if row["task"] == task and "accuracy" in row]
        (base,) = (row for row in own if row["arm"] == "base")
        seeds = common_seeds((row for row in own if row["seed"]), ARMS)
        of_run = {(row["arm"], row["seed"]): row for row in own}
        found = {arm: [of_run[arm, seed] for seed in seeds] for arm in ARMS}
        right = {arm: [row["accuracy"] for row in runs] for arm, runs in found.items()}
        print(
            f"{task}: the base solves {base['accuracy']:.3f}, with hints {base['with_hints']:.3f}; {len(seeds)} seeds"
        )
        for arm, runs in found.items():
            kl = ", ".join(f"{said} {shown([row[name] for row in runs], 2)}" for name, said in KLS.items())
            seconds = sum(row["cpu_seconds"] for row in runs) / len(runs)
            print(f"  {arm}: {shown(right[arm])}, {kl}; {seconds:.0f} processor seconds")
        for other, values in (*right.items(), ("base", [base["accuracy"]] * len(seeds))):
            if other != "hint":
                gap = paired(right["hint"], values)
                print(f"  hint minus {other}: {shown_gap(gap)}")
                if other != "labels":
                    claims[f"{task}: hint > {other}"] = gap[1] > 0
    return claims


if __name__ == "__main__":
    main()
