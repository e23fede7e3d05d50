"""Rollouts: sampled responses with log-probabilities under the policy and the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import GenerationArgs
from lightrlhf.data.batch import Batch, Rollout, inference_batches, response_batch
from lightrlhf.data.splits import Row
from lightrlhf.generation.engine import generate
from lightrlhf.models.quantisation import is_quantised
from lightrlhf.models.roles import policy_inputs
from lightrlhf.models.sharding import unsharded


@torch.no_grad()
def score_logprobs(module: nn.Module, batch: Batch, temperature: float, batch_size: int) -> Tensor:
    """Log-probabilities of a batch's actions, dropout off, in passes of at most `batch_size` rows: -> (B, T-1)."""
    was_training = module.training
    module.eval()
    out = torch.zeros(batch.action_mask.shape, device=batch.input_ids.device)
    for rows in inference_batches(batch.attention_mask.sum(1), batch_size):
        part = batch.select(rows)
        out[rows, : part.action_mask.shape[1]] = module(**policy_inputs(part), temperature=temperature).logprobs
    module.train(was_training)
    return out


def generate_rollout(
    policy: nn.Module,
    reference: nn.Module,
    rows: Sequence[Row],
    args: GenerationArgs,
    tokenizer: Any,
    uniforms: Tensor,
    num_slots: int,
) -> Rollout:
    """Sample a response to each prompt row and score it under the policy and the reference, at the same temperature.

    The policy's log-probabilities are those it sampled with; under autocast and with quantised weights, where a step
    and a whole pass round differently, a pass of its own finds them, or ratios would start off 1.
    """
    prompts = [[int(i) for i in row["input_ids"]] for row in rows]
    module = getattr(policy, "module", policy)
    with unsharded(module):
        sampled = generate(module, prompts, args, [tokenizer.eos_token_id], uniforms, num_slots, tokenizer)
        batch = response_batch(prompts, sampled.responses, tokenizer.pad_token_id).to(next(policy.parameters()).device)
        if torch.is_autocast_enabled(batch.input_ids.device.type) or is_quantised(module.model):
            logprobs = score_logprobs(policy, batch, args.temperature, num_slots)
        else:
            sampled_with = torch.tensor([value for row in sampled.logprobs for value in row])  # (N,) of all actions
            logprobs = torch.zeros(batch.action_mask.shape).to(batch.input_ids.device)  # (B, T-1)
            logprobs[batch.action_mask] = sampled_with.to(logprobs)
    return Rollout(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        action_mask=batch.action_mask,
        prompt_len=torch.tensor([len(prompt) for prompt in prompts], device=batch.input_ids.device),
        truncated=torch.tensor(sampled.truncated, device=batch.input_ids.device),
        logprobs=logprobs,
        ref_logprobs=score_logprobs(reference, batch, args.temperature, num_slots),
        columns=[row.get("columns", {}) for row in rows],
        removed_mass=sampled.removed_mass,
    )
