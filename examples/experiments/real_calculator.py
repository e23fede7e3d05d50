"""A real model learns to use a calculator: the products of `examples.experiments.agents`, with the tool and without.

SmolLM2-135M-Instruct (see `real_model`) is fine-tuned once on 1,024 scripted episodes, 64 steps; after 16 it wrote no
call (one trial, not kept). Both arms start from there: 8 steps of 32 episodes (4 groups of 8), one update each, on
equal prompts by seed. Script, reward and chat template are the small model's; only the marks of turns are SmolLM2's,
whose own template has no tools. The learning rate is the other real experiments'. Three seeds, for a processor: an arm
takes one to three minutes of a core, the start five.

Read: the share of right episodes in the last four steps (128 episodes), each played on a task that was not trained on
before. Claim: with the tool above without it, by the 95% interval of the paired difference over seeds. Finished arms
are kept, and begun ones gone on with.

    python -m examples.experiments.real_calculator
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.experiments.agent_tasks import end
from examples.experiments.agents import SAID, TOLD, Form, products, quiet, right, scripted
from examples.experiments.real_model import COMMON, in_own_process, seconds_of
from examples.experiments.real_tasks import RATE, RealArgs
from examples.experiments.records import Row, common_seeds, results
from examples.experiments.stats import paired, report_claims, shown, shown_gap
from examples.programs import made
from lightrlhf import grpo, sft
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import flag, random_seed
from lightrlhf.cli.lists import texts
from lightrlhf.cli.parser import parse
from lightrlhf.data.types import Tokenizer
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.run_dir import read_metrics
from lightrlhf.training.iterated_dir import find_started_run

SEEDS, LAST = (1, 2, 3), 4  # steps that are read
NUM_DEMONSTRATIONS = 1024
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    + "{% if loop.first %}"
    + TOLD
    + "{% endif %}"
    + SAID
    + "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = Form(
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    "{}<|im_end|>",
    "\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n",
)
TRAIN: dict[str, Any] = COMMON | {
    "eval_interval": 0,
    "learning_rate": RATE,
    "lr_warmup_steps": 4,
    "experiment_name": "training",
}
SFT = TRAIN | {"epochs": 1, "mini_batch_size": 16, "micro_batch_size": 16, "save_interval": 100}
GRPO = TRAIN | {
    "max_steps": 8,
    "lr_warmup_steps": 2,
    "num_generations": 8,
    "rollout_size": 4,
    "rollout_mini_batch_size": 32,
    "mini_batch_size": 32,
    "micro_batch_size": 32,
    "max_new_tokens": 40,
    "advantage": "rloo",
    "aggregation": "sum",
    "save_interval": 4,
}
WITH, WITHOUT = "with the tool", "without the tool"
ARMS: dict[str, dict[str, Any]] = {
    WITH: GRPO | {"tools": ["calculator"], "max_turns": 2, "env_workers": 2},
    WITHOUT: GRPO,
}


@dataclass(frozen=True, kw_only=True)
class RealCalculatorArgs(RealArgs):
    """Train a real model to use a calculator, over seeds."""

    output_dir: str = "real_calculator"
    """Folder for models, logs and results."""
    seeds: list[int] | None = random_seed(None)
    """Seeds to run; 1 to 3 by default."""
    arms: list[str] | None = flag(None, split=texts, choices=ARMS)
    """Names of the arms to run; all by default."""


@one_line_errors
def main(argv: list[str] | None = None) -> dict[str, bool]:
    """Run the arms that have no result yet; returns which claims hold."""
    args = parse(RealCalculatorArgs, argv)
    folder = Path(args.output_dir).resolve()
    settings: Row = {"model": args.model_name, "precision": args.precision, "arms": ARMS, "sft": SFT}
    settings |= {"demonstrations": NUM_DEMONSTRATIONS, "smoke": args.smoke}
    with results("real_calculator", folder, settings) as writer:
        done = {(row["seed"], row["arm"]) for row in writer.rows}
        for seed in args.seeds or SEEDS:
            for arm in args.arms or list(ARMS):
                if (seed, arm) not in done:
                    writer.append(in_own_process(run_arm, folder, args, seed, arm))
                    row = writer.rows[-1]
                    print(f"seed {seed}, {arm}: {row['scores']}, {row['cpu_seconds']} s of a processor", flush=True)
        rows = list(writer.rows)
    claims = show_results(rows)
    report_claims(claims, folder)
    return claims


def show_results(rows: Sequence[Row]) -> dict[str, bool]:
    """Print both arms' shares of right episodes and their difference; returns whether it is above 0."""
    seeds = common_seeds(rows, ARMS)
    if not seeds:
        return {}
    by_run = {(row["arm"], row["seed"]): end(row, LAST) for row in rows}
    ours, theirs = ([by_run[arm, seed] for seed in seeds] for arm in (WITH, WITHOUT))
    gap = paired(ours, theirs)
    print(f"{WITH} {shown(ours)}, {WITHOUT} {shown(theirs)}, difference {shown_gap(gap)}")
    return {f"{WITH} > {WITHOUT}": gap[1] > 0}


def run_arm(folder: Path, args: RealCalculatorArgs, seed: int, arm: str) -> Row:
    """Train one arm from the start that all share; returns the share of right episodes at each step."""
    torch.set_num_threads(1)
    start = made(folder / "start.txt", lambda: fine_tuned(folder / "start", args))
    work = folder / f"{arm}, {seed}".replace(" ", "_")
    flags: Row = ARMS[arm] | {"model_name": start, "precision": args.precision, "seed": seed}
    flags |= {"log_dir": str(work), "resume_from": find_started_run(work)}
    prompts = products(seed, GRPO["max_steps"] * GRPO["rollout_size"])
    with quiet(work):
        run = grpo.train(grpo.GRPOArgs(**flags | few(args)), prompts=prompts, reward=right)
    scores = [round(row["objective/score"], 6) for row in read_metrics(str(run)) if "objective/score" in row]
    seconds = seconds_of(str(run))
    shutil.rmtree(work)
    return {"seed": seed, "arm": arm, "scores": scores, "seconds": seconds}


def fine_tuned(folder: Path, args: RealCalculatorArgs) -> str:
    """The experiment dir of SFT on scripted episodes."""
    reader = tokenizer(args.model_name)
    flags: Row = SFT | {"model_name": args.model_name, "precision": args.precision, "seed": 0, "log_dir": str(folder)}
    rows = scripted(reader, 0, 16 if args.smoke else NUM_DEMONSTRATIONS, TURNS)
    with quiet(folder):
        return str(sft.train(sft.SFTArgs(**flags), tokenizer=reader, rows=rows))


def few(args: RealCalculatorArgs) -> Row:
    return {"max_steps": 2} if args.smoke else {}


def tokenizer(name: str) -> Tokenizer:
    """The model's tokenizer, with a chat template that writes tools."""
    reader = load_tokenizer(None, name)
    reader.chat_template = TEMPLATE
    return reader


if __name__ == "__main__":
    main()
