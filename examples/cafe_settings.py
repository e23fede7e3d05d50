"""Flags of the café's training stages, shared by the quickstart and the experiments that start from its models."""

from __future__ import annotations

from typing import Any

SFT: dict[str, Any] = {
    "epochs": 1,
    "mini_batch_size": 32,
    "micro_batch_size": 32,
    "learning_rate": 5e-4,
    "lr_warmup_steps": 5,
    "use_targets": True,
    "eval_interval": 30,
    "log_interval": 2,
}
RM: dict[str, Any] = {
    "epochs": 1,
    "mini_batch_size": 32,
    "micro_batch_size": 32,
    "learning_rate": 1e-3,
    "lr_warmup_steps": 20,
    "eval_interval": 60,
    "eval_iters": 12,
    "log_interval": 5,
    "loss_type": "last_token",
}
PPO: dict[str, Any] = {
    "epochs": 1,
    "rollout_size": 128,
    "rollout_mini_batch_size": 128,
    "mini_batch_size": 64,
    "micro_batch_size": 64,
    "ppo_epochs": 1,
    "max_new_tokens": 96,
    "actor_learning_rate": 3e-4,
    "critic_learning_rate": 1e-3,
    "lr_warmup_steps": 5,
    "lr_scheduler_type": "cosine",
    "init_kl_coeff": 0.05,
    "missing_eos_penalty": 1,
    "eval_interval": 10,
    "log_interval": 1,
}
FEW_ROWS: dict[str, Any] = {
    "num_finetune": 64,
    "num_preference": 64,
    "num_prompts": 64,
    "num_held_out": 32,
    "num_held_out_pairs": 32,
}
