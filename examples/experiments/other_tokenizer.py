"""The café distilled across tokenizers: the teacher of `distilled_cafe`, a student with another vocabulary, over seeds.

The teacher is the café's PPO policy, with 684 tokens. The student has the sizes of `distilled_cafe`'s, but a byte-level
BPE of 512 tokens, trained on the café's language, which cuts an answer into about a tenth more tokens; it starts from
the same SFT on the same demonstrations. Every arm sees 3,072 samples in 48 updates of 64:

    response         eight to a prompt, k1 of the whole response, leave-one-out (`--text_return response`)
    to go            the same, from the last border of words on (`--text_return to_go`)
    same tokenizer   `distilled_cafe`'s student, eight to a prompt, k1 with return to go: the same cost, token by token
    SFT on texts     the teacher's samples, their texts in the student's tokens

Of each arm the learning rate is chosen among the same four on seed 0, by the reward model's score of the answers to the
validation prompts, never by what is compared. Then the other seeds are trained at that rate. The start and the
checkpoints after 1/4, 1/2 and all of the updates answer the same 128 test prompts. Read: gold score, length, and in
nats a response KL(student || teacher) on the student's answers and KL(teacher || student) on the teacher's, as the mean
log-ratio of the sampler's probability of its ids to the other's of the same text in its own ids. Across tokenizers that
is at least the KL between texts, which a text's other ids would lower.

Written down before the runs: that `to go` has a higher gold score than `response`, that each of the two has a higher
one than the start, and which arms differ; at equal samples, and the differences at equal time too. Also printed: the
differences to the rows of `distilled_cafe`, at equal samples.

The teachers are the PPO policies of `distilled_cafe`; they are trained again unless `--output_dir` has its folders
`seed-N`. Results are stored as they come: the same command resumes after a kill, and `--seeds 6 7` adds two to those
there.

    python -m examples.experiments.other_tokenizer
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from datasets_prep.cafe import prepare_data
from datasets_prep.cafe.tokenizer import train_tokenizer
from examples.experiments.cafe_methods import RESPONSES, prepared
from examples.experiments.cafe_students import (
    EIGHT,
    MEASURES,
    ON_TEACHER,
    READ_PROMPTS,
    SAMPLING,
    SMOKE_PROMPTS,
    STUDENT,
    STUDENT_SFT,
    read_steps,
    save_demonstrations,
    student_of,
    teacher_of,
    trained_student,
    write_teacher_data,
)
from examples.experiments.log_ratio import log_ratio
from examples.experiments.readings import Curve, at_equal_samples_and_time, compare, each
from examples.experiments.records import FIVE, Row, best_rate, common_seeds, kept_rows, made_by, results
from examples.experiments.stats import interval, paired, report_claims, shown, shown_gap
from examples.programs import logged, made
from lightrlhf import distill, evaluate, generate, quickstart, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.parser import parse
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.encoding import Encoding, samples_of_row
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.storage.results import print_table

VOCABULARY = 512  # tokens of the student
RATES = [1e-4, 3e-4, 1e-3, 3e-3]
K1 = SAMPLING | EIGHT | {"objective": "sequence", "estimator": "k1"}
SAME, TEXTS = "same tokenizer", "SFT on texts"
ARMS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "response": (distill, K1),
    "to go": (distill, K1 | {"text_return": "to_go"}),
    SAME: (distill, K1),
    TEXTS: (sft, ON_TEACHER),
}
SAMPLED = {"max_new_tokens": 96, "rollout_mini_batch_size": 128, "accelerator": "cpu"}  # when a policy is read


@dataclass(frozen=True, kw_only=True)
class OtherTokenizerArgs(Args):
    """Compare ways to teach a student with another tokenizer than the teacher's on the café."""

    output_dir: str = "other_tokenizer"
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
    args = parse(OtherTokenizerArgs, argv)
    torch.set_num_threads(1)
    folder = Path(args.output_dir).resolve()
    arms, seeds = args.arms or list(ARMS), args.seeds or FIVE
    settings = {"arms": {name: flags for name, (_, flags) in ARMS.items()}, "rates": RATES, "vocabulary": VOCABULARY}
    settings |= {"student": STUDENT, "student_sft": STUDENT_SFT, "read_prompts": READ_PROMPTS, "smoke": args.smoke}
    with results("other_tokenizer", folder, settings) as writer:
        for arm, rate in product(arms, RATES[:1] if args.smoke else RATES):
            if not any((row["arm"], row["learning_rate"]) == (arm, rate) for row in writer.rows if not row["seed"]):
                writer.append(run_trial(folder, arm, rate, args.smoke) | made_by())
        for seed, arm in product(seeds, arms):
            if not any((row["arm"], row["seed"]) == (arm, seed) for row in writer.rows):
                rate = best_rate(row for row in writer.rows if row["arm"] == arm and not row["seed"])
                writer.append(run_seed(folder, arm, seed, rate, args.smoke) | made_by())
        rows = [row for row in writer.rows if row["seed"]]
    seeds = common_seeds(rows, arms)
    of_run = {(row["arm"], row["seed"]): row["curve"] for row in rows}
    claims = show_results({arm: [of_run[arm, seed] for seed in seeds] for arm in arms})
    show_kept([row for row in rows if row["seed"] in seeds], arms)
    report_claims(claims, folder)
    return claims


