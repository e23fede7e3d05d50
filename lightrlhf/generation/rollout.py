"""Rollouts: sampled responses with log-probabilities under the policy and the reference, their checks and metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import RunFailure, ServersGone
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.data.batch import Batch, Rollout, SampledBatch, inference_batches, response_batch
from lightrlhf.data.scores import Scores
from lightrlhf.data.splits import Row
from lightrlhf.generation.engine import Completions, generate
from lightrlhf.generation.served import Asked, ServedPolicy
from lightrlhf.maths.ops import masked_mean
from lightrlhf.maths.sampling_gap import gap_size, importance_weights
from lightrlhf.models.forward import inference
from lightrlhf.models.quantisation import is_quantised
from lightrlhf.models.roles import Policy, policy_inputs
from lightrlhf.models.sharding import unsharded
from lightrlhf.models.tokenizer import end_ids, store_ends
from lightrlhf.rewards.audit import RewardAudit
from lightrlhf.training.rollout_log import log_samples, rollout_rows
from lightrlhf.training.run import Metrics, Run


def generate_rollout(
    policy: nn.Module,
    reference: nn.Module | None,
    rows: Sequence[Row],
    args: SamplingArgs,
    tokenizer: Any,
    uniforms: Tensor,
    num_slots: int,
    served: ServedPolicy | None = None,
    following: Asked | None = None,
) -> Rollout:
    """Sample a response to each prompt row and score it under policy and reference at the same temperature.

    uniforms: (B, max_new_tokens), the only source of randomness; served: the servers that sample in place of this
    process, following: what is asked of them next. Log-probabilities of no reference are NaN.
    """
    prompts = prompt_ids(rows)
    module: Any = getattr(policy, "module", policy)  # without what Fabric wraps it in
    staleness = 0
    if served is not None:
        sampled, staleness = served.sample(prompts, uniforms, following)
    with unsharded(module):
        if served is None:
            sampled = generate(module, prompts, args, end_ids(tokenizer, module.model), uniforms, num_slots, tokenizer)
        batch = response_batch(prompts, sampled.responses, tokenizer.pad_token_id).to(next(policy.parameters()).device)
        logprobs, gap = old_logprobs(policy, batch, sampled, args, num_slots, is_served=served is not None)
    ref_logprobs = torch.full_like(logprobs, math.nan)
    if reference is not None:
        ref_logprobs = score_logprobs(reference, batch, args.temperature, num_slots)
    return batch.extend(
        Rollout,
        places=torch.arange(len(prompts), device=batch.input_ids.device),
        group=torch.arange(len(prompts), device=batch.input_ids.device),
        prompt_len=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64, device=batch.input_ids.device),
        truncated=torch.tensor(sampled.truncated, dtype=torch.bool, device=batch.input_ids.device),
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        sampling_gap=gap,
        staleness=staleness,
        tokenizer=tokenizer,
        columns=[row.get("columns", {}) for row in rows],
        removed_mass=sampled.removed_mass,
    )


def old_logprobs(
    policy: nn.Module, batch: Batch, sampled: Completions, args: SamplingArgs, num_slots: int, is_served: bool
) -> tuple[Tensor, Tensor | None]:
    """Log pi_old of the actions, (B, T-1), and the log-ratio of the policy to a server that sampled them, or None.

    pi_old is what sampled, unless a forward pass of the same weights gives other numbers and a ratio would not start
    at 1: under autocast and with quantised weights, where a decoding step rounds differently, and on a server whose
    gap is corrected. There it is a forward pass. Of a server without a correction it is always what sampled.
    """
    sampled_with = torch.zeros(batch.action_mask.shape).to(batch.input_ids.device)  # (B, T-1)
    values = torch.tensor([value for row in sampled.logprobs for value in row])  # (N,) of all actions
    sampled_with[batch.action_mask] = values.to(sampled_with)
    module: Any = getattr(policy, "module", policy)
    rounds = torch.is_autocast_enabled(batch.input_ids.device.type) or is_quantised(module.model)
    if not (rounds or is_served):
        return sampled_with, None
    scored = score_logprobs(policy, batch, args.temperature, num_slots)
    gap = torch.where(batch.action_mask, scored - sampled_with, 0.0) if is_served else None
    bypassed = is_served and getattr(args, "sampling_correction", "none") == "none"
    return (sampled_with if bypassed else scored), gap


def prompt_ids(rows: Sequence[Row]) -> list[list[int]]:
    """The ids of prompt rows."""
    return [[int(i) for i in row["input_ids"]] for row in rows]


def score_logprobs(module: nn.Module, batch: Batch, temperature: float, batch_size: int) -> Tensor:
    """Log-probabilities of a batch's actions, dropout off, in passes of at most `batch_size` rows: -> (B, T-1)."""
    out = torch.zeros(batch.action_mask.shape, device=batch.input_ids.device)
    with inference(module):
        for rows in inference_batches(batch.attention_mask.sum(1), batch_size):
            part = batch.select(rows)
            out[rows, : part.action_mask.shape[1]] = module(**policy_inputs(part), temperature=temperature).logprobs
    return out


