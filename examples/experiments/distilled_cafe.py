"""The café distilled: a student of a quarter of the teacher's size, over seeds.

The teacher is the café's PPO policy (`cafe_methods`). The student has half of its width, and starts from SFT on the
demonstrations. Every arm sees 3,072 samples in 48 updates of 64:

    distill by position   the student's samples, the reverse KL of each position
    distill by sequence   the student's samples, eight to a prompt, the KL of whole responses
    GRPO                  the student's samples, eight to a prompt, scored by the reward model of the teacher's training
    SFT on the teacher    the teacher's samples

Of each arm the learning rate is chosen among the same three on seed 0, by the reward model's score of the answers to
the validation prompts, never by the gold judge or by the KL, which are what is compared. Then the other seeds are
trained at that rate, one seed after the other, so that a run that is cut short has all arms of its seeds. The start and
the checkpoints after 1/4, 1/2 and all of the updates answer the same 128 test prompts. Read: gold score,
KL(student || teacher) on the student's answers and KL(teacher || student) on the teacher's, in nats a response, and
length, at equal samples (the end) and at equal time, where the fastest arm with that seed ended. Time is processor
seconds of the whole run, shared out evenly over its updates; for SFT it includes the teacher's sampling.

Results are stored as they come: the same command resumes after a kill, and `--seeds 6 7` adds two to those there.

    python -m examples.experiments.distilled_cafe
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from types import ModuleType
from typing import Any

from examples.experiments.cafe_methods import COMMON, GROUPED, RESPONSES, prepared
from examples.experiments.cafe_students import (
    EIGHT,
    MEASURES,
    ON_TEACHER,
    READ_AT,
    READ_PROMPTS,
    SAMPLING,
    SMOKE_PROMPTS,
    STUDENT,
    STUDENT_SFT,
    TEACHER_RATE,
    read_steps,
    student_of,
    teacher_of,
    write_teacher_data,
)
from examples.experiments.readings import Curve, at_equal_samples_and_time
from examples.experiments.records import FIVE, Row, best_rate, common_seeds, made_by, results
from examples.experiments.stats import interval, paired, report_claims, shown, shown_gap
from examples.programs import logged, made
from lightrlhf import distill, evaluate, grpo, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.parser import parse
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.results import print_table

RATES = [3e-4, 1e-3, 3e-3]
ARMS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "distill by position": (distill, SAMPLING | {"rollout_size": RESPONSES}),
    "distill by sequence": (distill, SAMPLING | EIGHT | {"objective": "sequence"}),
    "GRPO": (grpo, COMMON | GROUPED),
    "SFT on the teacher": (sft, ON_TEACHER),
}


@dataclass(frozen=True, kw_only=True)
class DistilledCafeArgs(Args):
    """Compare ways to teach a small student on the café."""

    output_dir: str = "distilled_cafe"
    """Folder for data, logs and results."""
    arms: list[str] | None = flag(None, choices=ARMS)
    """Arms to run; all by default."""
    seeds: list[int] | None = at_least(1, None, remedy="learning rates are chosen on seed 0")
    """Seeds to run; 1 to 5 by default."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(DistilledCafeArgs, argv)
    started = time.perf_counter()
    folder = Path(args.output_dir).resolve()
    arms, seeds = args.arms or list(ARMS), args.seeds or FIVE
    settings = {"arms": {name: flags for name, (_, flags) in ARMS.items()}, "rates": RATES, "read_at": READ_AT}
    settings |= {
        "read_prompts": READ_PROMPTS,
        "student": STUDENT,
        "student_sft": STUDENT_SFT,
        "teacher_rate": TEACHER_RATE,
        "smoke": args.smoke,
    }
    with results("distilled_cafe", folder, settings) as writer:
        for arm in arms:
            for rate in RATES:
                if not any((row["arm"], row["learning_rate"]) == (arm, rate) for row in writer.rows if not row["seed"]):
                    writer.append(run_trial(folder, arm, rate, args.smoke) | made_by())
        for seed, arm in product(seeds, arms):
            if not any((row["arm"], row["seed"]) == (arm, seed) for row in writer.rows):
                rate = best_rate(row for row in writer.rows if row["arm"] == arm and not row["seed"])
                writer.append(run_seed(folder, arm, seed, rate, args.smoke) | made_by())
        rows = [row for row in writer.rows if row["seed"]]
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes")
    seeds = common_seeds(rows, arms)
    of_run = {(row["arm"], row["seed"]): row["curve"] for row in rows}
    curves = {arm: [of_run[arm, seed] for seed in seeds] for arm in arms}
    claims = show_results(curves)
    report_claims(claims, folder)
    return claims


