"""Episodes of programs that speak OpenAI's chat (`--agent`): each in a process, with its session on a server.

A program gets the address and the key of a session on one of the servers. When it has ended, the session's trace gives
the episode: rows of the ids that were read and sampled, their log-probabilities, and turns; a row begins anew where the
program changed what was said. The function's value is the outcome. Episodes move on one by one, at most `--env_workers`
at once. A session that was lost with its server, has turns of other weights or a request that the server failed, or
whose time ended before its last request was answered, is thrown away, and its episode is played again.

The noise of an episode's turns follows from the run's seed. What is sampled may still depend on the clock, as the last
bits of a log-probability depend on which requests a server computes together.

    None, an exception          no reward
    env_crashed, env_timeout    the program ended its process, or took longer than `--env_timeout`: a reward of 0

Left out: several ranks, servers other than `lightrlhf.serve`, runs that resume bitwise, and limits of an episode's
turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, MutableSequence
from contextlib import suppress
from typing import Any, TypeVar

from lightrlhf.cli.errors import RunFailure, ServersGone, UsageError
from lightrlhf.cli.patience import REQUEST, SERVER, patience
from lightrlhf.generation.conversations import Conversation, Row, Turn
from lightrlhf.generation.episode_env import Fault
from lightrlhf.generation.episodes import Episode, Pool
from lightrlhf.generation.served import ServedPolicy
from lightrlhf.generation.server_client import (
    PROBE_SECONDS,
    Busy,
    HttpThread,
    InvalidResponse,
    NoRoute,
    ServerClient,
    UnusableServer,
    message_of,
    retry,
)
from lightrlhf.generation.session_client import ServedSession, Trace, open_session
from lightrlhf.generation.vllm import VLLM, Target
from lightrlhf.models.roles import vocabulary_size

Result = TypeVar("Result")
MAX_ATTEMPTS = 5  # at an episode whose session is lost
TRACE_ATTEMPTS = 3  # at reading a trace


class AgentSessions:
    """Plays episodes by the programs of a pool, over sessions of the servers that a policy is served by.

    args: `AgentArgs`, `SamplingArgs` and `ServerArgs`. `close` must be called. Raises: UsageError on several ranks.
    """

    def __init__(self, args: Any, pool: Pool, served: ServedPolicy) -> None:
        if served.ranks.num_processes > 1:
            raise UsageError(f"--agent {args.agent} runs in one process, not {served.ranks.num_processes}; --devices 1")
        self.args, self.pool, self.served = args, pool, served
        self.vocabulary = vocabulary_size(served.policy)
        self.http = HttpThread(patience(REQUEST))
        clients = [ServerClient(self.http, url, "--rollout_server") for url in args.rollout_server]
        self.servers = [VLLM(client, patience(REQUEST)) for client in clients]
        self.open: dict[int, ServedSession] = {}  # by episode

    def close(self) -> None:
        """End open sessions and cancel pending requests."""
        self._wait(self._end_open())
        self.http.close()

    def play(self, episodes: MutableSequence[Episode]) -> None:
        """Play episodes to their end by the current weights.

        Raises: ServersGone when no server answers for long, RunFailure when one has no sessions.
        """
        target = self.served.publish()
        attempts: Counter[int] = Counter()
        for number in range(len(episodes)):
            self._reset(number, episodes[number])
        for number, result in self.pool.results():
            one = episodes[number]
            one.take(result, lambda message: message, gives_reward=True)
            if one.waits_for == "turn":
                session = self.open[number] = self._wait(self._open(one, target, number + attempts[number]))
                self.pool.step(number, {"base_url": session.base_url, "api_key": session.key})
            elif one.waits_for == "end":
                self.pool.finish(number, one.stop_reason)
            elif number in self.open:  # else its process could not begin
                try:
                    fill(one, self._wait(self._end(self.open.pop(number), target, one.stop_reason)))
                except (Busy, UnusableServer) as problem:
                    attempts[number] += 1
                    if attempts[number] == MAX_ATTEMPTS:
                        one.fail(Fault("errors", f"its session was lost: {message_of(problem)}"))
                        continue
                    episodes[number] = anew(one)
                    self._reset(number, episodes[number])

    def _reset(self, number: int, one: Episode) -> None:
        self.pool.reset(number, one.seed, {**one.prompt.get("columns", {}), "messages": one.messages})

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.http.start(work).result()

    async def _open(self, one: Episode, target: Target, number: int) -> ServedSession:
        """A session on a server that has the weights of `target`; episodes are dealt by their number."""
        first = number % len(self.servers)
        model = target.version if target.is_adapter else None
        pinned = {"temperature": self.args.temperature, "max_tokens": self.args.max_new_tokens, "seed": one.noise}
        end = time.monotonic() + patience(SERVER)
        while True:
            reasons = []
            for server in self.servers[first:] + self.servers[:first]:
                try:
                    await server.check_version(target.version)
                except (Busy, UnusableServer) as problem:
                    reasons.append(f"{server.client.url}: {message_of(problem)}")
                    self.served.leave_out(server.client.url, problem)
                    continue
                try:
                    return await open_session(server.client, model=model, **pinned)
                except NoRoute:
                    raise RunFailure(f"{server.client.name} has no sessions: --agent needs lightrlhf.serve") from None
                except (Busy, UnusableServer) as problem:
                    reasons.append(f"{server.client.url}: {message_of(problem)}")
            if time.monotonic() > end:
                raise ServersGone(f"no --rollout_server opens a session ({'; '.join(reasons)})")
            await asyncio.sleep(PROBE_SECONDS)

    async def _end_open(self) -> None:
        await asyncio.gather(*map(end_session, self.open.values()))

    async def _end(self, session: ServedSession, target: Target, stop_reason: str) -> Trace:
        """The trace of a session, which ends.

        Raises: Busy or UnusableServer when it is not of the policy, or the server failed or was late.
        """
        try:
            trace = await retry(session.trace, TRACE_ATTEMPTS, PROBE_SECONDS)
        finally:
            await end_session(session)
        if trace.failed_requests:
            raise Busy(f"{session.client.name} failed {trace.failed_requests} of its requests")
        if stop_reason == "env_timeout" and not trace.is_answered:
            raise Busy(f"{session.client.name} had not answered when its time ended; set a longer --env_timeout")
        if versions := {turn.version for turn in trace.turns} - {target.version}:
            raise InvalidResponse(f"turns by weights of version {min(versions)[:80]}, not {target.version}")
        largest = max((max(row.ids) for row in trace.rows), default=0)
        if largest >= self.vocabulary:
            raise InvalidResponse(f"a row with the token {largest}, the model has {self.vocabulary}")
        return trace


async def end_session(session: ServedSession) -> None:
    """End a session; one that cannot be reached ends by itself."""
    with suppress(Busy, RunFailure):
        await session.end()


def anew(one: Episode) -> Episode:
    """An episode before its reset."""
    return Episode(one.messages, one.seed, one.noise, one.prompt, Conversation(one.conversation.tokenizer))


def fill(one: Episode, trace: Trace) -> None:
    """Give an episode the rows and turns of its session; without a turn it has failed."""
    one.conversation.rows = [Row(row.began, ids=row.ids) for row in trace.rows]
    for number, turn in enumerate(trace.turns):
        span = turn.row, turn.start, turn.end
        logprobs = trace.rows[turn.row].logprobs[turn.start : turn.end]
        told = turn.reply, turn.stop_reason, turn.version
        one.conversation.turns.append(Turn(number, turn.request, [], None, "", *span, logprobs, *told, {}))
    one.rewards = [0.0] * len(trace.turns)
    one.counts["calls"] = sum(len(turn.reply.get("tool_calls") or []) for turn in trace.turns)
    one.counts["truncated_turns"] = sum(turn.stop_reason == "length" for turn in trace.turns)
    if trace.turns:
        one.messages = trace.messages
    elif not one.fault:
        one.fail(Fault("errors", "the program asked for no turn"))
