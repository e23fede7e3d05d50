"""Scores of preference pairs: a policy's likelihoods and implicit reward, and a reward model's scores."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightrlhf.data.batch import micro_batch_indices, micro_batches, preference_batch
from lightrlhf.data.splits import Row, hash64
from lightrlhf.evaluation.responses import Mean
from lightrlhf.maths.ops import preference_loss, win_rate
from lightrlhf.models.forward import device_of
from lightrlhf.models.roles import Policy, ScalarModel, last_token, policy_inputs
from lightrlhf.storage.jsonl import Records


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
    scores, prompts = (array("d"), array("d")), array("Q")
    margin = 0.0
    for micro in micro_batches(rows, batch_size):
        prompts.extend(map(prompt_of, micro))
        inputs = policy_inputs(preference_batch(micro, pad_id).to(device_of(policy)))
        rewards = beta * divergence((policy(**inputs).logprobs - reference(**inputs).logprobs).sum(1))  # (2B,)
        chosen, rejected = rewards.chunk(2)
        for side, values in zip(scores, (chosen, rejected)):
            side.extend(values.tolist())
        margin += float((chosen - rejected).sum())
    accuracy, interval = win_rate(zip(*scores), prompts)
    return {
        "implicit_accuracy": accuracy,
        "implicit_accuracy_interval": interval,
        "implicit_margin": margin / len(rows),
    }


@torch.no_grad()
def rank_pairs(
    model: ScalarModel, pairs: Sequence[Row], pad_id: int, batch_size: int, records: Records
) -> dict[str, Any]:
    """Accuracy (ties half), loss and margin of a reward model on pairs, by group too; adds one record per pair."""
    scores, prompts = (array("d"), array("d")), array("Q")
    total = margin = 0.0
    groups: dict[Any, Mean] = {}  # shares of right pairs
    for micro in micro_batches(pairs, batch_size):
        prompts.extend(map(prompt_of, micro))
        chosen, rejected = pair_scores(model, micro, pad_id)
        losses = preference_loss(chosen, rejected).tolist()
        for row, good, bad, loss in zip(micro, chosen.tolist(), rejected.tolist(), losses):
            right = None if math.isnan(good - bad) else 0.5 if good == bad else float(good > bad)
            record = {**row.get("columns", {}), "chosen": good, "rejected": bad, "loss": loss, "right": right}
            records.extend([record])
            scores[0].append(good)
            scores[1].append(bad)
            total, margin = total + loss, margin + (good - bad)
            if "group" in record:
                groups.setdefault(record["group"], Mean()).add(right)
    accuracy, interval = win_rate(zip(*scores), prompts)
    count = len(prompts)
    results = {"accuracy": accuracy, "accuracy_interval": interval, "loss": total / count, "margin": margin / count}
    if groups:
        known = {name: mean for name, mean in sorted(groups.items()) if mean.count}
        results["by_group"] = {name: mean.total / mean.count for name, mean in known.items()}
    return results


@torch.no_grad()
def score_pairs(model: ScalarModel, pairs: Sequence[Row], pad_id: int, batch_size: int) -> Tensor:
    """Scores (2, N) of a reward model for the chosen and the rejected responses of pairs, in their order."""
    scores = torch.zeros(2, len(pairs))
    for index in micro_batch_indices(pairs, batch_size):
        scores[:, index] = torch.stack(pair_scores(model, [pairs[i] for i in index], pad_id)).float().cpu()
    return scores


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


def prompt_of(pair: Row) -> int:
    """A hash of the prompt of a pair of `preference_*.pt`; pairs of one prompt depend on each other."""
    return hash64(torch.as_tensor(pair["chosen_input_ids"])[: pair["prompt_len"]].int().numpy().tobytes())
