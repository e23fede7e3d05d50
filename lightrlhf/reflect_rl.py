"""Reflect-RL: online RL of a policy in text environments, with a frozen reflector (Zhou et al. 2024, 2402.12621).

Each iteration plays episodes from fresh starts: the reflector comments on the observation, the policy sees the comment
and chooses a command by one token. With G_t the reward from decision t on, N the decisions of the iteration over all
ranks and rho_t = pi(a_t) / pi_old(a_t), a step of the policy goes down

    L_pg  = -1/N sum_t A_t log pi(a_t | s_t)                                  A_t = G_t - V(s_t), V = 0 without critic
    L_ppo = -1/N sum_t min(rho_t A_t, clip(rho_t, 1-e, 1+e) A_t)              (Schulman et al. 2017, eq. 7)

less `--entropy_coeff` times the entropy of the choice. `--group_size K` plays K episodes from each start and takes
A = (G - mean) / deviation over those K (GRPO, Shao et al. 2024, 2402.03300, section 4.1.2). `--replay_buffer_size` adds
a step on past successes of the same stage, each decision weighted by min(rho_t, 2) or, as in the authors' code, not at
all. Without `--reflect_experiment_dir` this is plain RL after fine-tuning.

Left out: bootstrapped values at a horizon (it is part of the task), a penalty on the reflector, which never learns,
split models (`fsdp`, `deepspeed`), and environments in processes of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightrlhf.cli.args import DataArgs, EvalArgs, ModelArgs, StartArgs, TrainArgs, check_at_least, check_positive
from lightrlhf.cli.errors import RunFailure, UsageError, one_line_errors
from lightrlhf.cli.lists import PAIRS
from lightrlhf.cli.parser import parse
from lightrlhf.data.batch import Batch, response_batch
from lightrlhf.envs import make_env, prompts, read_options
from lightrlhf.envs.agents import (
    ActingArgs,
    Decision,
    Episode,
    ModelAgent,
    Reflector,
    allowed_labels,
    count,
    num_choices,
    play,
    rates,
)
from lightrlhf.envs.curriculum import Stage, curriculum, starts_of
from lightrlhf.maths.ops import clipped_surrogate, explained_variance, gae, whiten
from lightrlhf.models.loading import load_policy, load_scalar, new_head
from lightrlhf.models.names import resolve, starting_model
from lightrlhf.models.roles import Policy, TokenStats, count_parameters, model_inputs, policy_inputs
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.storage.checkpoint import write_text
from lightrlhf.training.run import Metrics, Run


@dataclass(frozen=True, kw_only=True)
class ReflectRLArgs(TrainArgs, DataArgs, EvalArgs, StartArgs, ActingArgs):
    """Online reinforcement learning in a text environment, with or without a reflector."""

    experiment_name: str = "reflect-rl"
    """Name of the folder below `log_dir` that collects the runs of one algorithm."""
    data_dir: str = ""
    """Names the experiment dir by its last two parts; the environment does when not given. No split is read."""
    env: str = "dangerous_taxi"
    """Environment: dangerous_taxi, auto_explore, alfworld, or your own `package.module:Class`."""
    env_options: list[str] = field(default_factory=list, metadata=PAIRS)
    """Options of the environment as name=value, such as pickup_bonus=1."""
    horizon: int | None = None
    """Steps until an episode is cut; the environment's own number when not given."""
    reflect_experiment_dir: str | None = None
    """Experiment dir or checkpoint of the reflector; without it the policy acts alone."""
    trainer: Literal["pg", "ppo"] = "pg"
    """Policy gradient with one step an iteration, or PPO."""
    max_steps: int | None = None
    """Iterations; when not given, `epochs` passes over the training starts."""
    rollout_size: int = 64
    """Episodes per iteration and device."""
    num_envs: int = 64
    """Environments that are played at once."""
    rollout_mini_batch_size: int = 64
    """At most so many prompts per forward pass while playing, and slots of the reflector's generation engine."""
    group_size: int = 1
    """Episodes from the same start; above 1 their mean and deviation make the advantages, and none of those below."""
    use_critic: bool = False
    """Take a critic's value of the state off the reward to come."""
    shared_critic: bool = False
    """The critic is a linear head on the policy's last hidden state; otherwise a model of its own."""
    gae_gamma: float = 1.0
    """Discount per decision."""
    gae_lambd: float = 1.0
    """GAE's lambda: 1 takes the whole reward to come."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of an iteration to mean 0 and variance 1, over all ranks."""
    learning_rate: float = 2e-4
    """Peak learning rate of the policy."""
    critic_learning_rate: float = 1e-3
    """Peak learning rate of the critic."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """Learning-rate schedule of both, by its name in `transformers.get_scheduler`."""
    mini_batch_size: int = 512
    """Decisions per optimiser step and device, for ppo; pg takes all of an iteration."""
    micro_batch_size: int = 64
    """Decisions per forward and backward pass; smaller saves memory and never changes a gradient."""
    ppo_epochs: int = 3
    """Passes over an iteration's decisions, for ppo."""
    clip_coeff: float = 0.1
    """Clip range of the probability ratio, for ppo."""
    entropy_coeff: float = 0.0
    """Weight of the entropy of the choice in the loss; in no reward and no metric."""
    init_kl_coeff: float = 0.0
    """Weight of the log-ratio to the starting policy, taken off each reward when learning."""
    disable_dropout: bool = True
    """Set the probability of every dropout module to 0."""
    replay_buffer_size: int = 0
    """Past successful episodes to keep; each iteration learns from as many of them as it plays. 0 keeps none."""
    replay_importance: bool = True
    """Weight a replayed decision by its ratio of probabilities now and then, at most 2; otherwise by 1."""
    levels: list[str] = field(default_factory=list)
    """Names of the environment's levels to train on; all when not given."""
    depth_curriculum: bool = False
    """Train on one level after another, for equal shares of the iterations."""
    merge_first_two: bool = False
    """Make one stage of the curriculum's first two levels."""
    merge_after_first_k: int | None = None
    """Make one stage of all levels after the first k."""
    first_step: bool = False
    """Begin with a stage of the first level in which episodes end after one decision."""
    leaveout_prob: float = 0.0
    """Share of what does not matter to an episode that is hidden from it in training, where an environment can."""
    eval_interval: int = 20
    """Iterations between evaluations on validation starts; 0 switches them off."""
    eval_iters: int | None = 1
    """Batches of `num_envs` validation episodes per evaluation, as many of each level; all starts when not given."""
    save_interval: int = 50
    """Iterations between checkpoints; a kill loses at most this many."""
    log_interval: int = 1
    """Iterations between two rows of metrics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_model()
        self.check_acting()
        read_options(self.env_options)
        check_positive(self, "learning_rate", "critic_learning_rate", "clip_coeff")
        for name in ("rollout_size", "num_envs", "rollout_mini_batch_size", "group_size", "ppo_epochs"):
            check_at_least(self, name, 1)
        for name in ("entropy_coeff", "init_kl_coeff", "replay_buffer_size"):
            check_at_least(self, name, 0)
        for name in ("horizon", "merge_after_first_k"):
            if getattr(self, name) is not None:
                check_at_least(self, name, 1)
        for name in ("gae_gamma", "gae_lambd", "leaveout_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)} must lie in [0, 1]")
        if self.rollout_size % self.group_size:
            raise ValueError(f"--rollout_size {self.rollout_size} must be a multiple of --group_size {self.group_size}")
        if self.group_size > 1 and self.use_critic:
            raise ValueError(f"--group_size {self.group_size} is a baseline already; use --use_critic False")
        if self.shared_critic and not self.use_critic:
            raise ValueError("--shared_critic True needs --use_critic True")
        if not self.use_critic and self.gae_lambd != 1:
            raise ValueError(f"--gae_lambd {self.gae_lambd} needs values: give --use_critic True, or leave it at 1")
        if (self.merge_first_two or self.merge_after_first_k) and not self.depth_curriculum:
            raise ValueError("--merge_first_two and --merge_after_first_k need --depth_curriculum True")
        self.check_eval()
        if self.trainer == "ppo" and self.lr_scheduler_type in ("linear", "cosine"):
            raise ValueError(
                f"--lr_scheduler_type {self.lr_scheduler_type} needs the number of updates, which --trainer ppo finds "
                "only while playing; use constant or constant_with_warmup"
            )
        if self.replay_buffer_size and self.devices * self.num_nodes > 1:
            raise ValueError(f"--replay_buffer_size {self.replay_buffer_size} is for one device; leave it at 0")
        if not self.do_sample:
            raise ValueError("--do_sample False: episodes must be sampled; lower --temperature instead")
        if self.strategy in ("fsdp", "deepspeed"):
            raise ValueError(f"--strategy {self.strategy} splits models, which acting step by step does not; use ddp")
        for flag in ("sft_experiment_dir", "reflect_experiment_dir"):
            if getattr(self, flag) and not Path(getattr(self, flag)).is_dir():
                raise ValueError(f"--{flag} {getattr(self, flag)} does not exist")


@dataclass(kw_only=True)
class DecisionBatch(Batch):
    """Decisions, one a row: `[prompt][action]`, the actions being what the policy said."""

    logprobs: Tensor  # (B, T-1) under the policy that sampled, 0 off actions
    allowed: Tensor  # (B, 1, L) bool, labels on offer; L is 0 for actions written out
    rewards: Tensor  # (B,) of this decision, the KL penalty included
    values: Tensor  # (B,) of the state before it
    advantages: Tensor  # (B,)
    returns: Tensor  # (B,) what a critic learns


def train(args: ReflectRLArgs) -> Path:
    """Reflect-RL; returns the experiment dir."""
    args.check_start()
    args = dataclasses.replace(args, data_dir=args.data_dir or f"{args.env.rpartition(':')[2]}/episodes")
    envs = make_envs(args)
    stages = curriculum(args, envs[0].levels)
    pools = {level: envs[0].starts("train", level) for stage in stages for level in stage.levels}
    run = Run(args, "reflect_rl")
    per_step = args.rollout_size // args.group_size * run.world_size  # starts
    num_starts = sum(map(len, pools.values()))
    num_steps = args.max_steps or math.ceil(num_starts / per_step) * args.epochs
    if num_steps < len(stages):
        raise UsageError(f"--max_steps {num_steps} is less than the {len(stages)} stages of the curriculum")
    agent, critic, reference, tokenizer = load_models(run, num_choices(envs[0], args))
    policy = agent.policy
    run.print0("policy: {:,} parameters, {:,} trainable; {:,} starts".format(*count_parameters(policy), num_starts))
    actor = run.setup("policy", policy, args.learning_rate, num_steps * (1 + (args.replay_buffer_size > 0)))
    value_model = critic and run.setup("critic", critic, args.critic_learning_rate, num_steps)
    replay = Replay(args.replay_buffer_size)
    if run.resumed:
        replay.load(run.resumed["extra"])

    results: Metrics = {}
    for step in run.steps(num_steps):
        stage = stages[step * len(stages) // num_steps]
        starts = starts_of(stage, pools, step, per_step, args)
        with run.phase("rollout"), run.autocast():
            seed = f"{args.seed}/train/{step}/{run.rank}"
            episodes = play(envs, run.shard(starts), agent, seed, stage.most_decisions)
        with run.phase("update"):
            batch = make_batch(run, episodes, agent)
            if step == 0:
                check_start(run, actor, batch, agent)
            add_penalty(run, batch, reference, agent)
            estimate_advantages(run, batch, episodes, value_model)
            metrics = update(run, actor, value_model, batch, agent, step)
            metrics |= replay_step(run, actor, replay, episodes, agent, stage)
        run.step += 1
        if run.due(args.log_interval, num_steps):
            metrics |= episode_metrics(run, episodes, envs[0].levels)
            metrics["curriculum/stage"] = stages.index(stage)
            times = {f"time/{phase}": run.seconds[phase] for phase in ("rollout", "update")}
            speed = {"time/steps_per_second": run.total(len(batch)) / sum(times.values())}
            run.log({**metrics, **times, **speed, "train/lr": run.learning_rate("policy")})
        if run.due(args.eval_interval, num_steps):
            with run.phase("evaluation"):
                results = evaluate(run, envs, agent, stages)
            run.log(results)
        if run.due(args.save_interval, num_steps):
            run.save(policy, tokenizer, extra=replay.state())
    return run.finish(results)


def make_envs(args: ReflectRLArgs) -> list[Any]:
    """As many environments as are played at once. Raises: UsageError when they cannot be made."""
    options = read_options(args.env_options) | ({"horizon": args.horizon} if args.horizon else {})
    return [make_env(args.env, **options) for _ in range(min(args.num_envs, args.rollout_size))]


# --------------------------------------------------------------------------------------------------------- the models
class ValueHead(nn.Module):
    """A critic that is a linear head on the policy's last hidden state; no gradient goes into the policy by it."""

    def __init__(self, policy: Policy, seed: int) -> None:
        super().__init__()
        self.__dict__["policy"] = policy  # unregistered: its weights are the policy's own affair
        width = policy.model.get_output_embeddings().weight.shape[1]
        self.score = nn.Linear(width, 1, bias=False)
        self.score.weight.data.copy_(new_head(width, seed))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T) ids and mask -> (B, T) values."""
        with torch.no_grad(), self.policy.active():
            inputs = model_inputs(self.policy.model, input_ids, attention_mask)
            hidden = self.policy.model.base_model(**inputs).last_hidden_state
        return self.score(hidden.float())[..., 0]


def load_models(run: Run[ReflectRLArgs], labels: int) -> tuple[ModelAgent, nn.Module | None, Policy | None, Any]:
    """The agent with policy and reflector, the critic and the reference where there are such, and the tokenizer."""
    args = run.args
    source, flag = starting_model(args)
    tokenizer = load_tokenizer(None, source)
    policy = load_policy(source, args, tokenizer, flag)
    reference = run.freeze(policy.reference()) if args.init_kl_coeff else None
    critic: nn.Module | None = None
    if args.use_critic:
        critic = ValueHead(policy, args.seed) if args.shared_critic else load_scalar(source, args, tokenizer, args.seed)
    agent = ModelAgent(policy, tokenizer, prompts, args, labels, args.rollout_mini_batch_size)
    agent.reflector = load_reflector(args, run)
    return agent, critic, reference, tokenizer


def load_reflector(args: ReflectRLArgs, run: Run[ReflectRLArgs]) -> Reflector | None:
    """The frozen model of `--reflect_experiment_dir`, in eval mode, with a tokenizer of its own."""
    if args.reflect_experiment_dir is None:
        return None
    flag = "--reflect_experiment_dir"
    source = resolve(args.reflect_experiment_dir, flag)
    tokenizer = load_tokenizer(None, source)
    frozen = ModelArgs(trust_remote_code=args.trust_remote_code)
    model = run.freeze(load_policy(source, frozen, tokenizer, flag))
    return Reflector(model, tokenizer, prompts, args, args.rollout_mini_batch_size)


# ------------------------------------------------------------------------------------------------------------ batches
def make_batch(run: Run[ReflectRLArgs], episodes: Sequence[Episode], agent: ModelAgent) -> DecisionBatch:
    """The decisions of episodes in their order, on the device; values and advantages are still 0."""
    decisions = [decision for episode in episodes for decision in episode.decisions]
    ids = [one.prompt_ids for one in decisions], [one.response_ids for one in decisions]
    batch = response_batch(*ids, agent.tokenizer.pad_token_id)
    logprobs = torch.zeros(batch.action_mask.shape)  # (B, T-1)
    logprobs[batch.action_mask] = torch.tensor([value for one in decisions for value in one.logprobs])
    nothing = torch.zeros(len(decisions))
    return DecisionBatch(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        action_mask=batch.action_mask,
        logprobs=logprobs,
        allowed=allowed_labels(decisions, len(agent.labels)),
        rewards=torch.tensor([one.reward for one in decisions]),
        values=nothing,
        advantages=nothing,
        returns=nothing,
    ).to(run.device)


def inputs_of(batch: DecisionBatch, agent: ModelAgent) -> dict[str, Any]:
    """What the policy takes of a batch: with the head cut to the labels where it chooses among them alone."""
    inputs = policy_inputs(batch) | {"temperature": agent.args.temperature}
    if agent.labels and agent.args.shrink_head:
        inputs |= {"label_ids": agent.label_ids.to(batch.input_ids.device), "allowed": batch.allowed}
    return inputs


def by_length(batch: Batch, size: int) -> tuple[Tensor, ...]:
    """Indices of rows of like length, `size` at a time; one empty part where there are no rows."""
    return batch.attention_mask.sum(1).argsort(stable=True).split(size)


@torch.no_grad()
def score(run: Run[ReflectRLArgs], policy: nn.Module, batch: DecisionBatch, agent: ModelAgent) -> Tensor:
    """Log-probabilities of the actions under a policy, dropout off: (B, T-1)."""
    was_training = policy.training
    policy.eval()
    out = torch.zeros_like(batch.logprobs)
    for rows in by_length(batch, run.args.micro_batch_size):
        part = batch.select(rows)
        with run.autocast():
            out[rows, : part.action_mask.shape[1]] = policy(**inputs_of(part, agent)).logprobs
    policy.train(was_training)
    return out


def check_start(run: Run[ReflectRLArgs], actor: nn.Module, batch: DecisionBatch, agent: ModelAgent) -> None:
    """Raises: RunFailure when sampling and scoring differ before the first update."""
    gap = float((score(run, actor, batch, agent) - batch.logprobs).abs().max())
    if not gap < (1e-2 if run.args.precision == "32-true" else 0.5):
        raise RunFailure(f"log-probabilities differ by {gap} between sampling and scoring of the same weights")


def add_penalty(run: Run[ReflectRLArgs], batch: DecisionBatch, reference: nn.Module | None, agent: ModelAgent) -> None:
    """Take the log-ratio to the starting policy off the rewards that are learned from."""
    if reference is not None:
        ratio = (batch.logprobs - score(run, reference, batch, agent)) * batch.action_mask  # (B, T-1)
        batch.rewards = batch.rewards - run.args.init_kl_coeff * ratio.sum(1)


# --------------------------------------------------------------------------------------------------------- advantages
def estimate_advantages(
    run: Run[ReflectRLArgs],
    batch: DecisionBatch,
    episodes: Sequence[Episode],
    critic: nn.Module | None,
    whitened: bool = True,
) -> None:
    """Fill in values, advantages and returns, (B,) each."""
    args = run.args
    lengths = torch.tensor([len(episode.decisions) for episode in episodes], device=batch.rewards.device)
    steps = torch.arange(int(lengths.max()), device=lengths.device)
    played = steps < lengths[:, None]  # (E, S) bool; row by row these are the decisions in their order
    batch.values = predict_values(run, critic, batch)
    rewards, values = (
        torch.zeros(played.shape, device=lengths.device).masked_scatter(played, row)
        for row in (batch.rewards, batch.values)
    )
    advantages, returns = gae(rewards, values, played, args.gae_gamma, args.gae_lambd)  # (E, S) each
    if args.group_size > 1 and whitened:
        advantages = group_advantages(returns[:, 0], args.group_size)[:, None].expand_as(rewards)
    batch.advantages, batch.returns = advantages[played], returns[played]
    if args.normalize_advantages and args.group_size == 1 and whitened:
        everywhere = torch.ones_like(batch.advantages, dtype=torch.bool)
        batch.advantages = whiten(batch.advantages, everywhere, sum_over_ranks=run.sum_over_ranks)


def group_advantages(returns: Tensor, group_size: int) -> Tensor:
    """(G - mean) / deviation over the episodes of a start (Shao et al. 2024, sec. 4.1.2): (E,) -> (E,); equal returns
    give 0."""
    groups = returns.view(-1, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (centred.pow(2).mean(1, keepdim=True).sqrt() + 1e-6)).flatten()


@torch.no_grad()
def predict_values(run: Run[ReflectRLArgs], critic: nn.Module | None, batch: DecisionBatch) -> Tensor:
    """The critic's value of each decision's state, 0 without a critic: (B,)."""
    values = torch.zeros(len(batch), device=batch.input_ids.device)
    if critic is not None:
        critic.eval()
        for rows in by_length(batch, run.args.micro_batch_size):
            with run.autocast():
                values[rows] = state_values(critic, batch.select(rows))
        critic.train()
    return values


def state_values(critic: nn.Module, batch: DecisionBatch) -> Tensor:
    """Values (B,) at the prompts' last tokens, before anything of the action is seen."""
    values = critic(batch.input_ids, batch.attention_mask)  # (B, T)
    return values.gather(1, batch.action_mask.long().argmax(1, keepdim=True))[:, 0].float()