# ------------------------------------------------------------------------------------------------- in a training loop
def sample_rollout(
    run: Run[Any],
    actor: nn.Module,
    reference: nn.Module | None,
    rows: Sequence[Row],
    noise: Tensor,
    tokenizer: Any,
    served: ServedPolicy | None = None,
    following: tuple[Sequence[Row], Tensor] | None = None,
) -> Rollout:
    """This rank's rollout in the run's precision; noise: (B, max_new_tokens) uniform numbers.

    following: rows and noise of the next rollout, which servers sample from now on.
    Raises: RunFailure when a server samples from other probabilities than those of its weights.
    """
    args = run.args
    asked = following and (prompt_ids(following[0]), following[1])
    with run.autocast():
        settings = (args, tokenizer, noise, args.rollout_mini_batch_size)
        rollout = generate_rollout(actor, reference, rows, *settings, served, asked)
    gap = rollout.sampling_gap
    if gap is None:
        return rollout
    if not rollout.staleness and served is not None:
        refuse_gap(run, rollout, served)
    if args.sampling_correction == "none":
        return rollout
    weights = importance_weights(gap, rollout.action_mask, args.sampling_correction, args.sampling_bound)
    return dataclasses.replace(rollout, correction=weights)


def refuse_gap(run: Run[Any], rollout: SampledBatch, served: ServedPolicy) -> None:
    """Raises: ServersGone, with what was found out, when servers sampled from other probabilities than the policy's."""
    args = run.args
    metrics = gap_metrics(run, rollout)
    limit = args.max_sampling_kl or (1e-6 if run.precision == "32-true" else 1e-2)
    if not metrics["sampling/kl"] <= limit:
        where = f" at step {run.step + 1}" if isinstance(run, Run) else ""
        raise ServersGone(
            f"servers sample from other probabilities than the policy{where}: KL "
            f"{metrics['sampling/kl']:.2g} a token, above {limit:g}, largest ratio {metrics['sampling/ratio_max']:.3g};"
            f" {served.diagnose(rollout, limit)}"
        )


def gap_metrics(run: Run[Any], rollout: SampledBatch) -> Metrics:
    """Size of the gap between servers and trainer over all ranks; nothing where this process sampled."""
    gap, args = rollout.sampling_gap, run.args
    if gap is None:
        return {}
    kind = None if args.sampling_correction == "none" else args.sampling_correction
    size = gap_size(gap, rollout.action_mask, kind, args.sampling_bound)
    largest = max(run.gather(float(size.ratio_max)))
    total = size._replace(sums=run.sum_over_ranks(size.sums), ratio_max=torch.tensor(largest))
    return total.metrics() | {"sampling/staleness": float(rollout.staleness)}


