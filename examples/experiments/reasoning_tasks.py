"""Six tasks of reasoning-gym for a small model, the ranges that its base learns from, and flags of SFT and GRPO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets_prep.reasoning_gym import prepare_data
from lightrlhf.cli.calls import call
from lightrlhf.storage.writing import write_text

PLAIN = {"operators": ["+", "-"], "operators_weights": [0.5, 0.5], "min_terms": 2, "max_terms": 2}  # x + 3 = 5
FACTOR = PLAIN | {"operators": ["+", "-", "*"], "operators_weights": [0.5, 0.5, 0.0]}  # 2*x + 3 = 7
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 3, "max_terms": 3, "max_digits": 1},
    "gcd": {"min_value": 2, "max_value": 60},
    "number_sequence": {"min_terms": 4, "max_terms": 5, "max_complexity": 1},
    "simple_equations": {**PLAIN, "min_value": 10, "max_value": 29},
    "count_bits": {"min_n": 256, "max_n": 2047},
    "letter_counting": {"min_words": 2, "max_words": 3},
}
BASE: dict[str, list[dict[str, Any]]] = {
    "chain_sum": [
        {"min_terms": 2, "max_terms": 2, "max_digits": 1},
        {"min_terms": 4, "max_terms": 4, "max_digits": 1},
    ],
    "gcd": [
        {"min_value": 2, "max_value": 60, "min_numbers": 3, "max_numbers": 3},
        {"min_value": 61, "max_value": 120},
    ],
    "number_sequence": [{"min_terms": 6, "max_terms": 8, "max_complexity": 1}],
    "simple_equations": [
        {**PLAIN, "min_value": 1, "max_value": 9},
        {**PLAIN, "min_value": 30, "max_value": 59},
        {**FACTOR, "min_value": 10, "max_value": 29},
    ],
    "count_bits": [{"min_n": 1, "max_n": 255}, {"min_n": 2048, "max_n": 4095}],
    "letter_counting": [{"min_words": 1, "max_words": 1}, {"min_words": 4, "max_words": 6}],
}
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    ". Give only the GCD as your final answer.",
    "Find the value of ",
    " in the equation: ",
    "Solve for ",
    "Determine the value of ",
    " that satisfies: ",
    "How many 1 bits are there in the binary representation of the number ",
    'How many times does the letter "',
    '" appear in the text: "',
)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.09,
}
NUM_HELD_OUT = 250  # items of a task
STEPS, PROMPTS, K = 128, 32, 8  # of GRPO: steps, prompts of one, samples a prompt
LONGEST = 8  # tokens of a response
CPU = {"accelerator": "cpu", "eval_interval": 0}
SFT = CPU | {
    "learning_rate": 3e-4,
    "max_steps": STEPS,
    "mini_batch_size": PROMPTS,
    "micro_batch_size": PROMPTS,
    "log_interval": 4,
}
GRPO = CPU | {
    "learning_rate": 1e-4,
    "max_steps": STEPS,
    "num_generations": K,
    "rollout_size": PROMPTS,
    "rollout_mini_batch_size": PROMPTS * K,
    "mini_batch_size": PROMPTS * K,
    "micro_batch_size": PROMPTS * K,
    "max_new_tokens": LONGEST,
    "reward_function": "examples.experiments.verified:solved",
    "lr_warmup_steps": 4,
    "log_interval": 4,
    "save_interval": STEPS,
}


def write_data(folder: Path, task: str, options: dict[str, Any], num_train: int, tokenizer: str) -> str:
    """Prepare a range of a task, once; returns its folder."""
    if not (folder / "args.json").is_file():
        config = folder.with_suffix(".json")
        config.parent.mkdir(parents=True, exist_ok=True)
        write_text(config, json.dumps({task: options}))
        flags = {"answer_format": "alone", "instruction": "", "num_samples": num_train, "num_held_out": NUM_HELD_OUT}
        where = {"destination_dir": folder, "tokenizer_name": tokenizer}
        call(prepare_data, tasks=[task], task_config=config, seed=1, num_proc=1, **where, **flags)
    return str(folder)
