"""The sampler of a run whose samples are episodes: prompts, seeds and noise, and the rollout of what was played.

Everything random follows from the run's seed, the step, and the number of the episode and its turn, so a resumed run
needs no state. The members of a group share the environment's seed, and each has its noise.

A row of the rollout has ids that the policy read and sampled; its actions are the sampled ones. An episode
has several rows where the chat template rewrites history, and then the column `episode`. Each has the whole dialogue as
`messages` and what happened as `episode` among its columns, for reward functions and logs.

With `--rollout_server` servers sample the turns by ids, and `lightrlhf.serve` with the same noise.

Left out: turns by older weights, and keys and values that a server keeps from turn to turn.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightrlhf import cpu
from lightrlhf.cli.errors import NotFinite, UsageError
from lightrlhf.cli.groups import EpisodeArgs, GroupAgentArgs
from lightrlhf.data.batch import Rollout, SampledBatch, masked_batch, mix_seed, noise_by_row, number_rows
from lightrlhf.data.chat import controls
from lightrlhf.data.splits import Row
from lightrlhf.data.tokens import decode, messages_of
from lightrlhf.data.types import Tokenizer
from lightrlhf.envs import read_options
from lightrlhf.envs.agent_sessions import AgentSessions
from lightrlhf.envs.env_workers import EnvPool
from lightrlhf.envs.ways import EnvSpec
from lightrlhf.generation.conversations import Conversation, Plan
from lightrlhf.generation.engine import Completions, generate
from lightrlhf.generation.episode_env import Fault, Message
from lightrlhf.generation.episodes import Episode, Limits, Pool, check_template, play
from lightrlhf.generation.rollout import make_rollout, measure_gap, refuse_gap, rounds_otherwise, score_logprobs
from lightrlhf.generation.rollout_sampler import RolloutSampler
from lightrlhf.generation.served import Request
from lightrlhf.models.roles import Policy, max_positions
from lightrlhf.models.sharding import gather_shards
from lightrlhf.models.tokenizer import end_ids
from lightrlhf.rewards.rewards import Rewards
from lightrlhf.rewards.scorers import EnvScorer
from lightrlhf.training.run import Run
from lightrlhf.training.start import Start

MOST_UNREWARDED = 0.2  # share of a step's episodes without a reward from which on the run warns


class EpisodeSampler(RolloutSampler):
    """Plays `responses` episodes from each prompt of a step, with the weights that are trained.

    Raises: UsageError when the chat template cannot render the tools, or the environment cannot be started.
    """

    def __init__(
        self,
        run: Run[Any],
        model: nn.Module,
        reference: nn.Module | None,
        start: Start[Any, Row],
        responses: int = 1,
        pool: Pool | None = None,
    ) -> None:
        super().__init__(run, model, reference, start, responses)
        module: Any = model
        self.policy: Policy = getattr(module, "module", module)  # without what Fabric wraps it in
        self.pool: Pool = pool or open_pool(run)
        self.sessions = None
        if self.served and isinstance(run.args, GroupAgentArgs) and run.args.agent:
            self.sessions = AgentSessions(run.args, self.pool, self.served)
            run.on_end(self.sessions.close)
        self.has_warned = False
        self.scored_by_env = False  # by nothing else
        check_template(self.tokenizer, self.pool.tools)
        positions = self.served.room() if self.served else math.inf
        self.limits = limits_of(run.args, self.policy, positions)

    def sample_held_out(self, rows: Sequence[Row]) -> Rollout:
        """An episode from each of the first held-out prompts, by the same seeds and noise each time."""
        rows = self.run.order.eval_rows(rows, self.run.args.rollout_mini_batch_size)
        return self._play(number_rows(rows, range(len(rows))), range(len(rows)), (-1,))

    def _respond(
        self, drawn: Sequence[int], groups: Sequence[int], key: tuple[int, ...], ahead: Request | None = None
    ) -> Rollout:
        rows = [row for row in number_rows(self.prompts, drawn) for _ in range(self.responses)]
        return self._play(rows, [group for group in groups for _ in range(self.responses)], key)

    def _play(self, rows: Sequence[Row], groups: Sequence[int], key: tuple[int, ...]) -> Rollout:
        """This rank's episodes from prompt rows of all ranks, numbered as `groups`."""
        seed, own = self.run.ranks.seed, self.run.ranks.shard(range(len(rows)))
        seeds = [(mix_seed(*key, groups[i], start=seed), mix_seed(*key, i, start=seed)) for i in own]
        episodes = [new_episode(self.tokenizer, rows[i], *one) for i, one in zip(own, seeds)]
        with self.run.autocast(), nullcontext() if self.served else gather_shards(self.policy):
            removed = self._act(episodes)
            for one in episodes if self.scored_by_env else []:
                if one.outcome is None and not one.fault:
                    one.fail(Fault("rewards", "it gave None"))
            rollout = self._rollout(episodes, removed)
        if self.served and self.run.ranks.total(int(rollout.action_mask.sum())):  # not of faults alone
            refuse_gap(self.served, rollout)
        self._warn(episodes)
        group = torch.tensor([groups[i] for i in own], dtype=torch.int64)[rollout.group]
        return dataclasses.replace(rollout, group=group, num_groups=self._num_groups)

    def _act(self, episodes: list[Episode]) -> float:
        """Play episodes to their end; see `play`."""
        if self.sessions:
            self.sessions.play(episodes)
            return 0.0
        sample = partial(self._sample, cpu.KeptPacking())
        removed = play(episodes, self.pool, sample, self.tokenizer, self.limits, self.run.args.lockstep)
        if self.served:
            self.served.wait_for_others()  # whose episodes may be longer
        return removed

    def _sample(self, pack: cpu.KeptPacking, episodes: Sequence[Episode], plans: Sequence[Plan]) -> Completions:
        """The next turn of each episode, of servers or here."""
        args = self.run.args
        request = Request([plan.ids for plan in plans], turn_noise(args, episodes))
        if self.served and (answered := self.served.sample_any(request)):
            return answered
        return sample_turns(self.policy, self.tokenizer, args, pack, episodes, plans)

    def _rollout(self, episodes: Sequence[Episode], removed: float) -> Rollout:
        """The rows of episodes; `group` is the number of each one's episode here."""
        args = self.run.args
        settings = args.temperature, args.rollout_mini_batch_size
        batch, turn, contexts = episode_batch(episodes, self.tokenizer.pad_token_id)
        if self.served:
            with gather_shards(self.policy):
                scored = score_logprobs(self.model, batch, *settings)  # (B, T-1)
            batch = measure_gap(batch, scored, args.sampling_correction)
        elif rounds_otherwise(self.policy):
            batch.logprobs = score_logprobs(self.model, batch, *settings)
        assert batch.episode is not None
        sampled = Completions([], [], [is_cut(episodes[i]) for i in batch.episode.tolist()], removed)
        rollout = make_rollout(batch, contexts, sampled, self.tokenizer, self.reference, *settings)
        several = batch.episode if len(batch) > len(episodes) else None
        owners = zip(batch.episode.tolist(), batch.ends().tolist())
        after = [episodes[number].next_prompt if is_last else [] for number, is_last in owners]
        return dataclasses.replace(rollout, group=batch.episode, episode=several, turn=turn, next_prompts=after)

    def _warn(self, episodes: Sequence[Episode]) -> None:
        """Warn once where many episodes have no reward, since a policy must not escape a bad one by a fault."""
        faults = [one.fault for one in episodes if one.fault]
        if len(faults) > MOST_UNREWARDED * len(episodes) and not self.has_warned:
            self.has_warned = True
            self.run.print0(
                f"warning: {len(faults)} of {len(episodes)} episodes of step {self.run.step + 1} have no reward, for "
                f"their environment or program failed ({faults[0].kind}: {faults[0].text}); they are left out"
            )