# --------------------------------------------------------------------------------------------------------- the update
def policy_gradient_loss(stats: TokenStats, batch: DecisionBatch, weights: Tensor, entropy_coeff: float) -> Tensor:
    """Minus the sum over decisions of w A log pi(a|s) and of the entropy bonus; `weights` (B,) carry no gradient."""
    gain = (weights * batch.advantages)[:, None] * stats.logprobs  # (B, T-1)
    if entropy_coeff:
        gain = gain + entropy_coeff * stats.entropy
    return -gain[batch.action_mask].sum()


def ppo_loss(stats: TokenStats, batch: DecisionBatch, clip_coeff: float, entropy_coeff: float) -> Tensor:
    """Minus the sum over decisions' tokens of the clipped surrogate and of the entropy bonus."""
    gain = clipped_surrogate(stats.logprobs - batch.logprobs, batch.advantages[:, None], clip_coeff)  # (B, T-1)
    if entropy_coeff:
        gain = gain + entropy_coeff * stats.entropy
    return -gain[batch.action_mask].sum()


def value_loss(values: Tensor, batch: DecisionBatch) -> Tensor:
    """Half the sum of squared errors of (B,) values."""
    return 0.5 * (values - batch.returns).pow(2).sum()


def update(
    run: Run[ReflectRLArgs],
    actor: nn.Module,
    critic: nn.Module | None,
    batch: DecisionBatch,
    agent: ModelAgent,
    step: int,
) -> Metrics:
    """All optimiser steps of an iteration; means over them."""
    args = run.args
    found = [
        update_minibatch(run, actor, critic, minibatch, agent, clip=args.trainer == "ppo")
        for minibatch in minibatches(run, batch, step)
    ]
    metrics = {name: sum(row[name] for row in found) / len(found) for name in found[0]}
    if critic is not None:
        everywhere = torch.ones_like(batch.returns, dtype=torch.bool)
        explained = explained_variance(batch.values, batch.returns, everywhere, run.sum_over_ranks)
        metrics["value/explained_variance"] = float(explained)
    return metrics


