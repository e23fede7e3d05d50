"""GRPO, RLOO and PPO on the café with the same samples a step, and the models that they start from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from datasets_prep.cafe import prepare_data
from datasets_prep.cafe.pretrain_base import BASE_DIR
from examples.programs import logged
from lightrlhf import grpo, ppo, quickstart, rm, sft

RESPONSES = 64  # a step
COMMON = {
    "accelerator": "cpu",
    "logger": "csv",
    "log_interval": 1,
    "max_new_tokens": 96,
    "mini_batch_size": RESPONSES,
    "micro_batch_size": RESPONSES,
    "rollout_mini_batch_size": RESPONSES,
    "init_kl_coeff": 0.05,
    "missing_eos_penalty": 1,
    "normalize_rewards": True,
    "lr_scheduler_type": "constant_with_warmup",
    "lr_warmup_steps": 5,
}
GROUPED = {"num_generations": 8, "rollout_size": RESPONSES // 8, "kl_placement": "reward"}


class Method(NamedTuple):
    """A program, its flags, and the name of its learning rate."""

    program: ModuleType
    flags: dict[str, Any]
    rate: str = "learning_rate"


METHODS = {
    "GRPO": Method(grpo, GROUPED),
    "RLOO": Method(grpo, GROUPED | {"advantage": "rloo", "loss_type": "reinforce", "aggregation": "sum"}),
    "PPO": Method(ppo, {"rollout_size": RESPONSES, "critic_learning_rate": 1e-3}, "actor_learning_rate"),
}


def prepared(folder: Path, seed: int, smoke: bool) -> tuple[str, str, str]:
    """Data, SFT policy and reward model of a seed: (data dir, experiment dir, experiment dir); trained once."""
    done = folder / "models.json"
    if not done.is_file():
        run, data = partial(logged, folder / "output.txt"), f"{folder}/data/cafe"
        few_rows, few_steps = (quickstart.FEW_ROWS, {"max_steps": 1}) if smoke else ({}, {})
        if not Path(data, "args.json").is_file():
            run(prepare_data, destination_dir=data, tokenizer_name=BASE_DIR, seed=seed, num_proc=1, **few_rows)
        common = {"data_dir": data, "log_dir": folder / "logs", "seed": seed, "accelerator": "cpu"}
        start = run(sft, **common, model_name=BASE_DIR, **quickstart.SFT, **few_steps)
        reward = run(rm, **common, sft_experiment_dir=start, **quickstart.RM, **few_steps)
        done.write_text(json.dumps([data, start, reward]))
    return tuple(json.loads(done.read_text()))
