"""SFT, reward model, DPO, GRPO and PPO of a real model on real dialogues, with a judge that none of them has seen.

SmolLM2-135M-Instruct (see `real_model`) and 1,500 pairs of the harmless dataset, split as `examples/hh_cpu.sh` splits
them: a fifth of the prompts is test (240 pairs, of the 244 there, whose tokenizer is another one), texts of at most 384
tokens, prompts of at most 256. The 910 training pairs are divided by the hash of their prompt into two halves: policies
and their reward model learn from one, the judge from the other.

    rm         a reward model on all training pairs, from the instruct model: held-out accuracy, against the .590
               [.528, .650] of a model made from nothing (howto/algorithms/rm.md)
    judge      a reward model on the judge's half, of another seed
    sft        SFT on the chosen responses of the policy's half: perplexity of 120 test responses, before and after
    dpo        from sft, on the pairs of that half, beta 0.1
    policy_rm  a reward model on that half, from the instruct model, for the two below
    grpo, ppo  from sft, 24 steps of 32 responses (GRPO: 8 prompts, 4 each) of at most 64 tokens, KL coefficient .05

One epoch everywhere, batches of 16. Learning rates, none of them tried: 2e-4 for SFT and reward models, 5e-5 for DPO,
1e-4 for GRPO and PPO (critic 2e-4). Five seeds, 1 to 5 (three until the first three had been run).

Win rates are those of one response (temperature 1, at most 64 tokens, the same noise) of dpo, grpo and ppo against
sft's to the first 120 test prompts, by the judge of the seed, also at equal length. The judge's held-out accuracy over
seeds stands beside them, and where its mean is below .60 no claim is made of any. Claims, by 95% intervals over seeds:
reward model above .590; SFT lowers the perplexity; each policy wins more often than .5 at equal length.

    python -m examples.experiments.real_dialogues --dataset_name FILE --arms rm --seeds 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from datasets_prep.helpful_harmless import prepare_data
from examples.experiments.real_model import COMMON, ENOUGH, MODEL, in_own_process, seconds_of, trained
from examples.experiments.records import FIVE, results
from examples.experiments.stats import interval, paired, report_claims, shown, shown_gap
from examples.programs import logged
from lightrlhf import annotate, dpo, evaluate, generate, grpo, judge, ppo, rm, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, flag, random_seed
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import load_split, save_split, split_by_hash
from lightrlhf.models.names import resolve
from lightrlhf.models.tokenizer import load_tokenizer, store_tokenizer
from lightrlhf.storage.jsonl import read_jsonl
from lightrlhf.storage.results import print_table

FROM_NOTHING = 0.590  # accuracy of the reward model of howto/algorithms/rm.md
GOOD_JUDGE = 0.60
PREPARE = {"split": "null", "test_percentage": 0.2, "max_length": 384, "max_prompt_length": 256, "num_proc": 1}
HALVES = ("policy", "judge")
LONGEST, NUM_PROMPTS = 64, 120  # tokens of a response, test prompts of the win rates
BATCH = {"mini_batch_size": 16, "micro_batch_size": 4, "epochs": 1, "save_interval": 15}
RM = COMMON | BATCH | {"learning_rate": 2e-4, "eval_interval": 0, "eval_iters": 16, "loss_type": "last_token"}
SFT = COMMON | BATCH | {"learning_rate": 2e-4, "eval_interval": 0}
DPO = COMMON | BATCH | {"learning_rate": 5e-5, "eval_interval": 0, "beta": 0.1}
RL = COMMON | {
    "max_steps": 24,
    "mini_batch_size": 32,
    "micro_batch_size": 16,
    "rollout_mini_batch_size": 32,
    "max_new_tokens": LONGEST,
    "init_kl_coeff": 0.05,
    "normalize_rewards": True,
    "missing_eos_penalty": 1.0,
    "lr_warmup_steps": 3,
    "eval_interval": 0,
    "save_interval": 6,
}
GRPO = RL | {"learning_rate": 1e-4, "num_generations": 4, "rollout_size": 8}
PPO = RL | {"actor_learning_rate": 1e-4, "critic_learning_rate": 2e-4, "rollout_size": 32}
FLAGS = {"rm": RM, "judge": RM, "sft": SFT, "dpo": DPO, "policy_rm": RM, "grpo": GRPO, "ppo": PPO}
POLICIES = ("dpo", "grpo", "ppo")
NEEDS = {"dpo": ("judge", "sft"), "grpo": ("judge", "sft", "policy_rm"), "ppo": ("judge", "sft", "policy_rm")}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RealDialoguesArgs(Args):
    """Train a real pretrained model on real dialogues, and judge it by a reward model of other pairs."""

    dataset_name: str
    """Pairs of dialogues: what `datasets_prep.helpful_harmless` reads."""
    output_dir: str = "real_dialogues"
    """Folder for data, logs and results; finished arms in it are kept, and begun ones gone on with."""
    model_name: str = MODEL
    """Instruct model that all runs start from."""
    arms: list[str] | None = flag(None, choices=FLAGS)
    """Arms to run; all by default, each with those that it needs."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 5 by default."""
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    """Precision of training."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run what has no result yet; returns which claims hold."""
    args = parse(RealDialoguesArgs, argv)
    folder, seeds, wanted = Path(args.output_dir).resolve(), args.seeds or FIVE, args.arms or list(FLAGS)
    arms = [arm for arm in FLAGS if arm in wanted or any(arm in NEEDS.get(other, ()) for other in wanted)]
    settings = {"model": args.model_name, "precision": args.precision, "flags": FLAGS, "smoke": args.smoke}
    with results("real_dialogues", folder, settings) as writer:
        done = {(row["arm"], row["seed"]) for row in writer.rows}
        for arm in arms:
            for seed in seeds:
                if (arm, seed) not in done:
                    writer.append(in_own_process(run_arm, folder, args, arm, seed))
                elif is_missing(folder, arm, seed, done, arms):  # of rows that the repository keeps it has no runs
                    in_own_process(run_arm, folder, args, arm, seed)
        rows = [row for row in writer.rows if row["arm"] in arms]
    claims = show_results(rows)
    report_claims(claims, folder)
    return claims


