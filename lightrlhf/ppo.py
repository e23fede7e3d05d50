"""PPO for RLHF (Schulman et al. 2017; Ziegler et al. 2019; Ouyang et al. 2022, step 3).

A rollout samples a response to each prompt. Its reward is the score at the last token minus beta times the KL to the
reference at each token; advantages come from GAE, whitened over the whole rollout and all ranks. Then, for
`--ppo_epochs` passes in mini-batches, with rho_t = pi(y_t) / pi_old(y_t),

    L_policy = -sum_t min(rho_t A_t, clip(rho_t, 1-e, 1+e) A_t) / N                                       (2017, eq. 7)
    L_value  = 1/2 sum_t max((V_t - R_t)^2, (V_old,t + clip(V_t - V_old,t, -e, e) - R_t)^2) / N

A macro action (MA-RLHF, Chai et al. 2025) is a segment of the response: `--termination_condition` says where segments
end, `--value_function` how the values of a segment's tokens become its value. Rewards are summed over a segment, GAE
runs over segments, and each token gets its segment's advantage and return. `--ngram 1`, the default, is token PPO.

Actor and critic have an optimiser each. They are two networks or, with LoRA, adapters and heads on one backbone, which
without the new adapter is the reference and with the reward model's is the scorer. Dropout is off wherever
log-probabilities are stored.

Left out: the pretraining-loss mix (PPO-ptx), value-network warm-up, and asynchronous rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import (
    DataArgs,
    EvalArgs,
    ModelArgs,
    RewardArgs,
    SamplingArgs,
    StartArgs,
    TrainArgs,
    check_at_least,
    check_data_dir,
    check_positive,
)
from lightrlhf.cli.errors import RunFailure, one_line_errors
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Batch, Rollout, inference_batches
from lightrlhf.data.macro_parsers import Parser, check_parser, make_parser, parsed_segments
from lightrlhf.data.splits import Row, check_vocabulary, load_prompts
from lightrlhf.data.tokens import decode
from lightrlhf.generation.engine import check_room
from lightrlhf.generation.rollout import generate_rollout
from lightrlhf.maths import macro_actions as macro
from lightrlhf.maths.ops import clipped_surrogate, explained_variance, gae, masked_mean, whiten
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.models.names import resolve, starting_model
from lightrlhf.models.roles import Policy, ScalarModel, TokenStats, count_parameters, policy_inputs, vocabulary_size
from lightrlhf.models.sharding import unsharded
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.kl import AdaptiveKL, FixedKL, token_rewards
from lightrlhf.rewards.loading import load_function, reward_statistics
from lightrlhf.rewards.scorers import FunctionScorer, RewardModelScorer, Scorer
from lightrlhf.training.run import Metrics, Run


@dataclass(frozen=True, kw_only=True)
class PPOArgs(TrainArgs, DataArgs, EvalArgs, StartArgs, RewardArgs, SamplingArgs):
    """Proximal policy optimisation against a reward model or a reward function."""

    experiment_name: str = "rlhf-ppo"
    """Name of the folder below `log_dir` that collects the runs of one algorithm."""
    critic_init: Literal["reward", "policy"] | None = None
    """What the critic starts from; the reward model where there is one."""
    share_backbone: bool = True
    """With `--finetune_mode lora`: all roles on one set of base weights if they can; never with fsdp or deepspeed."""
    rollout_size: int = 128
    """Prompts per rollout and device."""
    rollout_mini_batch_size: int = 32
    """Rows decoded at a time, and at most so many scored in one pass."""
    ppo_epochs: int = 1
    """Passes over each rollout."""
    mini_batch_size: int = 32
    """Responses per optimiser step and device."""
    actor_learning_rate: float = 1e-6
    """Peak learning rate of the policy."""
    critic_learning_rate: float = 1e-6
    """Peak learning rate of the critic."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    """Learning-rate schedule of both, by its name in `transformers.get_scheduler`."""
    disable_dropout: bool = True
    """Set the probability of every dropout module to 0."""
    init_kl_coeff: float = 0.1
    """Weight of the KL penalty in the reward, at the start."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL penalty: k1 unbiased, k2 half the squared log-ratio, k3 unbiased and never negative."""
    adaptive_kl_coeff: bool = False
    """Steer the KL weight so that the KL of a response stays near `target_kl_coeff`."""
    target_kl_coeff: float = 6.0
    """KL of a whole response, in nats, that the adaptive controller steers to."""
    clip_coeff: float = 0.2
    """Clip range of the probability ratio and of the change in value."""
    vf_coeff: float = 1.0
    """Weight of the critic's loss."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the policy's loss."""
    gae_gamma: float = 1.0
    """Discount per token."""
    gae_lambd: float = 0.95
    """GAE's lambda: 1 is Monte Carlo, 0 one-step TD."""
    termination_condition: Literal["fixed", "randomized", "parsing", "ppl"] = "fixed"
    """Where macro actions end: every `ngram` tokens, at drawn lengths, with a constituent, or as perplexity rises."""
    ngram: int = 1
    """Tokens per macro action for `fixed`: 1 is token PPO, 0 takes the whole response as one."""
    repeat_times: int = 3
    """How often each of the lengths 2, 3, 5 and 10 comes in a row for `randomized`."""
    parser: str = "textblob"
    """For `parsing`: textblob, benepar, stanza, python (for programs), or your own `package.module:function`."""
    parser_model: str | None = None
    """Local folder of the model that benepar or stanza reads."""
    parsing_cutoff: int = 5
    """For `parsing`: a constituent of at most this many tokens is a macro action, a larger one is divided."""
    on_parse_error: Literal["ngram", "token", "raise"] = "ngram"
    """What happens to a response that cannot be parsed: cut it every `ngram` tokens or at each, or stop the run."""
    value_function: Literal["equal", "unit", "position", "first"] = "equal"
    """A macro action's value: mean of its tokens' values, the last, weighted towards the last, or the first."""
    macro_ratio: Literal["token", "segment"] = "token"
    """Clip the ratio of each token (as MA-RLHF's code does) or the product over a macro action (its equation 3)."""
    macro_discount: Literal["segment", "length"] = "segment"
    """Discount by gamma once per macro action, or by gamma to the power of its length."""
    normalize_rewards: bool = True
    """Shift and scale scores by the mean and deviation stored with the reward model."""
    normalize_advantages: bool = True
    """Whiten advantages over the rollout of all ranks."""
    clip_rewards: bool = True
    """Clip scores to +-`reward_clip_value`."""
    reward_clip_value: float = 5.0
    """Largest absolute score after normalisation."""
    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that reached `max_new_tokens` without an end token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_model()
        self.check_generation()
        self.check_eval()
        check_positive(self, "actor_learning_rate", "critic_learning_rate", "clip_coeff", "reward_clip_value")
        check_positive(self, "target_kl_coeff")
        check_at_least(self, "ngram", 0)
        for name in ("rollout_size", "rollout_mini_batch_size", "ppo_epochs", "repeat_times", "parsing_cutoff"):
            check_at_least(self, name, 1)
        for name in ("init_kl_coeff", "vf_coeff", "entropy_coeff", "missing_eos_penalty"):
            check_at_least(self, name, 0)
        for name in ("gae_gamma", "gae_lambd"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)} must lie in [0, 1]")
        if self.mini_batch_size > self.rollout_size:
            raise ValueError(
                f"--mini_batch_size {self.mini_batch_size} must not exceed --rollout_size {self.rollout_size}"
            )
        if self.critic_init == "reward" and self.rm_experiment_dir is None:
            raise ValueError("--critic_init reward needs --rm_experiment_dir; use --critic_init policy")
        if self.termination_condition == "parsing":
            check_parser(self.parser, self.parser_model)


