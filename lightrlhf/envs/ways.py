"""Environments by their flags: the kind of an object by its members, and an adapter for each kind.

    --env package.module:Class      gymnasium's API with texts: reset(seed=…), step(text) -> a tuple of five
    --env package.module:Class      TRL's: reset(**row), public methods are the tools, perhaps get_reward()
    --env package.module:Class      this library's own `EpisodeEnv`
    --env ws://host:port            a server of OpenEnv, see lightrlhf/envs/openenv.py
    --tools package.module:f …      functions with type hints and docstring
    --mcp "command" or URL          a server of the Model Context Protocol, see lightrlhf/envs/mcp.py
    --agent package.module:f        a program that plays by itself, see lightrlhf/envs/agent_program.py
    --env, --tools NAME             one of this library, see lightrlhf/cli/groups/agents.py

None of these packages is imported here. A class, or a function that makes an object, is called with `--env_options`.

Left out: TRL's table of several factories.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.functions import load_function, parameters_of
from lightrlhf.cli.groups.agents import EPISODE_ENVS, TOOLS, check_env
from lightrlhf.envs import construct
from lightrlhf.envs.agent_program import AgentProgram
from lightrlhf.envs.mcp import McpEnv
from lightrlhf.envs.openenv import OpenEnv
from lightrlhf.envs.tool_env import ToolCaller, ToolEnv
from lightrlhf.generation.episode_env import Answer, EpisodeEnv, Json, Message

NOT_TOOLS = ("reset", "get_reward")


@dataclass(frozen=True)
class EnvSpec:
    """An environment, by plain values that another process can make it from."""

    env: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    mcp: str | None = None
    agent: str | None = None

    @property
    def flag(self) -> str:
        given = {"env": self.env, "mcp": self.mcp, "agent": self.agent, "tools": " ".join(self.tools)}
        return " ".join(f"--{name} {value}" for name, value in given.items() if value)

    def make(self) -> EpisodeEnv:
        """The environment. Raises: UsageError naming the flag."""
        if sum(map(bool, (self.env, self.tools, self.mcp, self.agent))) != 1:
            raise UsageError("give one of --env, --tools, --mcp and --agent")
        if self.agent:
            return AgentProgram(self.agent)
        if self.mcp:
            return McpEnv(self.mcp)
        if self.env is None:
            return ToolEnv([load_tool(path) for path in self.tools])
        if self.env.startswith(("ws://", "wss://")):
            return OpenEnv(self.env)
        check_env(self.env, "--env")
        return adapted(construct(EPISODE_ENVS.get(self.env, self.env), **self.options), self.flag)


def load_tool(path: str) -> Any:
    """A function of `--tools`, by its name or path. Raises: UsageError."""
    return load_function(TOOLS.get(path, path), "--tools", "f(argument: type) -> text", takes_columns=False)


def adapted(made: Any, flag: str) -> EpisodeEnv:
    """An object as an `EpisodeEnv`. Raises: UsageError when it is not one of the known kinds."""
    if all(hasattr(made, name) for name in ("tools", "step", "finish")):
        return made
    reset = getattr(made, "reset", None)
    if not callable(reset):
        raise UsageError(f"{flag} has no reset; see lightrlhf/envs/ways.py for the kinds of environments")
    if hasattr(made, "step") and any(one.name in ("seed", "options") for one in parameters_of(reset) or []):
        return GymEnv(made)
    methods = inspect.getmembers(made, inspect.ismethod)
    tools = [one for name, one in methods if not name.startswith("_") and name not in NOT_TOOLS]
    if not tools:
        raise UsageError(f"{flag} has neither step(text) nor public methods to call as tools")
    return MethodsEnv(made, tools)


class GymEnv:
    """A text environment of gymnasium's API: the policy's whole text is the action.

    A row's column `options` goes to `reset`. The commands and the task in the `info` of `lightrlhf.envs` are shown.
    """

    tools: list[Json] | None = None
    gives_reward = True
    has_outcome = False
    is_stateless = False

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, seed: int, row: dict[str, Any]) -> list[Message]:
        names = {parameter.name for parameter in parameters_of(self.env.reset) or []}
        given = {"seed": seed, "options": row.get("options")}
        observation, info = self.env.reset(**{name: value for name, value in given.items() if name in names})
        return [said(getattr(self.env, "instructions", ""), shown(observation, info))]

    def step(self, reply: Message) -> Answer:
        observation, reward, terminated, truncated, info = self.env.step((reply.get("content") or "").strip())
        counts = {"calls": 1, "failed_calls": int(bool(info.get("invalid")))}
        stop_reason = "truncated" if truncated and not terminated else "done"
        return Answer([said(shown(observation, info))], reward, bool(terminated or truncated), stop_reason, counts)

    def finish(self, stop_reason: str) -> float | None:
        return 0.0  # all rewards came with the turns


def shown(observation: Any, info: Mapping[str, Any]) -> str:
    """An observation, with the task and the commands that an `info` of `lightrlhf.envs` has."""
    if not isinstance(observation, str):
        raise TypeError(f"the observation is a {type(observation).__name__}, not a text")
    if "admissible" not in info:
        return observation
    parts = [info.get("task", ""), observation, "Commands:", *info["admissible"]]
    return "\n".join(part.rstrip("\n") for part in parts if part)


def said(*parts: str) -> Message:
    return {"role": "user", "content": "\n\n".join(part for part in parts if part)}


class MethodsEnv:
    """An environment of TRL's: public methods are the tools, of which each may be `async`.

    Where it has no `get_reward`, or that returns None, there is no reward.
    """

    is_stateless = False

    def __init__(self, env: Any, methods: list[Any]) -> None:
        self.env = env
        self.caller = ToolCaller(methods)
        self.gives_reward = hasattr(env, "get_reward")

    @property
    def tools(self) -> list[Json]:
        return self.caller.schemas()

    def reset(self, seed: int, row: dict[str, Any]) -> list[Message]:
        parameters = parameters_of(self.env.reset) or []
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        given = {name: value for name, value in row.items() if takes_all or name in names}
        text = self._call(self.env.reset, given)
        if text is not None and not isinstance(text, str):
            raise TypeError(f"reset returned a {type(text).__name__}, not a text or None")
        return [said(text)] if text else []

    def step(self, reply: Message) -> Answer:
        return self.caller.answer(reply)

    def finish(self, stop_reason: str) -> float | None:
        return self._call(self.env.get_reward) if self.gives_reward else None

    def _call(self, function: Any, given: Mapping[str, Any] = {}) -> Any:
        (value,) = self.caller.settled([function(**given)])
        if isinstance(value, BaseException):
            raise value
        return value
