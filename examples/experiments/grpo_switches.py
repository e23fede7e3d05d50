"""What GRPO's switches are worth, one at a time: how advantages are made, tokens weighed, and the KL placed.

The task: a prompt lists two to ten digits, a response may say any filler words, then `answer` and the digits in order.
It is right (1) or wrong (0), whatever it says before; length is free. The base, 0.1M parameters made from nothing, is
fine-tuned on 6,000 demonstrations in which each digit is wrong with a chance of .15, after 0 to 6 filler words, as many
before wrong as before right answers. So long lists are often wrong in all of a group's responses, and short ones soon
right in all. (Number of demonstrations, their noise, length of lists and steps were set with the default arm on seed
100, in five trials, until the base was right on part of the lists of each length and 100 steps at some rate improved
it; of the other arms only dynamic sampling was run, once, on an easier version, to see its time.)

Every arm is `lightrlhf.grpo` with one switch changed, 100 steps of 16 prompts with eight responses each; no full cross.
The learning rate is the best of three on seed 0 **for the default arm alone** (std, token, no KL, one update a
rollout), by its mean score on validation prompts, and is then that of all arms on seeds 1 to 10: an arm may prefer
another rate. Ranges and ratios only act where a rollout is used more than once, so those arms are compared with the
default at four updates a rollout (two passes in two mini-batches); `several updates` is that default against the other.

Prefix sharing changes no gradient (tests say so) and is no arm here.

Read, on 512 test prompts with the same noise for all: the share of right responses at the end, and its mean over the
validation every 20 steps (speed); the KL to the base; the length of wrong responses and their filler words at the end,
less those at the start. Dr. GRPO's claim is about lengths: under `sequence` wrong responses get longer, since each
token of a long one is punished less, and under `constant` they do not. The length of wrong responses also changes
because those that are still wrong belong to longer lists; filler words need not, so the claim is read from both.

Each arm is compared with its control by the 95% interval of the paired difference over seeds, not adjusted: of as many
comparisons as there are, one in twenty is expected to exclude 0 where nothing differs; the program says how many there
were. A run takes 8 to 18 seconds, all of them about 40 minutes of one core. Results are stored as they come: the same
command resumes after a kill, and `--seeds 11 12` adds two to those that are there. They are in
howto/results.md.

    python -m examples.experiments.grpo_switches
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.experiments.claim_list import COMPARED, DEFAULT, SEVERAL
from examples.experiments.claim_list import SWITCHES as TABLES
from examples.experiments.records import TEN, best_rate, common_seeds, made_by, now, results, spent
from examples.experiments.small_models import word_tokenizer, write_model
from examples.experiments.stats import interval, paired, report_claims, shown, shown_gap
from examples.programs import logged
from lightrlhf import evaluate, grpo, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import IGNORE_INDEX, save_split
from lightrlhf.data.tokens import encode_prompt, encode_response
from lightrlhf.models.tokenizer import store_tokenizer
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.storage.results import print_table
from lightrlhf.storage.run_dir import read_metrics
from lightrlhf.storage.seals import seal
from lightrlhf.storage.writing import write_text

DIGITS, FILLER = "0123456789", ("well", "so", "hm", "then")
SHORTEST, LONGEST, MOST_FILLER, WRONG = 2, 10, 6, 0.15
NUM_DEMONSTRATIONS, NUM_PROMPTS, NUM_HELD_OUT = 6000, 2048, 512
RATES = [1e-4, 3e-4, 1e-3]
SFT = {
    "accelerator": "cpu",
    "logger": "csv",
    "epochs": 4,
    "learning_rate": 3e-3,
    "lr_warmup_steps": 20,
    "use_targets": True,
    "mini_batch_size": 64,
    "micro_batch_size": 64,
    "eval_interval": 0,
    "log_interval": 50,
}
GRPO = {
    "accelerator": "cpu",
    "logger": "csv",
    "log_interval": 1,
    "save_interval": 1000,
    "eval_interval": 20,
    "max_steps": 100,
    "rollout_size": 16,
    "num_generations": 8,
    "rollout_mini_batch_size": 128,
    "mini_batch_size": 128,
    "micro_batch_size": 128,
    "max_new_tokens": 32,
    "lr_scheduler_type": "constant",
    "reward_function": "examples.experiments.grpo_switches:is_right",
}
KL = 0.05
UPDATES = {"mini_batch_size": 64, "micro_batch_size": 64, "ppo_epochs": 2}
ARMS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "mean": {"advantage": "mean"},
    "batch_std": {"advantage": "batch_std"},
    "rloo": {"advantage": "rloo"},
    "maxrl": {"advantage": "maxrl"},
    "reinforce_pp": {"advantage": "none", "normalize_advantages": True},
    "reinforce_pp_baseline": {"advantage": "mean", "normalize_advantages": True},
    "sequence": {"aggregation": "sequence"},
    "sum": {"aggregation": "sum"},
    "constant": {"aggregation": "constant"},
    "prompt": {"aggregation": "prompt"},
    "KL in the reward": {"init_kl_coeff": KL, "kl_placement": "reward"},
    "KL in the loss": {"init_kl_coeff": KL, "kl_placement": "loss"},
    "resample_rounds 4": {"resample_rounds": 4},
    SEVERAL: UPDATES,
    "clip_coeff_high .28": UPDATES | {"clip_coeff_high": 0.28},
    "gspo": UPDATES
    | {
        "importance_sampling_level": "sequence",
        "aggregation": "sequence",
        "clip_coeff": 3e-4,
        "clip_coeff_high": 4e-4,
    },
    "cispo": UPDATES | {"loss_type": "cispo"},
    "sapo": UPDATES | {"loss_type": "sapo"},
}
MEASURES = {
    "right": "right at the end",
    "speed": "right, mean of the run",
    "kl": "KL, nats",
    "wrong_length": "wrong: tokens more than at the start",
    "wrong_filler": "wrong: filler more than at the start",
}
Result = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class GRPOSwitchesArgs(Args):
    """Compare the switches of GRPO on a small task."""

    output_dir: str = "grpo_switches"
    """Folder for data, logs and results."""
    tables: list[str] | None = flag(None, choices=TABLES)
    """Tables to run; all by default."""
    seeds: list[int] | None = at_least(1, None, remedy="the learning rate is chosen on seed 0")
    """Seeds to run; 1 to 10 by default."""
    smoke: bool = False
    """Run every arm for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(GRPOSwitchesArgs, argv)
    started = time.perf_counter()
    folder = Path(args.output_dir).resolve()
    tables, seeds = args.tables or list(TABLES), args.seeds or TEN
    arms = list(dict.fromkeys(arm for name in tables for arm in (TABLES[name][0], *TABLES[name][1])))
    settings = {"arms": ARMS, "grpo": GRPO, "sft": SFT, "rates": RATES, "smoke": args.smoke}
    with results("grpo_switches", folder, settings) as writer:
        for rate in RATES:
            if (0, rate) not in {(row["seed"], row["learning_rate"]) for row in writer.rows}:
                row = run_arm(folder, DEFAULT, 0, rate, args.smoke)
                writer.append(row | {"score": row["result"]["speed"]} | made_by())
        rate = best_rate(row for row in writer.rows if row["seed"] == 0)
        for seed in seeds:
            for arm in arms:
                if (seed, arm) not in {(row["seed"], row["arm"]) for row in writer.rows}:
                    writer.append(run_arm(folder, arm, seed, rate, args.smoke) | made_by())
        rows = writer.rows
    print(f"\n{(time.perf_counter() - started) / 60:.1f} minutes")
    for row in rows:
        if row["seed"] == 0:
            print(f"  seed 0, default at learning rate {row['learning_rate']:g}: {row['score']:.3f}")
    of_run = {(row["seed"], row["arm"]): row["result"] for row in rows if row["seed"]}
    seeds = common_seeds((row for row in rows if row["seed"]), arms)
    by_arm = {arm: [of_run[seed, arm] for seed in seeds] for arm in arms}
    seconds = [row["seconds"] for row in rows]
    print(f"  {len(seconds)} runs of {sum(seconds) / len(seconds):.1f} seconds, {len(seeds)} seeds")
    claims = show_results({name: TABLES[name] for name in tables}, by_arm)
    report_claims(claims, folder)
    return claims