@dataclass(kw_only=True)
class PPOBatch(Batch):
    """What an update needs of a rollout; all (B, T-1), 0 off actions."""

    logprobs: Tensor  # under the policy that sampled
    values: Tensor
    advantages: Tensor
    returns: Tensor
    segments: Tensor  # int64, number of each action's macro action in its row, -1 off actions

    @property
    def num_segments(self) -> int:
        """How many macro actions all rows have."""
        return int(macro.segment_mask(self.segments).sum())


def train(args: PPOArgs) -> Path:
    """PPO; returns the experiment dir."""
    check_data_dir(args)
    args.check_start()
    args.check_reward()
    prompts = load_prompts(args.data_dir, "train")
    held_out = load_prompts(args.data_dir, "validation") if args.eval_interval else []
    run = Run(args, "ppo")
    source, flag = starting_model(args)
    tokenizer = load_tokenizer(args.data_dir, source)
    shares = args.share_backbone and args.strategy not in ("fsdp", "deepspeed")
    policy = load_policy(source, args, tokenizer, flag, shares=shares)
    check_vocabulary(prompts, vocabulary_size(policy), args.data_dir)
    check_room(policy.model, [row["input_ids"] for row in prompts + held_out], args)
    reference = run.freeze(policy.reference())
    scorer = make_scorer(run, tokenizer, policy)
    parser = make_parser(args.parser, args.parser_model) if args.termination_condition == "parsing" else None
    critic = load_critic(args, tokenizer, policy)
    run.print0("actor: {:,} parameters, {:,} trainable; {:,} prompts".format(*count_parameters(policy), len(prompts)))

    num_steps, results = run.num_steps(len(prompts), args.rollout_size), {}
    num_updates = num_steps * args.ppo_epochs * math.ceil(args.rollout_size / args.mini_batch_size)
    actor = run.setup("policy", policy, args.actor_learning_rate, num_updates)
    value_model = run.setup("critic", critic, args.critic_learning_rate, num_updates)
    kl_coeff = (
        AdaptiveKL(args.init_kl_coeff, args.target_kl_coeff) if args.adaptive_kl_coeff else FixedKL(args.init_kl_coeff)
    )
    if run.resumed:
        kl_coeff.value = run.resumed["extra"]["kl_coeff"]

    for step in run.steps(num_steps):
        rows = run.global_batch(prompts, step, args.rollout_size)
        noise = torch.rand(len(rows), args.max_new_tokens, generator=run.generator(step))  # (B of all ranks, length)
        with run.phase("rollout"):
            rollout = sample_rollout(run, actor, reference, run.shard(rows), run.shard(noise), tokenizer)
        if step == 0:
            check_start(rollout)
        with run.phase("score"):
            scores = score(rollout, scorer, args)  # (B,)
            values = predict_values(value_model, rollout, args.rollout_mini_batch_size)  # (B, T-1)
            rewards = token_rewards(rollout, scores, kl_coeff.value, args.kl_estimator)  # (B, T-1)
            segments, parse_failures = segment_responses(run, rollout, len(rows), step, tokenizer, parser)  # (B, T-1)
            batch = estimate_advantages(run, rollout, rewards, values, segments)
        with run.phase("update"):
            metrics = update(run, actor, value_model, batch, step)
        metrics |= rollout_metrics(run, rollout, scores, rewards, batch) | {"objective/kl_coeff": kl_coeff.value}
        metrics["completions/parse_failures"] = run.total(parse_failures) / len(rows)
        kl_coeff.update(metrics["objective/kl"], len(rows))

        run.step += 1
        if run.due(args.log_interval, num_steps):
            times = {f"time/{phase}": run.seconds[phase] for phase in ("rollout", "score", "update")}
            tokens = run.total(int(rollout.attention_mask.sum()))
            speed = {"time/tokens_per_second": tokens / sum(times.values())}
            run.log({**metrics, **times, **speed, "train/lr": run.learning_rate("policy")})
        if held_out and run.due(args.eval_interval, num_steps):
            with run.phase("evaluation"):
                results = evaluate(run, actor, reference, scorer, held_out, tokenizer)
            run.log(results)
        if run.due(args.save_interval, num_steps):
            set_generation_config(policy, args, tokenizer)
            run.save(policy, tokenizer, extra={"kl_coeff": kl_coeff.value})
    return run.finish(results)


