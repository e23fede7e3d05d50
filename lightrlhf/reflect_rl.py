"""Reflect-RL: online RL of a policy in text environments, with a frozen reflector (Zhou et al. 2024, 2402.12621).

Each iteration plays new episodes: the reflector comments on the observation, and the policy, which reads the comment,
chooses a command by one token. With G_t the return from decision t on, N the decisions of the iteration over all ranks
and rho_t = pi(a_t) / pi_old(a_t), a step of the policy minimises

    L_pg  = -1/N sum_t A_t log pi(a_t | s_t)                                  A_t = G_t - V(s_t), V = 0 without critic
    L_ppo = -1/N sum_t min(rho_t A_t, clip(rho_t, 1-e, 1+e) A_t)              (Schulman et al. 2017, eq. 7)

minus `--entropy_coeff` times the entropy of the choice. `--num_generations K` plays K episodes from each start and
takes A = (G - mean) / standard deviation over those K (GRPO, Shao et al. 2024, 2402.03300, section 4.1.2).
`--replay_buffer_size` adds a policy-gradient step on past successes of the same stage, each decision weighted by
min(rho_t, 2) or, as in the authors' code, by 1. Without `--reflect_experiment_dir` this is plain RL after fine-tuning.

Left out: bootstrapped values at the horizon (it is part of the task), a penalty on the reflector, which is never
trained, sharded models (`fsdp`, `deepspeed`), and environments in separate processes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli.errors import UsageError, one_line_errors
from lightrlhf.cli.fields import at_least, between, check_args, flag, positive
from lightrlhf.cli.groups import EvalArgs, FrozenModelsArgs, RolloutLogArgs, RolloutServerArgs, StartArgs
from lightrlhf.cli.lists import pairs
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Batch, to_device
from lightrlhf.data.types import PreTrainedModel, Tokenizer
from lightrlhf.envs import TextEnv, check_option, curriculum, make_env, read_options
from lightrlhf.envs.agents import ActingArgs, ModelAgent, load_reflector, num_choices
from lightrlhf.envs.episodes import Episode, PlayedBatch, Replay, play
from lightrlhf.envs.log import episode_metrics, held_out_metrics, log_episodes, write_trajectories
from lightrlhf.generation.rollout import gap_metrics
from lightrlhf.generation.served import ServedPolicy
from lightrlhf.gguf.files import check_model_exists
from lightrlhf.maths import groups, ops, sampling_gap
from lightrlhf.models import forward, given, loading, names
from lightrlhf.models.roles import Policy, TokenStats
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.models.value_head import ValueHead
from lightrlhf.training.provenance import describe_given
from lightrlhf.training.run import Metrics, OnStep, Run

MAX_REPLAY_WEIGHT = 2.0  # of a replayed decision


@dataclass(frozen=True, kw_only=True)
class ReflectRLArgs(FrozenModelsArgs, EvalArgs, StartArgs, ActingArgs, RolloutServerArgs, RolloutLogArgs):
    """Online reinforcement learning in a text environment, with or without a reflector."""

    experiment_name: str = "reflect-rl"
    """Folder below `log_dir` for the runs of one algorithm."""
    env: str = "dangerous_taxi"
    """Environment: dangerous_taxi, auto_explore, alfworld, or your own `package.module:Class`."""
    env_options: list[str] = flag([], split=pairs, check=check_option)
    """Options of the environment as name=value, such as pickup_bonus=1."""
    horizon: int | None = at_least(1, None, show="rarely")
    """Maximum steps of an episode. Default: the environment's limit."""
    reflect_experiment_dir: str | None = flag(None, check=check_model_exists)
    """Experiment dir or checkpoint of the reflector; without it the policy acts alone."""
    trainer: Literal["pg", "ppo"] = flag("pg", excludes={"lr_scheduler_type": ("linear", "cosine")})
    """Policy gradient with one step an iteration, or PPO."""
    max_steps: int | None = None
    """Number of iterations. Default: `epochs` passes over the training starts."""
    rollout_size: int = at_least(1, 64)
    """Episodes per iteration and device."""
    num_envs: int = at_least(1, 64, show="rarely")
    """Environments played at once."""
    rollout_mini_batch_size: int = at_least(1, 64, show="rarely")
    """Maximum prompts per forward pass while playing, and slots of the reflector's generation engine."""
    num_generations: int = at_least(1, 1, excludes={"use_critic": True})
    """Episodes per start (K); above 1, advantages are normalised within groups instead of whitened."""
    use_critic: bool = False
    """Subtract a critic's value of the state from the return."""
    shared_critic: bool = flag(False, needs={"use_critic": True}, show="rarely")
    """Make the critic a linear head on the policy's last hidden state instead of a separate model."""
    gae_gamma: float = between(0, 1, 1.0, show="rarely")
    """Discount per decision."""
    gae_lambd: float = between(0, 1, 1.0, needs={"use_critic": True}, show="rarely")
    """GAE's lambda; below 1 needs `use_critic`."""
    normalize_advantages: bool = flag(True, show="rarely")
    """Whiten the advantages of an iteration over all ranks; ignored when `num_generations` is above 1."""
    learning_rate: float = positive(2e-4)
    """Peak learning rate of the policy."""
    critic_learning_rate: float = positive(1e-3, show="rarely")
    """Peak learning rate of the critic."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """Learning-rate schedule of policy and critic, by its name in `transformers.get_scheduler`."""
    mini_batch_size: int = 512
    """Decisions per optimiser step and device, for ppo; pg takes a whole iteration."""
    micro_batch_size: int = 64
    """Decisions per forward and backward pass; smaller saves memory and never changes a gradient."""
    ppo_epochs: int = at_least(1, 3)
    """Passes over an iteration's decisions, for ppo."""
    clip_coeff: float = positive(0.1)
    """Clip range of the probability ratio, for ppo."""
    entropy_coeff: float = at_least(0, 0.0, show="rarely")
    """Weight of the entropy bonus in the loss; it is not part of rewards or metrics."""
    init_kl_coeff: float = at_least(0, 0.0)
    """Weight of the log-ratio to the initial policy, subtracted from each reward before advantages are estimated."""
    disable_dropout: bool = True
    """Set the probability of every dropout module to 0."""
    replay_buffer_size: int = at_least(0, 0, excludes={"devices": ..., "num_nodes": ...}, show="rarely")
    """Size of the replay buffer of successful episodes; each iteration replays as many as it plays. 0 disables it."""
    replay_importance: bool = flag(True, show="rarely")
    """Weight a replayed decision by the ratio of its probabilities now and when played, at most 2; otherwise by 1."""
    levels: list[str] = flag([], excludes={"stages": ...})
    """Names of the environment's levels to train on, all in one stage; all levels when not given."""
    stages: str | None = flag(None, check=curriculum.split_stages)
    """Curriculum, each stage for an equal share of the iterations: "a; b+c". "a/1" ends episodes after one decision."""
    leaveout_prob: float = between(0, 1, 0.0, show="rarely")
    """Fraction of an episode's distractors to hide in training, in environments that support it."""
    eval_interval: int = 20
    """Iterations between evaluations on validation starts; 0 disables them."""
    eval_iters: int | None = 1
    """Batches of `num_envs` validation episodes per evaluation, divided evenly among levels; null takes all starts."""
    save_interval: int = 50
    """Iterations between checkpoints; a kill loses at most this many."""
    log_interval: int = 1
    """Iterations between rows of metrics, each the mean over the iterations since the previous row."""

    strategy: Literal["auto", "ddp"] = "auto"
    """Only ddp, a whole model on each rank: acting does not support sharded models."""

    def _check(self) -> None:
        if self.rollout_size % self.num_generations:
            raise ValueError(
                f"--rollout_size {self.rollout_size} must be a multiple of --num_generations {self.num_generations}"
            )
        if self.sft_experiment_dir:
            check_model_exists(self.sft_experiment_dir, "--sft_experiment_dir")