# ------------------------------------------------------------------------------------------------------------- task
def answer_of(completion: str) -> str:
    """What follows the first `answer` of a response; nothing where there is none."""
    return completion.partition("answer")[2].strip()


def is_right(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """The reward: whether the digits of a prompt follow the first `answer` in order, and nothing else."""
    return [
        float(answer_of(text) == " ".join(sorted(prompt.split()[:-1]))) for prompt, text in zip(prompts, completions)
    ]


def judge(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[Result]:
    """The same for `lightrlhf.evaluate`, with the words of a response and how many of them are filler."""
    return [
        {"score": score, "words": len(text.split()), "filler": sum(word in FILLER for word in text.split())}
        for score, text in zip(is_right(prompts, completions), completions)
    ]


def demonstration(rng: random.Random) -> tuple[str, str]:
    """A prompt and a response, each digit of which is another with a chance of `WRONG`."""
    digits = [rng.choice(DIGITS) for _ in range(rng.randint(SHORTEST, LONGEST))]
    answer = [rng.choice(DIGITS) if rng.random() < WRONG else digit for digit in sorted(digits)]
    filler = rng.choices(FILLER, k=rng.randint(0, MOST_FILLER))
    return " ".join([*digits, "sort"]), " ".join([*filler, "answer", *answer])


def write_data(folder: Path, seed: int) -> None:
    """Write demonstrations and prompts of one seed."""
    tokenizer = word_tokenizer([*DIGITS, "sort", "answer", *FILLER])
    sizes = {("finetune", "train"): NUM_DEMONSTRATIONS, ("prompts", "train"): NUM_PROMPTS}
    sizes |= {("prompts", split): NUM_HELD_OUT for split in ("validation", "test")}
    for (stage, split), count in sizes.items():
        rng, rows = random.Random(f"{seed} {stage} {split}"), []
        for _ in range(count):
            prompt, response = demonstration(rng)
            ids = encode_prompt(tokenizer, prompt)
            row: dict[str, Any] = {"prompt_len": len(ids), "input_ids": ids, "columns": {}}
            if stage == "finetune":
                learned = encode_response(tokenizer, response)
                targets = torch.tensor([IGNORE_INDEX] * len(ids) + learned)
                row = {"prompt_len": len(ids), "input_ids": [*ids, *learned], "targets": targets}
            rows.append(row)
        save_split(folder, stage, split, rows)
    store_tokenizer(tokenizer, folder)
    write_text(folder / "args.json", json.dumps({"judge": "examples.experiments.grpo_switches:judge"}))
    seal(folder, ["args.json"])


# ------------------------------------------------------------------------------------------------------------- runs
def base(own: Path, seed: int, smoke: bool) -> str:
    """The experiment dir of the base, and its answers to the test prompts; trained once."""
    done = sorted((own / "logs" / "base").rglob("eval/test.jsonl"))
    if done:
        return str(done[-1].parents[1])
    write_data(own / "data", seed)
    model = write_model(own / "model", seed, word_tokenizer([*DIGITS, "sort", "answer", *FILLER]))
    few_steps = {"max_steps": 2} if smoke else {}
    where = {"data_dir": own / "data", "log_dir": own / "logs", "experiment_name": "base", "model_name": model}
    experiment = logged(own / "output.txt", sft, **where, seed=seed, **SFT, **few_steps)
    answer_tests(own, experiment, experiment)
    return experiment


def answer_tests(own: Path, experiment: str, reference: str) -> dict[str, Any]:
    """Answer the test prompts; returns means, and leaves the answers in the experiment dir."""
    flags = {"reference_dir": reference, "data_dir": own / "data", "max_new_tokens": GRPO["max_new_tokens"]}
    flags |= {"rollout_mini_batch_size": 256, "accelerator": "cpu"}
    (row,) = logged(own / "output.txt", evaluate, model_name=experiment, **flags)
    return row


def run_arm(folder: Path, arm: str, seed: int, rate: float, smoke: bool) -> dict[str, Any]:
    """Train one arm; returns its measures, its curve of validation scores, and its flags."""
    own = folder / f"seed-{seed}"
    start = base(own, seed, smoke)
    flags = GRPO | ARMS[arm] | ({"max_steps": 2, "eval_interval": 2, "eval_iters": 1} if smoke else {})
    where = {"data_dir": own / "data", "log_dir": own / "logs", "sft_experiment_dir": start, "seed": seed}
    began = now()
    experiment = logged(own / "output.txt", grpo, **where, learning_rate=rate, **flags)
    seconds = spent(began)
    tested, metrics = answer_tests(own, experiment, start), read_metrics(experiment)
    curve = [row["val/score"] for row in metrics if "val/score" in row]
    before, after = (wrong_answers(Path(directory)) for directory in (start, experiment))
    result = {"right": tested["gold"], "speed": sum(curve) / len(curve), "kl": tested["kl"]}
    result |= {name: after[name] - before[name] for name in after}
    result |= {"length": tested["mean_length"], "groups_without_signal": zero_groups(metrics)}
    print(f"seed {seed}, {arm}, {rate:g}: " + ", ".join(f"{k} {v:.3f}" for k, v in result.items()), flush=True)
    kept = {name: [row[name] for row in metrics if name in row] for name in KEPT}
    return {
        **{"arm": arm, "seed": seed, "learning_rate": rate, "result": result, **seconds},
        **{"curve": curve, "before": before, "metrics": kept, "flags": ARMS[arm]},
    }


KEPT = ("objective/score", "completions/mean_length", "objective/zero_std_ratio", "policy/clipfrac")


def wrong_answers(experiment: Path) -> Result:
    """Mean words and filler words of the wrong ones among the answers to the test prompts."""
    wrong = [row["gold"] for row in read_jsonl(experiment / "eval" / "test.jsonl") if not row["gold"]["score"]]
    mean = {name: sum(row[name] for row in wrong) / max(len(wrong), 1) for name in ("words", "filler")}
    return {"wrong_length": mean["words"], "wrong_filler": mean["filler"]}


def zero_groups(metrics: Sequence[dict[str, Any]]) -> float:
    """Mean share of a run's groups whose responses were all right or all wrong."""
    shares = [row["objective/zero_std_ratio"] for row in metrics if "objective/zero_std_ratio" in row]
    return sum(shares) / len(shares)


# ---------------------------------------------------------------------------------------------------------- results
def show_results(tables: dict[str, tuple[str, list[str]]], by_arm: dict[str, list[Result]]) -> dict[str, bool]:
    """Print the tables and what differs from its control; returns which claims about lengths hold."""

    def values(arm: str, measure: str) -> list[float]:
        return [result[measure] for result in by_arm[arm]]

    seeds = len(next(iter(by_arm.values())))
    num_comparisons, differ = 0, []
    for title, (control, arms) in tables.items():
        rows = []
        for arm in (control, *arms):
            gaps = {name: paired(values(arm, name), values(control, name)) for name in COMPARED if arm != control}
            num_comparisons += len(gaps)
            differ += [f"{arm}, {name}" for name, (_, low, high) in gaps.items() if low > 0 or high < 0]
            compared = ((shown(values(arm, name)), shown_gap(gaps[name]) if gaps else "") for name in COMPARED)
            others = (shown(values(arm, name), 2) for name in MEASURES if name not in COMPARED)
            rows.append((arm, *(cell for cells in compared for cell in cells), *others))
        right, speed, *others = MEASURES.values()
        headings = ("", right, "minus control", speed, "minus control", *others)
        print_table(f"{title}: mean over {seeds} seeds [95% interval], control: {control}", headings, rows, width=220)
    print(f"  {num_comparisons} comparisons, unadjusted; 0 is excluded in: {'; '.join(differ) or 'none'}")
    claims: dict[str, bool] = {}
    if {"sequence", "constant"} <= by_arm.keys():
        for name in ("wrong_length", "wrong_filler"):
            grows = {arm: interval(values(arm, name)) for arm in ("sequence", "constant")}
            gap = paired(values("sequence", name), values("constant", name))
            print(f"  {name}, sequence minus constant: {shown_gap(gap)}")
            claims[f"{name} grows under sequence"] = grows["sequence"][1] > 0
            claims[f"{name} does not grow under constant"] = grows["constant"][1] <= 0
            claims[f"{name} grows more under sequence than under constant"] = gap[1] > 0
    return claims


if __name__ == "__main__":
    main()
