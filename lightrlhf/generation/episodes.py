"""Episodes of several turns with tools or an environment, played together, exact to the token.

An episode's ids are kept as they were read and sampled (`conversations`). All episodes that wait for a turn are sampled
in one call of the engine, then their environments answer, each in its own process. In lock-step a call waits for all
answers, so that what is sampled depends on no clock. Else it takes those that are there, and no episode waits for the
slowest tool: the clock decides which episodes share a call, and so their last bits, but each has its own noise.
Environments that are fewer than the episodes are used one episode after another.

An episode ends by a stop reason:

    done, answer               the environment says so; a reply without a call, where there are tools alone
    truncated                  the environment cuts it, as gymnasium says it
    turns, tokens, context     the next turn would exceed a limit; of `context`, the model's positions
    template                   the chat template refuses the last reply, such as a text beside a call
    env_crashed, env_timeout   a call of the policy took the environment's process down
    fault                      the environment's own side failed: there is no reward, which is never 0

Left out: turns that join a call of the engine that has begun, compaction of a context that is full, and reasoning in
replies to an environment without tools.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.data.chat import protect
from lightrlhf.data.splits import Row
from lightrlhf.data.tokens import decode, encode_text, prompt_text
from lightrlhf.data.tool_calls import parse, schema_of
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.conversations import Conversation, Plan
from lightrlhf.generation.engine import Completions
from lightrlhf.generation.episode_env import Answer, Fault, Json, Message, opening
from lightrlhf.generation.prefix_cache import CachedPrefix

Result = list[Message] | Answer | float | None | Fault
CUT = ("truncated", "turns", "tokens", "context")  # stop reasons of episodes that could have gone on
STOP_REASONS = ("done", "answer", *CUT, "template", "env_crashed", "env_timeout", "fault")
LONGEST_NAME = 40  # characters of a tool's name in the logs
LINGER = 0.1  # of the time of a call of the engine, in which answers still join the next one
BROKEN = ("env_crashed", "env_timeout")  # stop reasons after which there is no environment to ask


class Pool(Protocol):
    """Environments in processes. A request returns at once; an episode has one at a time."""

    @property
    def tools(self) -> list[Json] | None: ...

    @property
    def gives_reward(self) -> bool: ...

    @property
    def has_outcome(self) -> bool: ...

    def reset(self, episode: int, seed: int, row: dict[str, Any]) -> None: ...

    def step(self, episode: int, reply: Message) -> None: ...

    def finish(self, episode: int, stop_reason: str) -> None: ...

    def drop(self, episode: int) -> None:
        """End an episode without an outcome; there is no result."""

    def results(self, linger: float = math.inf) -> Iterator[tuple[int, Result]]:
        """What was asked for, as it comes, until nothing runs; a reset may wait for an episode to end.

        linger: seconds after a result in which the next one must come, else what still runs is left for another call.
        """


class Limits(NamedTuple):
    """Where an episode ends."""

    turns: int
    tokens: float  # that are sampled in all turns
    positions: float  # of the model
    turn: int  # tokens of one turn
    observation: int  # tokens of a message of the environment


@dataclass(eq=False)
class Episode:
    """An episode from its prompt to its outcome. `waits_for` the environment's reset, answer or outcome, or a turn."""

    messages: list[Message]
    seed: int  # of the environment, one for all members of a group
    noise: int  # seed of the noise of its turns
    prompt: Row
    conversation: Conversation
    rewards: list[float] = field(default_factory=list)  # of each turn
    counts: Counter[str] = field(default_factory=Counter)
    stop_reason: str = ""
    outcome: float | None = None
    fault: Fault | None = None
    waits_for: str = "reset"  # answer, outcome, turn; empty: it is over
    prefix: CachedPrefix | None = None  # KV cache of the last prompt
    next_prompt: list[int] = field(default_factory=list)  # ids of the turn that a limit cut off, without an outcome

    @property
    def num_turns(self) -> int:
        return len(self.conversation.turns)

    @property
    def num_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(turn.end - turn.start for turn in self.conversation.turns)

    @property
    def score(self) -> float | None:
        """Rewards of turns and outcome together; None without one."""
        return None if self.fault or self.outcome is None else sum(self.rewards) + self.outcome

    def facts(self) -> dict[str, Any]:
        """What the logs show beside its ids, as plain values."""
        said = [called(message) for message in self.messages if message["role"] == "assistant"]
        return {
            "stop_reason": self.stop_reason,
            "cut": self.stop_reason in CUT,
            "turns": self.num_turns,
            "rows": len(self.conversation.rows),
            "tokens": self.num_tokens,
            "rewards": self.rewards,
            "calls": said[max(len(said) - self.num_turns, 0) :],  # not the prompt's
            "score": self.score,
            "fault": self.fault and self.fault.kind,
            "counts": dict(self.counts),
        }

    def take(self, result: Result, shorten: Callable[[Message], Message], gives_reward: bool) -> None:
        """Take what an environment has answered, which gives a reward or not."""
        if isinstance(result, Fault):
            self.fail(result)
        elif isinstance(result, Answer):
            self.rewards.append(result.reward)
            self.counts.update(result.counts)
            self.messages += map(shorten, result.messages)
            if result.done:
                self.stop_reason, self.waits_for = result.stop_reason, "end"
                if result.stop_reason in BROKEN:
                    self.outcome, self.waits_for = 0.0 if gives_reward else None, ""
            elif result.messages:
                self.waits_for = "turn"
            else:
                self.fail(Fault("errors", "the environment gave neither an observation nor an end"))
        elif isinstance(result, list):
            self.messages = opening(self.messages, [shorten(message) for message in result])
            self.waits_for = "turn"
        else:
            self.outcome, self.waits_for = result, ""
        if not self.waits_for:
            self.prefix = None

    def fail(self, fault: Fault) -> None:
        self.fault, self.stop_reason, self.waits_for, self.prefix = fault, "fault", "", None