@dataclass(kw_only=True)
class DecisionBatch(PlayedBatch):
    """Decisions with what an update needs."""

    values: Tensor  # (B,) of the state before the decision
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,) targets of the critic
    correction: Tensor | None = None  # (B, T-1) importance weights of the gap between sampler and trainer; None is 1

    def weight(self, values: Tensor) -> Tensor:
        """Values (B, T-1) or (B, 1) of the loss, times the importance weights."""
        return values if self.correction is None else values * self.correction


Loss = Callable[[TokenStats, DecisionBatch], tuple[Tensor, dict[str, Tensor]]]
"""The sum over decisions of a loss, and 1-D values by metric, of which the means over all ranks are logged."""


def train(
    args: ReflectRLArgs,
    *,
    policy: PreTrainedModel | Policy | None = None,
    tokenizer: Tokenizer | None = None,
    envs: Sequence[TextEnv] | Callable[[], TextEnv] | None = None,
    on_step: OnStep | None = None,
) -> Path:
    """Train by Reflect-RL; returns the experiment dir. Objects given here replace what the flags would load.

    policy: a causal language model of transformers, which is trained in place; its tokenizer is required unless a flag
    names a model; envs: equal environments, all played at once, or a function that makes one; on_step: called with
    (step, metrics) where metrics are logged, may raise `StopTraining`.
    Raises: UsageError for invalid input, RunFailure when the run fails.
    """
    check_args(args, ReflectRLArgs, {"policy": policy})
    games = make_envs(args, envs)
    stages = curriculum.curriculum(games[0].levels, args.levels, args.stages)
    pools = {level: games[0].starts("train", level) for stage in stages for level in stage.levels}
    name = args.env.rpartition(":")[2] if envs is None else type(games[0]).__name__
    objects = describe_given(policy=policy, tokenizer=tokenizer, envs=None if envs is None else type(games[0]))
    run = Run(args, "reflect_rl", on_step, objects, data=f"{name}/episodes")
    num_starts = args.rollout_size // args.num_generations  # of an iteration, on each device
    every_start = [start for pool in pools.values() for start in pool]
    run.order.name_rows("starts", every_start)
    num_steps = run.order.num_steps(every_start, num_starts)
    check_stages(run, len(stages), num_steps)
    agent = load_agent(run, num_choices(games[0], args), policy, tokenizer)
    reference = run.freeze(agent.policy.reference()) if args.init_kl_coeff else None
    critic = load_critic(args, agent, is_given=policy is not None)
    actor = run.setup("policy", agent.policy, args.learning_rate, num_steps * (1 + (args.replay_buffer_size > 0)))
    value_model = critic and run.setup("critic", critic, args.critic_learning_rate, num_steps)
    replay = Replay(args.replay_buffer_size)
    replay.load(run.resumed["extra"] if run.resumed else {})
    run.keep(agent.policy, agent.tokenizer, replay.state)
    measure = functools.partial(evaluate, run, games, agent, stages)

    for step in run.steps(num_steps):
        stage_index = step * len(stages) // num_steps
        stage = stages[stage_index]
        draw = (step, num_starts * run.ranks.world_size, args.seed, args.num_generations, args.leaveout_prob)
        rows, starts = (run.ranks.shard(one) for one in curriculum.starts_of(stage, pools, *draw))  # K times each
        with run.phase("rollout", rows), run.autocast():
            episodes = play(games, starts, agent, f"{args.seed}/train/{step}/{run.ranks.rank}", stage.max_decisions)
            agent.wait_for_others()  # whose episodes may be longer
        with run.phase("update"):
            played = agent.compare(run, actor, agent.batch(episodes, rows))  # B decisions, (B, T)
            gap = played.sampling_gap, played.action_mask, args.sampling_correction, args.sampling_bound
            correction = sampling_gap.importance_weights(*gap)  # (B, T-1); None where this process samples
            penalized, log_ratio = penalize_rewards(run, played, reference, agent)  # rewards less KL, (B,); (B, T-1)
            values = predict_values(run, value_model, played)  # (B,), 0 without a critic
            batch = estimate_advantages(args, played, penalized, values, correction, run.ranks.sum)
            columns = {"advantages": batch.advantages} | ({"values": values} if args.use_critic else {})
            log_episodes(run, episodes, batch, agent.tokenizer, args.num_generations, log_ratio, **columns)
            metrics = update(run, actor, value_model, batch, agent, step)
            metrics |= replay_step(run, actor, replay, episodes, agent, stage)  # on earlier successes
        metrics |= gap_metrics(run.ranks, batch, args) | episode_metrics(run, episodes, games[0].levels)
        run.end_step(metrics | {"curriculum/stage": stage_index}, len(batch), measure)
    return run.finish()


