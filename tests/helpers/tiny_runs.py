"""Runs of every training program as small as they get: a few steps of a model of width 16, in tenths of a second."""

from __future__ import annotations

from pathlib import Path

import torch

from helpers import CPU, save_model
from helpers.corridor import save_corridor_model
from lightrlhf.data.splits import save_split
from lightrlhf.models.tokenizer import store_tokenizer

WIDTH = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SAMPLING = ("ppo", "grpo", "online_dpo", "online_refuel", "iterative_refuel", "reflect_rl")
PROGRAMS = ("sft", "rm", "dpo", "refuel", *SAMPLING)
ITERATED = ("online_dpo", "iterative_refuel")
TRAINED = tuple(program for program in PROGRAMS if program not in ITERATED)  # with one loop of steps
STEPS = 6


class TinyRuns:
    """The models and data of the runs, in one folder; those that an earlier process made there are taken."""

    def __init__(self, folder: Path, cafe_data: Path, talk_data: Path, tokenizer) -> None:
        self.folder, self.cafe, self.talk = folder, cafe_data, talk_data
        self.model, self.corridor, self.pairs = folder / "llama", folder / "corridor", folder / "dialogues" / "pairs"
        if (self.pairs / "tokenizer").is_dir():  # the last that is made
            return
        noise = {"attention_dropout": 0.1}  # so that resuming must bring back the random numbers, too
        save_model("llama", self.model, tokenizer, **WIDTH, **noise)
        tokenizer.save_pretrained(self.model)
        save_corridor_model(self.corridor, **WIDTH)
        for split, number in (("train", 12), ("validation", 4)):
            save_split(self.pairs, "refuel", split, [refuel_row(i) for i in range(number)])
        store_tokenizer(tokenizer, self.pairs)

    def flags(self, program: str, log_dir: Path, *more: object, steps: int = STEPS) -> list[str]:
        """Flags of a run with a checkpoint every other step; `more` come last."""
        rates = ["--learning_rate", "1e-2", "--mini_batch_size", 4, "--micro_batch_size", 2]
        every = ["--max_steps", steps, "--log_interval", 1, "--save_interval", 2, "--logger", "csv", "--keep_last", 3]
        start, data = ["--model_name", self.model], ["--data_dir", self.cafe]
        if program == "ppo":
            rates = ["--actor_learning_rate", "1e-2", "--critic_learning_rate", "1e-2", "--adaptive_kl_coeff", "True"]
            rates += ["--rollout_size", 4, "--mini_batch_size", 4, "--micro_batch_size", 2, "--max_new_tokens", 3]
            rates += ["--reward_function", "helpers.rewards:vowels", "--eval_interval", 0]
        elif program == "grpo":
            rates = ["--learning_rate", "1e-2", "--num_generations", 2, "--rollout_size", 3, "--ppo_epochs", 2]
            rates += ["--mini_batch_size", 4, "--micro_batch_size", 2, "--max_new_tokens", 3, "--resample_rounds", 2]
            rates += ["--init_kl_coeff", "0.1", "--reward_function", "helpers.rewards:whole_vowels"]
            rates += ["--eval_interval", 0]
        elif program == "reflect_rl":
            start, data = ["--model_name", self.corridor], ["--env", "helpers.corridor:Corridor", "--horizon", 4]
            rates = ["--learning_rate", "1e-2", "--rollout_size", 4, "--num_envs", 4, "--num_generations", 2]
            rates += ["--micro_batch_size", 4, "--eval_interval", 0]
        elif program == "refuel":
            data = ["--data_dir", self.pairs]
            rates += ["--eval_interval", 0]
        elif program == "online_refuel":
            data = ["--data_dir", self.talk]
            rates += ["--reward_function", "helpers.rewards:vowels", "--rollout_size", 4, "--max_new_tokens", 3]
            rates += ["--eval_interval", 0, "--eval_dialogues", 0]
        elif program == "iterative_refuel":
            data, every = ["--data_dir", self.talk], ["--save_interval", 1, "--logger", "csv"]
            rates += ["--user_function", "helpers.rewards:echo", "--reward_function", "helpers.rewards:vowels"]
            rates += ["--iterations", 2, "--num_data", 8, "--num_turns", 2, "--max_new_tokens", 4, "--eta", 2]
            rates += ["--eval_dialogues", 2, "--validation_percentage", 0, "--eval_interval", 0]
        elif program == "online_dpo":
            every = ["--save_interval", 1, "--logger", "csv"]
            rates += ["--iterations", 2, "--prompts_per_iteration", 6, "--num_generations", 2, "--max_new_tokens", 3]
            rates += ["--eval_prompts", 2, "--reward_function", "helpers.rewards:vowels"]
        else:
            rates += ["--eval_interval", 0]
        given = [*data, *start, "--log_dir", log_dir, *CPU, *every, "--disable_dropout", "False", *rates, *more]
        return [str(flag) for flag in given if program not in ITERATED or flag not in ("--disable_dropout", "False")]


def refuel_row(number: int) -> dict:
    """A pair of dialogues with a common prefix, drawn from its number."""
    generator = torch.Generator().manual_seed(number)
    prefix = torch.randint(2, 61, (3,), generator=generator)
    row: dict = {}
    for side in ("chosen", "rejected"):
        ids = torch.cat([prefix, torch.randint(2, 61, (2 + number % 4,), generator=generator)])
        row |= {f"{side}_input_ids": ids, f"{side}_action_mask": torch.arange(1, len(ids)) >= 3}
        row |= {f"{side}_reward": float(torch.rand((), generator=generator))}
    return row


def experiment_of(log_dir: Path) -> Path:
    """The one experiment dir below a folder, without those of its iterations."""
    return min((path.parent for path in log_dir.rglob("args.json")), key=lambda path: len(path.parts))