def minibatches(run: Run[ReflectRLArgs], batch: DecisionBatch, step: int) -> Iterator[DecisionBatch]:
    """For pg the whole batch; for ppo its rows in shuffled order, in as many parts on every rank."""
    args = run.args
    if args.trainer == "pg":
        yield batch
        return
    sizes = torch.zeros(run.world_size, device=run.device)
    sizes[run.rank] = len(batch)
    parts = math.ceil(float(run.sum_over_ranks(sizes).max()) / args.mini_batch_size)
    for epoch in range(args.ppo_epochs):
        order = torch.randperm(len(batch), generator=run.generator(step, epoch, run.rank))
        for rows in order.tensor_split(parts):
            yield batch.select(rows.to(batch.input_ids.device))


def update_minibatch(
    run: Run[ReflectRLArgs],
    actor: nn.Module,
    critic: nn.Module | None,
    batch: DecisionBatch,
    agent: ModelAgent,
    clip: bool,
    replayed: bool = False,
) -> Metrics:
    """One optimiser step of policy and critic; the gradient does not depend on how micro-batches are cut."""
    args = run.args
    total = max(run.total(len(batch)), 1.0)  # decisions of all ranks
    sums = torch.zeros(6, device=run.device)
    micros = by_length(batch, args.micro_batch_size)
    for i, rows in enumerate(micros):
        micro, more = batch.select(rows), i + 1 < len(micros)
        with run.accumulate(actor, enabled=more):
            stats = actor(**inputs_of(micro, agent), with_entropy=args.entropy_coeff > 0)
            difference = (stats.logprobs - micro.logprobs).detach() * micro.action_mask  # (B, T-1)
            weights = torch.ones_like(micro.advantages)
            if replayed and args.replay_importance:
                weights = difference.sum(1).exp().clamp(max=MOST_WEIGHT)
            if clip:
                loss = ppo_loss(stats, micro, args.clip_coeff, args.entropy_coeff)
            else:
                loss = policy_gradient_loss(stats, micro, weights, args.entropy_coeff)
            run.backward(loss / total)
        critic_loss = torch.zeros((), device=run.device)
        if critic is not None:
            with run.accumulate(critic, enabled=more):
                critic_loss = value_loss(state_values(critic, micro), micro)
                run.backward(critic_loss / total)
        actions = difference[micro.action_mask]
        ratio = actions.exp()
        outside = ((ratio - 1).abs() > args.clip_coeff).float()
        per_decision = [loss.detach(), critic_loss.detach(), weights.sum()]
        sums += torch.stack([*per_decision, outside.sum(), (ratio - 1 - actions).sum(), ratio.sum()])
    tokens = max(run.total(batch.num_actions), 1.0)
    sums = run.sum_over_ranks(sums)
    policy, value, weight = (sums[:3] / total).tolist()
    clipfrac, approxkl, ratio = (sums[3:] / tokens).tolist()
    norm = run.optimize("policy")
    if replayed:
        return {"replay/loss": policy, "replay/weight": weight}
    metrics = {"policy/loss": policy, "policy/grad_norm": norm}
    if clip:
        metrics |= {"policy/clipfrac": clipfrac, "policy/approxkl": approxkl, "policy/ratio": ratio}
    if critic is not None:
        metrics |= {"value/loss": value, "value/grad_norm": run.optimize("critic")}
    return metrics