def check_stages(run: Run[ReflectRLArgs], number: int, num_steps: int) -> None:
    """Raises: UsageError when steps are too few for the stages, or others than before: a resumed run would go back."""
    if num_steps < number:
        raise UsageError(f"--max_steps {num_steps} is less than the {number} stages of the curriculum")
    if number > 1:
        run.order.began.fix("steps_of_stages", num_steps, "the number of steps of --stages is", "give that --max_steps")


def make_envs(args: ReflectRLArgs, envs: Sequence[TextEnv] | Callable[[], TextEnv] | None) -> Sequence[TextEnv]:
    """The environments played at once. Raises: UsageError when they cannot be made."""
    if envs is None:
        options = read_options(args.env_options) | ({"horizon": args.horizon} if args.horizon else {})
        envs = functools.partial(make_env, args.env, **options)
    return [envs() for _ in range(min(args.num_envs, args.rollout_size))] if callable(envs) else envs


def load_agent(
    run: Run[ReflectRLArgs], num_labels: int, start: PreTrainedModel | Policy | None, tokenizer: Tokenizer | None
) -> ModelAgent:
    """The policy that is trained, from `start` if it is given, with the frozen reflector if there is one."""
    args, num_slots = run.args, run.args.rollout_mini_batch_size
    tokenizer = load_tokenizer(None, names.starting_model(args)[0], tokenizer)
    policy, reflector = given.load_start(start, args, tokenizer), None
    if args.reflect_experiment_dir is not None:
        reflector = load_reflector(args.reflect_experiment_dir, args, num_slots, run.device, args.trust_remote_code)
    agent = ModelAgent(policy, tokenizer, args, num_labels, num_slots, reflector)
    if args.rollout_server:
        agent.served = ServedPolicy(args, policy, tokenizer, run, only_labels=args.shrink_head)
    return agent