def is_missing(folder: Path, arm: str, seed: int, done: set[tuple[str, int]], arms: Sequence[str]) -> bool:
    """Whether an arm that has its row must be trained for one that has none, because its run is not in `folder`."""
    needed = any(arm in NEEDS.get(other, ()) and (other, seed) not in done for other in arms)
    return needed and not (folder / f"seed-{seed}" / arm / "run.txt").is_file()


# ------------------------------------------------------------------------------------------------------------- data
def write_data(folder: Path, args: RealDialoguesArgs) -> dict[str, str]:
    """Prepare the pairs once, whole and by halves of the training prompts; returns the folders by name."""
    whole = folder / "data" / "all"
    if not (whole / "args.json").is_file():
        where = {"dataset_name": args.dataset_name, "destination_dir": whole, "tokenizer_name": args.model_name}
        few = {"num_samples": 60} if args.smoke else {}
        logged(folder / "output.txt", prepare_data, **where, **PREPARE, **few)
    for half in HALVES:
        if not (folder / "data" / half / "done.txt").is_file():
            write_half(whole, folder / "data" / half, half)
    return {name: str(folder / "data" / name) for name in ("all", *HALVES)}


def write_half(whole: Path, folder: Path, half: str) -> None:
    """Write the training rows whose prompts fall into a half; held-out rows are the same in both."""
    store_tokenizer(load_tokenizer(str(whole), None), folder)
    for stage in ("finetune", "preference", "prompts"):
        for split in ("train", "validation", "test"):
            rows = load_split(whole, stage, split)
            save_split(folder, stage, split, rows if split != "train" else [r for r in rows if half_of(r) == half])
    (folder / "done.txt").write_text(half)


def half_of(row: Row) -> str:
    """The half of a row, by its prompt alone."""
    ids = row["chosen_input_ids" if "chosen_input_ids" in row else "input_ids"][: row["prompt_len"]]
    return split_by_hash(f"half {torch.as_tensor(ids).tolist()}".encode(), {HALVES[0]: 0.5}, HALVES[1])


