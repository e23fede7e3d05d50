"""PPO for RLHF (Schulman et al. 2017; Ziegler et al. 2019; Ouyang et al. 2022, step 3).

A rollout samples a response to each prompt. Its reward is the score at the last token minus beta times the KL to the
reference at each token; advantages come from GAE, whitened over the whole rollout and all ranks. Then, for
`--ppo_epochs` passes in mini-batches, with rho_t = pi(y_t) / pi_old(y_t),

    L_policy = -sum_t min(rho_t A_t, clip(rho_t, 1-e, 1+e) A_t) / N                                       (2017, eq. 7)
    L_value  = 1/2 sum_t max((V_t - R_t)^2, (V_old,t + clip(V_t - V_old,t, -e, e) - R_t)^2) / N

With `--teacher_coeff c` L_policy has c times the loss of `lightrlhf.distill` beside it, a divergence from a teacher;
with `--observation_weight w`, w times the mean cross-entropy of observations.

A macro action (MA-RLHF, Chai et al. 2025) is a segment of the response: `--termination_condition` sets where segments
end, `--value_function` how the values of a segment's tokens are reduced to its value. Rewards are summed over a
segment, GAE runs over segments, and each token gets its segment's advantage and return. `--ngram 1`, the default, is
token PPO.

With `--env` or `--tools` a response is an episode of several turns (`generation.episodes`). A turn's reward lies on its
last token, and GAE goes through observations and from row to row; `--termination_condition turn` makes each turn a
macro action. The end of an episode is terminal, unless rewards come with the turns alone and a limit cut it: then GAE
goes on to the value of what the policy would have read next.

Actor and critic have an optimiser each. They are two networks or, with LoRA, adapters and heads on one backbone, which
without the new adapter is the reference and with the reward model's adapter is the scorer. Dropout is off wherever
log-probabilities are stored.

Left out: the pretraining-loss mix (PPO-ptx), value-network warm-up, and rollouts by weights of more than one step ago.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli import groups as flags
from lightrlhf.cli.errors import one_line_errors
from lightrlhf.cli.fields import at_least, between, flag, positive
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Batch, Rollout, inference_batches, response_batch, to_device
from lightrlhf.data.macro_parsers import Parser, check_parser, make_parser, parsed_segments
from lightrlhf.data.rows import Given, Row, load_splits
from lightrlhf.data.scores import Scores
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.envs.episode_sampler import make_sampler
from lightrlhf.generation import observations, rollout_metrics, rollout_sampler
from lightrlhf.maths import macro_actions, ops, sampling_gap
from lightrlhf.models import forward, given, loading, names, probes, sharding
from lightrlhf.models.roles import Policy, ScalarModel, policy_inputs
from lightrlhf.rewards import functions, kl, turns
from lightrlhf.rewards.loading import make_rewards
from lightrlhf.rewards.rewards import Rewards
from lightrlhf.teachers.lesson import Lesson, TaughtBatch, Term, make_teacher, present, teach
from lightrlhf.training.rollout_log import log_rollouts
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.start import begin, check_prompts


@dataclass(frozen=True, kw_only=True)
class PPOArgs(
    flags.FrozenModelsArgs,
    flags.DataSetsArgs,
    flags.EvalArgs,
    flags.StartArgs,
    flags.AuditArgs,
    flags.TeacherTermArgs,
    flags.AheadServerArgs,
    flags.RolloutLogArgs,
    flags.AgentArgs,
    flags.TensorParallelArgs,
):
    """Proximal policy optimisation against a reward model or a reward function."""

    experiment_name: str = "rlhf-ppo"
    """Folder below `log_dir` for the runs of one algorithm."""
    critic_init: Literal["reward", "policy"] | None = flag(
        None, when="reward", needs="rm_experiment_dir", show="rarely"
    )
    """Initial critic. Default: the reward model if there is one, else the policy."""
    share_backbone: bool = flag(True, show="rarely")
    """With `--finetune_mode lora`: share one set of base weights among all roles; not with fsdp or deepspeed."""
    rollout_size: int = at_least(1, 128)
    """Prompts per rollout and device."""
    rollout_mini_batch_size: int = at_least(1, 32, show="rarely")
    """Slots of the generation engine, and the most rows per scoring pass."""
    ppo_epochs: int = at_least(1, 1)
    """Passes over each rollout."""
    max_kl: float | None = positive(None, show="rarely")
    """Stop the update early after a mini-batch whose mean KL to the sampling policy exceeds this."""
    mini_batch_size: int = 32
    """Responses per optimiser step and device."""
    actor_learning_rate: float = positive(1e-6)
    """Peak learning rate of the policy."""
    critic_learning_rate: float = positive(1e-6)
    """Peak learning rate of the critic."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    """Learning-rate schedule of policy and critic, by its name in `transformers.get_scheduler`."""
    log_interval: int = 1
    """Steps between rows of metrics, each the mean over the steps since the previous row."""
    disable_dropout: bool = True
    """Set the probability of every dropout module to 0."""
    init_kl_coeff: float = at_least(0, 0.1)
    """Initial weight of the KL penalty in the reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = flag("k1", show="rarely")
    """Estimator of the KL penalty: k1 unbiased, k2 half the squared log-ratio, k3 unbiased and never negative."""
    adaptive_kl_coeff: bool = flag(False, show="rarely")
    """Adapt the KL weight to keep the KL per response near `target_kl_coeff`."""
    target_kl_coeff: float = positive(6.0, show="rarely")
    """Target KL per response, in nats, of the adaptive controller."""
    clip_coeff: float = positive(0.2)
    """Clip range of the probability ratio and of the value change."""
    vf_coeff: float = at_least(0, 1.0, show="rarely")
    """Weight of the critic's loss."""
    entropy_coeff: float = at_least(0, 0.0, show="rarely")
    """Weight of the entropy bonus in the policy's loss."""
    gae_gamma: float = between(0, 1, 1.0, show="rarely")
    """Discount per token in a macro action, once between two; per turn with `--termination_condition turn`."""
    gae_lambd: float = between(0, 1, 0.95)
    """GAE's lambda: 1 is Monte Carlo, 0 one-step TD."""
    termination_condition: Literal["fixed", "randomized", "parsing", "ppl", "turn"] = "fixed"
    """Where macro actions end: every `ngram` tokens, at random lengths, with a constituent, as perplexity rises, or
    with a turn of an episode."""
    ngram: int = at_least(0, 1)
    """Tokens per macro action for `fixed`: 1 is token PPO, 0 makes the response one macro action."""
    repeat_times: int = at_least(1, 3, needs={"termination_condition": "randomized"}, show="rarely")
    """For `randomized`: macro actions of each length (2, 3, 5, 10) in a response, in random order."""
    parsing_cutoff: int = at_least(1, 5, needs={"termination_condition": "parsing"}, show="rarely")
    """For `parsing`: largest constituent, in tokens, that is one macro action; larger ones are divided."""
    parser: str = flag("textblob", show="rarely")
    """For `parsing`: textblob, benepar:FOLDER, stanza:FOLDER, python (for programs), or `package.module:name`."""
    value_function: Literal["equal", "unit", "position", "position_first", "first"] = flag("equal", show="rarely")
    """Value of a macro action: mean of its tokens' values, plain or weighted to the last or first, or one of these."""
    normalize_rewards: bool = flag(True, show="rarely")
    """Standardise scores by the mean and deviation stored with the reward model."""
    normalize_advantages: bool = flag(True, show="rarely")
    """Whiten advantages over the rollout of all ranks."""
    clip_rewards: bool = flag(True, show="rarely")
    """Clip scores, and rewards of turns, to +-`reward_clip_value`."""
    reward_clip_value: float = positive(5.0, show="rarely")
    """Largest absolute score after normalisation."""
    missing_eos_penalty: float = at_least(0, 0.0, show="rarely")
    """Penalty subtracted from the score of a response without an end token, or of an episode that a limit ended."""

    def _check(self) -> None:
        if self.mini_batch_size > self.rollout_size:
            raise ValueError(
                f"--mini_batch_size {self.mini_batch_size} must not exceed --rollout_size {self.rollout_size}"
            )
        if self.termination_condition == "turn" and not self.plays_episodes:
            raise ValueError("--termination_condition turn needs episodes, of --env, --tools or --mcp")
        if self.termination_condition == "parsing":
            check_parser(self.parser)

    @property
    def num_lengths(self) -> int:
        """Random lengths of a response's macro actions."""
        return self.repeat_times * len(macro_actions.RANDOM_LENGTHS)


