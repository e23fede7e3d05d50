"""How much of GRPO's gain on a real model does distilling its adapter give, with what share of its samples?

The base is `real_reasoning`'s: SmolLM2-135M-Instruct after SFT on short answers. Its task `gcd`, on the same backbone:

    GRPO       the adapter that `real_reasoning`'s GRPO trains: 3,072 samples in 48 steps, paid by the task's scorer
    distilled  a new adapter, which `lightrlhf.distill` moves towards GRPO's by position, on 1,536 of its own samples

GRPO's prompts, number of samples a step, learning rate and adapters are the student's, too; no rate was tried. The
student never sees a score. Read as there, after 1/8, 1/4 and 1/2 of GRPO's samples, on 200 held-out items: greedy,
pass@1, pass@8, length and the KL to the base; and at the end, in nats a response, KL(student || teacher) on the
student's samples and KL(teacher || student) on the teacher's. The share of the gain is the student's difference to the
base in pass@1 over the teacher's.

Written down before the runs, for three seeds or more: the student is better than the base in pass@1 after a quarter
of the samples, and has more than half of the gain then, and after half of them (95% intervals over seeds). An arm
takes minutes of a core, a seed about thirty: five seeds, 1 to 5. Finished arms are kept, and begun ones gone on with.

    python -m examples.experiments.real_distillation
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.experiments.log_ratio import log_ratio
from examples.experiments.real_model import COMMON, ENOUGH, in_own_process, seconds_of, trained
from examples.experiments.real_tasks import (
    CANDIDATES,
    FORMAT,
    GRPO,
    MEASURES,
    RATE,
    SHAPE,
    RealArgs,
    measures,
    write_base,
    write_data,
)
from examples.experiments.records import FIVE, Row, results
from examples.experiments.stats import interval, report_claims, shown, shown_gap
from examples.experiments.verified import curve_of
from lightrlhf import distill, grpo
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.jsonl import read_jsonl

TASK = "gcd"
READ_AT, SMOKE_READ_AT = (6, 12, 24), (1,)  # updates of the student; GRPO makes 48 of as many samples
SHARED = ("num_generations", "rollout_size", "rollout_mini_batch_size", "mini_batch_size", "micro_batch_size")
STUDENT = COMMON | {name: GRPO[name] for name in (*SHARED, "max_new_tokens", "lr_warmup_steps")}
STUDENT |= {"learning_rate": RATE, "eval_interval": 0, "keep_last": 0}
STUDENT |= {"max_steps": READ_AT[-1], "save_interval": READ_AT[0]}
KLS = {"kl_to_teacher": "KL(student || teacher)", "kl_of_teacher": "KL(teacher || student)"}


@dataclass(frozen=True, kw_only=True)
class RealDistillationArgs(RealArgs):
    """Distil the adapter that GRPO trained on a real model into its base."""

    output_dir: str = "real_distillation"
    """Folder for data, logs and results; finished arms in it are kept, and begun ones gone on with."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 5 by default."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(RealDistillationArgs, argv)
    folder = Path(args.output_dir).resolve()
    settings: Row = {"model": args.model_name, "precision": args.precision, "smoke": args.smoke}
    settings |= {"task": CANDIDATES[TASK], "format": FORMAT, "read_at": READ_AT}
    base = write_base(folder, args)
    jobs = [("base", 0), *((arm, seed) for seed in args.seeds or FIVE for arm in ("GRPO", "distilled"))]
    with results("real_distillation", folder, settings | {"grpo": GRPO, "student": STUDENT}) as writer:
        done = {(row["arm"], row["seed"]) for row in writer.rows}
        for job in jobs:
            if job not in done:
                writer.append(in_own_process(run_arm, folder, args, base, *job))
                if job[0] == "distilled":  # gigabytes; the rows have all that is used
                    shutil.rmtree(folder / "runs" / str(job[1]), ignore_errors=True)
        rows = writer.rows
    claims = show_results(rows)
    report_claims(claims, folder)
    return claims


