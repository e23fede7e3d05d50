"""The log-ratio of two models on one model's responses, whose mean is a KL in nats a response."""

from __future__ import annotations

from collections.abc import Sequence

from lightrlhf.cli.groups import FrozenArgs
from lightrlhf.data.batch import response_batch
from lightrlhf.generation.rollout import score_logprobs
from lightrlhf.models.loading import load_policy
from lightrlhf.models.tokenizer import load_tokenizer

ROWS = 128  # scored at once
Said = tuple[str, Sequence[tuple[Sequence[int], Sequence[int]]]]  # a model, and prompts and responses in its tokens


def log_ratio(sampler: Said, other: Said) -> float:
    """Mean over responses of their log-probability by the sampler less that by another model.

    The other may read other prompts, or other tokens of the same texts: then a text's further tokenisations, which are
    left out, would lower it.
    """
    totals = []
    for name, rows in (sampler, other):
        tokenizer = load_tokenizer(None, name)
        prompts, responses = zip(*rows)
        batch = response_batch(prompts, responses, int(tokenizer.pad_token_id))
        policy = load_policy(name, FrozenArgs(), tokenizer)
        totals.append(float(score_logprobs(policy, batch, 1.0, ROWS).sum()))  # 0 where there is no action
    return (totals[0] - totals[1]) / len(sampler[1])