# ------------------------------------------------------------------------------------------------------------- replay
MOST_WEIGHT = 2.0  # of a replayed decision


@dataclass
class Replay:
    """The last successful episodes of the current stage."""

    size: int
    episodes: list[Episode] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)  # of the stage they are from

    def enter(self, stage: Stage) -> None:
        """Forget the successes of another stage."""
        if self.levels != list(stage.levels):
            self.episodes, self.levels = [], list(stage.levels)

    def add(self, episodes: Sequence[Episode]) -> None:
        self.episodes = [*self.episodes, *(one for one in episodes if one.success)][-self.size :]

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"replay": [dataclasses.asdict(one) for one in self.episodes], "replay_levels": self.levels}

    def load(self, state: dict[str, Any]) -> None:
        self.levels = state["replay_levels"]
        self.episodes = [
            Episode(**{**one, "decisions": [Decision(**decision) for decision in one["decisions"]]})
            for one in state["replay"]
        ]


def replay_step(
    run: Run[ReflectRLArgs],
    actor: nn.Module,
    replay: Replay,
    episodes: Sequence[Episode],
    agent: ModelAgent,
    stage: Stage,
) -> Metrics:
    """A step of the policy on past successes, then this iteration's are kept.

    Their rewards to come are the advantages: whitened, the worse half of the successes would be unlearned.
    """
    if not replay.size:
        return {}
    replay.enter(stage)
    metrics = {"replay/size": len(replay.episodes)}
    if replay.episodes:
        order = torch.randperm(len(replay.episodes), generator=run.generator(run.step, -2)).tolist()
        chosen = [replay.episodes[i] for i in order[: len(episodes)]]
        batch = make_batch(run, chosen, agent)
        estimate_advantages(run, batch, chosen, None, whitened=False)
        metrics |= update_minibatch(run, actor, None, batch, agent, clip=False, replayed=True)
    replay.add(episodes)
    return metrics


