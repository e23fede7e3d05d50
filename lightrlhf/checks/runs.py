"""Our own runs: steps of `rollouts.jsonl`, and what `metrics.jsonl` and the checkpoints must agree on.

Left out: PPO's advantages, which are whitened over rows that are not logged, and runs with tools or several turns whose
rows have no end token.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from lightrlhf.checks.logprobs import LARGEST_LOGIT, ROUNDED
from lightrlhf.checks.step import UNITS, Missing, Step, from_rows
from lightrlhf.checks.verdicts import RIGHT, WRONG, Verdict
from lightrlhf.maths.groups import ADVANTAGES
from lightrlhf.storage.checkpoint import checkpoints
from lightrlhf.storage.run_dir import read_args, read_logged, read_metrics

DIGITS = 5  # of the numbers in rollouts.jsonl
CHANGED = ("normalize_advantages", "overlong_buffer", "missing_eos_penalty", "overlong_filter", "normalize_each_reward")
OF_AGENTS = ("env", "tools", "mcp", "agent")
OF_ROLLOUTS = ("batch_std", "none")  # advantages that need rows which are not logged


def read_run(directory: str) -> list[Step]:
    """The logged samples of each step of a run; none where it has no rollouts."""
    args, rows = read_args(directory), read_logged(Path(directory) / "rollouts.jsonl")
    ends = _ends(Path(directory))
    return [_step(list(part), args, ends, step) for step, part in groupby(rows, key=lambda row: row["step"])]


def _step(rows: list[dict[str, Any]], args: Mapping[str, Any], ends: list[int], number: int) -> Step:
    """One step: ids, masks, scores and groups, and advantages where they are made of the logged rows alone."""
    size = args.get("num_generations") or 1
    members = Counter(row["group"] for row in rows)
    made, kept = [], [row for row in rows if members[row["group"]] == size]
    is_of_groups = args.get("program") == "grpo" and args.get("advantage") in {*ADVANTAGES} - {*OF_ROLLOUTS}
    is_plain = is_of_groups and not any(args.get(name) for name in CHANGED)
    config = {"method": args.get("program"), "digits": DIGITS, "temperature": args.get("temperature")}
    sizes = [0.0]
    for row in kept or rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        one = {"input_ids": prompt + response, "loss_mask": [0] * len(prompt) + row["mask"], "prompt_len": len(prompt)}
        if row["truncated"] is not None and not args.get("stop_strings"):
            one["truncated"] = float(row["truncated"])
        if is_plain and kept:
            first = next((value for value, is_on in zip(row["advantages"], row["mask"]) if is_on), 0.0)
            one |= {"rewards": row["score"], "group": row["group"], "advantages": first}
            one["row_kl"] = sum(value or 0.0 for value in row["log_ratio"] or [])
            sizes.append(sum(abs(value or 0.0) for value in row["log_ratio"] or []) + abs(first))
        made.append(one)
    if is_plain and kept:
        coeff = args["init_kl_coeff"] if args["kl_placement"] == "reward" else 0.0
        _without_kl(made, coeff, size / (size - 1) if args["advantage"] == "rloo" and size > 1 else 1.0)
        config["advantage_error"] = (2.0 + coeff) * 10.0 ** (1 - DIGITS) * max(sizes) if coeff else 0.0
    config["mask_truncated"] = bool(args.get("overlong_filter"))
    ends = [] if any(args.get(name) for name in OF_AGENTS) else ends  # templates end turns that were cut
    config |= {"eos_token_id": ends or None} | ({"advantage": args["advantage"]} if is_plain and kept else {})
    return from_rows(made, config, f"step {number}")


def _without_kl(rows: list[dict[str, Any]], coeff: float, scale: float) -> None:
    """Add to each advantage what the KL in the reward took from it: its coefficient times the row's less the mean."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        if row["rewards"] is not None:
            groups.setdefault(row["group"], []).append(row["row_kl"])
    for row in rows:
        kl, others = row.pop("row_kl"), groups.get(row["group"], [])
        if row["rewards"] is not None and len(others) > 1:
            row["advantages"] += coeff * scale * (kl - sum(others) / len(others))


def _ends(directory: Path) -> list[int]:
    """End tokens of the policy, by the generation config of its last checkpoint."""
    found = checkpoints(directory)
    file = found[-1] / "generation_config.json" if found else directory
    if not file.is_file():
        return []
    given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return given if isinstance(given, list) else [] if given is None else [given]


