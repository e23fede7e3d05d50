"""Answers that a verifier of reasoning-gym scores: sampling them, and RAFT on those that are right."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightrlhf import generate, sft
from lightrlhf.cli.calls import call
from lightrlhf.data.batch import epoch_order
from lightrlhf.data.splits import IGNORE_INDEX, Row, load_split, save_split
from lightrlhf.data.tokens import decode
from lightrlhf.models.tokenizer import load_tokenizer, store_tokenizer
from lightrlhf.rewards.verifiers import reasoning_gym
from lightrlhf.storage.jsonl import read_jsonl, write_jsonl
from lightrlhf.storage.writing import write_text

SLOTS = 256  # of the generation engine


class Shape(NamedTuple):
    """How many prompts a run sees, in what portions, and how many samples of which length it draws of each."""

    prompts: int
    iterations: int  # of RAFT
    k: int
    longest: int


def solved(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """The reward, and whether a held-out item counts as right: 1 where the task's scorer pays in full, else 0."""
    return [float(score == 1) for score in reasoning_gym(prompts, completions, **columns)]


def curve_of(run: str, metric: str) -> list[Row]:
    """(step, value) of a metric of a run."""
    rows = read_jsonl(Path(run) / "metrics.jsonl")
    return [{"step": row["step"], "value": row[metric]} for row in rows if metric in row]


def sampled(policy: str, output: Path, shape: Shape, **flags: Any) -> list[Row]:
    """Responses to prompts, a row of each prompt."""
    common = {"max_new_tokens": shape.longest, "rollout_mini_batch_size": SLOTS, "accelerator": "cpu"}
    call(generate, model_name=policy, output_file=output, **common, **flags)
    return read_jsonl(output)


def scores_of(row: Row) -> list[float]:
    """`solved` for each response of a row."""
    count = len(row["responses"])
    columns = {name: [row[name]] * count for name in ("task", "entry", "answer")}
    return solved([row["prompt"]] * count, row["responses"], **columns)


def run_raft(work: Path, base: str, data: str, seed: int, flags: Row, shape: Shape) -> tuple[str, list[Row]]:
    """RAFT with verified answers (Dong et al. 2023, 2304.06767): sample, keep the first right one, fine-tune, repeat.

    Returns the last policy, and the share of samples that were right in each iteration. What `work` already has of a
    killed run is kept: whole iterations, and the samples of a begun one.
    """
    tokenizer = load_tokenizer(data, None)
    rows = load_split(data, "prompts", "train")
    order = [index for epoch in range(-(-shape.prompts // len(rows))) for index in epoch_order(len(rows), seed, epoch)]
    size = shape.prompts // shape.iterations
    policy, curve = base, []
    for number in range(1 if flags.get("max_steps") == 1 else shape.iterations):
        part = [rows[index] for index in order[number * size : (number + 1) * size]]
        folder = work / f"part-{number}"
        done = folder / "done.json"
        if done.is_file():
            policy, found = json.loads(done.read_text(encoding="utf-8"))
            curve.append(found)
            continue
        shutil.rmtree(folder / "logs", ignore_errors=True)  # of a run that was killed
        started = time.perf_counter()
        ids = [torch.as_tensor(row["input_ids"]).tolist() for row in part]
        texts = [{"prompt": decode(tokenizer, one), "prompt_ids": one} for one in ids]
        write_jsonl(folder / "prompts.jsonl", [{**row["columns"], **text} for row, text in zip(part, texts)])
        source = {"prompts_file": folder / "prompts.jsonl", "num_prompts": size, "seed": seed * 1000 + number}
        answers = sampled(policy, folder / "samples.jsonl", shape, num_generations=shape.k, **source)
        kept, right = [], 0.0
        for row in answers:
            scores = scores_of(row)
            right += sum(scores)
            if 1 in scores:
                prompt, response = row["prompt_ids"], row["response_ids"][scores.index(1)]
                targets = torch.tensor([IGNORE_INDEX] * len(prompt) + response)
                kept.append({"prompt_len": len(prompt), "input_ids": [*prompt, *response], "targets": targets})
        if kept:
            save_split(folder / "data", "finetune", "train", kept)
            store_tokenizer(tokenizer, folder / "data")
            where = {"data_dir": folder / "data", "log_dir": folder / "logs", "seed": seed * 1000 + number}
            policy = call(sft, model_name=policy, **where, **flags)
        spent = round(time.perf_counter() - started, 1)
        found = {"step": number, "value": right / (shape.k * len(answers)), "kept": len(kept), "seconds": spent}
        curve.append(found)
        write_text(done, json.dumps([policy, found]))
    return policy, curve
