"""Episodes of a policy that is not trained, several from each prompt, with their scores.

Seeds and noise follow from the run's seed, the number of the prompt and of the episode, so an interrupted program plays
the same ones. All episodes of a prompt share the environment's seed.

Left out: episodes on servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from lightrlhf import cpu
from lightrlhf.cli.fields import at_least, flag, random_seed
from lightrlhf.cli.groups import DecodingArgs, EpisodeArgs, RewardArgs
from lightrlhf.data.batch import mix_seed
from lightrlhf.data.splits import Row
from lightrlhf.data.types import Tokenizer
from lightrlhf.envs.episode_sampler import check_scored, episode_batch, is_cut, limits_of, new_episode, sample_turns
from lightrlhf.generation.engine import Completions
from lightrlhf.generation.episodes import Episode, Pool, check_template, play
from lightrlhf.generation.rollout import make_rollout
from lightrlhf.models.roles import Policy
from lightrlhf.rewards.rewards import Rewards


@dataclass(frozen=True, kw_only=True)
class PlayArgs(EpisodeArgs, DecodingArgs, RewardArgs):
    """Agents."""

    rm_experiment_dir: str | None = flag(None, required=None)
    """Reward model that scores episodes, beside the environment's own reward."""
    reward_function: list[str] = flag([], required=None)
    """Python functions `package.module:name` that score episodes, one or several, beside the environment's reward."""
    trust_remote_code: bool = flag(False, show="rarely")
    """Allow a model to run code from its folder."""
    num_generations: int = at_least(1, 1)
    """Episodes per prompt (K)."""
    rollout_mini_batch_size: int = at_least(1, 64)
    """Episodes that are played together, and slots of the generation engine."""
    seed: int = random_seed(42)
    """Seed of the environments and of the sampling noise."""

    def _check(self) -> None:
        if not self.plays_episodes:
            raise ValueError("--env, --tools or --mcp is needed: where episodes are played")
        if not self.do_sample and self.num_generations > 1:
            raise ValueError(f"--num_generations {self.num_generations}: greedy episodes are identical; use 1")


class Played(NamedTuple):
    """An episode that has ended."""

    episode: Episode
    score: float | None  # the weighted sum of its rewards; None without one
    rewards: dict[str, float | None]  # by name


class Player:
    """Plays `--num_generations` episodes from each prompt, and scores them.

    Raises: UsageError when the chat template cannot render the tools, or nothing scores the episodes.
    """

    def __init__(
        self, args: PlayArgs, policy: Policy, tokenizer: Tokenizer, pool: Pool, rewards: Rewards, scored: bool
    ) -> None:
        """scored: whether each episode needs a score."""
        self.args, self.policy, self.tokenizer, self.pool, self.rewards = args, policy, tokenizer, pool, rewards
        self.limits, self.pack = limits_of(args, policy), cpu.KeptPacking()
        check_template(tokenizer, pool.tools)
        if scored:
            check_scored(args, pool, rewards)

    def __call__(self, rows: Sequence[Row]) -> list[Played]:
        """The episodes of prompt rows with their numbers as `row`, in order."""
        args, tokenizer = self.args, self.tokenizer
        episodes = [
            new_episode(tokenizer, row, mix_seed(row["row"], start=args.seed), mix_seed(row["row"], k, start=args.seed))
            for row in rows
            for k in range(args.num_generations)
        ]
        sample = partial(sample_turns, self.policy, tokenizer, args, self.pack)
        play(episodes, self.pool, sample, tokenizer, self.limits, args.lockstep)
        batch, _, contexts = episode_batch(episodes, tokenizer.pad_token_id)
        assert batch.episode is not None
        sampled = Completions([], [], [is_cut(episodes[i]) for i in batch.episode.tolist()], 0.0)
        rollout = make_rollout(batch, contexts, sampled, tokenizer, None, args.temperature, 1)
        rollout = replace(rollout, group=batch.episode, episode=batch.episode)
        ends = rollout.ends()
        scores = self.rewards(rollout).select(ends)
        parts = [map(none_if_nan, part.tolist()) for part in scores.parts]
        totals = map(none_if_nan, scores.total.tolist())
        return [Played(one, score, dict(zip(scores.names, own))) for one, score, own in zip(episodes, totals, parts)]


def none_if_nan(value: float) -> float | None:
    return None if value != value else value
