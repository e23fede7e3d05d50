"""REINFORCE with a baseline (Williams 1992): r the score of a response, b the running mean of earlier scores,

    L = -sum_i sum_t (r_i - b) log pi(y_it) / N

Left out: a KL penalty, and further updates by the same samples, which need importance weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightrlhf.cli import errors, fields, groups, parser
from lightrlhf.data.batch import Rollout
from lightrlhf.data.rows import Given, load_splits
from lightrlhf.generation import rollout_metrics
from lightrlhf.generation.rollout_sampler import RolloutSampler
from lightrlhf.models import given, roles
from lightrlhf.rewards import functions, loading
from lightrlhf.training.rollout_log import log_rollouts
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.start import begin, check_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class ReinforceArgs(
    groups.TrainArgs,
    groups.DataSetsArgs,
    groups.EvalArgs,
    groups.StartArgs,
    groups.RewardArgs,
    groups.SamplingArgs,
    groups.ServerArgs,
    groups.RolloutLogArgs,
):
    """REINFORCE with a baseline."""

    experiment_name: str = "rlhf-reinforce"
    """Folder below `log_dir` for the runs of one algorithm."""
    rollout_mini_batch_size: int = fields.at_least(1, 32)
    """Responses sampled or scored at a time."""
    learning_rate: float = fields.positive(1e-5)
    """Peak learning rate."""
    momentum: float = fields.between(0, 1, 0.9)
    """Weight of the old baseline in the new one."""

    @property
    def rollout_size(self) -> int:
        """Prompts of a rollout and device, all learned from in one optimiser step."""
        return self.mini_batch_size


def train(
    args: ReinforceArgs,
    *,
    policy: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prompts: Given | None = None,
    reward: functions.RewardFunctions | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by REINFORCE; returns the experiment dir. Objects replace what flags would load."""
    objects = {"policy": policy, "tokenizer": tokenizer, "prompts": prompts, "reward": reward}
    load = partial(load_splits, "prompts")
    run, start = begin(args, ReinforceArgs, "reinforce", load, given.load_start, check_prompts, objects, on_step)
    rewards = loading.load_rewards(args, run.device, args.rollout_mini_batch_size, reward, ranks=run.ranks)
    num_steps = run.order.num_steps(start.rows, args.rollout_size)
    model = run.setup("policy", start.policy, args.learning_rate, num_steps)
    sampler = RolloutSampler(run, model, None, start)
    baseline = start.resumed.get("baseline", 0.0)
    run.keep(start.policy, start.tokenizer, lambda: {"baseline": baseline})  # what checkpoints hold

    def measure() -> Metrics:
        rollout = sampler.sample_held_out(start.held_out)
        return rollout_metrics.evaluation_metrics(run, rollout, rewards(rollout).total)

    for step in run.steps(num_steps):
        with run.phase("rollout"):
            rollout = sampler.sample(step)  # a response to each prompt, (B, T)
        with run.phase("score"):
            scores = rewards(rollout)
            advantages = scores.total - baseline  # (B,), NaN without a score
        log_rollouts(run, rollout, scores, advantages[:, None] * rollout.action_mask)
        with run.phase("update"):
            metrics = update(run, model, rollout, advantages) | {"objective/baseline": baseline}
        (mean,) = rollout_metrics.row_means(run, [scores.total], ~scores.total.isnan())
        if not math.isnan(mean):
            baseline = args.momentum * baseline + (1 - args.momentum) * mean
        run.end_step(metrics | {"objective/score": mean}, rollout, measure if start.held_out else None)
    return run.finish()


def update(run: Run[ReinforceArgs], model: nn.Module, rollout: Rollout, advantages: Tensor) -> Metrics:
    """One optimiser step; advantages: (B,), NaN without a score."""
    args, rollout = run.args, rollout.masked(~advantages.isnan())
    count = max(run.ranks.total(rollout.num_actions), 1.0)
    micros = run.ranks.pad_passes(rollout.by_length(args.micro_batch_size))
    total = 0.0
    for i, rows in enumerate(micros):
        micro = rollout.select(rows)
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            logprobs = model(**roles.policy_inputs(micro), temperature=args.temperature).logprobs  # (b, T-1)
            loss = -(advantages[rows, None] * logprobs)[micro.action_mask].sum() / count
            run.backward(loss, micro.row)
        total += float(loss.detach())
    return {"policy/loss": run.ranks.total(total), "policy/grad_norm": run.optimize("policy")}


@errors.one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parser.parse(ReinforceArgs, argv)))


if __name__ == "__main__":
    main()