def load_critic(args: ReflectRLArgs, agent: ModelAgent, is_given: bool) -> nn.Module | None:
    """A critic that starts from the policy: a head on its states, or a separate model; None without `use_critic`."""
    if args.shared_critic:
        return ValueHead(agent.policy, args.seed)
    if not args.use_critic:
        return None
    if is_given:
        return given.critic_from(agent.policy, args, args.seed)
    return loading.load_scalar(names.starting_model(args)[0], args, agent.tokenizer, args.seed)


# --------------------------------------------------------------------------------------------- rewards and advantages
def penalize_rewards(
    run: Run[ReflectRLArgs], batch: PlayedBatch, reference: nn.Module | None, agent: ModelAgent
) -> tuple[Tensor, Tensor | None]:
    """Rewards (B,) less the weighted log-ratio to the starting policy, and that ratio, (B, T-1), 0 off actions."""
    if reference is None:
        return batch.rewards, None
    log_ratio = (batch.logprobs - agent.score(run, reference, batch)) * batch.action_mask  # (B, T-1)
    return batch.rewards - run.args.init_kl_coeff * log_ratio.sum(1), log_ratio


def estimate_advantages(
    args: ReflectRLArgs,
    batch: PlayedBatch,
    rewards: Tensor,
    values: Tensor,
    correction: Tensor | None = None,
    sum_over_ranks: ops.SumOverRanks | None = None,
) -> DecisionBatch:
    """GAE from rewards and values (B,), then whitened over all ranks, or replaced by the advantages of each group."""
    advantages, returns = ops.episode_gae(rewards, values, batch.episode, args.gae_gamma, args.gae_lambd)  # (B,) each
    if args.num_generations > 1:
        lengths = batch.episode.bincount()  # (E,)
        episode_returns = returns[lengths.cumsum(0) - lengths]  # (E,) at the first decision of each episode
        start = torch.arange(len(lengths)) // args.num_generations  # (E,) of each episode
        moments = groups.group_moments(episode_returns, start, int(start.max()) + 1)
        by_episode = groups.group_advantages(episode_returns, moments, groups.standardise)  # (E,)
        advantages = by_episode.repeat_interleave(lengths)  # (B,)
    elif args.normalize_advantages:
        counted = torch.ones_like(advantages, dtype=torch.bool)
        advantages = ops.whiten(advantages, counted, sum_over_ranks=sum_over_ranks)
    columns = {"advantages": advantages, "returns": returns, "correction": correction}
    return batch.extend(DecisionBatch, values=values, **columns)