def make_sampler(
    run: Run[Any],
    model: nn.Module,
    reference: nn.Module | None,
    start: Start[Any, Row],
    rewards: Rewards,
    responses: int = 1,
) -> RolloutSampler:
    """The sampler of a run: of episodes with `--env` or `--tools`, else of responses.

    Raises: UsageError when nothing scores the episodes.
    """
    if not run.args.plays_episodes:
        return RolloutSampler(run, model, reference, start, responses)
    sampler = EpisodeSampler(run, model, reference, start, responses)
    check_scored(run.args, sampler.pool, rewards)
    sampler.scored_by_env = all(isinstance(scorer, EnvScorer) for scorer in rewards.scorers)
    return sampler


def open_pool(run: Run[Any]) -> Pool:
    """The environments of a run, which end with it. Raises: UsageError when the flags name none."""
    pool = make_pool(run.args)
    run.on_end(pool.close)
    return pool


# ------------------------------------------------------------------------------- also of programs that do not train
def make_pool(args: EpisodeArgs) -> EnvPool:
    """The environments of the flags. Raises: UsageError when they name none."""
    agent = args.agent if isinstance(args, GroupAgentArgs) else None
    try:
        spec = EnvSpec(args.env, read_options(args.env_options), tuple(args.tools), args.mcp, agent)
        json.dumps(spec.options)
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    except TypeError as problem:
        given = " ".join(args.env_options)
        raise UsageError(f"--env_options {given}: give numbers, texts, lists and dicts alone ({problem})") from None
    return EnvPool(spec, args.env_workers, args.env_timeout)


def check_scored(args: EpisodeArgs, pool: Pool, rewards: Rewards) -> None:
    """Raises: UsageError when nothing scores the episodes."""
    if not pool.gives_reward and all(isinstance(scorer, EnvScorer) for scorer in rewards.scorers):
        where = EnvSpec(args.env, tools=tuple(args.tools), mcp=args.mcp).flag
        raise UsageError(f"{where} gives no reward; add --reward_function or --rm_experiment_dir")