def check_start(rollout: Rollout, reference: str = "the reference's") -> None:
    """Raises: RunFailure when policy and reference, which start from the same weights, differ in the first rollout."""
    logprobs = rollout.logprobs
    if rollout.sampling_gap is not None and rollout.correction is None:  # a server's; their gap has its own check
        logprobs = logprobs + rollout.sampling_gap
    gap = float((logprobs - rollout.ref_logprobs).abs().max())
    if not gap < 1e-2:
        raise RunFailure(f"before the first update the policy's log-probabilities differ from {reference} by {gap}")


def response_kl(rollout: Rollout) -> Tensor:
    """k1 estimate of the KL to the reference, summed over each response, in nats: (B,); NaN without a reference."""
    return ((rollout.logprobs - rollout.ref_logprobs) * rollout.action_mask).sum(1)


def rollout_metrics(run: Run[Any], rollout: Rollout, scores: Tensor, rewards: Tensor) -> Metrics:
    """Means over the responses of all ranks; scores: (B,), NaN where there is none, rewards: (B, T-1).

    Score and reward are means over the scored responses, NaN where there is none; all others, the KL too, are
    means over all that were sampled, so the rollout is the one with the actions of them all.
    """
    entropy = -masked_mean(rollout.logprobs, rollout.action_mask, 1)
    columns = [response_kl(rollout), entropy, rollout.lengths(), rollout.truncated.float(), ~scores.isnan()]
    kl, entropy_mean, length, truncated, valid = row_means(run, columns, torch.ones_like(rollout.truncated))
    metrics = {
        "objective/kl": kl,
        "objective/entropy": entropy_mean,
        "objective/valid_ratio": valid,
        "completions/removed_mass": run.total(rollout.removed_mass) / run.world_size,
        "completions/mean_length": length,
        "completions/truncated_ratio": truncated,
        "completions/eos_ratio": 1 - truncated,
    } | gap_metrics(run, rollout)
    score, reward = row_means(run, [scores, rewards.sum(1)], ~scores.isnan())
    return {"objective/score": score, "objective/reward": reward} | metrics


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
    return {f"reward/{kind}": run.total(count) for kind, count in scores.failures.items()}


def evaluation_metrics(run: Run[Any], rollout: Rollout, scores: Tensor) -> Metrics:
    """Means over held-out responses of all ranks, as in `rollout_metrics`; keeps the first ones in `samples.jsonl`."""
    columns = [response_kl(rollout), rollout.lengths(), rollout.truncated.float(), ~scores.isnan()]
    means = row_means(run, columns, torch.ones_like(rollout.truncated))
    if run.is_first and run.args.log_rollouts:
        log_samples(run, rollout_rows(rollout, run.args.log_rollouts, scores))
    metrics = dict(zip(("val/kl", "val/mean_length", "val/truncated_ratio", "val/valid_ratio"), means))
    return dict(zip(("val/score",), row_means(run, [scores], ~scores.isnan()))) | metrics


def row_means(run: Run[Any], columns: Sequence[Tensor], counted: Tensor) -> list[float]:
    """Mean of each column (B,) over the counted rows of all ranks, (B,) bool; NaN where there is none."""
    values = torch.stack([column.float() for column in columns], 1)  # (B, C)
    kept = torch.where(counted[:, None], values, torch.zeros_like(values))  # NaN times 0 would be NaN
    *sums, count = run.sum_over_ranks(torch.cat([kept.sum(0), counted.sum()[None].float()])).tolist()
    return [total / count if count else math.nan for total in sums]


def store_sampling(policy: Policy, args: SamplingArgs, tokenizer: Any) -> None:
    """Store how responses were sampled in the model's generation config."""
    config: Any = policy.model.generation_config
    config.do_sample, config.max_new_tokens = True, args.max_new_tokens
    config.temperature, config.top_k, config.top_p, config.min_p = args.temperature, args.top_k, args.top_p, args.min_p
    config.stop_strings = args.stop_strings or None
    store_ends(policy.model, tokenizer, *args.eos_ids)