# ------------------------------------------------------------------------------------------------------- the models
def make_scorer(run: Run[PPOArgs], tokenizer: Any, policy: Policy) -> Scorer:
    """The reward model (with its own tokenizer) or the reward function, as `Rollout -> (B,)`."""
    args = run.args
    if args.reward_function:
        return FunctionScorer(load_function(args.reward_function, "--reward_function"), tokenizer)
    source = resolve(args.rm_experiment_dir, "--rm_experiment_dir")
    frozen = ModelArgs(trust_remote_code=args.trust_remote_code)
    model = load_scalar(source, frozen, tokenizer, args.seed, "--rm_experiment_dir", needs_head=True, backbone=policy)
    scorer = RewardModelScorer(run.freeze(model), load_tokenizer(None, source), tokenizer, args.rollout_mini_batch_size)
    mean, std = reward_statistics(source) if args.normalize_rewards else (0.0, 1.0)
    return lambda rollout: (scorer(rollout) - mean) / std


def load_critic(args: PPOArgs, tokenizer: Any, policy: Policy) -> ScalarModel:
    """A critic that starts from the reward model, head included, or from the policy with a new head."""
    if args.rm_experiment_dir and args.critic_init != "policy":
        source, flag = args.rm_experiment_dir, "--rm_experiment_dir"
    else:
        source, flag = starting_model(args)
    return load_scalar(source, args, tokenizer, args.seed, flag, backbone=policy)