# ------------------------------------------------------------------------------------------------------------ metrics
def level_name(name: str) -> str:
    return name.replace(" ", "_")


def rates_by_level(
    run: Run[ReflectRLArgs], episodes: Sequence[Episode], levels: Sequence[str]
) -> tuple[dict, dict[str, dict]]:
    """Means over the episodes of all ranks, altogether and by level, of levels that were played."""
    parts = [[one for one in episodes if one.level == level] for level in range(len(levels))]
    counts = torch.tensor([count(part) for part in (episodes, *parts)], dtype=torch.float64, device=run.device)
    total, *each = run.sum_over_ranks(counts).tolist()
    return rates(total), {level_name(name): rates(row) for name, row in zip(levels, each) if row[0]}


def episode_metrics(run: Run[ReflectRLArgs], episodes: Sequence[Episode], levels: Sequence[str]) -> Metrics:
    """Success, cost, length and invalid actions; none of them knows of entropy or KL."""
    overall, by_level = rates_by_level(run, episodes, levels)
    logprobs = [value for one in episodes for decision in one.decisions for value in decision.logprobs]
    entropy = run.total(-sum(logprobs)) / max(run.total(len(logprobs)), 1.0)
    metrics = {"objective/score": overall.pop("reward"), "objective/entropy": entropy}
    metrics |= {f"episodes/{name}": value for name, value in overall.items()}
    for level, found in by_level.items():
        metrics |= {f"success/{level}": found["success"], f"cost/{level}": found["cost"]}
    return metrics


