"""Scores of preference pairs: a policy's likelihoods and implicit reward, and a reward model's scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightrlhf.data.batch import micro_batches, preference_batch
from lightrlhf.data.splits import Row
from lightrlhf.maths.ops import preference_loss, win_rate
from lightrlhf.models.forward import device_of
from lightrlhf.models.roles import Policy, ScalarModel, last_token, policy_inputs


@torch.no_grad()
def implicit_rewards(
    policy: Policy,
    reference: Policy,
    rows: list[Row],
    divergence: Callable[[Tensor], Tensor],
    beta: float,
    pad_id: int,
    batch_size: int,
) -> dict[str, Any]:
    """Accuracy (ties half) and margin of a DPO policy's implicit reward on pairs, beta f'(pi / pi_ref)."""
    scores: list[tuple[float, float]] = []
    prompts: list[tuple[int, ...]] = []
    margin = 0.0
    for micro in micro_batches(rows, batch_size):
        prompts += map(prompt_of, micro)
        inputs = policy_inputs(preference_batch(micro, pad_id).to(device_of(policy)))
        rewards = beta * divergence((policy(**inputs).logprobs - reference(**inputs).logprobs).sum(1))  # (2B,)
        chosen, rejected = rewards.chunk(2)
        scores += zip(chosen.tolist(), rejected.tolist())
        margin += float((chosen - rejected).sum())
    accuracy, interval = win_rate(scores, prompts)
    return {
        "implicit_accuracy": accuracy,
        "implicit_accuracy_interval": interval,
        "implicit_margin": margin / len(rows),
    }


@torch.no_grad()
def rank_pairs(model: ScalarModel, pairs: list[Row], pad_id: int, batch_size: int) -> tuple[dict[str, Any], list[Row]]:
    """Accuracy (ties half), loss and margin of a reward model on pairs, by group too, and one record per pair."""
    records: list[dict[str, Any]] = []
    prompts: list[tuple[int, ...]] = []
    for micro in micro_batches(pairs, batch_size):
        prompts += map(prompt_of, micro)
        chosen, rejected = pair_scores(model, micro, pad_id)
        losses = preference_loss(chosen, rejected).tolist()
        for row, good, bad, loss in zip(micro, chosen.tolist(), rejected.tolist(), losses):
            right = None if math.isnan(good - bad) else 0.5 if good == bad else float(good > bad)
            records.append({**row.get("columns", {}), "chosen": good, "rejected": bad, "loss": loss, "right": right})
    accuracy, interval = win_rate(((r["chosen"], r["rejected"]) for r in records), prompts)
    count = len(records)
    results = {
        "accuracy": accuracy,
        "accuracy_interval": interval,
        "loss": sum(r["loss"] for r in records) / count,
        "margin": sum(r["chosen"] - r["rejected"] for r in records) / count,
    }
    groups = sorted({r["group"] for r in records if "group" in r})
    members = {
        group: [r["right"] for r in records if r.get("group") == group and r["right"] is not None] for group in groups
    }
    if groups:
        results["by_group"] = {group: sum(values) / len(values) for group, values in members.items() if values}
    return results, records


@torch.no_grad()
def likelihoods(policy: Policy, rows: list[Row], pad_id: int, batch_size: int) -> list[tuple[float, float]]:
    """Log-likelihoods of the chosen and the rejected response of each pair, in nats, summed over their tokens."""
    values: list[tuple[float, float]] = []
    for micro in micro_batches(rows, batch_size):
        batch = preference_batch(micro, pad_id).to(device_of(policy))
        chosen, rejected = policy(**policy_inputs(batch)).logprobs.sum(1).chunk(2)  # (B,) each
        values += zip(chosen.tolist(), rejected.tolist())
    return values


@torch.no_grad()
def pair_scores(model: ScalarModel, rows: list[Row], pad_id: int) -> tuple[Tensor, Tensor]:
    """Scores (B,) of a reward model for the chosen and the rejected responses of B pairs, at the last token."""
    batch = preference_batch(rows, pad_id).to(device_of(model))
    chosen, rejected = last_token(model(batch.input_ids, batch.attention_mask), batch.attention_mask).chunk(2)
    return chosen, rejected


def prompt_of(pair: Row) -> tuple[int, ...]:
    """The prompt of a pair of `preference_*.pt`; pairs of one prompt depend on each other."""
    return tuple(torch.as_tensor(pair["chosen_input_ids"])[: pair["prompt_len"]].tolist())
