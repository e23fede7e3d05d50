"""Flags of agents: episodes of several turns with tools or an environment."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.fields import Args, at_least, declared_flags, flag, positive
from lightrlhf.cli.functions import check_found
from lightrlhf.cli.lists import pairs

ENVIRONMENTS = {  # which have fixed starts, see `lightrlhf.envs`
    "alfworld": "lightrlhf.envs.alfworld:AlfWorld",
    "auto_explore": "lightrlhf.envs.auto_explore:AutoExplore",
    "dangerous_taxi": "lightrlhf.envs.dangerous_taxi:DangerousTaxi",
}
EPISODE_ENVS = {
    "guess_number": "lightrlhf.envs.games:GuessNumber",
    "sums": "lightrlhf.envs.games:Sums",
    "search": "lightrlhf.envs.search:Search",
}
TOOLS = {"calculator": "lightrlhf.envs.games:calculator", "python": "datasets_prep.apps.python_tool:python"}

# what is not made for episodes of several turns
NOT_YET: dict[str, Any] = {
    "max_staleness": ...,
    "sampling_correction": ("sequence_truncate", "sequence_mask"),
    "tensor_parallel": ...,
    "teacher_coeff": ...,
    "overlong_buffer": ...,
    "ngram": ...,
    "termination_condition": ("randomized", "parsing", "ppl"),
}
NOT_BY_PROGRAMS: dict[str, Any] = {
    **NOT_YET,
    **dict.fromkeys(("env", "tools", "mcp", "max_turns", "max_episode_tokens", "max_observation_tokens"), ...),
    **dict.fromkeys(
        ("lockstep", "eos_ids", "stop_strings", "resample_rounds", "overlong_filter", "missing_eos_penalty"), ...
    ),
    **{"importance_sampling_level": "sequence", "aggregation": "constant", "advantage": "none"},
}
OF_EPISODES = {"max_turns", "max_episode_tokens", "max_observation_tokens", "env_workers", "env_timeout"}
OF_EPISODES |= {"observation_weight", "lockstep"}
NOT_BY_TURN: dict[str, Any] = {"normalize_each_reward": True, "advantage": "maxrl"}


def check_env(name: str, flag: str) -> None:
    """Raises: UsageError when an environment is neither a known name, nor an address, nor a class that is found."""
    if ":" not in name and name not in EPISODE_ENVS | ENVIRONMENTS:
        known = ", ".join([*EPISODE_ENVS, *ENVIRONMENTS])
        raise UsageError(f"{flag} {name} is unknown; give {known} or an import path such as package.module:Class")
    if ":" in name and not name.startswith(("ws://", "wss://")):
        check_found(name, f"{flag} {name}")


def check_tool(name: str, flag: str) -> None:
    """Raises: UsageError when a tool is neither a known name nor a function that is found."""
    if ":" in name:
        check_found(name, f"{flag} {name}")
    elif name not in TOOLS:
        raise UsageError(f"{flag} {name} is unknown; give {', '.join(TOOLS)} or a function such as my_tools.py:add")


def check_mcp(server: str, flag: str) -> None:
    """Raises: UsageError when a server is neither an address nor a command that is found."""
    if server.startswith(("http://", "https://")):
        return
    remedy = "give a command that starts a server, or an address, http://…"
    try:
        words = shlex.split(server)
    except ValueError as problem:
        raise UsageError(f"{flag} {server}: {problem}; {remedy}") from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"{flag} {server}: there is no such command; {remedy}")


def names_episodes(words: Sequence[str]) -> bool:
    """Whether words of a command line say where episodes are played."""
    return any(word.partition("=")[0] in ("--env", "--tools", "--mcp") for word in words)


@dataclass(frozen=True, kw_only=True)
class EpisodeArgs(Args):
    """Agents."""

    env: str | None = flag(None, excludes=NOT_YET)
    """Environment to act in over several turns, by name or `package.module:Class`; its reward is named `env`."""
    tools: list[str] = flag([], unique=True, excludes=NOT_YET, show="rarely")
    """Tools that the policy may call: `calculator`, `python`, or functions `package.module:name` without state."""
    mcp: str | None = flag(None, excludes={**NOT_YET, "env": ..., "tools": ...}, show="rarely")
    """Server of the Model Context Protocol whose tools the policy may call: its command, or its address."""
    env_options: list[str] = flag([], split=pairs, needs="env", show="rarely")
    """Arguments of the environment, one or several `name=value`."""
    max_turns: int = at_least(1, 8, show="rarely")
    """Most turns of the policy in an episode; `max_new_tokens` limits each."""
    max_episode_tokens: int | None = at_least(1, None, show="rarely")
    """Most tokens that the policy samples in an episode. Default: as many as its turns may have."""
    max_observation_tokens: int = at_least(16, 1024, show="rarely")
    """Longest observation in tokens; of a longer one head and tail are kept."""
    env_workers: int = at_least(1, 16, show="rarely")
    """Processes on each rank, with an environment each; more episodes wait for these, except with `tools`."""
    env_timeout: float = positive(60.0, show="rarely")
    """Seconds of one call of the environment, after which its process is ended."""
    lockstep: bool = flag(True, show="rarely")
    """Wait for all environments before the next turns, so that runs resume bitwise; else slow ones delay no other."""

    def _check(self) -> None:
        if self.env and self.tools:
            raise ValueError(
                f"--tools {' '.join(self.tools)} with --env {self.env}: an environment brings its own tools"
            )
        flags = declared_flags(type(self)) if not self.plays_episodes else {}
        for name in sorted(flags.keys() & OF_EPISODES):
            if getattr(self, name) != flags[name].default:
                where = "--env, --tools, --mcp or --agent" if "agent" in flags else "--env, --tools or --mcp"
                raise ValueError(f"--{name} {getattr(self, name)} is of episodes; give {where}")

    def _check_given(self, given: Mapping[str, object]) -> None:
        if self.env:
            check_env(self.env, "--env")
        for name in self.tools:
            check_tool(name, "--tools")
        if self.mcp:
            check_mcp(self.mcp, "--mcp")

    @property
    def plays_episodes(self) -> bool:
        """Whether samples are episodes of several turns."""
        return bool(self.env or self.tools or self.mcp)

    @property
    def longest_sample(self) -> int:
        """Most tokens that are sampled in an episode, or in a response."""
        args: Any = self
        if not self.plays_episodes:
            return int(args.max_new_tokens)
        return self.max_episode_tokens or self.max_turns * int(args.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class AgentArgs(EpisodeArgs):
    """Agents."""

    env: str | None = flag(None, required="reward")
    """Environment to act in over several turns, by name or `package.module:Class`; its reward is named `env`."""
    observation_weight: float = at_least(0, 0.0, show="rarely")
    """Weight in the loss of the mean cross-entropy of observations, between the turns of a row."""


@dataclass(frozen=True, kw_only=True)
class GroupAgentArgs(AgentArgs):
    """Agents."""

    agent: str | None = flag(None, required="reward", needs="rollout_server", excludes=NOT_BY_PROGRAMS, show="rarely")
    """Program that plays by itself over OpenAI's chat: `package.module:f`, called as f(task, base_url, api_key)."""
    credit: Literal["episode", "turn"] = flag("episode", needs="env", excludes=NOT_BY_TURN, show="rarely")
    """Credit of a turn: the episode's score, or what follows the turn."""

    def _check(self) -> None:
        own = getattr(self, "advantage", "")
        if self.credit == "turn" and ":" in own:
            raise ValueError(f"--credit turn excludes --advantage {own}; give rloo, mean, std or batch_std")

    def _check_given(self, given: Mapping[str, object]) -> None:
        if self.agent:
            check_found(self.agent, f"--agent {self.agent}")

    @property
    def plays_episodes(self) -> bool:
        """Whether samples are episodes of several turns."""
        return super().plays_episodes or bool(self.agent)
