"""A pool of processes with an environment each: a hung or crashed one costs its own episode alone.

An environment is made once, is used for episode after episode, and is reseeded at each `reset`, with the global
generators of `random` and `numpy`. Where there are more episodes than processes, later ones wait for earlier ones to
finish. A stateless environment's episodes share the processes: any free one takes the next call, reseeded by the
episode's turn. A call that takes longer than its limit ends its process; another one takes its place.

Where `step` ended the process, the policy's action did: its episode ends there with the rewards it has, and counts. A
stateless environment's episode goes on, with an error in place of the results. Any other loss is a `Fault`: an
exception, a value that is not a reward, a process that ended or hung while it began or finished an episode, or that
could not start although an earlier one did.

The processes get no keys of servers, print to stderr, and hash texts alike, so that sets have one order.

Left out: limits of memory, and isolation: tools are the user's own code; programs that a model writes belong into
`--tools python`, whose sandbox has both. A process that a tool detaches from its session outlives the worker.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import random
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.processes import START_LIMIT, Process, begin_worker, kill_all
from lightrlhf.envs.mcp import USERS_PATH
from lightrlhf.envs.tool_env import as_content, result_message
from lightrlhf.envs.ways import EnvSpec
from lightrlhf.generation.episode_env import Answer, EpisodeEnv, Fault, Json, Message
from lightrlhf.rewards.functions import Failure, describe, failure_of, number_of

SECRET = re.compile(  # in names of variables
    r"(^|_)(KEY|TOKEN|SECRET|CREDENTIAL|AUTH|PASS|PAT)S?($|_)|_PWD$|APIKEY|PASSWORD|PASSWD|PASSPHRASE", re.IGNORECASE
)
LARGEST_ANSWER = 2**28  # bytes from a worker
GLANCE = 1.0  # seconds between looks whether a process has ended whose child holds its connection open
Result = list[Message] | Answer | float | None | Fault


class EnvWorker(Process):
    """A process with an environment; `request` is the one it works on, `episode` the one it plays."""

    def __init__(self, spec: EnvSpec) -> None:
        environment = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
        own = {"PYTHONHASHSEED": "0", USERS_PATH: os.environ.get("PYTHONPATH", "")}
        super().__init__("lightrlhf.envs.env_workers", [json.dumps(asdict(spec))], environment | own)
        self.request: tuple[Any, ...] | None = ("start",)
        self.episode: int | None = None

    def ask(self, request: tuple[Any, ...], seconds: float) -> None:
        self.request, self.deadline = request, time.monotonic() + seconds
        with suppress(OSError):  # it has ended, which is found where its answer is read
            self.connection.send_bytes(pickle.dumps(request))


class EnvPool:
    """Episodes in at most `size` processes; `reset`, `step` and `finish` return at once, `results` gives the answers.

    seconds: limit of each call; tools: schemas, None where the environment reads texts; gives_reward, has_outcome: see
    `EpisodeEnv`.
    Starts the first process. Raises: UsageError when the environment cannot be made.
    """

    def __init__(self, spec: EnvSpec, size: int, seconds: float) -> None:
        self.spec, self.size, self.seconds = spec, size, seconds
        self.workers: list[EnvWorker] = []
        self.playing: dict[int, EnvWorker] = {}  # by episode; of a stateless environment while a call runs
        self.seeds: dict[int, int] = {}  # of the episodes that have not ended
        self.waiting: deque[tuple[int, tuple[Any, ...]]] = deque()
        self.ready: deque[tuple[int, Result]] = deque()
        self.described: Json | None = None
        self.close = weakref.finalize(self, kill_all, self.workers)  # when it is not used any more, or at exit
        described = self._describe()
        self.tools: list[Json] | None = described["tools"]
        self.gives_reward: bool = described["gives_reward"]
        self.has_outcome: bool = described["has_outcome"]
        self.is_stateless: bool = described["is_stateless"]

    def reset(self, episode: int, seed: int, row: dict[str, Any]) -> None:
        """Begin an episode as soon as a process is free; its result is a list of messages."""
        self.seeds[episode] = seed
        self._submit(episode, ("reset", seed, row))

    def step(self, episode: int, reply: Message) -> None:
        """Give the policy's turn to an episode; its result is an `Answer`."""
        self._submit(episode, ("step", reply))

    def finish(self, episode: int, stop_reason: str) -> None:
        """End an episode and free its process; its result is the outcome's reward, or None."""
        self._submit(episode, ("finish", stop_reason))

    def drop(self, episode: int) -> None:
        """End an episode whose policy's side failed, with the process that it holds; there is no result."""
        del self.seeds[episode]
        if episode in self.playing:
            self._forget(self.playing[episode])

    def results(self, linger: float = math.inf) -> Iterator[tuple[int, Result]]:
        """Episodes and their results as they come, until all that can go on waits for the caller.

        linger: seconds after a result in which the next one must come, else what still runs is left for another call.
        """
        end = math.inf
        while True:
            self._dispatch()
            while self.ready:
                yield self.ready.popleft()
                self._dispatch()
                end = time.monotonic() + linger
            busy = [worker for worker in self.workers if worker.request is not None]
            if not busy or time.monotonic() >= end:
                return
            self._listen(busy, end)

    def _submit(self, episode: int, request: tuple[Any, ...]) -> None:
        if episode not in self.seeds:
            raise ValueError(f"episode {episode} is not played: it was not reset, or has ended")
        if self.is_stateless and request[0] == "step":
            self.seeds[episode] += 1
            request += (self.seeds[episode],)
        self.waiting.append((episode, request))
        self._dispatch()

    def _dispatch(self) -> None:
        """Send waiting requests to the processes that are free for them, and start processes for others."""
        for idle in [one for one in self.workers if one.episode is None and one.request is None]:
            if idle.has_ended():  # between two episodes, which neither is to blame for
                self._forget(idle)
        remaining: deque[tuple[int, tuple[Any, ...]]] = deque()
        missing = 0
        for episode, request in self.waiting:
            worker = self.playing.get(episode)
            if request[0] == "reset" or self.is_stateless:
                free = (one for one in self.workers if one.episode is None and one.request is None)
                worker = next(free, None)
                missing += worker is None
            if worker is None or worker.request is not None:
                remaining.append((episode, request))
            elif worker.has_ended():
                self._forget(worker)
                self._tell(episode, Fault("crashes", "its process ended between two calls"), is_last=True)
            else:
                worker.episode, self.playing[episode] = episode, worker
                worker.ask(request, self.seconds)
        self.waiting = remaining
        starting = sum(worker.episode is None for worker in self.workers)
        for _ in range(min(missing - starting, self.size - len(self.workers))):
            self.workers.append(EnvWorker(self.spec))

    def _listen(self, busy: list[EnvWorker], end: float = math.inf) -> None:
        """Wait for the first of the busy processes to answer, to end, or to be late, at most until `end`."""
        pause = min([end, *(worker.deadline for worker in busy)]) - time.monotonic()
        heard = wait([worker.connection for worker in busy], min(max(pause, 0.0), GLANCE))
        for worker in busy:
            if worker.connection in heard:
                self._hear(worker)
            elif worker.has_ended():
                self._lose(worker, "crashes")
            elif time.monotonic() >= worker.deadline:
                self._lose(worker, "timeouts")

    def _hear(self, worker: EnvWorker) -> None:
        """Take a process's message: that it is ready, that it could not start, or a result."""
        try:
            kind, value = json.loads(worker.connection.recv_bytes(LARGEST_ANSWER))
        except (EOFError, OSError, ValueError):
            return self._lose(worker, "crashes")
        if kind == "broken":
            episode = worker.episode
            self._forget(worker)
            return self._give_up(episode, Fault("errors", value))
        worker.request = None
        if kind == "ready":
            return
        if kind == "introduced":
            self.described = value
            return
        if worker.episode is None:
            raise UsageError(f"{self.spec.flag}: {value[1].removeprefix('introduce: ')}")
        episode, result = worker.episode, READERS[kind](value)
        is_lost = kind == "answer" and result.done and result.stop_reason in LOST.values()
        is_last = is_lost or kind in ("score", "fault")
        if is_last or self.is_stateless:
            self._release(worker)
        self._tell(episode, result, is_last)

    def _lose(self, worker: EnvWorker, kind: str) -> None:
        """A process ended, or is late, in the middle of a call."""
        request, episode = worker.request, worker.episode
        ended = worker.has_ended()
        status = self._forget(worker)
        text = "its process ended" + (f" with status {status}" if ended else "")
        if request is None or episode is None or request[0] == "start":
            return self._give_up(episode, Fault(kind, f"{self.spec.flag}: {text} while it started"))
        if kind == "timeouts":
            text = f"it took more than {self.seconds:g} seconds"
        if request[0] != "step":
            self._tell(episode, Fault(kind, f"{request[0]}: {text}"), is_last=True)
        elif self.is_stateless:
            self._tell(episode, unanswered(request[1], kind, text), is_last=False)
        else:
            answer = Answer(done=True, stop_reason=LOST[kind], counts=counts_of(request[1], kind))
            self._tell(episode, answer, is_last=True)

    def _give_up(self, episode: int | None, fault: Fault) -> None:
        """A process could not start: the first one ends the run, a later one costs its episode, or the next.

        Raises: UsageError for the first one.
        """
        if self.described is None:
            raise UsageError(fault.text)
        if episode is None:
            needing = (number for number, request in self.waiting if request[0] == "reset" or self.is_stateless)
            episode = next(needing, None)
        if episode is not None:
            self.waiting = deque(one for one in self.waiting if one[0] != episode)
            self._tell(episode, fault, is_last=True)

    def _tell(self, episode: int, result: Result, is_last: bool) -> None:
        if is_last:
            del self.seeds[episode]
        self.ready.append((episode, result))

    def _forget(self, worker: EnvWorker) -> int:
        self.workers.remove(worker)
        self._release(worker)
        return worker.kill()

    def _release(self, worker: EnvWorker) -> None:
        if worker.episode is not None:
            del self.playing[worker.episode]
        worker.episode = None

    def _describe(self) -> Json:
        worker = EnvWorker(self.spec)
        self.workers.append(worker)
        try:
            while self.described is None:
                if worker.request is None:
                    worker.ask(("introduce",), START_LIMIT)
                self._listen([worker])
        except BaseException:
            kill_all(self.workers)
            raise
        return self.described


