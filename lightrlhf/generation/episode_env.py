"""The interface of environments for episodes of many turns, and their answer to a turn of the policy.

A policy and an environment talk in messages of OpenAI's form. The policy's side plays many episodes at once; an
environment plays one at a time, lives in a worker process and is used again after its episode.

Of the failures, those that an action of the policy caused are observations, or end the episode with the rewards that
it has. Those of the environment's side are a `Fault`: no reward, which is never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]  # role, content, tool_calls, tool_call_id, name
Json = dict[str, Any]


@dataclass
class Answer:
    """What an environment says to a turn of the policy."""

    messages: list[Message] = field(default_factory=list)  # read next; results of calls in the order of the calls
    reward: float = 0.0  # of this turn
    done: bool = False
    stop_reason: str = "done"  # where `done`; truncated; env_crashed, env_timeout: its calls ended it, no `finish`
    counts: dict[str, int] = field(default_factory=dict)  # calls, failed_calls, and these by kind


class EpisodeEnv(Protocol):
    """An environment, as the worker processes call it. All but the results of tools raises for a fault.

    `has_outcome = False` tells that rewards come with the turns alone: an episode that is cut could have had more.
    """

    @property
    def tools(self) -> list[Json] | None:
        """JSON schemas for the chat template; None: the environment reads texts, and no calls."""

    gives_reward: bool
    """Whether `step` or `finish` give a reward; a run without one needs reward functions."""
    is_stateless: bool
    """Whether nothing is kept from call to call, so that any process may take an episode's next one."""

    def reset(self, seed: int, row: dict[str, Any]) -> list[Message]:
        """Begin an episode: the messages that follow the prompt's, see `opening`. All of a group get one seed."""
        ...

    def step(self, reply: Message) -> Answer:
        """Answer the assistant's message, with its calls as `data.tool_calls` reads them."""
        ...

    def finish(self, stop_reason: str) -> float | None:
        """The reward of the outcome, beside the rewards of turns; None: this episode has no reward."""
        ...


class Fault(NamedTuple):
    """The environment's side failed: the episode has no reward."""

    kind: str  # crashes, timeouts, errors, or rewards: it gave something else than a finite number
    text: str


def opening(prompt: Sequence[Message], first: Sequence[Message]) -> list[Message]:
    """A prompt's messages and what `reset` returned; two messages of the user become one, as templates want it."""
    messages = [dict(message) for message in prompt]
    for message in first:
        if messages and message["role"] == messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n\n" + message["content"]
        else:
            messages.append(dict(message))
    return messages