# ------------------------------------------------------------------------------------------------------------- arms
def run_arm(folder: Path, args: RealDialoguesArgs, arm: str, seed: int) -> Row:
    """Train an arm, and read what is read of it."""
    torch.set_num_threads(1)
    data = write_data(folder, args)
    runs = folder / f"seed-{seed}"
    programs: dict[str, tuple[ModuleType, str, Row]] = {
        "rm": (rm, "all", {"model_name": args.model_name}),
        "judge": (rm, "judge", {"model_name": args.model_name}),
        "sft": (sft, "policy", {"model_name": args.model_name}),
        "dpo": (dpo, "policy", {"sft_experiment_dir": runs / "sft"}),
        "policy_rm": (rm, "policy", {"model_name": args.model_name}),
        "grpo": (grpo, "policy", {"sft_experiment_dir": runs / "sft", "rm_experiment_dir": runs / "policy_rm"}),
        "ppo": (ppo, "policy", {"sft_experiment_dir": runs / "sft", "rm_experiment_dir": runs / "policy_rm"}),
    }
    program, part, start = programs[arm]
    start = {flag: run_of(value) if isinstance(value, Path) else value for flag, value in start.items()}
    few: Row = {"max_steps": 1, "epochs": None} if args.smoke else {}
    flags = FLAGS[arm] | {"seed": seed + 100 * (arm == "judge"), "precision": args.precision} | few
    run = trained(runs / arm, program, data_dir=data[part], **start, **flags)
    row = {"arm": arm, "seed": seed, "seconds": seconds_of(run)}
    read: Callable[..., Row] = {rm: read_rewards, sft: read_perplexity}.get(program, read_wins)
    return row | read(runs, args, run, data["all"])


def run_of(folder: Path) -> str:
    """Experiment dir of a finished arm."""
    return (folder / "run.txt").read_text(encoding="utf-8")


def read_rewards(runs: Path, args: RealDialoguesArgs, run: str, data: str) -> Row:
    """Accuracy of a reward model on the test pairs, with its interval for the one run."""
    few = {"num_samples": 4 if args.smoke else None, "rollout_mini_batch_size": 4}
    (result,) = logged(runs / "output.txt", evaluate, model_name=[run], data_dir=data, accelerator="cpu", **few)
    return {name: result[name] for name in ("accuracy", "accuracy_interval", "loss")}


def read_perplexity(runs: Path, args: RealDialoguesArgs, run: str, data: str) -> Row:
    """Perplexity of the test responses under a policy and under the model that it began as."""
    few = {"num_samples": 4 if args.smoke else NUM_PROMPTS, "rollout_mini_batch_size": 4, "max_new_tokens": 1}
    where = {"data_dir": data, "accelerator": "cpu", "model_name": [resolve(args.model_name), run]}
    before, after = logged(runs / "output.txt", evaluate, **where, **few)
    return {"perplexity": after["perplexity"], "perplexity_before": before["perplexity"]}


