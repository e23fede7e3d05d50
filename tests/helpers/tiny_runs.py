"""Runs of every training program as small as they get: a few steps of a model of width 16, in tenths of a second."""

import shutil
from pathlib import Path

import torch

from helpers import CPU, save_model
from helpers.corridor import save_corridor_model
from helpers.programs import fields_of, small_flags
from lightrlhf.data.splits import load_split, save_split
from lightrlhf.models.tokenizer import store_tokenizer
from lightrlhf.programs import TRAINING

WIDTH = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PROGRAMS = tuple(TRAINING)
SAMPLING = tuple(name for name, one in TRAINING.items() if one.samples)
ITERATED = tuple(name for name in PROGRAMS if "iterations" in fields_of(f"lightrlhf.{name}"))
TRAINED = tuple(name for name in PROGRAMS if name not in ITERATED)  # with one loop of steps
STEPS = 6
RUN = {"max_steps": STEPS, "log_interval": 1, "save_interval": 2, "logger": "csv", "keep_last": 3}
RUN |= {"disable_dropout": False, "eval_interval": 0}
RATES = dict.fromkeys(("learning_rate", "actor_learning_rate", "critic_learning_rate"), "1e-2")
SIZES = {"mini_batch_size": 4, "micro_batch_size": 2, "rollout_size": 4, "num_generations": 2, "max_new_tokens": 3}
SIZES |= {"reward_function": "helpers.rewards:vowels", "eval_dialogues": 0}
ITERATIONS = {"iterations": 2, "save_interval": 1, "logger": "csv", "eval_prompts": 2}
OWN: dict[str, dict[str, object]] = {  # what else the runs of a program need to go through its branches
    "ppo": {"adaptive_kl_coeff": True},
    "grpo": {
        "rollout_size": 3,
        "ppo_epochs": 2,
        "resample_rounds": 2,
        "init_kl_coeff": 0.1,
        "reward_function": "helpers.rewards:whole_vowels",
    },
    "online_dpo": {"prompts_per_iteration": 6},
    "iterative_refuel": {
        "user_function": "helpers.rewards:echo",
        "num_data": 8,
        "num_turns": 2,
        "max_new_tokens": 4,
        "eta": 2,
        "eval_dialogues": 2,
        "validation_percentage": 0,
        "eval_interval": 0,
    },
    "distill": {"objective": "sequence"},
    "reflect_rl": {"horizon": 4, "num_envs": 4, "micro_batch_size": 4, "max_new_tokens": 1},
}


class TinyRuns:
    """The models and data of the runs, in one folder; those that an earlier process made there are taken."""

    def __init__(self, folder: Path, cafe_data: Path, talk_data: Path, tokenizer) -> None:
        self.folder, self.cafe, self.talk = folder, cafe_data, talk_data
        self.model, self.corridor, self.pairs = folder / "llama", folder / "corridor", folder / "dialogues" / "pairs"
        self.unpaired, self.teacher = folder / "unpaired", folder / "teacher"
        if (self.pairs / "tokenizer").is_dir():  # the last that is made
            return
        noise = {"attention_dropout": 0.1}  # so that resuming must bring back the random numbers, too
        save_model("llama", self.model, tokenizer, **WIDTH, **noise)
        save_model("llama", self.teacher, tokenizer, **WIDTH | {"hidden_size": 32})
        for model in (self.model, self.teacher):
            tokenizer.save_pretrained(model)
        save_corridor_model(self.corridor, **WIDTH)
        take_pairs_apart(self.cafe, self.unpaired)
        for split, number in (("train", 12), ("validation", 4)):
            save_split(self.pairs, "refuel", split, [refuel_row(i) for i in range(number)])
        store_tokenizer(tokenizer, self.pairs)

    def flags(self, program: str, log_dir: Path, *more: object, steps: int = STEPS) -> list[str]:
        """Flags of a run with a checkpoint every other step, or of two iterations; `more` come last."""
        data, model = TRAINING[program].data, self.model
        folders = {"refuel": self.pairs, "dialogue": self.talk, "unpaired": self.unpaired}
        where: dict[str, object] = {"data_dir": folders.get(data, self.cafe)}
        if data == "environment":
            where, model = {"env": "helpers.corridor:Corridor"}, self.corridor
        if program == "distill":
            where["teacher"] = self.teacher
        every = ITERATIONS if program in ITERATED else RUN | {"max_steps": steps}
        values = {**where, "model_name": model, "log_dir": log_dir, **RATES, **SIZES, **every, **OWN.get(program, {})}
        return [*small_flags(f"lightrlhf.{program}", values), *CPU, *map(str, more)]


def take_pairs_apart(cafe: Path, folder: Path) -> Path:
    """A copy of data with its pairs as labelled responses; of every third pair the chosen one alone."""
    shutil.copytree(cafe, folder)
    for split in ("train", "validation", "test"):
        rows = []
        for i, pair in enumerate(load_split(folder, "preference", split)):
            for side in ("chosen", "rejected") if i % 3 else ("chosen",):
                row = {"prompt_len": pair["prompt_len"], "input_ids": pair[f"{side}_input_ids"]}
                rows.append({**row, "label": side == "chosen", "columns": {"number": i}})
        save_split(folder, "unpaired", split, rows)
        (folder / f"preference_{split}.pt").unlink()
    return folder


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
