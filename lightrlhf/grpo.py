"""GRPO and its relatives: policy gradients without a critic (Shao et al. 2024, 2402.03300).

K responses to a prompt are each other's baseline. With r_i the score of response i, m and s the mean and deviation of
the scores of its group, and rho_t = pi(y_t) / pi_old(y_t), a step minimises

    L = sum_i sum_t w_it max(-rho_t A_i, -clip(rho_t, 1 - e_low, 1 + e_high) A_i)         A_i = (r_i - m) / s

Switches make the relatives of it; examples/configs/grpo has them by name:

    --advantage      std (above), mean (Dr. GRPO), batch_std, rloo, maxrl, or a function package.module:name of a
                     group's scores; none with --normalize_advantages: REINFORCE++
    --loss_type      clip (above), cispo, sapo, reinforce, or a function package.module:name
    --importance_sampling_level   token, or sequence (GSPO)
    --aggregation    w_it: of N tokens token 1/N, of B responses of T_i tokens sequence 1/(B T_i), sum 1/B,
                     constant 1/(B most tokens of one), of P prompts of N_p tokens prompt 1/(P N_p)
    --kl_placement   reward (k1, beside the score), or loss (rho (log pi - log pi_ref)^2 / 2)
    --entropy_coeff  c: less c times the sum of w_it H(pi(. | s_t))
    --teacher_coeff  c: plus c times the loss of `lightrlhf.distill`, a divergence from a teacher
    --observation_weight          w: plus w times the mean cross-entropy of an episode's observations

All counts are over micro-batches and ranks, and a baseline is the whole group's wherever its rows are. Responses
without a score are in no baseline and not in the loss; groups of equal scores have no advantage; both are counted.
`--resample_rounds` replaces such groups by other prompts (DAPO, 2503.14476, section 3.2), `--curriculum_score` draws
them less (`training.pass_rates`). The prompt of a group is read once. Dropout is off wherever log-probabilities are
stored. With `--env` or `--tools` a response is an episode of several turns, see `generation.episodes`.

Left out: a replay of earlier groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli import groups as flags
from lightrlhf.cli.errors import RunFailure, one_line_errors
from lightrlhf.cli.fields import above, at_least, flag, positive
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Rollout, joined, to_device
from lightrlhf.data.rows import Given, Row, load_splits
from lightrlhf.data.scores import Scores
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.envs.episode_sampler import make_sampler
from lightrlhf.generation import observations, rollout_metrics, rollout_sampler
from lightrlhf.maths import groups, ops, policy_losses, sampling_gap
from lightrlhf.models.given import load_start
from lightrlhf.models.roles import Policy, policy_inputs
from lightrlhf.rewards import functions, kl, loading, own_functions, turns
from lightrlhf.rewards.rewards import Rewards
from lightrlhf.teachers.lesson import Lesson, TaughtBatch, Term, make_teacher, present, teach
from lightrlhf.training.ranks import LocalRanks, Ranks
from lightrlhf.training.rollout_log import log_rollouts
from lightrlhf.training.run import Metrics, OnStep, Run
from lightrlhf.training.start import begin, check_prompts

FULL_TUNING_RATE = 5e-6  # with LoRA a learning rate below is too low: 10 times as much as for full tuning is usual


@dataclass(frozen=True, kw_only=True)
class GRPOArgs(
    flags.FrozenModelsArgs,
    flags.DrawnDataArgs,
    flags.EvalArgs,
    flags.StartArgs,
    flags.AuditArgs,
    flags.TeacherTermArgs,
    flags.AheadServerArgs,
    flags.RolloutLogArgs,
    flags.GroupAgentArgs,
    flags.TensorParallelArgs,
):
    """Group relative policy optimisation against reward functions or a reward model."""

    experiment_name: str = "rlhf-grpo"
    """Folder below `log_dir` for the runs of one algorithm."""
    num_generations: int = at_least(1, 8)
    """Responses per prompt (K)."""
    rollout_size: int = at_least(1, 16)
    """Prompts per rollout and device."""
    rollout_mini_batch_size: int = at_least(1, 32, show="rarely")
    """Slots of the generation engine, and the most rows per scoring pass."""
    ppo_epochs: int = at_least(1, 1, show="rarely")
    """Passes over each rollout."""
    mini_batch_size: int = 128
    """Responses per optimiser step and device."""
    learning_rate: float = positive(1e-6)
    """Peak learning rate; with LoRA take about ten times the rate of full tuning."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant_with_warmup"
    """Learning-rate schedule, by its name in `transformers.get_scheduler`."""
    log_interval: int = 1
    """Steps between rows of metrics, each the mean over the steps since the previous row."""
    disable_dropout: bool = True
    """Set the probability of every dropout module to 0."""
    advantage: str = flag(
        "std",
        check=partial(own_functions.check_known_or_own, groups.ADVANTAGES),
        when="maxrl",
        excludes={"normalize_each_reward": True},
    )
    """std, mean, batch_std, rloo, maxrl, none, or a function `package.module:name` of a group's scores."""
    normalize_advantages: bool = flag(False, show="rarely")
    """Whiten advantages over all tokens of the rollout of all ranks."""
    normalize_rewards: bool = flag(False, show="rarely")
    """Standardise a reward model's scores by the mean and deviation stored with it."""
    normalize_each_reward: bool = flag(False, show="rarely")
    """Standardise each reward within its group before summing (GDPO, with `--advantage batch_std`)."""
    loss_type: str = flag("clip", check=partial(own_functions.check_known_or_own, policy_losses.LOSSES))
    """clip, cispo, sapo, reinforce, or a function `package.module:name`."""
    importance_sampling_level: Literal["token", "sequence"] = flag("token", excludes={"loss_type": "reinforce"})
    """Importance ratio: per token, or its geometric mean over the response, or over each turn (GSPO)."""
    aggregation: Literal["token", "sequence", "sum", "constant", "prompt"] = "token"
    """How token losses are averaged: equal weight per token, per response or per prompt."""
    clip_coeff: float = positive(0.2)
    """Clip the ratio below 1 - `clip_coeff`; 1 or more means no lower bound."""
    clip_coeff_high: float | None = positive(None, show="rarely")
    """Clip the ratio above 1 + `clip_coeff_high`. Default: `clip_coeff`."""
    dual_clip: float | None = above(1, None, remedy="3 is usual", needs={"loss_type": "clip"}, show="rarely")
    """With `clip`: upper bound of the ratio for negative advantages, such as 3 (dual clip)."""
    entropy_coeff: float = at_least(0, 0.0, show="rarely")
    """Weight of the entropy bonus in the loss."""
    init_kl_coeff: float = at_least(0, 0.0)
    """Weight of the KL penalty; 0 loads no reference model and logs no KL."""
    kl_placement: Literal["reward", "loss"] = flag("reward", needs="init_kl_coeff", show="rarely")
    """Where the KL enters: the reward of a response, or the loss of each token."""
    missing_eos_penalty: float = at_least(0, 0.0, show="rarely")
    """Penalty subtracted from the score of a response without an end token, or of an episode that a limit ended."""
    overlong_buffer: int = at_least(0, 0, show="rarely")
    """The length penalty grows from 0 to `overlong_penalty` over this many tokens before `max_new_tokens` (DAPO)."""
    overlong_penalty: float = at_least(0, 1.0, show="rarely")
    """Penalty of a response of length `max_new_tokens`, with `overlong_buffer`."""
    overlong_filter: bool = flag(False, show="rarely")
    """Keep truncated responses and episodes out of the loss; they stay in their group's baseline."""
    sibling_score: float | None = flag(None, needs="teacher_coeff", show="rarely")
    """Score from which another response of the group is shown to the teacher, as a hint behind the prompt (SDPO)."""
    resample_rounds: int = at_least(0, 0, excludes={"data_weights": ..., "num_generations": 1}, show="rarely")
    """Rounds of replacing groups with equal scores by other prompts (DAPO's dynamic sampling)."""

    def _check(self) -> None:
        if self.num_generations < 2 and self.advantage != "none":
            raise ValueError(
                f"--advantage {self.advantage} compares the responses to a prompt; give --num_generations above 1, "
                "or --advantage none"
            )
        if self.overlong_buffer >= self.max_new_tokens:
            raise ValueError(
                f"--overlong_buffer {self.overlong_buffer} must be below --max_new_tokens {self.max_new_tokens}"
            )
        responses = self.rollout_size * self.num_generations
        if self.mini_batch_size > responses:
            raise ValueError(
                f"--mini_batch_size {self.mini_batch_size} must not exceed the responses of a rollout, --rollout_size "
                f"{self.rollout_size} times --num_generations {self.num_generations}; try {responses}"
            )

    def _check_given(self, given: Mapping[str, object]) -> None:
        self.load_loss()  # so that a wrong one is refused before a model is loaded
        if self.advantage not in groups.ADVANTAGES:
            own_functions.load_own_advantage(self.advantage, self.num_generations)

    @property
    def shows_siblings(self) -> bool:
        """Whether the teacher reads other responses to the prompt."""
        return self.sibling_score is not None

    @property
    def compares_responses(self) -> bool:
        """Whether a response has others to be compared with."""
        return self.num_generations > 1

    def load_loss(self) -> policy_losses.TokenLoss:
        """The loss of `--loss_type`. Raises: UsageError when a function cannot be imported or called."""
        if self.loss_type not in policy_losses.LOSSES:
            return own_functions.load_own_loss(self.loss_type)
        return policy_losses.make_loss(self.loss_type, self.clip_coeff, self.upper_range, self.dual_clip)

    @property
    def upper_range(self) -> float:
        """Upper clip range of the ratio."""
        return self.clip_coeff if self.clip_coeff_high is None else self.clip_coeff_high