# ------------------------------------------------------------------------------------------------- data and students
def write_tokenizer(folder: Path) -> str:
    """The student's tokenizer, the same for all seeds; returns its folder."""
    train_tokenizer(VOCABULARY).save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")


def data_of(folder: Path, arm: str, seed: int, smoke: bool) -> str:
    """The café in the tokens of an arm's student, written once."""
    own = folder / f"seed-{seed}"
    if arm == SAME:
        return prepared(own, seed, smoke)[0]
    few = quickstart.FEW_ROWS if smoke else {}
    where = {"destination_dir": own / "data" / "other", "tokenizer_name": write_tokenizer(folder)}
    write = partial(logged, own / "output.txt", prepare_data, **where, **few, seed=seed, num_proc=1)
    return made(own / "other_data.txt", lambda: write() or where["destination_dir"])


def start_of(folder: Path, arm: str, seed: int, smoke: bool) -> str:
    """The student that an arm starts from: SFT of random weights on the demonstrations, trained once."""
    if arm == SAME:
        return student_of(folder, seed, smoke)
    data = data_of(folder, arm, seed, smoke)
    return trained_student(folder / f"seed-{seed}", "other_student", data, load_tokenizer(data, None), seed, smoke)


def write_texts(folder: Path, seed: int, smoke: bool) -> str:
    """Demonstrations by the teacher, one a prompt, in the student's tokens; returns their folder."""
    own = folder / f"seed-{seed}"
    write_teacher_data(folder, seed, smoke)
    tokenizer = load_tokenizer(data_of(folder, TEXTS, seed, smoke), None)
    said = map(partial(encoded, Encoding(tokenizer)), read_jsonl(own / "teacher.jsonl"))
    return save_demonstrations(own / "data" / "texts", tokenizer, said)


def encoded(encoding: Encoding, row: Row) -> tuple[list[int], list[int]]:
    """The prompt and the only response of a row of `generate`, in any tokenizer."""
    (sample,) = samples_of_row(row)
    assert sample is not None
    return encoding.prompt_and_response(sample)


# -------------------------------------------------------------------------------------------------------------- runs
def trained(folder: Path, arm: str, seed: int, rate: float, smoke: bool) -> tuple[str, float]:
    """The experiment dir of one run, and its processor seconds."""
    own, steps = folder / f"seed-{seed}", read_steps(smoke)
    data, start = data_of(folder, arm, seed, smoke), start_of(folder, arm, seed, smoke)
    program, flags = ARMS[arm]
    where: dict[str, Any] = {"seed": seed, "learning_rate": rate, "max_steps": steps[-1]}
    where |= {"log_dir": own / "logs" / f"other-{arm.replace(' ', '-')}-{rate:g}"}
    teacher = teacher_of(folder, seed, smoke)
    began = time.process_time()
    if arm == TEXTS:
        data, where["model_name"] = write_texts(folder, seed, smoke), start
    else:
        where |= {"sft_experiment_dir": start, "teacher": teacher}
    saves = {"save_interval": steps[0], "keep_last": 0, "eval_interval": 0}
    experiment = logged(own / "output.txt", program, **flags | where | saves, data_dir=data)
    return experiment, time.process_time() - began


def evaluated(folder: Path, arm: str, seed: int, smoke: bool, model: str, split: str) -> Row:
    """Results of a model of an arm, or of the teacher with the tokenizer of `SAME`, on the prompts of a split."""
    own = folder / f"seed-{seed}"
    where = {"model_name": model, "data_dir": data_of(folder, arm, seed, smoke), "num_samples": prompts_of(smoke)}
    where |= {"rm_experiment_dir": prepared(own, seed, smoke)[2], "split": split}
    (found,) = logged(own / "output.txt", evaluate, **where, **SAMPLED)
    return found


def prompts_of(smoke: bool) -> int:
    """Prompts that a checkpoint answers."""
    return SMOKE_PROMPTS if smoke else READ_PROMPTS


def run_trial(folder: Path, arm: str, rate: float, smoke: bool) -> Row:
    """Train with one learning rate on seed 0; returns the reward model's score on validation prompts."""
    experiment, seconds = trained(folder, arm, 0, rate, smoke)
    score = evaluated(folder, arm, 0, smoke, experiment, "validation")["reward"]
    print(f"{arm}, trial: {rate:g} has score {score:.3f}", flush=True)
    return {"arm": arm, "seed": 0, "learning_rate": rate, "score": score, "seconds": seconds}