# ------------------------------------------------------------------------------------------- metrics and checkpoints
def check_run_files(directory: str) -> Iterator[Verdict]:
    """Verdicts beside the steps: on the first update, and on the weights of checkpoints."""
    for name, check in (("start", check_start), ("weights", check_weights)):
        try:
            yield check(directory)
        except Missing as missing:
            yield Verdict(name, "cannot tell", evidence=f"needs {missing}")


def check_start(directory: str) -> Verdict:
    """The first row of metrics: DPO begins at log 2, and one update a rollout has a ratio of 1."""
    args, first = read_args(directory), read_metrics(directory)[0]
    error = _unit(args) * LARGEST_LOGIT * ROUNDED
    if first["step"] != 1:
        raise Missing("a row of metrics of step 1 (log_interval 1)")
    if not args.get("disable_dropout", True):
        raise Missing("disable_dropout: with dropout the first pass differs from the stored one")
    if args.get("program") == "dpo" and args.get("loss_type") == "sigmoid" and "train/preference_loss" in first:
        found, gap = first["train/preference_loss"], error * args["beta"] * 1e3  # tokens of two responses, at most
        evidence = f"preference loss {found:.6g} at step 1; log 2 = {math.log(2):.6g} at the reference"
        if abs(found - math.log(2)) <= gap:
            return Verdict("start", RIGHT, evidence=evidence)
        causes = ("the reference is another model", "an adapter is missing in the reference", "dropout")
        return Verdict("start", WRONG, "reference is not the start", evidence, causes, "--sft_experiment_dir")
    if first.get("policy/updates", _updates(args)) == 1 and not args.get("rollout_server") and "policy/ratio" in first:
        found, evidence = first["policy/ratio"], f"mean ratio {first['policy/ratio']:.6g} in the only update of step 1"
        if abs(found - 1) <= error:
            return Verdict("start", RIGHT, evidence=evidence)
        causes = ("dropout in one of the passes", "another temperature", "stale weights of the sampler")
        return Verdict("start", WRONG, "ratio not 1 at the first pass", evidence, causes, "--disable_dropout")
    raise Missing("dpo with the loss sigmoid, or one update for each rollout")


def _updates(args: Mapping[str, Any]) -> int:
    """Updates that a rollout of `grpo` gets; 0 for other programs."""
    if args.get("program") != "grpo":
        return 0
    return int(math.ceil(args["rollout_size"] * args["num_generations"] / args["mini_batch_size"]) * args["ppo_epochs"])


def _unit(args: Mapping[str, Any]) -> float:
    """Rounding of the passes, by the run's precision."""
    half = "bfloat16" if "bf16" in str(args.get("precision")) else "float16"
    return UNITS["float32" if str(args.get("precision", "32")).startswith("32") else half]


def check_weights(directory: str) -> Verdict:
    """The weights of the first and the last checkpoint: finite, and not the same."""
    from safetensors.torch import load_file

    folders = checkpoints(Path(directory))
    if len(folders) < 2:
        raise Missing("two checkpoints")
    count = 0
    same: list[str] = []
    changed: list[str] = []
    for file in sorted(folders[-1].glob("*.safetensors")):
        last = load_file(file)
        before = load_file(folders[0] / file.name) if (folders[0] / file.name).is_file() else {}
        for name, weight in last.items():
            if not bool(weight.isfinite().all()):
                causes = ("overflow of float16", "a learning rate that is too high")
                return Verdict("weights", WRONG, "weights are not finite", f"{folders[-1].name}: {name}", causes)
            if name in before:
                count += 1
                (same if torch.equal(before[name], weight) else changed).append(name)
    if not count:
        raise Missing("weights as safetensors in both checkpoints")
    evidence = f"{len(changed)} of {count} tensors differ between {folders[0].name} and {folders[-1].name}"
    if changed and read_args(directory).get("finetune_mode") == "last_layer":
        top = max(_layer(name) for name in [*same, *changed])
        if beyond := [name for name in changed if 0 <= _layer(name) < top]:
            evidence = f"{beyond[0]}; {evidence}"
            return Verdict("weights", WRONG, "frozen weights changed", evidence, (), "--finetune_mode")
    if changed or not _learns(directory):
        return Verdict("weights", RIGHT, evidence=evidence)
    why = ("all parameters frozen", "the optimiser has others than the model", "gradients of 0")
    return Verdict("weights", WRONG, "weights did not change", evidence, why, "--finetune_mode")


def _layer(name: str) -> int:
    """The number of the layer in a weight's name; -1 for others."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def _learns(directory: str) -> bool:
    """Whether a step had a gradient and a learning rate above 0."""
    rows = read_metrics(directory)
    return any(row.get("train/lr") and (row.get("train/grad_norm") or row.get("policy/grad_norm")) for row in rows)