def limits_of(args: Any, policy: Policy, positions: float = math.inf) -> Limits:
    """Where the episodes of a policy end; positions: of a server, at most."""
    lengths = args.max_new_tokens, args.max_observation_tokens
    return Limits(args.max_turns, args.longest_sample, min(max_positions(policy), positions), *lengths)


def new_episode(tokenizer: Tokenizer, row: Row, seed: int, noise: int) -> Episode:
    """An episode that begins with a prompt row; seed, noise: of its environment and of its turns."""
    messages = prompt_messages(tokenizer, row)
    return Episode(messages, seed % 2**31, noise, prompt=row, conversation=Conversation(tokenizer))


def turn_noise(args: Any, episodes: Sequence[Episode]) -> Tensor:
    """Uniform numbers of the next turn of each episode: (B, max_new_tokens)."""
    return noise_by_row([mix_seed(one.num_turns, start=one.noise) for one in episodes], args.max_new_tokens)


def sample_turns(
    policy: Policy,
    tokenizer: Tokenizer,
    args: Any,
    pack: cpu.KeptPacking,
    episodes: Sequence[Episode],
    plans: Sequence[Plan],
) -> Completions:
    """The next turn of each episode, behind the keys and values of its last prompt; pack: of the policy's weights."""
    ends, prefixes = end_ids(tokenizer, policy.model), [one.prefix for one in episodes]
    settings = ends, turn_noise(args, episodes), args.rollout_mini_batch_size, tokenizer, prefixes
    try:
        sampled = generate(policy, [plan.ids for plan in plans], args, *settings, pack=pack)
    except NotFinite as problem:
        raise NotFinite(str(problem), rows=[episodes[i].prompt["row"] for i in problem.indices]) from None
    for one, prefix in zip(episodes, prefixes):
        one.prefix = prefix
    return sampled


def episode_batch(episodes: Sequence[Episode], pad_id: int) -> tuple[SampledBatch, Tensor, list[Row]]:
    """All rows of episodes, numbered from 0 in `episode`; `Rollout.turn`; and what each row begins with as a prompt."""
    contexts, episode, found = [], [], []
    for number, one in enumerate(episodes):
        columns = {**one.prompt.get("columns", {}), "messages": one.messages, "episode": one.facts()}
        for ids, sampled, logprobs in rows_of(one):
            start = next((i for i, turn in enumerate(sampled) if turn), len(ids))
            contexts.append({"row": one.prompt["row"], "input_ids": ids[:start], "columns": columns})
            episode.append(number)
            found.append((ids, sampled, logprobs))
    whole = masked_batch([ids for ids, _, _ in found], [sampled for _, sampled, _ in found], pad_id)
    turn = torch.zeros_like(whole.action_mask, dtype=torch.int64)  # (B, T-1)
    turn[whole.action_mask] = torch.tensor([i - 1 for _, sampled, _ in found for i in sampled if i], dtype=torch.int64)
    numbers = torch.tensor(episode, dtype=torch.int64)  # (B,)
    batch = whole.sampled(logprobs for _, _, logprobs in found)
    return dataclasses.replace(batch, episode=numbers), turn, contexts


def rows_of(one: Episode) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """The rows of an episode; without a turn its prompt.

    Each is ids, for each the number of the turn that sampled it, from 1, or 0, and the samples' log-probabilities.
    """
    turns = one.conversation.turns
    for number, row in enumerate(one.conversation.rows):
        sampled, logprobs = [0] * len(row.ids), []
        for count, turn in enumerate(turns, start=1):
            if turn.row == number:
                sampled[turn.start : turn.end] = [count] * (turn.end - turn.start)
                logprobs += turn.logprobs
        yield row.ids, sampled, logprobs
    if not turns:
        ids = [int(i) for i in one.prompt["input_ids"]]
        yield ids, [0] * len(ids), []


def is_cut(one: Episode) -> bool:
    """Whether the last turn was stopped by its length."""
    return bool(one.conversation.turns) and one.conversation.turns[-1].stop_reason == "length"


def prompt_messages(tokenizer: Tokenizer, row: Row) -> list[Message]:
    """The messages of a prompt row; a text is what the user says.

    Raises: UsageError when the chat template did not render it, or rendered it with tools.
    """
    ids = [int(i) for i in row["input_ids"]]
    if messages := messages_of(tokenizer, ids):
        return [dict(message) for message in messages]
    if controls(tokenizer).ids & {*ids[1:]}:
        raise UsageError(
            f"prompt {row['row']} of the data was not rendered by the tokenizer's chat template, or with tools: "
            "episodes need its messages; prepare it again without tools"
        )
    return [{"role": "user", "content": decode(tokenizer, ids)}]