def predict_values(run: Run[ReflectRLArgs], critic: nn.Module | None, batch: Batch) -> Tensor:
    """The critic's value of each decision's state, 0 without a critic: (B,)."""
    values = torch.zeros(len(batch), device=run.device)
    if critic is not None:
        with forward.inference(critic), run.autocast():
            for rows in batch.by_length(run.args.micro_batch_size):
                values[to_device(rows, run.device)] = state_values(critic, batch.select(rows).to(run.device))
    return values.cpu()


def state_values(critic: nn.Module, batch: Batch) -> Tensor:
    """Values (B,) at the last tokens of the prompts, which do not depend on the actions."""
    values = critic(batch.on_host.input_ids, batch.on_host.attention_mask)  # (B, T)
    return values.gather(1, batch.action_mask.long().argmax(1, keepdim=True))[:, 0].float()


# --------------------------------------------------------------------------------------------------------- the losses
def policy_gradient_loss(
    stats: TokenStats, batch: DecisionBatch, entropy_coeff: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus the sum over decisions of A log pi(a|s) and of the entropy bonus."""
    gain = batch.advantages[:, None] * stats.logprobs  # (B, T-1)
    if stats.entropy is not None:
        gain = gain + entropy_coeff * stats.entropy
    return -batch.weight(gain)[batch.actions].sum(), {}


def ppo_loss(
    stats: TokenStats, batch: DecisionBatch, clip_coeff: float, entropy_coeff: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus the sum over the decisions' tokens of the clipped surrogate and of the entropy bonus."""
    terms = (stats.logprobs, batch.logprobs, batch.weight(batch.advantages[:, None]), batch.actions)
    entropy = stats.entropy if stats.entropy is None else batch.weight(stats.entropy)  # (B, T-1)
    log_ratio = (stats.logprobs - batch.logprobs).detach()[batch.actions]  # (N,)
    ratio = log_ratio.exp()
    return ops.policy_loss(*terms, clip_coeff, entropy, entropy_coeff), {
        "policy/clipfrac": ((ratio - 1).abs() > clip_coeff).float(),
        "policy/approxkl": ratio - 1 - log_ratio,
        "policy/ratio": ratio,
    }


def replay_loss(
    stats: TokenStats, batch: DecisionBatch, entropy_coeff: float, importance: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with each decision weighted by min(pi / pi_old, 2), a constant; by 1 if not `importance`."""
    log_ratio = ((stats.logprobs - batch.logprobs).detach() * batch.action_mask).sum(1)  # (B,)
    weights = log_ratio.exp().clamp(max=MAX_REPLAY_WEIGHT) if importance else torch.ones_like(log_ratio)
    weighted = replace(batch, advantages=weights * batch.advantages)
    return policy_gradient_loss(stats, weighted, entropy_coeff)[0], {"replay/weight": weights}


# --------------------------------------------------------------------------------------------------------- the update
def update(
    run: Run[ReflectRLArgs],
    actor: nn.Module,
    critic: nn.Module | None,
    batch: DecisionBatch,
    agent: ModelAgent,
    step: int,
) -> Metrics:
    """All optimiser steps of an iteration; returns means over them."""
    args = run.args
    loss: Loss = functools.partial(policy_gradient_loss, entropy_coeff=args.entropy_coeff)
    if args.trainer == "ppo":
        loss = functools.partial(ppo_loss, clip_coeff=args.clip_coeff, entropy_coeff=args.entropy_coeff)
    rows = [update_minibatch(run, actor, critic, part, agent, loss) for part in minibatches(run, batch, step)]
    metrics = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    if critic is not None:
        counted = torch.ones_like(batch.returns, dtype=torch.bool)
        explained = ops.explained_variance(batch.values, batch.returns, counted, run.ranks.sum)
        metrics["value/explained_variance"] = float(explained)
    return metrics


def minibatches(run: Run[ReflectRLArgs], batch: DecisionBatch, step: int) -> Iterator[DecisionBatch]:
    """The whole batch for pg; for ppo its shuffled rows, in equally many parts on every rank."""
    args = run.args
    if args.trainer == "pg":
        yield batch
        return
    parts = math.ceil(max(run.ranks.gather(len(batch))) / args.mini_batch_size)
    for epoch in range(args.ppo_epochs):
        order = torch.randperm(len(batch), generator=run.ranks.generator(step, epoch, run.ranks.rank))
        for rows in order.tensor_split(parts):
            yield batch.select(rows)


def update_minibatch(
    run: Run[ReflectRLArgs],
    actor: nn.Module,
    critic: nn.Module | None,
    batch: DecisionBatch,
    agent: ModelAgent,
    loss: Loss,
) -> Metrics:
    """One optimiser step of policy and critic; the gradient does not depend on how micro-batches are cut."""
    args = run.args
    total = max(run.ranks.total(len(batch)), 1.0)  # decisions of all ranks
    losses = torch.zeros(2, device=run.device)  # of policy and critic
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    micros = run.ranks.pad_passes(batch.by_length(args.micro_batch_size), num_models=1 + (critic is not None))
    for i, rows in enumerate(micros):
        micro, more = batch.select(rows).to(run.device), i + 1 < len(micros)
        with run.accumulate(actor, enabled=more):
            stats = actor(**agent.inputs(micro), with_entropy=args.entropy_coeff > 0)
            actor_loss, measured = loss(stats, micro)
            run.backward(actor_loss / total, micro.on_host.row)
        critic_loss = torch.zeros((), device=run.device)
        if critic is not None:
            with run.accumulate(critic, enabled=more):
                critic_loss = 0.5 * (state_values(critic, micro) - micro.returns).pow(2).sum()
                run.backward(critic_loss / total, micro.on_host.row)
        losses += torch.stack([actor_loss.detach(), critic_loss.detach()])
        for name, values in measured.items():
            sums[name] = sums.get(name, torch.zeros((), device=run.device)) + values.sum()
            counts[name] = counts.get(name, 0) + len(values)
    policy, value = (run.ranks.sum(losses) / total).tolist()
    metrics = {"policy/loss": policy, "policy/grad_norm": run.optimize("policy")}
    for name in sums:
        metrics[name] = float(run.ranks.sum(sums[name]) / max(run.ranks.total(counts[name]), 1.0))
    if critic is not None:
        metrics |= {"value/loss": value, "value/grad_norm": run.optimize("critic")}
    return metrics


# ------------------------------------------------------------------------------------------------------------- replay
def replay_step(
    run: Run[ReflectRLArgs],
    actor: nn.Module,
    replay: Replay,
    episodes: Sequence[Episode],
    agent: ModelAgent,
    stage: curriculum.Stage,
) -> Metrics:
    """One step of the policy on past successes; then adds this iteration's.

    Advantages are the plain returns: whitening would give the worse half of the successes negative ones.
    """
    if not replay.size:
        return {}
    args = run.args
    replay.enter([*stage.levels, stage.max_decisions])
    metrics: Metrics = {"replay/size": len(replay.episodes)}
    if replay.episodes:
        order = torch.randperm(len(replay.episodes), generator=run.ranks.generator(run.step, -2)).tolist()
        played = agent.batch([replay.episodes[i] for i in order[: len(episodes)]])
        values = torch.zeros_like(played.rewards)
        advantages, returns = ops.episode_gae(played.rewards, values, played.episode, args.gae_gamma, args.gae_lambd)
        batch = played.extend(DecisionBatch, values=values, advantages=advantages, returns=returns)
        loss = functools.partial(replay_loss, entropy_coeff=args.entropy_coeff, importance=args.replay_importance)
        row = update_minibatch(run, actor, None, batch, agent, loss)
        metrics |= {"replay/loss": row["policy/loss"], "replay/weight": row["replay/weight"]}
    replay.add(episodes)
    return metrics


# --------------------------------------------------------------------------------------------------------- evaluation
def evaluate(
    run: Run[ReflectRLArgs], envs: Sequence[TextEnv], agent: ModelAgent, stages: Sequence[curriculum.Stage]
) -> Metrics:
    """Sampled episodes from validation starts of the curriculum's levels, with the same random numbers each time."""
    args = run.args
    levels = sorted({level for stage in stages for level in stage.levels})
    share = run.order.eval_iters and max(run.order.eval_iters * args.num_envs // len(levels), 1)
    starts = [start for level in levels for start in envs[0].starts("validation", level)[:share]]
    with run.autocast():
        episodes = play(envs, run.ranks.shard(starts), agent, f"{args.seed}/validation/{run.ranks.rank}")
        agent.wait_for_others()
    write_trajectories(run, episodes)
    return held_out_metrics(run, episodes, envs[0].levels)


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(ReflectRLArgs, argv)))


if __name__ == "__main__":
    main()
