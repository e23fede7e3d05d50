"""Rollouts of given prompts and responses."""

import torch

from lightrlhf.data.batch import Rollout, response_batch
from lightrlhf.data.scores import Scores
from lightrlhf.maths.groups import group_advantages, group_moments, standardise

EOS = 1


def rollout_of(prompts, responses, pad_id=EOS, truncated=None, columns=None, tokenizer=None) -> Rollout:
    batch = response_batch(prompts, responses, pad_id)
    noise = torch.randn(2, *batch.action_mask.shape)
    return Rollout(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        action_mask=batch.action_mask,
        row=torch.arange(len(prompts)),
        group=torch.arange(len(prompts)),
        prompt_len=torch.tensor([len(prompt) for prompt in prompts]),
        truncated=torch.tensor(truncated or [False] * len(prompts)),
        logprobs=noise[0] * batch.action_mask,
        ref_logprobs=noise[1] * batch.action_mask,
        tokenizer=tokenizer,
        columns=columns or [{} for _ in prompts],
    )


def scores_of(values: list[float]) -> Scores:
    """Scores of one reward of weight 1."""
    total = torch.tensor(values)
    weights = torch.ones(1, dtype=torch.float64)
    return Scores(total=total, parts=total[:, None], names=("given",), weights=weights)


def advantages_of(returns: torch.Tensor, size: int) -> torch.Tensor:
    """Standardised advantages (N,) in groups of adjacent returns."""
    group = torch.arange(len(returns)) // size
    return group_advantages(returns, group_moments(returns, group, len(returns) // size), standardise)