def set_generation_config(policy: nn.Module, args: PPOArgs, tokenizer: Any) -> None:
    """Store how responses were sampled with the checkpoint, for whoever generates from it."""
    config = policy.model.generation_config
    config.do_sample, config.max_new_tokens = True, args.max_new_tokens
    config.temperature, config.top_k, config.top_p, config.min_p = args.temperature, args.top_k, args.top_p, args.min_p
    config.eos_token_id = [tokenizer.eos_token_id, *args.eos_ids]
    config.stop_strings = args.stop_strings or None


# ------------------------------------------------------------------------------------------------------ the rollout
def sample_rollout(
    run: Run[PPOArgs], actor: nn.Module, reference: nn.Module, rows: list[Row], noise: list[Tensor], tokenizer: Any
) -> Rollout:
    """This rank's responses with their log-probabilities under actor and reference."""
    with run.autocast():
        return generate_rollout(
            actor, reference, rows, run.args, tokenizer, torch.stack(noise), run.args.rollout_mini_batch_size
        )


def check_start(rollout: Rollout) -> None:
    """Raises: RunFailure when policy and reference differ before the first update (they are the same weights)."""
    gap = float((rollout.logprobs - rollout.ref_logprobs).abs().max())
    if not gap < 1e-2:
        raise RunFailure(f"before the first update the policy's log-probabilities differ from the reference's by {gap}")


def score(rollout: Rollout, scorer: Scorer, args: PPOArgs) -> Tensor:
    """Scores (B,), clipped, less the penalty for a missing end. A sample scored NaN loses its actions."""
    scores = scorer(rollout)
    failed = scores.isnan()
    rollout.action_mask = rollout.action_mask & ~failed[:, None]
    scores = torch.where(failed, torch.zeros_like(scores), scores)
    if args.clip_rewards:
        scores = scores.clamp(-args.reward_clip_value, args.reward_clip_value)
    return scores - args.missing_eos_penalty * rollout.truncated.to(scores)


@torch.no_grad()
def predict_values(critic: nn.Module, rollout: Rollout, batch_size: int) -> Tensor:
    """Values of the states the actions were taken in, dropout off: (B, T-1), 0 off actions."""
    critic.eval()
    values = torch.zeros(rollout.action_mask.shape, device=rollout.input_ids.device)
    with unsharded(critic):
        for rows in inference_batches(rollout.attention_mask.sum(1), batch_size):
            part = rollout.select(rows)
            values[rows, : part.action_mask.shape[1]] = critic(part.input_ids, part.attention_mask)[:, :-1]
    critic.train()
    return torch.where(rollout.action_mask, values, torch.zeros_like(values))


def segment_responses(
    run: Run[PPOArgs], rollout: Rollout, num_rows: int, step: int, tokenizer: Any, parser: Parser | None
) -> tuple[Tensor, int]:
    """The macro actions of each response, (B, T-1) as in `maths/macro_actions.py`, and how many could not be parsed.

    num_rows counts those of all ranks.
    """
    args = run.args
    if args.termination_condition == "parsing":
        fallback = {"ngram": args.ngram, "token": 1, "raise": None}[args.on_parse_error]
        return parsed_segments(rollout, tokenizer, parser, args.parsing_cutoff, fallback)
    if args.termination_condition == "ppl":
        return macro.perplexity(rollout.action_mask, rollout.ref_logprobs), 0
    if args.termination_condition == "fixed":
        return macro.fixed(rollout.action_mask, args.ngram), 0
    width = args.repeat_times * len(macro.RANDOM_LENGTHS)
    noise = torch.rand(num_rows, width, generator=run.generator(step, -1))
    return macro.randomized(rollout.action_mask, torch.stack(run.shard(noise))), 0