def read_wins(runs: Path, args: RealDialoguesArgs, run: str, data: str) -> Row:
    """Win rates of a policy against SFT's by the judge of the seed, its KL to SFT, and lengths."""
    folder, start, judging = Path(run).parents[3], run_of(runs / "sft"), run_of(runs / "judge")
    files = [scored(runs, args, *one, judging, data) for one in ((run, folder), (start, runs / "sft"))]
    records = [record(one, other) for one, other in zip(*map(read_jsonl, files), strict=True)]
    result = judge.summary(records, seed=0)
    names = ("win_rate", "length_controlled_win_rate", "length_controlled_win_rate_interval")
    few = {"num_samples": 4 if args.smoke else NUM_PROMPTS // 2, "max_new_tokens": LONGEST}
    where = {"data_dir": data, "accelerator": "cpu", "rollout_mini_batch_size": 16, "reference_dir": start}
    (found,) = logged(runs / "output.txt", evaluate, model_name=[run], **where, **few)
    row = {name: result[name] for name in names} | {"kl": found["kl"], "length": found["mean_length"]}
    return row | ({"implicit_accuracy": found["implicit_accuracy"]} if "implicit_accuracy" in found else {})


def scored(runs: Path, args: RealDialoguesArgs, policy: str, folder: Path, judging: str, data: str) -> Path:
    """File of a policy's responses to the first test prompts, with the judge's scores, made once."""
    count = 4 if args.smoke else NUM_PROMPTS
    responses, output = folder / "responses.jsonl", folder / "judged.jsonl"
    prompts = runs / "prompts"
    if not (prompts / "done.txt").is_file():  # the first ones, which `generate` would draw at random
        save_split(prompts, "prompts", "test", load_split(data, "prompts", "test")[:count])
        store_tokenizer(load_tokenizer(data, None), prompts)
        (prompts / "done.txt").write_text("")
    where = {"data_dir": prompts, "accelerator": "cpu", "max_new_tokens": LONGEST, "rollout_mini_batch_size": 32}
    logged(runs / "output.txt", generate, model_name=policy, output_file=responses, **where)
    files = {"responses_file": responses, "output_file": output, "rm_experiment_dir": judging}
    logged(runs / "output.txt", annotate, **files, accelerator="cpu", rollout_mini_batch_size=8)
    return output


def record(one: Row, other: Row) -> Row:
    """A judgement of two responses to a prompt, as `lightrlhf.judge` has them."""
    a, b = one["rewards"][0], other["rewards"][0]
    verdict = "malformed" if a is None or b is None else "tie" if a == b else "A" if a > b else "B"
    return {"prompt": one["prompt_ids"], "a": one["responses"][0], "b": other["responses"][0], "verdict": verdict}


# ---------------------------------------------------------------------------------------------------------- results
def show_results(rows: Sequence[Row]) -> dict[str, bool]:
    """Print the tables; returns which claims hold, of what was run with enough seeds."""
    claims: dict[str, bool] = {}
    by_arm = {arm: sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"]) for arm in FLAGS}
    table = []
    for arm in (arm for arm in FLAGS if by_arm[arm]):
        own = by_arm[arm]
        names = [name for name in ("accuracy", "perplexity", "length_controlled_win_rate", "kl") if name in own[0]]
        cells = "; ".join(f"{name.replace('_', ' ')} {shown([row[name] for row in own])}" for name in names)
        hours = (sum(row[f"{kind}_seconds"] for row in own) / len(own) / 3600 for kind in ("cpu", "wall"))
        table.append((arm, len(own), cells, *(f"{hour:.2f}" for hour in hours), max(row["peak_gib"] for row in own)))
    headings = ("arm", "seeds", "on held-out rows", "hours of a core", "hours of the clock", "peak GiB")
    lines = [tuple(map(str, line)) for line in table]
    print_table("mean over seeds [95% interval]", headings, lines, width=150)
    for arm in ("rm", "judge", "policy_rm"):
        for row in by_arm[arm]:
            low, high = row["accuracy_interval"]
            print(f"  {arm}, seed {row['seed']}: accuracy {row['accuracy']:.3f} [{low:.3f}, {high:.3f}] over pairs")
    if len(by_arm["rm"]) >= ENOUGH:
        low = interval([row["accuracy"] for row in by_arm["rm"]])[1]
        claims[f"reward model above {FROM_NOTHING:.3f}"] = low > FROM_NOTHING
    if len(by_arm["sft"]) >= ENOUGH:
        ends = ([math.log(row[name]) for row in by_arm["sft"]] for name in ("perplexity", "perplexity_before"))
        gap = paired(*ends)
        print(f"  SFT, log of the perplexity, after minus before: {shown_gap(gap)}")
        claims["SFT lowers the perplexity"] = gap[2] < 0
    judged = [row["accuracy"] for row in by_arm["judge"]]
    trusted = bool(judged) and sum(judged) / len(judged) >= GOOD_JUDGE
    for arm in POLICIES:
        if len(by_arm[arm]) >= ENOUGH and trusted:
            low = interval([row["length_controlled_win_rate"] for row in by_arm[arm]])[1]
            claims[f"{arm} wins against sft at equal length"] = low > 0.5
        elif by_arm[arm] and not trusted:
            print(f"  {arm}: no win rate is claimed, the judge's accuracy is below {GOOD_JUDGE}")
    return claims


if __name__ == "__main__":
    main()