def run_seed(folder: Path, arm: str, seed: int, rate: float, smoke: bool) -> Row:
    """Train one arm; returns its curve, measured on test prompts."""
    steps = (0, *read_steps(smoke))
    experiment, seconds = trained(folder, arm, seed, rate, smoke)
    by_step = {int(path.name.partition("-")[2]): str(path) for path in checkpoints(Path(experiment))}
    by_step[0] = start_of(folder, arm, seed, smoke)
    curve = [
        {"samples": step * RESPONSES, "seconds": seconds * step / steps[-1]} | read(folder, arm, seed, smoke, model)
        for step, model in ((step, by_step[step]) for step in steps)
    ]
    print(f"{arm}, seed {seed}: " + ", ".join(f"{name} {curve[-1][name]:.3f}" for name in MEASURES), flush=True)
    return {"arm": arm, "seed": seed, "learning_rate": rate, "curve": curve, "seconds": seconds}


# ----------------------------------------------------------------------------------------------------------- reading
def read(folder: Path, arm: str, seed: int, smoke: bool, model: str) -> Row:
    """What a student and the teacher say to test prompts."""
    own, teacher = folder / f"seed-{seed}", teacher_of(folder, seed, smoke)
    found = evaluated(folder, arm, seed, smoke, model, "test")
    said = made(own / "says.txt", lambda: sampled(folder, SAME, seed, smoke, teacher, own / "says.jsonl"))
    values = {"gold": found["gold"], "reward": found["reward"], "length": found["mean_length"]}
    values["kl"] = ratio(sampled(folder, arm, seed, smoke, model, own / "read.jsonl"), model, teacher)
    return values | {"kl_of_teacher": ratio(Path(said), teacher, model)}


def sampled(folder: Path, arm: str, seed: int, smoke: bool, model: str, output: Path) -> Path:
    """One response of a model to each test prompt, in the tokens of an arm's student, written to a file."""
    where = {"model_name": model, "data_dir": data_of(folder, arm, seed, smoke), "output_file": output}
    output.unlink(missing_ok=True)  # of another checkpoint
    log = folder / f"seed-{seed}" / "output.txt"
    logged(log, generate, **where, **SAMPLED, num_prompts=prompts_of(smoke), split="test")
    return output


def ratio(path: Path, sampler: str, other: str) -> float:
    """`log_ratio` of two models on one's responses, each with its own tokens of their texts."""
    rows, said = read_jsonl(path), []
    for name in (sampler, other):
        encoding = Encoding(load_tokenizer(None, name))
        said.append((name, [encoded(encoding, row) for row in rows]))
    return log_ratio(*said)


# ---------------------------------------------------------------------------------------------------------- results
def show_results(curves: dict[str, list[Curve]]) -> dict[str, bool]:
    """Print the tables; returns which claims hold."""
    claims: dict[str, bool] = {}
    count = len(next(iter(curves.values())))
    for arm, runs in curves.items():
        start = ", ".join(f"{MEASURES[name]} {shown([curve[0][name] for curve in runs])}" for name in MEASURES)
        gain = paired([curve[-1]["gold"] for curve in runs], [curve[0]["gold"] for curve in runs])
        print(f"  {arm}: starts at {start}; gold at the end minus at the start: {shown_gap(gap=gain)}")
        if arm in ("response", "to go"):
            claims[f"{arm} > its start"] = gain[1] > 0
    for reading, by_arm in at_equal_samples_and_time(curves, list(MEASURES)).items():
        table = []
        for arm, values in by_arm.items():
            ends = interval([curve[-1]["seconds"] for curve in curves[arm]])[0]
            cells = (shown(values[name], 3 if name == "gold" else 1) for name in MEASURES)
            table.append((arm, *cells, f"{ends:.0f}"))
        title = f"the café distilled across tokenizers, at {reading}: mean over {count} seeds [95% interval]"
        print_table(title, ("", *MEASURES.values(), "seconds of the whole run"), table, width=150)
        for one, other in combinations(by_arm, 2):
            gap = paired(by_arm[one]["gold"], by_arm[other]["gold"])
            print(f"  gold at {reading}, {one} minus {other}: {shown_gap(gap)}")
            claims[f"{one} differs from {other} at {reading}"] = gap[1] > 0 or gap[2] < 0
            if (one, other, reading) == ("response", "to go", "equal samples"):
                claims["to go > response"] = gap[2] < 0
    return claims


def show_kept(rows: list[Row], arms: list[str]) -> None:
    """Print the differences to the rows that the repository keeps of `distilled_cafe`."""
    kept = [row for row in kept_rows("distilled_cafe") if row["seed"]]
    gold = each(lambda row: float(row["curve"][-1]["gold"]))
    for arm, other in product(arms, dict.fromkeys(row["arm"] for row in kept)):
        found = compare([*rows, *kept], arm, other, gold)
        if found:
            print(f"  gold at equal samples, {arm} minus {other} of distilled_cafe: {shown_gap(found.gap)}")


if __name__ == "__main__":
    main()
