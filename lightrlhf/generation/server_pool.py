"""The servers of `--rollout_server` as one sampler.

With several servers, each takes the next chunk of prompts when it is free. One that fails is left out and its prompts
go to the others; once back it gets the current weights before any prompt. The version of a server's weights is read
before and after each request, so no response of unknown weights is returned.

Left out: starting servers (see `lightrlhf.serve`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from lightrlhf.cli.errors import RunFailure, ServersGone
from lightrlhf.cli.groups import SamplingArgs, ServerArgs
from lightrlhf.cli.patience import REQUEST, SERVER, patience
from lightrlhf.generation.engine import Completions
from lightrlhf.generation.server_client import (
    PROBE_SECONDS,
    Busy,
    HttpThread,
    InvalidResponse,
    Late,
    ServerClient,
    UnusableServer,
    message_of,
    retry,
)
from lightrlhf.generation.vllm import VLLM, Chunk, OtherVersion, Response, Target

RETRY_SECONDS = 1.0  # before the second attempt at a chunk
LONGEST_PAUSE = 60.0  # seconds, of a Retry-After
MAX_ATTEMPTS = 3  # at a chunk that a server answers wrongly or refuses for now
MAX_RETURNS = 5  # of a chunk, by each server
CHUNKS_PER_SERVER = 4  # of the prompts of one call, where several servers share them
MOST_ROWS = 1024  # of a request; vLLM takes no more prompts by default
MOST_NOISE = 2**23  # uniform numbers of a request: our own server takes bodies of up to 64 MiB


class RolloutServers:
    """The servers of `--rollout_server`, as one sampler.

    vocabulary: number of token ids that the model has; a response with another one is refused.
    Raises: RunFailure when one does not answer in time, is neither vLLM nor `lightrlhf.serve`, or
    refuses the key.
    """

    def __init__(self, args: ServerArgs, vocabulary: int = 2**31) -> None:
        self.args, self.vocabulary = args, vocabulary
        self.http = HttpThread(patience(REQUEST))
        clients = [ServerClient(self.http, url, "--rollout_server") for url in args.rollout_server]
        self.servers = [VLLM(client, patience(REQUEST)) for client in clients]
        self.outages: dict[VLLM, str] = {}  # why a server is left out
        self.last_seen = 0.0  # when some server was in use
        self.target: Target | None = None
        self._revivals: set[asyncio.Task[None]] = set()  # a loop keeps no task alive by itself
        try:
            self.http.start(self._connect()).result()
        except BaseException:
            self.http.close()
            raise

    def close(self) -> None:
        """Cancel pending requests."""
        self.http.close()

    def load(self, target: Target) -> None:
        """Load weights into all servers; one that fails is left out. Raises: RunFailure when one fails at the first."""
        self.http.start(self._load(target)).result()

    def start(
        self,
        prompts: Sequence[list[int]],
        args: SamplingArgs,
        ends: Sequence[int],
        uniforms: Tensor,
        allowed: Sequence[list[int]] | None = None,
    ) -> Future[Completions]:
        """Sample one response to each prompt; equal prompts that are adjacent are read once.

        uniforms: (B, max_new_tokens); our own server samples with them, others draw their own numbers; allowed: the
        only tokens that may be sampled, for each prompt, log-probabilities are then over them.
        The future raises: ServersGone when no server is left for long, RunFailure for what no server
        would answer.
        """
        return self.http.start(self._sample(list(prompts), args, {*ends, *args.eos_ids}, uniforms, allowed))

    def leave_out(self, url: str, problem: Exception) -> None:
        """Leave the server of an address out, from any thread, until it has the current weights again."""
        for server in self.servers:
            if server.client.url == url.rstrip("/"):
                self.http.loop.call_soon_threadsafe(self._leave_out, server, problem)

    def sleep(self, asleep: bool) -> None:
        """Have all servers free the accelerator's memory, or take it again."""
        self.http.start(self._sleep(asleep)).result()

    def settings(self) -> list[tuple[str, dict[str, Any]]]:
        """Address and settings of each active server."""
        return [(server.client.url, server.settings) for server in self._usable()]

    def score(self, texts: Sequence[list[int]]) -> list[tuple[str, list[list[float]]]]:
        """Address, and log-probability of each token after the first, read without cached prefixes, at temperature 1.

        Of each server that is not left out and can do so.
        """
        return self.http.start(self._score(list(texts))).result()

    # ------------------------------------------------------------------------------------- in the requests' thread
    def _usable(self) -> list[VLLM]:
        return [server for server in self.servers if server not in self.outages]

    async def _connect(self) -> None:
        timeout = patience(SERVER)
        await asyncio.gather(*(server.client.wait_until(server.connect, timeout) for server in self.servers))

    async def _score(self, texts: list[list[int]]) -> list[tuple[str, list[list[float]]]]:
        found = []
        for server in self._usable():
            if not server.adapter:  # vLLM on a CPU would end
                try:
                    found.append((server.client.url, await server.score(texts)))
                except (Busy, RunFailure):  # a server without this route explains nothing
                    continue
        return found

    async def _sleep(self, asleep: bool) -> None:
        for server in self._usable():
            try:
                await server.sleep(asleep)
            except Busy as problem:
                self._leave_out(server, problem)

    async def _load(self, target: Target) -> None:
        is_first, self.target = self.target is None, target
        waiting = self._usable()
        results = await asyncio.gather(*(server.load(target) for server in waiting), return_exceptions=True)
        for server, problem in zip(waiting, results):
            if problem is None:
                continue
            if is_first or not isinstance(problem, Busy | RunFailure):
                raise (
                    problem if isinstance(problem, RunFailure) else RunFailure(describe(server, problem))
                ) from problem
            self._leave_out(server, problem)

    def _leave_out(self, server: VLLM, problem: BaseException) -> None:
        """Leave a server out until `_revive` has given it the current weights."""
        if server in self.outages:  # another call found it out before
            return
        self.outages[server], self.last_seen = message_of(problem), time.monotonic()
        others = len(self._usable())
        print(f"warning: {describe(server, problem)}; it is left out, {others} go on", file=sys.stderr, flush=True)
        task = asyncio.create_task(self._revive(server))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, server: VLLM) -> None:
        """Take a server back as soon as it answers, with the weights that are current then."""
        while server in self.outages and not self.http.is_closed.is_set():  # an error may hide that it was cancelled
            await asyncio.sleep(PROBE_SECONDS)
            target = self.target
            try:
                await server.connect()
                if target is not None:
                    await server.load(target)
            except Exception as problem:  # whatever a server can make of an answer: it stays out
                self.outages[server] = message_of(problem)
                continue
            if target is self.target:
                del self.outages[server]
                print(f"{server.client.name} is back", file=sys.stderr, flush=True)

    async def _sample(
        self,
        prompts: list[list[int]],
        args: SamplingArgs,
        ends: Collection[int],
        uniforms: Tensor,
        allowed: Sequence[list[int]] | None,
    ) -> Completions:
        chunks = chunks_of(prompts, uniforms, allowed, len(self.servers))
        todo: asyncio.Queue[int] = asyncio.Queue()  # numbers of chunks
        for number in range(len(chunks)):
            todo.put_nowait(number)
        returns = [0] * len(chunks)  # how often each was given back
        responses: list[list[Response]] = [[] for _ in chunks]

        async def work(server: VLLM) -> None:
            while True:
                await self._wait_for(server)
                number = await todo.get()
                try:
                    responses[number] = await self._sample_chunk(server, chunks[number], args, ends)
                except (Busy, UnusableServer) as problem:
                    self._leave_out(server, problem)
                    returns[number] += 1
                    if returns[number] > MAX_RETURNS * len(self.servers):
                        raise ServersGone(f"{describe(server, problem)}, as others at the same prompts") from None
                    todo.put_nowait(number)
                todo.task_done()

        self.last_seen = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(work(server)) for server in self.servers]
                await todo.join()
                for worker in workers:
                    worker.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        rows = [row for own in responses for row in own]
        columns = ([row.ids for row in rows], [row.logprobs for row in rows], [row.truncated for row in rows])
        return Completions(*columns, removed_mass=0.0)

    async def _wait_for(self, server: VLLM) -> None:
        """Wait until a server is not left out. Raises: ServersGone when all of them have been for long."""
        while server in self.outages:
            seconds = patience(SERVER)
            if not self._usable() and time.monotonic() - self.last_seen > seconds:
                reasons = "; ".join(f"{server.client.url}: {reason}" for server, reason in self.outages.items())
                raise ServersGone(f"no --rollout_server has answered for {seconds:g} s ({reasons})")
            await asyncio.sleep(PROBE_SECONDS)

    async def _sample_chunk(
        self, server: VLLM, chunk: Chunk, args: SamplingArgs, ends: Collection[int]
    ) -> list[Response]:
        """The responses of one request, all by the current weights. Raises: Busy after some attempts."""
        assert self.target is not None
        version = self.target.version

        async def attempt() -> list[Response]:
            if server in self.outages:  # found by another call
                raise OtherVersion(self.outages[server])
            await server.check_version(version)
            responses = await server.sample(chunk, args, ends)
            await server.check_version(version)
            largest = max(max(response.ids) for response in responses)
            if largest >= self.vocabulary:
                raise InvalidResponse(f"a response with the token {largest}, the model has {self.vocabulary}")
            return responses

        unless = (OtherVersion, Late)  # other servers may be faster
        return await retry(attempt, MAX_ATTEMPTS, RETRY_SECONDS, longest_pause=LONGEST_PAUSE, unless=unless)


def chunks_of(
    prompts: list[list[int]], uniforms: Tensor, allowed: Sequence[list[int]] | None, num_servers: int
) -> list[Chunk]:
    """Cut prompts into requests: one for a single server, else some for each; a group of equal prompts stays whole."""
    most = len(prompts) if num_servers == 1 else math.ceil(len(prompts) / (CHUNKS_PER_SERVER * num_servers))
    most = min(most, MOST_ROWS, max(1, MOST_NOISE // uniforms.shape[1]))
    starts = [0]
    end = 0
    for _, rows in itertools.groupby(prompts):
        start, end = end, end + len(list(rows))
        if end - starts[-1] > most and start > starts[-1]:
            starts.append(start)
    slices = [slice(a, b) for a, b in itertools.pairwise([*starts, len(prompts)]) if a < b]
    return [Chunk(prompts[own], uniforms[own], None if allowed is None else list(allowed[own])) for own in slices]


def describe(server: VLLM, problem: BaseException) -> str:
    """The line about a server that failed."""
    return f"{server.client.name} failed: {message_of(problem)}"