# ------------------------------------------------------------------------------------------------------------- runs
def trained(folder: Path, arm: str, seed: int, rate: float, smoke: bool) -> tuple[str, float]:
    """The experiment dir of one run, and its processor seconds."""
    own, steps = folder / f"seed-{seed}", read_steps(smoke)
    data, _, reward = prepared(own, seed, smoke)
    program, flags = ARMS[arm]
    where: dict[str, Any] = {"sft_experiment_dir": student_of(folder, seed, smoke), "seed": seed, "learning_rate": rate}
    where |= {"log_dir": own / "logs" / f"{arm.replace(' ', '-')}-{rate:g}", "max_steps": steps[-1]}
    teacher = teacher_of(folder, seed, smoke)
    began = time.process_time()
    if program is sft:
        where["model_name"] = where.pop("sft_experiment_dir")
        data = write_teacher_data(folder, seed, smoke)
    elif program is grpo:
        where["rm_experiment_dir"] = reward
    else:
        where["teacher"] = teacher
    saves = {"save_interval": steps[0], "keep_last": 0, "eval_interval": 0}
    experiment = logged(own / "output.txt", program, **flags | where | saves, data_dir=data)
    return experiment, time.process_time() - began


def evaluated(folder: Path, seed: int, smoke: bool, models: list[str], reference: str, split: str) -> list[Row]:
    """Results of models on the prompts of a split."""
    own = folder / f"seed-{seed}"
    data, _, reward = prepared(own, seed, smoke)
    count = SMOKE_PROMPTS if smoke else READ_PROMPTS
    flags = {"max_new_tokens": 96, "rollout_mini_batch_size": 128, "num_samples": count}
    where = {"model_name": models, "reference_dir": reference, "rm_experiment_dir": reward, "data_dir": data}
    return logged(own / "output.txt", evaluate, **where, **flags, split=split, accelerator="cpu")


def run_trial(folder: Path, arm: str, rate: float, smoke: bool) -> Row:
    """Train with one learning rate on seed 0; returns the reward model's score on validation prompts."""
    experiment, seconds = trained(folder, arm, 0, rate, smoke)
    (tested,) = evaluated(folder, 0, smoke, [experiment], teacher_of(folder, 0, smoke), "validation")
    print(f"{arm}, trial: {rate:g} has score {tested['reward']:.3f}, KL {tested['kl']:.1f}", flush=True)
    row = {"arm": arm, "seed": 0, "learning_rate": rate, "score": tested["reward"], "kl": tested["kl"]}
    return row | {"seconds": seconds}


def run_seed(folder: Path, arm: str, seed: int, rate: float, smoke: bool) -> Row:
    """Train one arm; returns its curve, measured on test prompts."""
    steps = (0, *read_steps(smoke))
    experiment, seconds = trained(folder, arm, seed, rate, smoke)
    by_step = {int(path.name.partition("-")[2]): str(path) for path in checkpoints(Path(experiment))}
    start = made(folder / f"seed-{seed}" / "start.json", lambda: json.dumps(read(folder, seed, smoke, None)))
    found = [json.loads(start), *(read(folder, seed, smoke, by_step[step]) for step in steps[1:])]
    curve = [
        {"samples": step * RESPONSES, "seconds": seconds * step / steps[-1]} | values
        for step, values in zip(steps, found, strict=True)
    ]
    print(f"{arm}, seed {seed}: " + ", ".join(f"{name} {curve[-1][name]:.3f}" for name in MEASURES), flush=True)
    return {"arm": arm, "seed": seed, "learning_rate": rate, "curve": curve, "seconds": seconds}


def read(folder: Path, seed: int, smoke: bool, model: str | None) -> Row:
    """What a checkpoint of the student, by default its start, and the teacher say to test prompts."""
    teacher, student = teacher_of(folder, seed, smoke), model or student_of(folder, seed, smoke)
    (own,) = evaluated(folder, seed, smoke, [student], teacher, "test")
    (other,) = evaluated(folder, seed, smoke, [teacher], student, "test")
    values = {"gold": own["gold"], "kl": own["kl"], "kl_of_teacher": other["kl"], "length": own["mean_length"]}
    return values | {"reward": own["reward"], "teacher_gold": other["gold"], "teacher_reward": other["reward"]}


# ---------------------------------------------------------------------------------------------------------- results
def show_results(curves: dict[str, list[Curve]]) -> dict[str, bool]:
    """Print the tables; returns which arms differ in gold."""
    claims: dict[str, bool] = {}
    seeds = len(next(iter(curves.values())))
    for reading, by_arm in at_equal_samples_and_time(curves, list(MEASURES)).items():
        table = []
        for arm, values in by_arm.items():
            ends = interval([curve[-1]["seconds"] for curve in curves[arm]])[0]
            cells = (shown(values[name], 3 if name == "gold" else 1) for name in MEASURES)
            table.append((arm, *cells, f"{ends:.0f}"))
        title = f"the café distilled, at {reading}: mean over {seeds} seeds [95% interval]"
        print_table(title, ("", *MEASURES.values(), "seconds of the whole run"), table, width=150)
        for one, other in combinations(by_arm, 2):
            gap = paired(by_arm[one]["gold"], by_arm[other]["gold"])
            print(f"  gold at {reading}, {one} minus {other}: {shown_gap(gap)}")
            claims[f"{one} differs from {other} at {reading}"] = gap[1] > 0 or gap[2] < 0
    return claims


if __name__ == "__main__":
    main()
