"""Tasks of reasoning-gym for a real model, the base that runs on them start from, GRPO's flags, and what is read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datasets_prep.reasoning_gym import prepare_data
from examples.experiments.real_model import COMMON, MODEL, trained
from examples.experiments.verified import Shape, sampled, scores_of
from examples.programs import logged
from lightrlhf import evaluate, sft
from lightrlhf.cli.fields import Args
from lightrlhf.storage.writing import write_text

CANDIDATES: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "simple_equations": {
        **{"operators": ["+", "-"], "operators_weights": [0.5, 0.5], "min_terms": 2, "max_terms": 2},
        **{"min_value": 1, "max_value": 50},
    },
    "gcd": {"min_value": 2, "max_value": 100},
    "letter_counting": {"min_words": 2, "max_words": 4},
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
    "leg_counting": {"min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 9},
    "number_sequence": {"min_terms": 4, "max_terms": 6, "max_complexity": 1},
}
SHAPE = Shape(prompts=384, iterations=4, k=8, longest=16)
PROMPTS = 8  # of a step of GRPO
NUM_HELD_OUT, NUM_KL, NUM_FORMAT = 200, 100, 32
RATE = 2e-4
TRAIN = COMMON | {"eval_interval": 0, "learning_rate": RATE}
FORMAT = TRAIN | {"epochs": 2, "mini_batch_size": 16, "micro_batch_size": 16, "save_interval": 8}
GRPO = TRAIN | {
    "max_steps": SHAPE.prompts // PROMPTS,
    "num_generations": SHAPE.k,
    "rollout_size": PROMPTS,
    "rollout_mini_batch_size": PROMPTS * SHAPE.k,
    "mini_batch_size": PROMPTS * SHAPE.k,
    "micro_batch_size": PROMPTS * SHAPE.k,
    "max_new_tokens": SHAPE.longest,
    "reward_function": "examples.experiments.verified:solved",
    "lr_warmup_steps": 4,
    "save_interval": 8,
}
MEASURES = {"greedy": "greedy", "pass_1": "pass@1", "pass_8": "pass@8", "kl": "KL, nats", "length": "tokens"}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RealArgs(Args):
    """Runs on a real model."""

    model_name: str = MODEL
    """Instruct model that all runs start from."""
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    """Precision of training."""
    smoke: bool = False
    """Run every stage for a moment only, to test that it works; the results mean nothing."""


def write_data(folder: Path, args: RealArgs, tasks: Sequence[str], num_train: int, seed: int) -> str:
    """Prepare items of tasks once, in `folder`; returns it."""
    if not (folder / "args.json").is_file():
        config = folder.with_suffix(".json")
        config.parent.mkdir(parents=True, exist_ok=True)
        write_text(config, json.dumps({task: CANDIDATES[task] for task in tasks}))
        flags = {"answer_format": "alone", "num_samples": num_train, "num_held_out": NUM_HELD_OUT, "num_proc": 1}
        where = {"destination_dir": folder, "tokenizer_name": args.model_name, "task_config": config, "seed": seed}
        logged(folder.parent / "output.txt", prepare_data, tasks=list(tasks), **where, **flags)
    return str(folder)


def write_base(folder: Path, args: RealArgs) -> str:
    """Train the base once: the instruct model after SFT on short answers to all candidates; returns its run."""
    few = {"max_steps": 1, "epochs": None} if args.smoke else {}
    data = write_data(folder / "data" / "format", args, list(CANDIDATES), 2 if args.smoke else NUM_FORMAT, seed=2)
    flags = FORMAT | {"model_name": args.model_name, "data_dir": data, "precision": args.precision, "seed": 0}
    return trained(folder / "base", sft, **flags | few)


def measures(work: Path, args: RealArgs, policy: str, base: str, data: str, num_train: int) -> Row:
    """What is read of a policy on test items; all policies get the same sampling noise."""
    count = 4 if args.smoke else NUM_HELD_OUT
    where = {"data_dir": data, "split": "test", "num_prompts": count}
    greedy = sampled(policy, work / "greedy.jsonl", SHAPE, do_sample=False, **where)
    drawn = sampled(policy, work / "drawn.jsonl", SHAPE, num_generations=SHAPE.k, **where)
    right = [scores_of(row) for row in drawn]
    found: Row = {"items": len(greedy), "greedy": mean([scores_of(row)[0] for row in greedy])}
    found |= {"pass_1": mean([mean(one) for one in right]), "pass_8": mean([max(one) for one in right])}
    texts = Counter(text for row in drawn for text in row["responses"])
    found |= {"length": mean_length(drawn), "commonest": max(texts.values()) / sum(texts.values())}
    few = {"num_samples": 4 if args.smoke else NUM_KL, "max_new_tokens": SHAPE.longest, "rollout_mini_batch_size": 32}
    models = {"model_name": [policy], "reference_dir": base, "data_dir": data, "accelerator": "cpu"}
    (result,) = logged(work / "output.txt", evaluate, **models, **few)
    return found | {"kl": result["kl"]}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def mean_length(rows: Sequence[Row]) -> float:
    """Mean number of tokens of the responses."""
    return mean([len(ids) for row in rows for ids in row["response_ids"]])
