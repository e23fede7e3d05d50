"""Metrics of rollouts over all ranks: of a step's samples and their scores, and of answers to held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightrlhf.cli.groups import EpisodeArgs
from lightrlhf.data.batch import Rollout
from lightrlhf.data.scores import Scores
from lightrlhf.generation.episodes import STOP_REASONS
from lightrlhf.generation.rollout import gap_metrics
from lightrlhf.maths.ops import masked_mean
from lightrlhf.rewards.audit import RewardAudit
from lightrlhf.training.rollout_log import log_samples, rollout_rows
from lightrlhf.training.run import Metrics, Run

COUNTS = ("calls", "failed_calls", "unreadable_calls", "truncated_turns")  # of an episode, whose means are metrics


def response_kl(rollout: Rollout) -> Tensor:
    """k1 estimate of the KL to the reference, summed over each response or episode, in nats: (B,).

    NaN without a reference.
    """
    return by_episode(rollout, ((rollout.logprobs - rollout.ref_logprobs) * rollout.action_mask).sum(1))


def by_episode(rollout: Rollout, values: Tensor) -> Tensor:
    """Values (B,) of rows, summed over the rows of each episode, in each of them."""
    if rollout.episode is None:
        return values
    last = rollout.last_rows()
    return torch.zeros_like(values).index_add(0, last, values)[last]


def rollout_metrics(run: Run[Any], rollout: Rollout, scores: Tensor, by_token: Tensor) -> Metrics:
    """Means over the responses of all ranks; scores: (B,), NaN where missing, by_token: rewards, (B, T-1).

    Of an episode the last row counts, but rewards are summed over all rows.

    Score and reward are means over the scored responses, NaN where there is none; all others, the KL too, are
    means over all that were sampled, so the rollout is the one with the actions of them all.
    """
    entropy = -masked_mean(rollout.logprobs, rollout.action_mask, 1)
    columns = [response_kl(rollout), entropy, rollout.lengths(), rollout.truncated.float(), ~scores.isnan()]
    kl, entropy_mean, length, truncated, valid = row_means(run, columns, rollout.ends())
    metrics = {
        "objective/kl": kl,
        "objective/entropy": entropy_mean,
        "objective/valid_ratio": valid,
        "completions/removed_mass": run.ranks.total(rollout.removed_mass) / run.ranks.world_size,
        "completions/mean_length": length,
        "completions/truncated_ratio": truncated,
        "completions/eos_ratio": 1 - truncated,
    } | gap_metrics(run.ranks, rollout, run.args)
    rewards = by_episode(rollout, by_token.sum(1))  # (B,)
    score, reward = row_means(run, [scores, rewards], rollout.ends() & ~scores.isnan())
    return {"objective/score": score, "objective/reward": reward} | metrics | episode_metrics(run, rollout, "episodes")


def episode_metrics(run: Run[Any], rollout: Rollout, prefix: str) -> Metrics:
    """Means over the episodes of all ranks, as `{prefix}/turns` and the like; nothing of responses of one turn."""
    if not (isinstance(run.args, EpisodeArgs) and run.args.plays_episodes):
        return {}
    columns = episode_columns([columns["episode"] for columns in rollout.columns])
    values = [torch.tensor(column, dtype=torch.float32) for column in columns.values()]
    return {f"{prefix}/{name}": mean for name, mean in zip(columns, row_means(run, values, rollout.ends()))}


def episode_columns(facts: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """What is counted of episodes by their `facts`, whose means are metrics: name -> a number for each."""
    columns = {name: [float(one[name]) for one in facts] for name in ("turns", "rows", "tokens")}
    columns |= {name: [float(one["counts"].get(name, 0)) for one in facts] for name in COUNTS}
    columns["no_reward_ratio"] = [float(one["fault"] is not None) for one in facts]
    stopped = {
        f"stop_{reason}_ratio": [float(one["stop_reason"] == reason) for one in facts] for reason in STOP_REASONS
    }
    return columns | stopped


def reward_metrics(run: Run[Any], scores: Scores, audit: RewardAudit | None) -> Metrics:
    """`reward/{name}`: means over the responses of all ranks to which a reward gave a number; how many failed.

    And the audit of the step, which may warn.
    """
    means = {}
    for name, part in scores.by_name().items():
        (means[f"reward/{name}"],) = row_means(run, [part], ~part.isnan())
    return means | failure_metrics(run, scores) | (audit.compare(run.step + 1, scores) if audit else {})


def failure_metrics(run: Run[Any], scores: Scores) -> Metrics:
    """`reward/timeouts` and the like: responses of all ranks that have no score because a function failed."""
    return {f"reward/{kind}": run.ranks.total(count) for kind, count in scores.failures.items()}


def evaluation_metrics(run: Run[Any], rollout: Rollout, scores: Tensor) -> Metrics:
    """Means over held-out responses of all ranks, as in `rollout_metrics`; keeps the first ones in `samples.jsonl`."""
    columns = [response_kl(rollout), rollout.lengths(), rollout.truncated.float(), ~scores.isnan()]
    means = row_means(run, columns, rollout.ends())
    if run.ranks.is_first and run.args.log_rollouts:
        log_samples(run, rollout_rows(rollout, run.args.log_rollouts, scores))
    metrics = dict(zip(("val/kl", "val/mean_length", "val/truncated_ratio", "val/valid_ratio"), means))
    (score,) = row_means(run, [scores], rollout.ends() & ~scores.isnan())
    return {"val/score": score} | metrics | episode_metrics(run, rollout, "val")


def row_means(run: Run[Any], columns: Sequence[Tensor], counted: Tensor) -> list[float]:
    """Mean of each column (B,) over the counted rows of all ranks, (B,) bool; NaN without any."""
    values = torch.stack([column.float() for column in columns], 1)  # (B, C)
    kept = torch.where(counted[:, None], values, torch.zeros_like(values))  # NaN times 0 would be NaN
    *sums, count = run.ranks.sum(torch.cat([kept.sum(0), counted.sum()[None].float()])).tolist()
    return [total / count if count else math.nan for total in sums]