def estimate_advantages(
    run: Run[PPOArgs], rollout: Rollout, rewards: Tensor, values: Tensor, segments: Tensor
) -> PPOBatch:
    """GAE over the macro actions of each response (Chai et al. 2025, sec. 3), whitened over all rows and ranks."""
    args = run.args
    macro_rewards = macro.discounted_sum(rewards, segments, args.gae_gamma)  # (B, M)
    macro_values = macro.VALUE_FUNCTIONS[args.value_function](values, segments)  # (B, M)
    discounts = torch.full_like(macro_values, args.gae_gamma)  # (B, M)
    if args.macro_discount == "length":
        discounts = discounts ** macro.lengths(segments)
    found = gae(macro_rewards, macro_values, macro.segment_mask(segments), discounts, args.gae_lambd)  # (B, M) each
    advantages, returns = (macro.broadcast(part, segments) for part in found)  # (B, T-1) each
    if args.normalize_advantages:
        advantages = whiten(advantages, rollout.action_mask, sum_over_ranks=run.sum_over_ranks)
    return PPOBatch(
        input_ids=rollout.input_ids,
        attention_mask=rollout.attention_mask,
        action_mask=rollout.action_mask,
        logprobs=rollout.logprobs,
        values=values,
        advantages=advantages,
        returns=returns,
        segments=segments,
    )


# ------------------------------------------------------------------------------------------------------- the update
def policy_loss(stats: TokenStats, batch: PPOBatch, clip_coeff: float, entropy_coeff: float) -> Tensor:
    """Minus the sum over actions of the clipped surrogate (Schulman et al. 2017, eq. 7) and the entropy bonus."""
    surrogate = clipped_surrogate(stats.logprobs - batch.logprobs, batch.advantages, clip_coeff)  # (B, T-1)
    if entropy_coeff:
        surrogate = surrogate + entropy_coeff * stats.entropy
    return -surrogate[batch.action_mask].sum()


def macro_policy_loss(stats: TokenStats, batch: PPOBatch, clip_coeff: float, entropy_coeff: float) -> Tensor:
    """Minus the sum over macro actions of the surrogate with the product of their ratios (Chai et al. 2025, eq. 3)."""
    log_ratio = macro.reduce_sum(stats.logprobs - batch.logprobs, batch.segments)  # (B, M)
    advantages = macro.value_first(batch.advantages, batch.segments)  # (B, M)
    surrogate = clipped_surrogate(log_ratio, advantages, clip_coeff)
    if entropy_coeff:
        surrogate = surrogate + entropy_coeff * macro.reduce_sum(stats.entropy, batch.segments)
    return -surrogate[macro.segment_mask(batch.segments)].sum()


def value_loss(values: Tensor, batch: PPOBatch, clip_coeff: float) -> Tensor:
    """Half the sum of the larger of plain and clipped squared error over the actions: a scalar."""
    clipped = batch.values + (values - batch.values).clamp(-clip_coeff, clip_coeff)  # (B, T-1)
    error = torch.maximum((values - batch.returns).pow(2), (clipped - batch.returns).pow(2))
    return 0.5 * error[batch.action_mask].sum()


def minibatches(batch: PPOBatch, size: int, num_rows: int, generator: torch.Generator) -> Iterator[PPOBatch]:
    """The rows in shuffled order in parts of about `size`; `num_rows`, the fullest rank's, sets how many on all."""
    order = torch.randperm(len(batch), generator=generator)
    for rows in order.tensor_split(math.ceil(num_rows / size)):
        yield batch.select(rows.to(batch.input_ids.device))


def update(run: Run[PPOArgs], actor: nn.Module, critic: nn.Module, batch: PPOBatch, step: int) -> Metrics:
    """All optimiser steps of one rollout; returns means over them."""
    args = run.args
    fullest = int(run.total(len(batch)) + run.world_size - 1) // run.world_size
    sums: Metrics = {}
    parts = 0
    for epoch in range(args.ppo_epochs):
        for minibatch in minibatches(batch, args.mini_batch_size, fullest, run.generator(step, epoch)):
            for name, value in update_minibatch(run, actor, critic, minibatch).items():
                sums[name] = sums.get(name, 0.0) + value
            parts += 1
    return {name: value / parts for name, value in sums.items()}


