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

import torch

from datasets_prep.cafe.pretrain_base import BASE_DIR
from examples.experiments.cafe_methods import COMMON, GROUPED, METHODS, RESPONSES, prepared
from examples.experiments.readings import Curve, at_equal_samples_and_time
from examples.experiments.records import FIVE, Row, best_rate, common_seeds, made_by, results
from examples.experiments.small_models import write_model
from examples.experiments.stats import interval, paired, report_claims, shown, shown_gap
from examples.programs import logged, made
from lightrlhf import distill, evaluate, generate, grpo, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.parser import parse
from lightrlhf.data.schema import IGNORE_INDEX
from lightrlhf.data.splits import save_split
from lightrlhf.models.tokenizer import load_tokenizer, store_tokenizer
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.storage.results import print_table

READ_AT, SMOKE_READ_AT = (12, 24, 48), (1, 2)  # updates; the last is the end
READ_PROMPTS, SMOKE_PROMPTS = 128, 8  # that a checkpoint answers
RATES = [3e-4, 1e-3, 3e-3]
TEACHER_RATE = 1e-3  # of PPO, as `critic_free_cafe` chose it
STUDENT = {  # a quarter of the teacher's parameters
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
STUDENT_SFT = {"epochs": 4, "learning_rate": 2e-3, "lr_warmup_steps": 20, "eval_interval": 0}
BATCHES = {"mini_batch_size": RESPONSES, "micro_batch_size": RESPONSES}
SCHEDULE = {name: COMMON[name] for name in ("accelerator", "logger", "lr_scheduler_type", "lr_warmup_steps")}
SAMPLING = SCHEDULE | BATCHES | {"max_new_tokens": 96, "rollout_mini_batch_size": RESPONSES}
EIGHT = {"num_generations": 8, "rollout_size": RESPONSES // 8}
ARMS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "distill by position": (distill, SAMPLING | {"rollout_size": RESPONSES}),
    "distill by sequence": (distill, SAMPLING | EIGHT | {"objective": "sequence"}),
    "GRPO": (grpo, COMMON | GROUPED),
    "SFT on the teacher": (sft, SCHEDULE | BATCHES | {"use_targets": True, "epochs": 9}),
}
MEASURES = {
    "gold": "gold score",
    "kl": "KL(student || teacher)",
    "kl_of_teacher": "KL(teacher || student)",
    "length": "tokens of a response",
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
def read_steps(smoke: bool) -> tuple[int, ...]:
    return SMOKE_READ_AT if smoke else READ_AT


def teacher_of(folder: Path, seed: int, smoke: bool) -> str:
    """The café's PPO policy of a seed, trained once."""
    own = folder / f"seed-{seed}"
    data, start, reward = prepared(own, seed, smoke)
    program, flags, rate = METHODS["PPO"]
    where = {"data_dir": data, "sft_experiment_dir": start, "rm_experiment_dir": reward, "seed": seed}
    where |= {"log_dir": own / "logs" / "teacher", "max_steps": read_steps(smoke)[-1], rate: TEACHER_RATE}
    log = own / "output.txt"
    return made(own / "teacher.txt", lambda: logged(log, program, **where, **COMMON, **flags, eval_interval=0))


def student_of(folder: Path, seed: int, smoke: bool) -> str:
    """The student that every arm of a seed starts from: SFT of random weights on the demonstrations, trained once."""
    own = folder / f"seed-{seed}"
    data = prepared(own, seed, smoke)[0]
    steps = {"max_steps": 1} if smoke else {}

    def train() -> str:
        model = write_model(own / "student", seed, load_tokenizer(None, str(BASE_DIR)), STUDENT)
        where = {"data_dir": data, "model_name": model, "seed": seed, "log_dir": own / "logs" / "student"}
        flags = {"accelerator": "cpu", "mini_batch_size": 32, "micro_batch_size": 32, "use_targets": True}
        return logged(own / "output.txt", sft, **where, **flags, **STUDENT_SFT, **steps)

    return made(own / "student.txt", train)


def write_teacher_data(folder: Path, seed: int, smoke: bool) -> str:
    """Demonstrations by the teacher, one a prompt; returns their folder."""
    own = folder / f"seed-{seed}"
    data, output = prepared(own, seed, smoke)[0], own / "teacher.jsonl"
    flags = {"max_new_tokens": 96, "rollout_mini_batch_size": RESPONSES, "accelerator": "cpu", "seed": seed}
    where = {"model_name": teacher_of(folder, seed, smoke), "data_dir": data, "output_file": output}
    count = RESPONSES * read_steps(smoke)[-1]
    logged(own / "output.txt", generate, **where, **flags, num_prompts=count, split="train")
    rows = []
    for row in read_jsonl(output):
        prompt, response = row["prompt_ids"], row["response_ids"][0]
        targets = torch.tensor([IGNORE_INDEX] * len(prompt) + response)
        rows.append({"prompt_len": len(prompt), "input_ids": [*prompt, *response], "targets": targets})
    save_split(own / "data" / "teacher", "finetune", "train", rows)
    store_tokenizer(load_tokenizer(data, None), own / "data" / "teacher")
    return str(own / "data" / "teacher")


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