# -------------------------------------------------------------------------------------------------------------- runs
def run_arm(folder: Path, args: RealArgs, base: str, arm: str, seed: int) -> Row:
    """Train an arm, and measure it on held-out items."""
    torch.set_num_threads(1)
    work, num_train = folder / "runs" / str(seed), 16 if args.smoke else SHAPE.prompts
    data = write_data(folder / "data" / TASK, args, [TASK], num_train, seed=1)
    where = {"model_name": base, "data_dir": data, "seed": seed, "precision": args.precision}
    few = {"max_steps": 1, "save_interval": 1} if args.smoke else {}
    row: Row = {"arm": arm, "seed": seed, "seconds": 0.0}
    if arm == "base":
        return row | measures(work / arm, args, base, base, data, num_train)
    teacher = trained(work / "GRPO", grpo, **where, **GRPO | few)
    if arm == "GRPO":
        row |= {"seconds": seconds_of(teacher), "curve": curve_of(teacher, "objective/score")}
        return row | measures(work / arm, args, teacher, base, data, num_train)
    student = trained(work / arm, distill, teacher=teacher, **where, **STUDENT | few)
    steps, kl = SMOKE_READ_AT if args.smoke else READ_AT, curve_of(student, "objective/kl")
    by_step = {int(path.name.partition("-")[2]): str(path) for path in checkpoints(Path(student))}
    read = [
        {"step": step} | measures(work / f"read-{step}", args, by_step[step], base, data, num_train) for step in steps
    ]
    if not (work / "GRPO" / "drawn.jsonl").is_file():  # of a row that the repository keeps
        measures(work / "GRPO", args, teacher, base, data, num_train)
    models, said = (student, teacher), (work / f"read-{steps[-1]}", work / "GRPO")
    row |= {name: ratio(*pair) for name, *pair in zip(KLS, said, models, models[::-1])}
    return row | {"seconds": seconds_of(student), "curve": kl, "read": read}


def ratio(folder: Path, sampler: str, other: str) -> float:
    """`log_ratio` of two models on the first response to each item that `measures` drew of one of them."""
    rows = [(row["prompt_ids"], row["response_ids"][0]) for row in read_jsonl(folder / "drawn.jsonl")]
    return log_ratio((sampler, rows), (other, rows))


# ---------------------------------------------------------------------------------------------------------- results
def show_results(rows: Sequence[Row]) -> dict[str, bool]:
    """Print what was read; returns which claims hold, where there are enough seeds."""
    of_run: dict[tuple[str, int], Any] = {(row["arm"], row["seed"]): row for row in rows}
    seeds = sorted(seed for arm, seed in of_run if arm == "distilled")
    claims: dict[str, bool] = {}
    if not seeds:
        return claims
    base, teachers = of_run["base", 0], [of_run["GRPO", seed] for seed in seeds]
    students = [of_run["distilled", seed] for seed in seeds]
    by_step = {one["step"]: [row["read"][i] for row in students] for i, one in enumerate(students[0]["read"])}
    gain = [row["pass_1"] - base["pass_1"] for row in teachers]
    print(f"{TASK}, {base['items']} held-out items: mean over {len(seeds)} seeds [95% interval]")
    for name, found in {"base": [base], "GRPO": teachers, **by_step}.items():
        print(f"  {name}: " + ", ".join(f"{MEASURES[key]} {shown([one[key] for one in found])}" for key in MEASURES))
    for step, found in by_step.items():
        own = [one["pass_1"] - base["pass_1"] for one in found]
        share = [one / whole if whole else 0.0 for one, whole in zip(own, gain)]
        print(
            f"  after {step} of 48 steps: {shown_gap(interval(own))} to the base, share of the gain {shown(share, 2)}"
        )
        if len(seeds) >= ENOUGH and step > READ_AT[0]:
            claims[f"{step} steps: more than half of the gain"] = interval(share)[1] > 0.5
            if step == READ_AT[1]:
                claims[f"{step} steps: distilled > base"] = interval(own)[1] > 0
    for name, said in KLS.items():
        print(f"  {said}: {shown([row[name] for row in students])}")
    for arm, found in (("GRPO", teachers), ("distilled", students)):
        print(f"  {arm}: {shown([row['cpu_seconds'] for row in found], 0)} processor seconds with its reading")
    return claims


if __name__ == "__main__":
    main()