def update_minibatch(run: Run[PPOArgs], actor: nn.Module, critic: nn.Module, minibatch: PPOBatch) -> Metrics:
    """One optimiser step of actor and critic; the gradient does not depend on how micro-batches are cut."""
    args = run.args
    count = max(run.total(minibatch.num_actions), 1.0)
    by_segment = args.macro_ratio == "segment"
    policy_count = max(run.total(minibatch.num_segments), 1.0) if by_segment else count
    loss_of = macro_policy_loss if by_segment else policy_loss
    sums = torch.zeros(5, device=run.device)
    micros = run.pad_passes(minibatch.attention_mask.sum(1).argsort(stable=True).split(args.micro_batch_size))
    for i, rows in enumerate(micros):
        micro = minibatch.select(rows)
        more = i + 1 < len(micros)
        with run.accumulate(actor, enabled=more):
            stats = actor(**policy_inputs(micro), temperature=args.temperature, with_entropy=args.entropy_coeff > 0)
            loss = loss_of(stats, micro, args.clip_coeff, args.entropy_coeff)
            run.backward(loss / policy_count)
        with run.accumulate(critic, enabled=more):
            values = critic(micro.input_ids, micro.attention_mask)[:, :-1]  # (B, T-1)
            critic_loss = value_loss(values, micro, args.clip_coeff)
            run.backward(args.vf_coeff * critic_loss / count)
        with torch.no_grad():
            difference = (stats.logprobs - micro.logprobs)[micro.action_mask]
            ratio = difference.exp()
            outside = ((ratio - 1).abs() > args.clip_coeff).float()
            sums += torch.stack([loss, critic_loss, outside.sum(), (ratio - 1 - difference).sum(), ratio.sum()])
    policy, value, clipfrac, approxkl, ratio = (run.sum_over_ranks(sums) / count).tolist()
    return {
        "policy/loss": policy * count / policy_count,
        "policy/clipfrac": clipfrac,
        "policy/approxkl": approxkl,
        "policy/ratio": ratio,
        "policy/grad_norm": run.optimize("policy"),
        "value/loss": value,
        "value/grad_norm": run.optimize("critic"),
    }


# ------------------------------------------------------------------------------------------------------ the metrics
def rollout_metrics(run: Run[PPOArgs], rollout: Rollout, scores: Tensor, rewards: Tensor, batch: PPOBatch) -> Metrics:
    """Means over the responses of all ranks; `objective/kl` is the k1 estimate summed over a response, in nats."""
    mask = rollout.action_mask
    length = (rollout.attention_mask.sum(1) - rollout.prompt_len).float()
    per_response = torch.stack(
        [
            ((rollout.logprobs - rollout.ref_logprobs) * mask).sum(1),
            scores,
            rewards.sum(1),
            -masked_mean(rollout.logprobs, mask, 1),
            length,
            rollout.truncated.float(),
        ],
        1,
    )  # (B, 6)
    count = run.total(len(rollout))
    macro_length = run.total(int(mask.sum())) / max(run.total(batch.num_segments), 1.0)
    kl, score, reward, entropy, length, truncated = (run.sum_over_ranks(per_response.sum(0)) / count).tolist()
    return {
        "objective/kl": kl,
        "objective/score": score,
        "objective/reward": reward,
        "objective/entropy": entropy,
        "completions/macro_length": macro_length,
        "completions/removed_mass": run.total(rollout.removed_mass) / run.world_size,
        "completions/mean_length": length,
        "completions/truncated_ratio": truncated,
        "completions/eos_ratio": 1 - truncated,
        "value/explained_variance": float(explained_variance(batch.values, batch.returns, mask, run.sum_over_ranks)),
    }


@torch.no_grad()
def evaluate(
    run: Run[PPOArgs], actor: nn.Module, reference: nn.Module, scorer: Scorer, rows: list[Row], tokenizer: Any
) -> Metrics:
    """Score, KL and length on held-out prompts, always with the same noise; keeps a few texts in `samples.jsonl`."""
    args = run.args
    rows = rows[: args.eval_iters * args.rollout_mini_batch_size * run.world_size if args.eval_iters else None]
    noise = torch.rand(len(rows), args.max_new_tokens, generator=run.generator(-1))
    rollout = sample_rollout(run, actor, reference, run.shard(rows), run.shard(noise), tokenizer)
    scores = score(rollout, scorer, args)
    kl = ((rollout.logprobs - rollout.ref_logprobs) * rollout.action_mask).sum(1)  # (B,)
    length = (rollout.attention_mask.sum(1) - rollout.prompt_len).float()
    sums = torch.stack([scores.sum(), kl.sum(), length.sum(), rollout.truncated.float().sum()])
    means = (run.sum_over_ranks(sums) / run.total(len(rollout))).tolist()
    texts = zip(rollout.prompt_ids()[:4], rollout.response_ids()[:4], scores.tolist())
    run.log_samples(
        [{"prompt": decode(tokenizer, p), "response": decode(tokenizer, r), "score": s} for p, r, s in texts]
    )
    return dict(zip(("val/score", "val/kl", "val/mean_length", "val/truncated_ratio"), means))


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(PPOArgs, argv)))


if __name__ == "__main__":
    main()