@dataclass(kw_only=True)
class PPOBatch(TaughtBatch):
    """A rollout as the update needs it; all (B, T-1), 0 off actions."""

    logprobs: Tensor  # under the policy before the update
    values: Tensor
    advantages: Tensor
    returns: Tensor
    segments: Tensor  # int64, number of each action's macro action in its row, -1 off actions
    correction: Tensor | None = None  # importance weights of the gap between sampler and trainer; None is 1

    @property
    def num_segments(self) -> int:
        """Number of macro actions of all rows."""
        return int(macro_actions.segment_mask(self.segments).sum())


def train(
    args: PPOArgs,
    *,
    policy: PreTrainedModel | Policy | None = None,
    teacher: PreTrainedModel | Policy | None = None,
    tokenizer: Tokenizer | None = None,
    prompts: Given | None = None,
    reward: functions.RewardFunctions | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by PPO; returns the experiment dir. Objects given here replace what the flags would load.

    policy, teacher: causal language models of transformers, the first trained in place; prompts: see `data.rows`;
    reward: see howto/rewards.md; on_step(step, metrics): called where those are logged, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    objects = {"policy": policy, "teacher": teacher, "tokenizer": tokenizer, "prompts": prompts, "reward": reward}
    load = partial(load_splits, "prompts")
    run, start = begin(args, PPOArgs, "ppo", load, load_actor, check_prompts, objects, on_step)
    reference = run.freeze(start.policy.reference())
    rewards = make_rewards(args, run, reward, backbone=start.policy, keeps_infinite=args.clip_rewards)
    expert = make_teacher(teacher, run, start.policy, start.tokenizer)
    parser = make_parser(args.parser) if args.termination_condition == "parsing" else None
    critic = load_critic(args, start.tokenizer, start.policy, is_given=policy is not None)
    num_steps = run.order.num_steps(start.rows, args.rollout_size)
    num_updates = num_steps * args.ppo_epochs * math.ceil(args.rollout_size / args.mini_batch_size)
    model = run.setup("policy", start.policy, args.actor_learning_rate, num_updates)
    value_model = run.setup("critic", critic, args.critic_learning_rate, num_updates)
    init_kl = start.resumed.get("kl_coeff", args.init_kl_coeff) if args.adaptive_kl_coeff else args.init_kl_coeff
    kl_coeff = kl.AdaptiveKL(init_kl, args.target_kl_coeff) if args.adaptive_kl_coeff else kl.FixedKL(init_kl)
    sampler = make_sampler(run, model, reference, start, rewards)
    run.keep(start.policy, start.tokenizer, lambda: {"kl_coeff": kl_coeff.value, **rewards.state()})
    measure = partial(evaluate, run, sampler, rewards, start.held_out) if start.held_out else None

    for step in run.steps(num_steps):
        with run.phase("rollout"):
            rollout = sampler.sample(step)  # a response to each prompt, (B, T)
            num_samples = int(run.ranks.total(int(rollout.ends().sum())))  # of all ranks
        with run.phase("score"):
            scores, by_turn = bound_scores(args, rollout, rewards(rollout))  # (B,) each, the audit, and (B, turns)
            scored = rollout.masked(~scores.total.isnan())  # without a score, a response has no actions
            values = predict_values(value_model, scored, args.rollout_mini_batch_size)  # (B, T-1)
            beyond = predict_beyond(args, value_model, scored, scores)  # (B,), after the last action
            by_token = kl.token_rewards(scored, by_turn, kl_coeff.value, args.kl_estimator)  # rewards, (B, T-1)
            noise = run.ranks.noise(num_samples, args.num_lengths, step, -1)  # (B, L), for random lengths
            segments, parse_failures = segment_responses(args, scored, noise, parser)  # (B, T-1)
            gap = rollout.sampling_gap, rollout.action_mask, args.sampling_correction, args.sampling_bound
            correction = sampling_gap.importance_weights(*gap)  # (B, T-1); None where this process samples
            batch = estimate_advantages(args, scored, by_token, values, segments, correction, run.ranks.sum, beyond)
        log_rollouts(run, rollout, scores, batch.advantages, values)
        with run.phase("update"):
            lesson = teach(run, model, expert, scored, batch, across=True) if expert else None
            metrics = update(run, model, value_model, batch, step, lesson)
        metrics |= rollout_metrics.rollout_metrics(run, rollout, scores.total, by_token)
        metrics |= rollout_metrics.reward_metrics(run, scores.select(rollout.ends()), rewards.audit)
        metrics |= macro_metrics(run, batch, parse_failures) | {"objective/kl_coeff": kl_coeff.value}
        if metrics["objective/valid_ratio"]:  # else there was no reward to weigh the KL against
            kl_coeff.update(metrics["objective/kl"], num_samples)
        run.end_step(metrics, rollout, measure)
    return run.finish()


def load_actor(start: PreTrainedModel | Policy | None, args: PPOArgs, tokenizer: Tokenizer) -> Policy:
    """The policy that is trained; with LoRA critic, reference and reward model may share its backbone."""
    shares = args.share_backbone and args.strategy not in ("fsdp", "deepspeed")
    return given.load_start(start, args, tokenizer, shares)


def load_critic(args: PPOArgs, tokenizer: Tokenizer, policy: Policy, is_given: bool = False) -> ScalarModel:
    """A critic that starts from the reward model, head included, or from the policy with a new head."""
    reward_model = args.rm_experiment_dir if args.critic_init != "policy" else None
    if is_given and not reward_model:
        critic = given.critic_from(policy, args, args.seed)
    else:
        source, flag = (reward_model, "--rm_experiment_dir") if reward_model else names.starting_model(args)
        critic = loading.load_scalar(source, args, tokenizer, args.seed, flag, backbone=policy)
    probes.enable_packing(critic)
    return critic


# ------------------------------------------------------------------------------------------------------ the rollout
def bound_scores(args: PPOArgs, rollout: Rollout, scores: Scores) -> tuple[Scores, Tensor]:
    """Scores with their totals (B,), and the rewards of turns (B, turns) that these are made of; NaN stays NaN.

    Rewards are clipped, the last turn's is less the penalty for a missing end. A response is one turn.
    """
    limit = args.reward_clip_value if args.clip_rewards else None
    by_turn = turns.turn_rewards(rollout, scores, scores.total, args.max_turns)
    unended = turns.last_turns(rollout, args.max_turns) & turns.unfinished(rollout)[:, None]  # (B, turns)
    by_turn = kl.bound_scores(by_turn, unended, limit, args.missing_eos_penalty)
    return replace(scores, total=by_turn.sum(1)), by_turn


def predict_values(critic: nn.Module, rollout: Batch, batch_size: int) -> Tensor:
    """Values of the states in which actions were taken, dropout off: (B, T-1), 0 off actions."""
    device = next(critic.parameters()).device
    values = torch.zeros(rollout.action_mask.shape, device=device)
    with forward.inference(critic), sharding.gather_shards(critic):
        for rows in inference_batches(rollout.attention_mask.sum(1), batch_size, device):
            part = rollout.select(rows)
            there = to_device(rows, device)
            values[there, : part.action_mask.shape[1]] = critic(part.input_ids, part.attention_mask)[:, :-1]
    return torch.where(rollout.action_mask, values.cpu(), 0.0)


def predict_beyond(args: PPOArgs, critic: nn.Module, rollout: Rollout, scores: Scores) -> Tensor | None:
    """Values (B,) of what episodes that a limit cut would have read next, 0 elsewhere; None: all ends are terminal.

    Only where rewards come with turns alone: other rewards are of the outcome.
    """
    if not args.plays_episodes or scores.weights[:-1].any():
        return None
    rows = [i for i, ids in enumerate(rollout.next_prompts) if ids]
    cut = response_batch([rollout.next_prompts[i] for i in rows], [[0]] * len(rows), 0)  # any action
    found = predict_values(critic, cut, args.rollout_mini_batch_size).sum(1)  # (b,)
    return torch.zeros(len(rollout)).index_put((torch.tensor(rows, dtype=torch.int64),), found)


def segment_responses(args: PPOArgs, rollout: Rollout, noise: Tensor, parser: Parser | None) -> tuple[Tensor, int]:
    """Macro actions of each response, (B, T-1) as in `maths/macro_actions.py`, and how many could not be parsed.

    noise: uniform numbers, (B, L), for random lengths; see `macro_actions.random_segments`.
    """
    if parser is not None:
        return parsed_segments(rollout, parser, args.parsing_cutoff, args.ngram)
    if args.termination_condition == "turn":
        assert rollout.turn is not None
        return macro_actions.turn_segments(rollout.action_mask, rollout.turn), 0
    if args.termination_condition == "ppl":
        return macro_actions.perplexity(rollout.action_mask, rollout.ref_logprobs), 0
    if args.termination_condition == "randomized":
        return macro_actions.random_segments(rollout.action_mask, noise), 0
    return macro_actions.fixed_segments(rollout.action_mask, args.ngram), 0


def estimate_advantages(
    args: PPOArgs,
    rollout: Rollout,
    by_token: Tensor,
    values: Tensor,
    segments: Tensor,
    correction: Tensor | None = None,
    sum_over_ranks: ops.SumOverRanks | None = None,
    beyond: Tensor | None = None,
) -> PPOBatch:
    """GAE over the macro actions of each response (Chai et al. 2025, sec. 3), whitened over all rows and ranks.

    by_token: rewards; values, segments, correction: all (B, T-1); beyond: values after the last action, (B,).
    """
    within = 1.0 if args.termination_condition == "turn" else args.gae_gamma
    macro_rewards = macro_actions.discounted_sum(by_token, segments, within)  # (B, M)
    macro_values = macro_actions.VALUE_FUNCTIONS[args.value_function](values, segments)  # (B, M)
    mask = macro_actions.segment_mask(segments)  # (B, M) bool
    discounts = args.gae_gamma, args.gae_lambd
    by_segment = ops.gae_over_rows(macro_rewards, macro_values, mask, rollout.episode, *discounts, beyond)  # (B, M)
    advantages, returns = (macro_actions.broadcast(part, segments) for part in by_segment)  # (B, T-1) each
    if args.normalize_advantages:
        advantages = ops.whiten(advantages, rollout.action_mask, sum_over_ranks=sum_over_ranks)
    columns = {"advantages": advantages, "returns": returns, "segments": segments, "correction": correction}
    return rollout.extend(PPOBatch, values=values, **columns)


# ------------------------------------------------------------------------------------------------------- the update
def value_loss(values: Tensor, batch: PPOBatch, clip_coeff: float) -> Tensor:
    """Half the sum over actions of the larger of plain and clipped squared error, a scalar; values: (B, T-1)."""
    clipped = batch.values + (values - batch.values).clamp(-clip_coeff, clip_coeff)  # (B, T-1)
    error = torch.maximum((values - batch.returns).pow(2), (clipped - batch.returns).pow(2))
    return 0.5 * error[batch.actions].sum()


def minibatches(batch: PPOBatch, size: int, num_episodes: int, generator: torch.Generator) -> Iterator[PPOBatch]:
    """Mini-batches of about `size` whole episodes, shuffled; num_episodes, of the fullest rank, fixes how many."""
    last = batch.last_rows()  # (B,)
    ends = batch.ends().nonzero()[:, 0]  # (E,)
    place = torch.randperm(len(ends), generator=generator).argsort()  # (E,)
    order = place[torch.searchsorted(ends, last)].argsort(stable=True)  # (B,)
    return batch.parts(order, math.ceil(num_episodes / size))


def update(
    run: Run[PPOArgs], actor: nn.Module, critic: nn.Module, batch: PPOBatch, step: int, lesson: Lesson | None = None
) -> Metrics:
    """All optimiser steps of one rollout, or those until `--max_kl` is exceeded; returns means over them."""
    args = run.args
    num_episodes = math.ceil(run.ranks.total(int(batch.ends().sum())) / run.ranks.world_size)
    parts = (
        minibatch
        for epoch in range(args.ppo_epochs)
        for minibatch in minibatches(batch, args.mini_batch_size, num_episodes, run.ranks.generator(step, epoch))
    )
    metrics = []
    with present(lesson):
        for minibatch in parts:
            metrics.append(update_minibatch(run, actor, critic, minibatch, lesson))
            approxkl = metrics[-1]["policy/approxkl"]  # over all ranks, so they all stop here
            if args.max_kl is not None and approxkl > args.max_kl:
                break
    means = {name: sum(row[name] for row in metrics) / len(metrics) for name in metrics[0]}
    run.learners.skip_updates(args.ppo_epochs * math.ceil(num_episodes / args.mini_batch_size) - len(metrics))
    return means | {"policy/updates": len(metrics)}


def update_minibatch(
    run: Run[PPOArgs], actor: nn.Module, critic: nn.Module, minibatch: PPOBatch, lesson: Lesson | None = None
) -> Metrics:
    """One optimiser step of actor and critic; the gradient does not depend on the size of micro-batches."""
    args = run.args
    count = max(run.ranks.total(minibatch.num_actions), 1.0)
    term = Term(lesson, minibatch) if lesson else observations.Term(run, minibatch) if args.observation_weight else None
    sums = torch.zeros(5, device=run.device)
    options = {"temperature": args.temperature, "with_entropy": args.entropy_coeff > 0}
    micros = run.ranks.pad_passes(minibatch.by_length(args.micro_batch_size), num_models=2)
    for i, rows in enumerate(micros):
        micro = minibatch.select(rows).to(run.device)
        actions, more = micro.actions, i + 1 < len(micros)
        with run.accumulate(actor, enabled=more):
            stats = term.read(actor, micro, **options) if term else actor(**policy_inputs(micro), **options)
            advantages = micro.advantages if micro.correction is None else micro.advantages * micro.correction
            terms = (stats.logprobs, micro.logprobs, advantages)  # (b, T-1) each
            loss = ops.policy_loss(*terms, actions, args.clip_coeff, stats.entropy, args.entropy_coeff)
            if term:
                loss = loss + term.coeff * term.total * (count / term.count)
            run.backward(loss / count, micro.on_host.row)
        with run.accumulate(critic, enabled=more):
            values = critic(micro.on_host.input_ids, micro.on_host.attention_mask)[:, :-1]  # (b, T-1)
            critic_loss = value_loss(values, micro, args.clip_coeff)
            run.backward(args.vf_coeff * critic_loss / count, micro.on_host.row)
        with torch.no_grad():
            difference = (stats.logprobs - micro.logprobs)[actions]
            ratio = difference.exp()
            outside = ((ratio - 1).abs() > args.clip_coeff).float()
            sums += torch.stack([loss, critic_loss, outside.sum(), (ratio - 1 - difference).sum(), ratio.sum()])
    told = term.metrics() if term else {}
    policy_mean, value_mean, clipfrac, approxkl, ratio_mean = (run.ranks.sum(sums) / count).tolist()
    return {
        "policy/loss": policy_mean,
        "policy/clipfrac": clipfrac,
        "policy/approxkl": approxkl,
        "policy/ratio": ratio_mean,
        **told,
        "policy/grad_norm": run.optimize("policy"),
        "value/loss": value_mean,
        "value/grad_norm": run.optimize("critic"),
    }


# ------------------------------------------------------------------------------------------ metrics and evaluation
def macro_metrics(run: Run[PPOArgs], batch: PPOBatch, parse_failures: int) -> Metrics:
    """Mean length of macro actions, share of scored responses not parsed, and explained variance, over all ranks."""
    num_scored = int(batch.action_mask.any(1).sum())
    variance = ops.explained_variance(batch.values, batch.returns, batch.action_mask, run.ranks.sum)
    return {
        "completions/macro_length": run.ranks.total(batch.num_actions) / max(run.ranks.total(batch.num_segments), 1.0),
        "completions/parse_failures": run.ranks.total(parse_failures) / max(run.ranks.total(num_scored), 1.0),
        "value/explained_variance": float(variance),
    }


@torch.no_grad()
def evaluate(
    run: Run[PPOArgs], sampler: rollout_sampler.RolloutSampler, rewards: Rewards, rows: Sequence[Row]
) -> Metrics:
    """Score, KL and length on held-out prompts, with the same noise each time."""
    rollout = sampler.sample_held_out(rows)
    scores, _ = bound_scores(run.args, rollout, rewards(rollout, audited=False))
    return rollout_metrics.evaluation_metrics(run, rollout, scores.total)


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(PPOArgs, argv)))


if __name__ == "__main__":
    main()