def called(message: Message) -> list[str]:
    """Names of the tools that a message calls, which may be of the policy's invention."""
    return [str(call["function"]["name"])[:LONGEST_NAME] for call in message.get("tool_calls") or []]


Sample = Callable[[Sequence[Episode], Sequence[Plan]], Completions]  # the next turn of each episode


def play(
    episodes: Sequence[Episode],
    pool: Pool,
    sample: Sample,
    tokenizer: Tokenizer,
    limits: Limits,
    lockstep: bool = True,
) -> float:
    """Play episodes to their end; returns the mean probability that top-k, top-p and min-p removed.

    lockstep: turns wait for all environments; else for a first one, and those that follow it soon.
    Raises: UsageError when the chat template refuses a prompt, or it does not fit into the model; RunFailure when the
    pool neither answers nor has anything to do.
    """
    removed = tokens = 0.0
    linger = math.inf if lockstep else 0.0

    def shorten(message: Message) -> Message:
        return shortened(tokenizer, message, limits.observation)

    for number, one in enumerate(episodes):
        pool.reset(number, one.seed, one.prompt.get("columns", {}))
    while any(before := [one.waits_for for one in episodes]):
        for number, result in pool.results(linger):
            episodes[number].take(result, shorten, pool.gives_reward)
            if episodes[number].fault and not isinstance(result, Fault):  # of which its process does not know
                pool.drop(number)
        plans: dict[int, Plan] = {}
        for number, one in enumerate(episodes):
            if one.waits_for == "turn":
                if plan := plan_turn(one, pool.tools, limits):
                    plans[number] = plan
                elif one.fault:
                    pool.drop(number)
            if one.waits_for == "end":
                if one.stop_reason in CUT and not pool.has_outcome:
                    one.next_prompt = next_prompt(one, pool.tools, limits)
                one.waits_for = "outcome"
                pool.finish(number, one.stop_reason)
        if not plans:
            if before == [one.waits_for for one in episodes]:
                raise RunFailure(f"episodes wait for environments that do not answer: {Counter(filter(None, before))}")
            continue
        started = time.monotonic()
        sampled = sample([episodes[number] for number in plans], [*plans.values()])
        if not lockstep:
            linger = LINGER * (time.monotonic() - started)
        count = sum(map(len, sampled.responses))
        removed, tokens = removed + sampled.removed_mass * count, tokens + count
        turns = zip(sampled.responses, sampled.logprobs, sampled.truncated)
        for (number, plan), (ids, logprobs, cut) in zip(plans.items(), turns):
            pool.step(number, take_turn(episodes[number], plan, pool.tools, limits, ids, logprobs, cut))
    return removed / max(tokens, 1)


