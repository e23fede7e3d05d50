"""Rollouts: sampled responses with log-probabilities under the policy and the reference, and the gap of servers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import ServersGone
from lightrlhf.cli.groups import SamplingArgs, ServerArgs
from lightrlhf.data.batch import Batch, Rollout, SampledBatch, inference_batches, response_batch, row_numbers, to_device
from lightrlhf.data.splits import Row
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.engine import Completions, generate
from lightrlhf.generation.served import ServedPolicy
from lightrlhf.maths.sampling_gap import gap_size
from lightrlhf.models.forward import device_of, inference
from lightrlhf.models.offload import on_device
from lightrlhf.models.quantisation import compute_dtype, is_quantised
from lightrlhf.models.roles import Policy, policy_inputs, vocabulary_size
from lightrlhf.models.sharding import gather_shards
from lightrlhf.models.tokenizer import end_ids, store_ends
from lightrlhf.training.ranks import Ranks
from lightrlhf.training.run import Metrics

AnySampled = TypeVar("AnySampled", bound=SampledBatch)


def generate_rollout(
    policy: nn.Module,
    reference: nn.Module | None,
    rows: Sequence[Row],
    args: SamplingArgs,
    tokenizer: Tokenizer,
    noise: Tensor,
    num_slots: int,
) -> Rollout:
    """Sample a response to each prompt row in this process, scored under policy and reference at one temperature.

    noise: (B, max_new_tokens) uniform numbers, the only source of randomness; num_slots: of the generation engine.
    Log-probabilities of no reference are NaN.
    """
    module: Any = getattr(policy, "module", policy)  # without what Fabric wraps it in
    prompts = prompt_ids(rows)
    with gather_shards(module):
        sampled = generate(module, prompts, args, end_ids(tokenizer, module.model), noise, num_slots, tokenizer)
        batch = sampled_batch(prompts, sampled, tokenizer.pad_token_id)
        if rounds_otherwise(module):
            batch.logprobs = score_logprobs(policy, batch, args.temperature, num_slots)
    return make_rollout(batch, rows, sampled, tokenizer, reference, args.temperature, num_slots)


def rounds_otherwise(policy: Policy) -> bool:
    """Whether a decoding step rounds differently from a pass over whole texts."""
    return torch.is_autocast_enabled(device_of(policy).type) or is_quantised(policy.model)


def prompt_ids(rows: Sequence[Row]) -> list[list[int]]:
    """Token ids of prompt rows."""
    return [[int(i) for i in row["input_ids"]] for row in rows]


def sampled_batch(prompts: Sequence[list[int]], sampled: Completions, pad_id: int) -> SampledBatch:
    """Prompts with their responses, and the log-probabilities that they were sampled with."""
    return response_batch(prompts, sampled.responses, pad_id).sampled(sampled.logprobs)


def make_rollout(
    batch: SampledBatch,
    rows: Sequence[Row],
    sampled: Completions,
    tokenizer: Tokenizer,
    reference: nn.Module | None,
    temperature: float,
    num_slots: int,
) -> Rollout:
    """The rollout of a batch of the prompt rows, each its own group, scored under the reference."""
    ref_logprobs = torch.full_like(batch.logprobs, math.nan)
    if reference is not None:
        ref_logprobs = score_logprobs(reference, batch, temperature, num_slots)
    return batch.extend(
        Rollout,
        row=row_numbers(rows),
        group=torch.arange(len(rows)),
        num_groups=len(rows),
        prompt_len=torch.tensor([len(row["input_ids"]) for row in rows], dtype=torch.int64),
        truncated=torch.tensor(sampled.truncated, dtype=torch.bool),
        ref_logprobs=ref_logprobs,
        tokenizer=tokenizer,
        columns=[row.get("columns", {}) for row in rows],
        removed_mass=sampled.removed_mass,
    )


def score_logprobs(module: nn.Module, batch: Batch, temperature: float, batch_size: int) -> Tensor:
    """Log-probabilities of a batch's actions, dropout off, in passes of at most `batch_size` rows: -> (B, T-1).

    Batch and result are on the host, which waits for the device once.
    """
    with on_device(module), inference(module):
        device = device_of(module)
        out = torch.zeros(batch.action_mask.shape, device=device)
        for rows in inference_batches(batch.attention_mask.sum(1), batch_size, device):
            part = batch.select(rows)
            logprobs = module(**policy_inputs(part), temperature=temperature).logprobs
            out[to_device(rows, device), : part.action_mask.shape[1]] = logprobs
        return out.cpu()


def score_top(policy: Policy, batch: Batch, count: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens at a batch's actions, at temperature 1, likeliest first: ids and log-probabilities.

    -> (B, T-1, K) each, int64 and float32, on the host, with K = `count` or the size of the vocabulary.
    """
    size = min(count, vocabulary_size(policy))

    def function(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        top = logits.log_softmax(-1).topk(size)  # (n, K)
        return logits.new_zeros(()), torch.cat([top.indices.float(), top.values], 1)  # ids below 2^24 are exact

    with on_device(policy), inference(policy):
        device = device_of(policy)
        out = torch.zeros(*batch.action_mask.shape, 2 * size, device=device)
        for rows in inference_batches(batch.attention_mask.sum(1), batch_size, device):
            part = batch.select(rows)
            _, values = policy(**policy_inputs(part), function=function, with_stats=False)  # (N, 2 K)
            places, columns = part.action_mask.nonzero(as_tuple=True)
            out[to_device(rows[places.cpu()], device), to_device(columns, device)] = values
    ids, logprobs = out.cpu().split(size, -1)
    return ids.long(), logprobs


def score_prompts(
    policy: Policy, prompts: Sequence[list[int]], count: int, batch_size: int
) -> list[list[dict[int, float]]]:
    """Log-probabilities of prompts' tokens after their first, and of the `count` likeliest, by id, at temperature 1."""
    batch = response_batch([ids[:1] for ids in prompts], [ids[1:] for ids in prompts], 0)
    own = score_logprobs(policy, batch, 1.0, batch_size)  # (B, T-1)
    top = score_top(policy, batch, count, batch_size) if count else (torch.zeros(*own.shape, 0),) * 2
    rows = zip(prompts, own.tolist(), top[0].tolist(), top[1].tolist())
    return [
        [{**dict(zip(*likely)), token: value} for token, value, *likely in zip(ids[1:], *columns)]
        for ids, *columns in rows
    ]


# ---------------------------------------------------------------------------------- the gap of servers to the trainer
def measure_gap(batch: AnySampled, scored: Tensor, correction: str) -> AnySampled:
    """A batch that servers sampled, with the log-ratio of the policy to them; scored: (B, T-1) under the policy.

    With a correction its log-probabilities are the policy's from now on, so that ratios start at 1; without one they
    stay the servers'.
    """
    gap = torch.where(batch.action_mask, scored - batch.logprobs, 0.0)  # (B, T-1)
    return dataclasses.replace(batch, sampling_gap=gap, logprobs=batch.logprobs if correction == "none" else scored)


def refuse_gap(served: ServedPolicy, batch: SampledBatch) -> None:
    """Raises: ServersGone, with a diagnosis, when a server's log-probabilities do not match its weights."""
    args, run = served.args, served.run
    metrics = gap_metrics(served.ranks, batch, args)
    rounds = run is not None and compute_dtype(run.args) != torch.float32
    limit = 1e-2 if rounds else 1e-6
    if not metrics["sampling/kl"] <= limit:
        where = f" at step {run.step + 1}" if run else ""
        raise ServersGone(
            f"servers sample from other probabilities than the policy{where}: KL "
            f"{metrics['sampling/kl']:.2g} a token, above {limit:g}, largest ratio {metrics['sampling/ratio_max']:.3g};"
            f" {served.diagnose(batch, limit)}"
        )


def gap_metrics(ranks: Ranks, batch: SampledBatch, args: ServerArgs) -> Metrics:
    """Size of the gap between servers and trainer over all ranks; nothing where this process sampled."""
    gap = batch.sampling_gap
    if gap is None:
        return {}
    kind = None if args.sampling_correction == "none" else args.sampling_correction
    size = gap_size(gap, batch.action_mask, kind, args.sampling_bound)
    largest = max(ranks.gather(float(size.ratio_max)))
    total = size._replace(sums=ranks.sum(size.sums), ratio_max=torch.tensor(largest))
    return total.metrics() | {"sampling/staleness": float(batch.staleness)}


def store_sampling(policy: Policy, args: SamplingArgs, tokenizer: Tokenizer) -> None:
    """Store how responses were sampled in the model's generation config."""
    config: Any = policy.model.generation_config
    config.do_sample, config.max_new_tokens = True, args.max_new_tokens
    config.temperature, config.top_k, config.top_p, config.min_p = args.temperature, args.top_k, args.top_p, args.min_p
    config.stop_strings = args.stop_strings or None
    store_ends(policy.model, tokenizer, *args.eos_ids)