@dataclass(kw_only=True)
class GRPOBatch(TaughtBatch):
    """A rollout as the update needs it; all (B, T-1), 0 off actions."""

    group: Tensor  # (B,) int64
    num_groups: int  # on all ranks
    turn: Tensor | None = None  # int64, see `Rollout`
    logprobs: Tensor  # under the policy before the update
    ref_logprobs: Tensor
    advantages: Tensor
    correction: Tensor | None = None  # importance weights of the gap between sampler and trainer; None is 1


def train(
    args: GRPOArgs,
    *,
    policy: PreTrainedModel | Policy | None = None,
    teacher: PreTrainedModel | Policy | None = None,
    tokenizer: Tokenizer | None = None,
    prompts: Given | None = None,
    reward: functions.RewardFunctions | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by GRPO or a relative of it; returns the experiment dir. Objects given here replace what flags would load.

    policy, teacher: causal language models of transformers, the first trained in place; prompts: see `data.rows`;
    reward: a function as in howto/rewards.md, or several; on_step: called with (step, metrics) where metrics are
    logged, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    given = {"policy": policy, "teacher": teacher, "tokenizer": tokenizer, "prompts": prompts, "reward": reward}
    load = partial(load_splits, "prompts")
    run, start = begin(args, GRPOArgs, "grpo", load, load_actor, check_prompts, given, on_step)
    loss = args.load_loss()
    reference = run.freeze(start.policy.reference()) if args.init_kl_coeff else None
    rewards = loading.make_rewards(args, run, reward, backbone=start.policy)
    expert = make_teacher(teacher, run, start.policy, start.tokenizer)
    warn_of_low_rate(run)
    num_steps = run.order.num_steps(start.rows, args.rollout_size)
    per_epoch = math.ceil(args.rollout_size * args.num_generations / args.mini_batch_size)  # updates
    model = run.setup("policy", start.policy, args.learning_rate, num_steps * args.ppo_epochs * per_epoch)
    sampler = make_sampler(run, model, reference, start, rewards, responses=args.num_generations)
    run.keep(start.policy, start.tokenizer, lambda: rewards.state() | sampler.state())
    measure = partial(evaluate, run, sampler, rewards, start.held_out) if start.held_out else None

    for step in run.steps(num_steps):
        with run.phase("rollout"):
            rollout = sampler.sample(step)  # K responses to each prompt, (B, T)
        with run.phase("score"):
            scores = rewards(rollout)  # (B,) by each reward, their weights, and the audit
        metrics = group_metrics(run, rollout, scores, rewards) | sampler.note(rollout, scores)  # before any is replaced
        with run.phase("resample"):  # DAPO's dynamic sampling
            for number in range(1, args.resample_rounds + 1):
                equal = find_equal_groups(run, rollout, scores)  # numbers of groups, the same on all ranks
                if not len(equal):
                    break
                fresh = sampler.replace(step, number, equal)  # other prompts for these groups
                keep = ~torch.isin(rollout.group, equal)  # (B,)
                metrics["sampling/prompts"] += len(equal)
                metrics["sampling/wasted_tokens"] += run.ranks.total(float(rollout.action_mask[~keep].sum()))
                scores = scores.replaced(keep, rewards(fresh))
                rollout = joined([rollout.select(keep), fresh])
        with run.phase("update"):
            gap = rollout.sampling_gap, rollout.action_mask, args.sampling_correction, args.sampling_bound
            correction = sampling_gap.importance_weights(*gap)  # (B, T-1); None where this process samples
            batch = estimate_advantages(args, rollout, scores, correction, run.ranks)
            log_rollouts(run, rollout, scores, batch.advantages)
            lesson = teach(run, model, expert, rollout, batch, scores=scores.total) if expert else None
            metrics |= update(run, model, batch, loss, step, lesson) | rollout_metrics.failure_metrics(run, scores)
        run.end_step(metrics, rollout, measure)
    return run.finish()


def load_actor(given: PreTrainedModel | Policy | None, args: GRPOArgs, tokenizer: Tokenizer) -> Policy:
    """The policy that is trained; with LoRA a reward model may share its backbone."""
    return load_start(given, args, tokenizer, shares=args.strategy not in ("fsdp", "deepspeed"))


def warn_of_low_rate(run: Run[GRPOArgs]) -> None:
    """Warn of a learning rate at which adapters hardly learn."""
    if run.args.finetune_mode == "lora" and run.args.learning_rate <= FULL_TUNING_RATE:
        run.print0(
            f"warning: --learning_rate {run.args.learning_rate} suits full fine-tuning; adapters need about "
            "ten times as much, such as 1e-5 to 1e-4"
        )


# ------------------------------------------------------------------------------------------- scores and advantages
def find_equal_groups(run: Run[GRPOArgs], rollout: Rollout, scores: Scores) -> Tensor:
    """Numbers of the groups without two different scores, before penalties of length, (G,); the same on all ranks."""
    total = combine_scores(run.args, rollout, scores, run.ranks.sum)  # (B,)
    moments = groups.group_moments(rollout.once(total), rollout.group, rollout.num_groups, run.ranks.sum)
    differ = torch.zeros(rollout.num_groups, dtype=torch.int64)
    differ.index_add_(0, rollout.group, moments.informative.to(differ))
    return (run.ranks.sum(differ) == 0).nonzero()[:, 0]


def penalize_length(args: GRPOArgs, rollout: Rollout, scores: Tensor) -> Tensor:
    """Scores (B,) less the penalties of length; NaN stays NaN."""
    scores = kl.bound_scores(scores, turns.unfinished(rollout), None, args.missing_eos_penalty)
    if not args.overlong_buffer:
        return scores
    over = kl.overlong(rollout.action_mask.sum(1), args.max_new_tokens, args.overlong_buffer)  # (B,)
    return scores - args.overlong_penalty * over


def combine_scores(
    args: GRPOArgs, rollout: Rollout, scores: Scores, sum_over_ranks: ops.SumOverRanks | None = None
) -> Tensor:
    """The weighted sum of the rewards, (B,), of each first made mean 0 and deviation 1 in its group on request (GDPO).

    NaN where a response is not scored, or by a number beyond float32; none of its rewards is in a mean or deviation.
    """
    total = torch.where(scores.total.isfinite(), scores.total, math.nan)
    if not args.normalize_each_reward:
        return total
    parts = []
    for part, weight in zip(scores.parts.T, scores.weights):
        known = torch.where(part.isfinite() & ~total.isnan(), part, math.nan)  # (B,); one of weight 0 may be infinite
        moments = groups.group_moments(rollout.once(known), rollout.group, rollout.num_groups, sum_over_ranks)
        parts.append(weight * groups.group_advantages(known, moments, groups.standardise))
    return torch.where(total.isnan(), total, torch.stack(parts).sum(0).to(total.dtype))


def estimate_advantages(
    args: GRPOArgs, rollout: Rollout, scores: Scores, correction: Tensor | None = None, ranks: Ranks | None = None
) -> GRPOBatch:
    """Advantages of a rollout's actions from its scores and, with `--kl_placement reward`, its KL.

    The KL of a response gets a baseline as its score does, and is never divided by the scores' deviation. Without a
    baseline (REINFORCE++) each action gets the reward to go, through tokens that are not actions.
    """
    ranks = ranks or LocalRanks()

    def advantages_of(values: Tensor, name: str) -> Tensor:
        """(B,), NaN where missing -> (B,); an episode counts once, whatever its rows."""
        if name not in groups.ADVANTAGES:
            return own_functions.own_advantages(name, args.num_generations, values, rollout, ranks)
        moments = groups.group_moments(rollout.once(values), rollout.group, rollout.num_groups, ranks.sum)
        return groups.group_advantages(values, moments, groups.ADVANTAGES[name])

    total = penalize_length(args, rollout, combine_scores(args, rollout, scores, ranks.sum))  # (B,)
    if args.advantage == "maxrl" and bool((total < 0).any()):
        raise RunFailure(
            f"--advantage maxrl divides by the mean score of a prompt, but a score, less penalties, is "
            f"{float(total.nan_to_num().min())}; give scores of at least 0, or --advantage mean"
        )
    scored = rollout.masked(~total.isnan())
    kl_coeff = args.init_kl_coeff if args.kl_placement == "reward" else 0.0
    if args.advantage == "none":
        by_turn = turns.turn_rewards(rollout, scores, total, args.max_turns, args.credit)  # (B, turns)
        by_token = kl.token_rewards(scored, by_turn, kl_coeff)  # (B, T-1)
        walk = scored.action_mask, rollout.episode, 1.0, 1.0
        advantages = ops.gae_over_rows(by_token, torch.zeros_like(by_token), *walk)[0]
    else:
        advantages = advantages_of(total, args.advantage)[:, None]  # (B, 1)
        if args.credit == "turn":
            advantages = turns.advantages(rollout, scores, total, args.advantage, args.max_turns, ranks.sum)  # (B, T-1)
        if kl_coeff:
            baseline = "rloo" if args.advantage == "rloo" else "mean"
            response_kl = torch.where(total.isnan(), total, rollout_metrics.response_kl(rollout))  # (B,)
            advantages = advantages - kl_coeff * advantages_of(response_kl, baseline)[:, None]
        advantages = advantages * scored.action_mask  # (B, T-1)
    if args.normalize_advantages:  # in float64, or equal ones would become noise, which Adam scales up
        exact = advantages.double()
        whitened = ops.whiten(exact, scored.action_mask, sum_over_ranks=ranks.sum)
        advantages = whitened.to(advantages)
    learned = scored.masked(~turns.unfinished(rollout)) if args.overlong_filter else scored
    advantages = torch.where(learned.action_mask, advantages, 0.0)
    return learned.extend(GRPOBatch, advantages=advantages, correction=correction)


# ------------------------------------------------------------------------------------------------------- the update
def update(
    run: Run[GRPOArgs],
    model: nn.Module,
    batch: GRPOBatch,
    loss: policy_losses.TokenLoss,
    step: int,
    lesson: Lesson | None = None,
) -> Metrics:
    """All optimiser steps of one rollout; averages each metric over the mini-batches that have it."""
    args = run.args
    num_episodes = math.ceil(run.ranks.total(int(batch.ends().sum())) / run.ranks.world_size)
    parts = (
        minibatch
        for epoch in range(args.ppo_epochs)
        for minibatch in minibatches(batch, args.mini_batch_size, num_episodes, run.ranks.generator(step, epoch, -2))
    )
    with present(lesson):
        metrics = [update_minibatch(run, model, minibatch, loss, lesson) for minibatch in parts]
    known = {name: [row[name] for row in metrics if not math.isnan(row[name])] for name in metrics[0]}
    return {name: sum(values) / len(values) if values else math.nan for name, values in known.items()}


def minibatches(batch: GRPOBatch, size: int, num_episodes: int, generator: torch.Generator) -> Iterator[GRPOBatch]:
    """Mini-batches of about `size` whole episodes, groups shuffled; num_episodes: the mean of ranks, fixes how many."""
    place = torch.randperm(batch.num_groups, generator=generator)  # (G,)
    return batch.parts(place[batch.group].argsort(stable=True), math.ceil(num_episodes / size))


def update_minibatch(
    run: Run[GRPOArgs],
    model: nn.Module,
    minibatch: GRPOBatch,
    loss: policy_losses.TokenLoss,
    lesson: Lesson | None = None,
) -> Metrics:
    """One optimiser step; the gradient does not depend on how micro-batches are cut.

    Loss weights include the importance weights of sampled tokens; entropy weights do not.
    """
    args, kl_coeff = run.args, run.args.init_kl_coeff if run.args.kl_placement == "loss" else 0.0
    counted = (minibatch.action_mask, minibatch.group, minibatch.num_groups)
    length, episode = args.longest_sample, minibatch.episode
    entropy_weights = policy_losses.token_weights(*counted, args.aggregation, length, run.ranks.sum, episode)
    weights = entropy_weights if minibatch.correction is None else entropy_weights * minibatch.correction  # (b, T-1)
    term = Term(lesson, minibatch) if lesson else observations.Term(run, minibatch) if args.observation_weight else None
    if args.loss_type in policy_losses.LOSSES and not (kl_coeff or args.entropy_coeff or term):
        learned = (minibatch.advantages != 0).any(1).nonzero()[:, 0]  # a response without an advantage has no gradient
        minibatch, weights = minibatch.select(learned), weights[learned]
    micros, sums = run.ranks.pad_passes(minibatch.by_group(args.micro_batch_size)), torch.zeros(5, device=run.device)
    for i, rows in enumerate(micros):
        micro = minibatch.select(rows).to(run.device)
        mask, actions = micro.action_mask, micro.actions
        weight, entropy_weight = (to_device(w[rows, : mask.shape[1]], run.device) for w in (weights, entropy_weights))
        with run.accumulate(model, enabled=i + 1 < len(micros)):
            options = {"temperature": args.temperature, "with_entropy": args.entropy_coeff > 0}
            stats = term.read(model, micro, **options) if term else model(**policy_inputs(micro), **options)
            logprobs = stats.logprobs  # (b, T-1)
            difference = torch.where(mask, logprobs - micro.logprobs, 0.0)  # (b, T-1)
            is_sequence = args.importance_sampling_level == "sequence"
            log_ratio = policy_losses.sequence_log_ratio(difference, mask, micro.turn) if is_sequence else difference
            losses = loss(logprobs, log_ratio, micro.advantages, mask)
            if kl_coeff:
                losses = losses + kl_coeff * policy_losses.kl_loss(logprobs, micro.ref_logprobs, difference)
            total = (weight * losses)[actions].sum()
            if args.entropy_coeff:
                bonus = policy_losses.entropy_bonus(stats.entropy, entropy_weight, actions)
                total = total - args.entropy_coeff * bonus
            if term:
                total = total + term.coeff * term.total / term.count
            run.backward(total, micro.on_host.row)
        with torch.no_grad():
            ratio, used = difference[actions].exp(), log_ratio[actions].exp()
            outside = ((used < 1 - args.clip_coeff) | (used > 1 + args.upper_range)).float()
            terms = [outside.sum(), (ratio - 1 - difference[actions]).sum(), ratio.sum(), mask.sum()]
            sums += torch.stack([total.detach(), *terms])
    total, *of_tokens, count = run.ranks.sum(sums).tolist()
    means = [value / count if count else math.nan for value in of_tokens]  # NaN: no advantage
    named = dict(zip(("policy/clipfrac", "policy/approxkl", "policy/ratio"), means)) | (term.metrics() if term else {})
    return {"policy/loss": total, **named, "policy/grad_norm": run.optimize("policy")}


# ------------------------------------------------------------------------------------------ metrics and evaluation
def group_metrics(run: Run[GRPOArgs], rollout: Rollout, scores: Scores, rewards: Rewards) -> Metrics:
    """Metrics of a rollout over all ranks, and the audit's comparison."""
    args = run.args
    penalized = penalize_length(args, rollout, scores.total)  # (B,)
    if args.init_kl_coeff and args.kl_placement == "reward":
        penalized = penalized - args.init_kl_coeff * rollout_metrics.response_kl(rollout)
    once = torch.where(rollout.ends(), penalized, 0.0)  # (B,), of an episode's rows the last one
    metrics = rollout_metrics.rollout_metrics(run, rollout, scores.total, once[:, None])
    if args.init_kl_coeff:
        k3 = torch.where(rollout.action_mask, ops.kl_k3(rollout.logprobs, rollout.ref_logprobs), 0.0).sum(1)  # (B,)
        k3 = rollout_metrics.by_episode(rollout, k3)
        (metrics["objective/kl_k3"],) = rollout_metrics.row_means(run, [k3], rollout.ends())
    equal = len(find_equal_groups(run, rollout, scores))
    counts = {"sampling/prompts": float(rollout.num_groups), "sampling/wasted_tokens": 0.0}
    metrics |= rollout_metrics.reward_metrics(run, scores.select(rollout.ends()), rewards.audit)
    return metrics | {"objective/zero_std_ratio": equal / rollout.num_groups} | counts


@torch.no_grad()
def evaluate(
    run: Run[GRPOArgs], sampler: rollout_sampler.RolloutSampler, rewards: Rewards, rows: Sequence[Row]
) -> Metrics:
    """Score, KL and length of one response to each held-out prompt, with the same noise each time."""
    rollout = sampler.sample_held_out(rows)
    scores = penalize_length(run.args, rollout, rewards(rollout, audited=False).total)  # (B,)
    return rollout_metrics.evaluation_metrics(run, rollout, scores)


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(GRPOArgs, argv)))


if __name__ == "__main__":
    main()