def evaluate(run: Run[ReflectRLArgs], envs: Sequence[Any], agent: ModelAgent, stages: Sequence[Stage]) -> Metrics:
    """Sampled episodes from validation starts of all the curriculum's levels, always with the same random numbers.

    Keeps four of them as text in `trajectories/`.
    """
    args = run.args
    levels = sorted({level for stage in stages for level in stage.levels})
    share = args.eval_iters and max(args.eval_iters * args.num_envs // len(levels), 1)
    starts = [start for level in levels for start in envs[0].starts("validation", level)[:share]]
    with run.autocast():
        episodes = play(envs, run.shard(starts), agent, f"{args.seed}/validation/{run.rank}")
    overall, by_level = rates_by_level(run, episodes, envs[0].levels)
    if run.is_first:
        folder = run.directory / "trajectories"
        folder.mkdir(exist_ok=True)
        write_text(folder / f"{run.step:06d}.txt", "\n".join(one.story() for one in episodes[:4]))
    found = {f"val/{name}": value for name, value in overall.items()}
    return found | {f"val/success/{level}": row["success"] for level, row in by_level.items()}


@one_line_errors
def main(argv: list[str] | None = None) -> str:
    """Run the program; returns the experiment dir."""
    return str(train(parse(ReflectRLArgs, argv)))


if __name__ == "__main__":
    main()
