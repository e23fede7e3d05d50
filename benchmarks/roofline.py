"""The machine's limits and the distance of a PPO iteration's phases from them: `python -m benchmarks.roofline`.

Ceilings are measured: operations per second by matrix products, bytes per second by reading and copying a large block.
The floor of a phase is its counted work over these ceilings; the formulas are in `training/roofline.py`. The times are
those of `lightrlhf.ppo`, run with `--profile` on random weights.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.inputs import SIZES, DataSize, write_data, write_models
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import Args, at_least
from lightrlhf.cli.parser import parse
from lightrlhf.data.splits import load_split
from lightrlhf.training.roofline import (
    Ceilings,
    Shape,
    Work,
    forward,
    measure_ceilings,
    ppo_floors,
    shared_lengths,
    update_work,
)
from lightrlhf.training.roofline import generate as generate_work


class Limits:
    """Floors of the benchmark's cases on this machine."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device(device), dtype

    @cached_property
    def ceilings(self) -> Ceilings:
        return measure_ceilings(self.device, self.dtype)

    def floor(self, facts: dict[str, Any], ours: dict[str, Any]) -> float:
        """Minimum seconds of a repetition of a case."""
        data = Path(facts["data"])
        if facts["kind"] == "rollout":
            prompts = [length for length in prompt_lengths(data) for _ in range(facts["samples"])]
            mean = ours["units"] / len(prompts)
            shape = shape_of(facts["model"])
            work = generate_work(shape, prompts, [mean] * len(prompts), facts["slots"], facts["bytes_per_number"])
            return self.ceilings.seconds(work)
        if facts["kind"] == "ppo":
            models, prompts = Path(facts["models"]), prompt_lengths(data)
            floors = ppo_floors(
                shape_of(models / "policy"),
                shape_of(models / "reward", scalar=True),
                prompts,
                [facts["mean_length"]] * len(prompts),
                self.ceilings,
                slots=facts["slots"],
                bytes_per_number=facts["bytes_per_number"],
                optimizer_steps=facts["optimizer_steps"],
            )
            return sum(floors.values())
        if facts["kind"] == "grpo":
            return grpo_floor(shape_of(facts["model"]), prompt_lengths(data), facts, self.ceilings)
        scalar = facts["kind"] == "rm"
        lengths, responses, shared = text_lengths(data, "finetune" if facts["kind"] == "sft" else "preference")
        num_logits = sum(responses) if facts["kind"] == "dpo" else sum(lengths)
        shape = shape_of(facts["model"], scalar)
        return self.ceilings.seconds(*update_work(shape, lengths, num_logits, shared, optimizer_steps=facts["steps"]))


def grpo_floor(shape: Shape, prompts: list[int], facts: dict[str, Any], ceilings: Ceilings) -> float:
    """Least seconds of sampling K responses to each prompt and of one update on them; a prompt is computed once."""
    samples, mean = facts["samples"], facts["mean_length"]
    rows, shared = prompts * samples, prompts * (samples - 1)
    sampling = generate_work(shape, rows, [mean] * len(rows), len(rows), facts["bytes_per_number"])
    sampling = Work(sampling.flops - forward(shape, shared, 0).flops, sampling.bytes)
    texts = [prompt + mean for prompt in rows]
    return ceilings.seconds(sampling, *update_work(shape, texts, mean * len(rows), shared))


def shape_of(folder: str | Path, scalar: bool = False) -> Shape:
    """The shape of a stored model, without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(folder)
    config.num_labels = 1
    with torch.device("meta"):
        return Shape.of((AutoModelForSequenceClassification if scalar else AutoModelForCausalLM).from_config(config))


def prompt_lengths(data: Path) -> list[int]:
    return [row["prompt_len"] for row in load_split(data, "prompts", "train")]


def text_lengths(data: Path, stage: str) -> tuple[list[int], list[int], list[int]]:
    """Tokens of each text (both sides of a pair), of its response, and of the common prefixes of pairs."""
    rows = load_split(data, stage, "train")
    keys = ("input_ids",) if stage == "finetune" else ("chosen_input_ids", "rejected_input_ids")
    lengths = [len(row[key]) for row in rows for key in keys]
    return lengths, [len(row[key]) - row["prompt_len"] for row in rows for key in keys], shared_lengths(rows)


@dataclass(frozen=True, kw_only=True)
class RooflineArgs(Args):
    """Compare the phases of a PPO iteration with the machine's limits."""

    size: Literal["tiny", "4M", "30M", "150M", "1B"] = "4M"
    """Size of actor, critic, reference and reward model."""
    accelerator: Literal["cpu", "cuda"] = "cpu"
    """Device to measure."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    """Precision of the passes."""
    rollout_size: int = at_least(1, 64)
    """Responses of an iteration."""
    max_new_tokens: int = at_least(1, 64)
    """Longest response; the mean is a fifth of it."""
    steps: int = at_least(1, 4)
    """Iterations."""
    threads: int | None = at_least(1, None)
    """Threads; one per core by default."""


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the program."""
    args = parse(RooflineArgs, argv)
    torch.set_num_threads(args.threads or os.cpu_count() or 1)
    from lightrlhf.ppo import main as ppo

    rows = args.rollout_size
    with tempfile.TemporaryDirectory() as work:
        data, models = Path(work, "data", "random"), Path(work, "models")
        write_data(data, DataSize(4, 4, rows), SIZES[args.size].vocab_size)
        write_models(models, SIZES[args.size], max(args.max_new_tokens / 5, 2))
        flags = {
            "data_dir": data,
            "log_dir": Path(work, "logs"),
            "sft_experiment_dir": models / "policy",
            "rm_experiment_dir": models / "reward",
            "rollout_size": rows,
            "rollout_mini_batch_size": min(rows, 64),
            "mini_batch_size": rows,
            "micro_batch_size": rows,
            "max_new_tokens": args.max_new_tokens,
            "actor_learning_rate": 1e-7,
            "critic_learning_rate": 1e-7,
            "epochs": args.steps,
            "log_interval": 1,
            "eval_interval": 0,
            "accelerator": args.accelerator,
            "precision": args.precision,
            "profile": True,
        }
        run = Path(ppo([word for flag, value in flags.items() for word in (f"--{flag}", str(value))]))
        print((run / "profile.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
