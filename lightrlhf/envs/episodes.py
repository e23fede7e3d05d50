"""Episodes in text environments: many are played at once, by an agent that acts on a whole batch of states.

An environment is an object as `lightrlhf.envs.TextEnv` describes it: gymnasium's API, with texts as observations and
actions. An agent maps the seats that wait for an action to decisions, so a model reads them in one batch.

The random numbers of a seat follow from the seed and the index of its episode alone: what happens in an episode does
not depend on how many are played at the same time.

Left out: environments in separate processes.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightrlhf.cli.errors import RunFailure
from lightrlhf.data.batch import SampledBatch, response_batch
from lightrlhf.envs import Info, Start, TextEnv
from lightrlhf.generation.prefix_cache import CachedPrefix
from lightrlhf.maths.ops import SumOverRanks

MAX_STEPS = 10_000  # an environment that never ends an episode is a bug, not a long episode


@dataclass
class Decision:
    """One action and how it was chosen. Ids are empty where no model of this library chose it."""

    action: str  # as sent to the environment
    observation: str = ""
    reflection: str | None = None
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the response's tokens, at the sampling temperature
    allowed: list[int] = field(default_factory=list)  # indices of the labels of the admissible commands
    reward: float = 0.0
    invalid: bool = False


@dataclass
class Episode:
    """A trajectory from a start to the end."""

    start: Start
    level: int = 0
    task: str = ""
    decisions: list[Decision] = field(default_factory=list)
    success: bool = False
    cost: float = 0.0

    @functools.cached_property
    def plain(self) -> dict[str, Any]:
        """Plain values of an episode that has ended; each step of a run with a replay needs them."""
        return asdict(self)

    def story(self) -> str:
        """The episode as text, for reading."""
        lines = [f"Task: {self.task}"] if self.task else []
        for number, one in enumerate(self.decisions, start=1):
            lines += [f"--- {number} ---", one.observation.rstrip()]
            lines += [f"Reflection: {one.reflection}"] if one.reflection else []
            lines += [f"Action: {one.action}  (reward {one.reward:g}{', invalid' if one.invalid else ''})"]
        outcome = "success" if self.success else "failure"
        return "\n".join([*lines, f"=== {outcome} after {len(self.decisions)} actions, cost {self.cost:g}", ""])


@dataclass
class Seat:
    """An environment that waits for an action."""

    env: TextEnv
    episode: Episode
    rng: random.Random
    text: str
    info: Info
    policy_prefix: CachedPrefix | None = None  # KV cache of the episode's last prompt, of the policy
    reflector_prefix: CachedPrefix | None = None  # and of the reflector


Agent = Callable[[Sequence[Seat]], list[Decision]]


def play(
    envs: Sequence[TextEnv], starts: Sequence[Start], agent: Agent, seed: str, max_decisions: int = MAX_STEPS
) -> list[Episode]:
    """One episode from each start, in their order; an environment whose episode has ended takes the next start.

    seed: key of the random numbers; max_decisions: an episode ends after this many (with 1 it is a bandit's).
    Raises: RunFailure when an environment never ends an episode.
    """
    episodes = [Episode(start) for start in starts]
    waiting = deque(enumerate(episodes))
    seats: list[Seat] = []

    def begin_next(env: TextEnv) -> None:
        if waiting:
            number, episode = waiting.popleft()
            rng = random.Random(f"{seed}/{number}")
            text, info = env.reset(seed=rng.getrandbits(31), options=episode.start)
            episode.level, episode.task = info["level"], info["task"]
            seats.append(Seat(env, episode, rng, text, info))

    for env in envs:
        begin_next(env)
    while seats:
        busy, seats = seats, []
        for seat, decision in zip(busy, agent(busy)):
            seat.text, reward, terminated, truncated, seat.info = seat.env.step(decision.action)
            decision.reward, decision.invalid = float(reward), bool(seat.info["invalid"])
            seat.episode.decisions.append(decision)
            seat.episode.cost, seat.episode.success = float(seat.info["cost"]), bool(seat.info["success"])
            if len(seat.episode.decisions) >= MAX_STEPS:
                raise RunFailure(f"{seat.env} did not end an episode within {MAX_STEPS} actions; give it a horizon")
            if terminated or truncated or len(seat.episode.decisions) >= max_decisions:
                begin_next(seat.env)
            else:
                seats.append(seat)
    return episodes


def oracle_agent(seats: Sequence[Seat]) -> list[Decision]:
    """The environment's own expert; the first admissible command where the expert has none."""
    return [Decision(seat.env.expert() or seat.info["admissible"][0], seat.text) for seat in seats]


def random_agent(seats: Sequence[Seat]) -> list[Decision]:
    """A random admissible command."""
    return [Decision(seat.rng.choice(seat.info["admissible"]), seat.text) for seat in seats]


# ------------------------------------------------------------------------------------------------------------ results
def count(episodes: Sequence[Episode]) -> list[float]:
    """Sums over episodes, for `rates`: episodes, successes, cost, reward, decisions, invalid decisions."""
    decisions = [decision for one in episodes for decision in one.decisions]
    rewards, invalid = sum(one.reward for one in decisions), sum(one.invalid for one in decisions)
    successes, cost = sum(one.success for one in episodes), sum(one.cost for one in episodes)
    return [len(episodes), successes, cost, rewards, len(decisions), invalid]


def rates(counts: Sequence[float]) -> dict[str, float]:
    """Means from `count`, or from sums of it: per episode, and of invalid decisions per decision."""
    episodes, successes, cost, rewards, decisions, invalid = counts
    return {
        "success": successes / max(episodes, 1),
        "cost": cost / max(episodes, 1),
        "reward": rewards / max(episodes, 1),
        "length": decisions / max(episodes, 1),
        "invalid_ratio": invalid / max(decisions, 1),
    }


def rates_by_level(
    episodes: Sequence[Episode], levels: Sequence[str], sum_over_ranks: SumOverRanks
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Rates over the episodes of all ranks, in total and for each level that was played, by its name in metrics."""
    parts = [[one for one in episodes if one.level == level] for level in range(len(levels))]
    counts = torch.tensor([count(part) for part in (episodes, *parts)], dtype=torch.float64)
    total, *each = sum_over_ranks(counts).tolist()
    return rates(total), {name.replace(" ", "_"): rates(row) for name, row in zip(levels, each) if row[0]}


# ------------------------------------------------------------------------------------------------------------ batches
@dataclass(kw_only=True)
class PlayedBatch(SampledBatch):
    """Decisions, one a row: `[prompt][action]`; the action tokens are those that the policy sampled."""

    allowed: Tensor  # (B, 1, L) bool, labels of the admissible commands; L is 0 for actions written out
    episode: Tensor  # (B,) int64, index of the episode; its decisions are adjacent and in order
    rewards: Tensor  # (B,) of this decision, from the environment


def decision_batch(
    episodes: Sequence[Episode], pad_id: int, num_labels: int, rows: Sequence[int] | None = None
) -> PlayedBatch:
    """The decisions of the episodes, in order; rows: numbers of the episodes' starts in the data."""
    decisions = [decision for episode in episodes for decision in episode.decisions]
    batch = response_batch([one.prompt_ids for one in decisions], [one.response_ids for one in decisions], pad_id)
    episode = torch.tensor([i for i, one in enumerate(episodes) for _ in one.decisions], dtype=torch.int64)  # (B,)
    return batch.sampled(one.logprobs for one in decisions).extend(
        PlayedBatch,
        row=None if rows is None else torch.tensor(rows, dtype=torch.int64)[episode],
        allowed=allowed_labels(decisions, num_labels),
        episode=episode,
        rewards=torch.tensor([one.reward for one in decisions]),
    )


def allowed_labels(decisions: Sequence[Decision], num_labels: int) -> Tensor:
    """(B, 1, L) bool, the same for every token of a row."""
    allowed = torch.zeros(len(decisions), 1, num_labels, dtype=torch.bool)
    for row, one in zip(allowed, decisions):
        row[0, one.allowed] = True
    return allowed


# ------------------------------------------------------------------------------------------------------------- replay
@dataclass
class Replay:
    """Buffer of the last successful episodes from the current stage of a curriculum."""

    size: int
    episodes: list[Episode] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)  # of the stage they were played in

    def enter(self, levels: Sequence[int]) -> None:
        """Drop the episodes of a stage with other levels; levels: the stage's, and its most decisions."""
        if self.levels != list(levels):
            self.episodes, self.levels = [], list(levels)

    def add(self, episodes: Sequence[Episode]) -> None:
        """Append the successes, drop the oldest beyond `size`."""
        self.episodes = [*self.episodes, *(one for one in episodes if one.success)][-self.size :]

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"replay": [one.plain for one in self.episodes], "replay_levels": self.levels}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; nothing of a run that begins."""
        self.levels = state.get("replay_levels", [])
        self.episodes = [
            Episode(**{**one, "decisions": [Decision(**decision) for decision in one["decisions"]]})
            for one in state.get("replay", [])
        ]