LOST = {"crashes": "env_crashed", "timeouts": "env_timeout"}  # stop reasons


def counts_of(reply: Message, kind: str) -> dict[str, int]:
    """Counts of a turn that ended its process; without a call the turn itself counts as one."""
    calls = len(reply.get("tool_calls") or [1])
    return {"calls": calls, "failed_calls": calls, f"tool_{kind}": calls}


def unanswered(reply: Message, kind: str, text: str) -> Answer:
    """The answer of stateless tools to calls of which one ended the process."""
    error = f"error: {text}"
    messages = [result_message(call, error) for call in reply.get("tool_calls") or []]
    return Answer(messages or [{"role": "user", "content": error}], counts=counts_of(reply, kind))


READERS: dict[str, Callable[[Any], Any]] = {
    "messages": list,
    "answer": lambda value: Answer(**value),
    "score": lambda value: value,
    "fault": lambda value: Fault(*value),
}


# ----------------------------------------------------------------------------------------------- in the other process
class Host:
    """The environment of a process, and its results as kind and plain value."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self.env: EpisodeEnv | None = spec.make()

    def answer(self, kind: str, *arguments: Any) -> tuple[str, Any]:
        """The result of a request; a fault leaves its environment to be made anew."""
        try:
            return getattr(self, kind)(*arguments)
        except (Exception, asyncio.CancelledError) as problem:  # whatever an environment raises
            with suppress(Exception):
                getattr(self.env, "close", int)()
            self.env = None
            failure = failure_of(problem)
            return "fault", (failure.kind, f"{kind}: {failure}")

    def introduce(self) -> tuple[str, Any]:
        facts = {name: getattr(self.env, name) for name in ("tools", "gives_reward", "is_stateless")}
        return "introduced", facts | {"has_outcome": getattr(self.env, "has_outcome", True)}

    def reset(self, seed: int, row: dict[str, Any]) -> tuple[str, Any]:
        self.env = self.env or self.spec.make()
        seed_all(seed)
        return "messages", checked(self.env.reset(seed, row))

    def step(self, reply: Message, seed: int | None = None) -> tuple[str, Any]:
        """seed: of a stateless environment's turn; None: the generators go on."""
        self.env = self.env or self.spec.make()
        if seed is not None:
            seed_all(seed)
        answer = self.env.step(reply)
        if not isinstance(answer, Answer):
            raise Failure("errors", f"it returned {describe(answer)}, not an Answer")
        answer.messages, answer.reward = checked(answer.messages), reward_of(answer.reward)
        return "answer", asdict(answer)

    def finish(self, stop_reason: str) -> tuple[str, Any]:
        self.env = self.env or self.spec.make()
        score = self.env.finish(stop_reason)
        return "score", None if score is None else reward_of(score)