def plan_turn(one: Episode, tools: list[Json] | None, limits: Limits) -> Plan | None:
    """What the policy reads before its next turn; None where the episode ends here, by a limit or a fault."""
    plan, stop_reason = None, ""
    if one.num_turns >= limits.turns:
        stop_reason = "turns"
    elif one.num_tokens >= limits.tokens:
        stop_reason = "tokens"
    else:
        try:
            plan = one.conversation.begin(one.messages, tools)
        except UsageError as problem:
            if not one.num_turns:
                raise
            if can_follow_reply(one, tools):  # template or tokenizer refuse a text of the environment
                one.fail(Fault("errors", str(problem)))
                return None
            stop_reason = "template"
        if plan and one.num_turns and len(plan.ids) + limits.turn > limits.positions:
            plan, stop_reason = None, "context"
    if stop_reason:
        one.stop_reason, one.waits_for = stop_reason, "end"
    return plan


def next_prompt(one: Episode, tools: list[Json] | None, limits: Limits) -> list[int]:
    """The ids that the policy would read next; none where the template refuses them, or the model has no positions."""
    try:
        ids = one.conversation.begin(one.messages, tools).ids
    except UsageError:
        return []
    return ids if len(ids) < limits.positions else []


def can_follow_reply(one: Episode, tools: list[Json] | None) -> bool:
    """Whether template and tokenizer take the messages to the policy's last reply, without what came after it."""
    tokenizer, length = one.conversation.tokenizer, len(one.conversation.turns[-1].messages) + 1
    try:
        encode_text(tokenizer, prompt_text(tokenizer, one.messages[:length], tools))
    except UsageError:
        return False
    return True


def take_turn(
    one: Episode,
    plan: Plan,
    tools: list[Json] | None,
    limits: Limits,
    ids: list[int],
    logprobs: list[float],
    truncated: bool,
) -> Message:
    """Add a sampled turn, cut to what is left of the episode's tokens; returns it as a message.

    The end of a turn that was cut is not sampled: the template's suffix closes it.
    """
    left = int(min(limits.tokens - one.num_tokens, len(ids)))
    ids, logprobs, truncated = ids[:left], logprobs[:left], truncated or left < len(ids)
    tokenizer = one.conversation.tokenizer
    reply: Message = {"role": "assistant", "content": decode(tokenizer, ids)}
    if tools:
        parsed = parse(tokenizer, ids, plan.prompt, tools, plan.number)
        reply = parsed.as_message()
        one.counts["unreadable_calls"] += parsed.problem is not None
    one.counts["truncated_turns"] += truncated
    stop_reason = "length" if truncated else "tool_calls" if "tool_calls" in reply else "stop"
    one.conversation.end(plan, {}, one.messages, tools, ids, logprobs, reply, stop_reason, "")
    one.messages = [*one.messages, reply]
    one.waits_for = "answer"
    return reply


def shortened(tokenizer: Tokenizer, message: Message, limit: int) -> Message:
    """A message of the environment with at most `limit` tokens of its text, head and tail, and a note between them."""
    text = message.get("content") or ""
    if len(text.encode()) <= limit:
        return message
    ids = encode_text(tokenizer, protect(tokenizer, text))
    if len(ids) <= limit:
        return message
    head, tail = (decode(tokenizer, part).strip("\ufffd") for part in (ids[: limit - limit // 2], ids[-(limit // 2) :]))
    return {**message, "content": f"{head}\n[{len(ids) - limit} tokens left out]\n{tail}"}


def check_template(tokenizer: Tokenizer, tools: list[Json] | None) -> None:
    """Raises: UsageError when episodes cannot be rendered by the tokenizer's chat template."""
    if not tokenizer.chat_template:
        raise UsageError("episodes of several turns need a chat template; give one by --chat_template")
    if tools:
        schema_of(tokenizer)