def seed_all(seed: int) -> None:
    """Seed the global generators that an environment may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def checked(messages: Any) -> list[Message]:
    """Messages of an environment, with contents that can be tokenised. Raises: Failure for anything else."""
    for message in messages if isinstance(messages, list) else [messages]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise Failure("errors", f"{describe(messages)} is not a list of messages with role and content")
    return [message | {"content": as_content(message["content"])} for message in messages]


def reward_of(value: Any) -> float:
    """Raises: Failure unless the value is a finite number."""
    number = number_of(value)
    if not isinstance(number, float) or not math.isfinite(number):
        raise Failure("rewards", f"the reward is {describe(value)}, not a finite number")
    return number


def serve(spec: str, descriptor: str, parent: str) -> None:
    """Answer each request that arrives, until the other end is closed."""
    connection = begin_worker(descriptor, parent)
    own = os.getpid()

    def say(kind: str, value: Any = None) -> None:
        connection.send_bytes(json.dumps([kind, value]).encode())

    made = EnvSpec(**json.loads(spec))
    try:
        seed_all(0)
        host = Host(made)
    except (Exception, SystemExit) as problem:
        return say("broken", str(problem) if isinstance(problem, UsageError) else f"{made.flag}: {failure_of(problem)}")
    say("ready")
    with suppress(EOFError, OSError):
        while True:
            result = host.answer(*pickle.loads(connection.recv_bytes()))
            if os.getpid() != own:
                os._exit(0)  # a copy that a tool forked and forgot to end
            try:
                say(*result)
            except (TypeError, ValueError) as problem:
                say("fault", ("errors", f"its answer has more than plain values: {first_line(problem)}"))


if __name__ == "__main__":
    serve(*sys.argv[1:])
