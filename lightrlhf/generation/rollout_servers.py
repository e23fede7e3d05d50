"""Client of servers that sample for training: token ids in; token ids, log-probabilities and the weights' version out.

Four verbs: sample, load the weights of a version (while paused), tell the version, sleep, by the routes of vLLM, which
`lightrlhf.serve` has too. No tokenizer stands between: what a model read and sampled comes back as ids.

Several servers share the work by what they finish. One that fails is left out and its prompts go to the others; one
that comes back gets the current weights before any prompt. A version is read from a server before and after each
request, and is set only once its weights are loaded, so no response of unknown weights is returned.

Left out: transfer of weights over NCCL, requests of several versions, several models at a server, and starting servers
(see `lightrlhf.serve`).
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lightrlhf.cli.addresses import KEY
from lightrlhf.cli.errors import RunFailure, ServersGone
from lightrlhf.cli.groups import SamplingArgs, ServerArgs
from lightrlhf.generation.engine import Completions
from lightrlhf.generation.http_thread import (
    Busy,
    HttpThread,
    Late,
    message_of,
    one_line,
    reason_of,
    retry_after,
    text_of,
)

NO_VERSION = "none"  # while weights are loaded, and where a load failed
PROBE_SECONDS = 1.0  # between two looks at a server that was left out
RETRY_SECONDS = 1.0  # before the second attempt of a request, and between attempts to reset a prefix cache
LONGEST_PAUSE = 60.0  # seconds, of a Retry-After
SHORT_DEADLINE = 30.0  # seconds, of requests that compute nothing
MAX_ATTEMPTS = 3  # at a chunk that a server answers wrongly or refuses for now
MAX_RETURNS = 5  # of a chunk, by each server
CHUNKS_PER_SERVER = 4  # of the prompts of one call, where several servers share them
BYTES_PER_TOKEN = 512  # at most, of a reply; vLLM writes about 60
MOST_ROWS = 1024  # of a request; vLLM takes no more prompts by default
MOST_NOISE = 2**23  # uniform numbers of a request: our own server takes bodies of up to 64 MiB
VERSION, PREFIX = re.compile(r"[0-9a-f]{8}-\d+"), "lightrlhf-"  # names of versions, and of exchange folders
RESETS = 60  # attempts to reset a prefix cache


class Wrong(Busy):
    """An answer that is none to what was asked."""


class Refused(RunFailure):
    """A server that takes no such key or has no such route: none to use, or another one than before at its address."""


class OtherVersion(Busy):
    """A server that was started again, or that another trainer uses."""


class Chunk(NamedTuple):
    """Prompts of one request: groups of equal ones are next to each other."""

    rows: Sequence[int]  # their places among those of the call
    prompts: list[list[int]]
    uniforms: Tensor  # (rows, max_new_tokens)
    allowed: list[list[int]] | None = None  # the only tokens that each may be answered by; None: any

    def select(self, places: list[int]) -> Chunk:
        """Some of the rows."""
        rows, prompts = [self.rows[i] for i in places], [self.prompts[i] for i in places]
        return Chunk(rows, prompts, self.uniforms[places], self.allowed and [self.allowed[i] for i in places])


class Response(NamedTuple):
    """One response of a server."""

    ids: list[int]
    logprobs: list[float]
    truncated: bool


@dataclass
class Server:
    """A server and what is known of it."""

    url: str
    dialect: VLLM | None = None  # found by asking
    model: str = ""  # name of the served model
    adapter: str = ""  # name of the adapter that requests ask for; the model itself when empty
    is_out: bool = False  # left out until it has the current weights
    reason: str = ""  # why
    settings: dict[str, Any] = field(default_factory=dict)  # dtype, logprobs_mode and more, where it tells them
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)  # one load at a time


class Target(NamedTuple):
    """Weights that servers are to have."""

    folder: Path
    version: str
    is_adapter: bool


class Ask:
    """Requests to one server. Raises: Busy for what may pass, RunFailure for what will not."""

    def __init__(self, http: HttpThread, url: str, deadline: float) -> None:
        self.http, self.url, self.deadline = http, url, deadline

    async def __call__(self, path: str, body: Any = None, deadline: float = SHORT_DEADLINE, tokens: int = 0) -> Any:
        """The JSON answer to a POST, or without a body to a GET; tokens: how many a long reply may have."""
        method = "GET" if body is None else "POST"
        longest = 16 * 2**20 + BYTES_PER_TOKEN * tokens
        response = await self.http.send(method, self.url + path, deadline, longest, json=body)
        status = response.status_code
        if status in (401, 403):
            raise Refused(f"--rollout_server {self.url} refused the key (status {status}); set {KEY}")
        if status == 404:
            raise Refused(f"--rollout_server {self.url} has no {path.partition('?')[0]} ({reason_of(response)})")
        if status in (400, 413, 422):
            raise RunFailure(f"--rollout_server {self.url} refused {path.partition('?')[0]}: {reason_of(response)}")
        if status != 200:
            reason = f"{path.partition('?')[0]} answered with status {status}: {reason_of(response)}"
            raise Busy(reason, retry_after(response))
        if not response.headers.get("content-type", "").lower().count("json"):
            return None  # a word for people
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError):
            raise Wrong(f"a reply that is no JSON: {one_line(text_of(response))[:200]!r}") from None


class VLLM:
    """vLLM 0.26 and later in developer mode (VLLM_SERVER_DEV_MODE=1), and `lightrlhf.serve`."""

    def __init__(self, takes_noise: bool) -> None:
        self.takes_noise = takes_noise  # our own server, whose samples are bitwise those of the local engine
        self.name = "lightrlhf" if takes_noise else "vLLM"

    async def sample(
        self, ask: Ask, server: Server, chunk: Chunk, args: SamplingArgs, ends: Sequence[int]
    ) -> list[Response]:
        """The responses to a chunk, in order; by a request for each list of allowed tokens, all at once."""
        if chunk.allowed is None:
            return await self._sample(ask, server, chunk, args, ends)
        places: dict[tuple[int, ...], list[int]] = {}  # of the rows with the same list
        for place, ids in enumerate(chunk.allowed):
            places.setdefault(tuple(ids), []).append(place)
        requests = (self._sample(ask, server, chunk.select(own), args, ends) for own in places.values())
        answers = await asyncio.gather(*requests, return_exceptions=True)  # all end before one is asked again
        responses: dict[int, Response] = {}
        for own, answer in zip(places.values(), answers):
            if isinstance(answer, BaseException):
                raise answer
            responses |= zip(own, answer)
        return [responses[place] for place in range(len(chunk.prompts))]

    async def _sample(
        self, ask: Ask, server: Server, chunk: Chunk, args: SamplingArgs, ends: Sequence[int]
    ) -> list[Response]:
        groups = [list(rows) for _, rows in itertools.groupby(chunk.prompts)]
        sizes = {len(rows) for rows in groups}
        n = sizes.pop() if len(sizes) == 1 else 1
        prompts = [rows[0] for rows in groups] if n > 1 else chunk.prompts
        count, model = len(chunk.prompts), server.adapter or server.model
        body = {
            "model": model,
            "prompt": prompts,
            "n": n,
            "max_tokens": args.max_new_tokens,
            "temperature": args.temperature if args.do_sample else 0.0,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": sorted({*ends, *args.eos_ids}),
            "stop": args.stop_strings or None,
            "include_stop_str_in_output": True,
            "ignore_eos": True,  # the ends are those of the policy, above
        }
        if chunk.allowed is not None:
            body["allowed_token_ids"] = chunk.allowed[0]
        room = server.settings.get("max_model_len")
        longest = max(map(len, prompts)) + args.max_new_tokens
        if type(room) is int and longest > room:  # vLLM would cut responses without a word
            raise RunFailure(
                f"--rollout_server {server.url} has room for {room} tokens, a prompt with its response needs "
                f"{longest}; start it with --max-model-len {longest} or more, or lower --max_new_tokens"
            )
        if self.takes_noise:
            body["noise"] = base64.b64encode(chunk.uniforms.float().numpy().astype("<f4").tobytes()).decode()
        else:
            body["cache_salt"] = await self.version(ask, server)  # keys and values of other weights are never reused
        tokens = count * (args.max_new_tokens + len(max(prompts, key=len)))
        reply = await ask("/v1/completions", body, ask.deadline, tokens)
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or len(choices) != count:
            raise Wrong(f"{len(choices) if isinstance(choices, list) else 'no'} choices for {count} responses")
        if reply.get("model", model) != model:
            raise Wrong(f"an answer of the model {reply['model']!r}, not of {model!r}")
        ordered: dict[int, dict[str, Any]] = {}
        for choice in choices:
            if not isinstance(choice, dict) or type(choice.get("index")) is not int:
                raise Wrong("a choice without an index")
            ordered[choice["index"]] = choice
        if sorted(ordered) != list(range(count)):
            raise Wrong("choices whose indices are not those of the request")
        responses = []
        for row in range(count):
            choice = ordered[row]
            echo, values = choice.get("prompt_token_ids"), choice.get("logprobs")
            if echo != chunk.prompts[row]:
                raise Wrong(f"an answer to another prompt in choice {row}")
            logprobs = values.get("token_logprobs") if isinstance(values, dict) else None
            ids, end = choice.get("token_ids"), choice.get("finish_reason")
            responses.append(checked_response(ids, logprobs, end, args, ends))
            if chunk.allowed is not None and not {*responses[-1].ids} <= {*chunk.allowed[row]}:
                raise Wrong("a response of tokens that were not allowed; does the server know allowed_token_ids?")
        return responses

    async def score(self, ask: Ask, server: Server, texts: list[list[int]]) -> list[list[float]]:
        """Log-probability of each token after the first, read without cached prefixes, at temperature 1."""
        body = {"model": server.adapter or server.model, "prompt": texts, "max_tokens": 1, "prompt_logprobs": 0}
        salt = {} if self.takes_noise else {"cache_salt": secrets.token_hex(8)}
        reply = await ask("/v1/completions", body | salt, ask.deadline, sum(map(len, texts)))
        try:
            choices = sorted(reply["choices"], key=lambda choice: choice["index"])
            return [
                [float(values[str(token)]["logprob"]) for token, values in zip(ids[1:], choice["prompt_logprobs"][1:])]
                for ids, choice in zip(texts, choices, strict=True)
            ]
        except (KeyError, TypeError, ValueError, OverflowError) as problem:
            raise Wrong(f"prompt_logprobs that cannot be read: {message_of(problem)}") from None

    async def load(self, ask: Ask, server: Server, target: Target) -> None:
        """Load weights while sampling is paused, and set their version."""
        with suppress(Refused):  # of a server without this route
            answer = await ask("/is_sleeping")
            if isinstance(answer, dict) and answer.get("is_sleeping") is True:  # left so by a run that was killed
                await self.sleep(ask, server, False)
        try:
            await ask("/pause?mode=wait", {}, ask.deadline)
            await self._drop_left(ask)
            await ask("/update_weight_version", {"new_version": NO_VERSION})
            if target.is_adapter:
                await self._load_adapter(ask, server, target)
            else:
                path = {"weights_path": str(target.folder)}
                await ask("/collective_rpc", {"method": "reload_weights", "kwargs": path}, ask.deadline)
            await self._reset_cache(ask)
            await ask("/update_weight_version", {"new_version": target.version})
        finally:
            await ask("/resume", {})
        answer = await ask("/is_paused")
        if isinstance(answer, dict) and answer.get("is_paused"):
            raise RunFailure(f"--rollout_server {ask.url} stays paused after /resume; restart it")

    async def _drop_left(self, ask: Ask) -> None:
        """Drop adapters of trainers that have ended: their folders went with them."""
        for model in await models_of(ask):
            name, root = str(model.get("id")), str(model.get("root"))
            if model.get("parent") and VERSION.fullmatch(name) and PREFIX in root and not Path(root).exists():
                await ask("/v1/unload_lora_adapter", {"lora_name": name})

    async def _load_adapter(self, ask: Ask, server: Server, target: Target) -> None:
        """Load an adapter under the name of its version, which was never used, and drop those of this run before it."""
        body = {"lora_name": target.version, "lora_path": str(target.folder)}
        if target.version not in [model.get("id") for model in await models_of(ask)]:  # else a load that failed later
            await ask("/v1/load_lora_adapter", body, ask.deadline)
        roots = {str(model.get("id")): model.get("root") for model in await models_of(ask)}
        if roots.get(target.version) != str(target.folder):
            raise RunFailure(
                f"--rollout_server {ask.url} serves adapter {target.version} from {roots.get(target.version)}, not "
                f"from {target.folder}; restart the server"
            )
        server.adapter = target.version
        token = target.version.partition("-")[0]
        for old in roots:
            if old.startswith(f"{token}-") and old != target.version:
                await ask("/v1/unload_lora_adapter", {"lora_name": old})

    async def _reset_cache(self, ask: Ask) -> None:
        """Drop cached keys and values of earlier weights; a server refuses while requests hold some."""
        for _ in range(RESETS):
            answer = await ask("/reset_prefix_cache", {})
            if not isinstance(answer, dict) or answer.get("success", True) is True:  # before 0.26 there is no answer
                return
            await asyncio.sleep(RETRY_SECONDS)
        raise Busy(f"its prefix cache could not be reset in {RESETS} attempts; other clients hold blocks of it")

    async def version(self, ask: Ask, server: Server) -> str:
        """The version of the weights that the server has."""
        answer = await ask("/weight_info")
        return str(answer.get("weight_version")) if isinstance(answer, dict) else NO_VERSION

    async def sleep(self, ask: Ask, server: Server, asleep: bool) -> None:
        """Free the server's memory of the accelerator, or take it again."""
        await ask("/sleep?level=1" if asleep else "/wake_up", {}, ask.deadline)


async def models_of(ask: Ask) -> list[dict[str, Any]]:
    """The models and adapters that a server names."""
    answer = await ask("/v1/models")
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or not data or not all(isinstance(model, dict) for model in data):
        raise Wrong("/v1/models names no model")
    return data


async def identify(ask: Ask, server: Server) -> None:
    """Find out whether it is vLLM or our own server, its model, and its settings. Raises: RunFailure if neither."""
    try:
        about = await ask("/version")
    except RunFailure as problem:
        if KEY in str(problem):
            raise
        about = None
    version = about.get("version") if isinstance(about, dict) else None
    if version is None:
        raise RunFailure(f"--rollout_server {ask.url} is neither vLLM nor lightrlhf.serve")
    server.dialect = VLLM(takes_noise=str(version).startswith("lightrlhf"))
    server.model = next((str(model.get("id")) for model in await models_of(ask) if not model.get("parent")), "")
    try:
        answer = await ask("/server_info?config_format=json")
    except RunFailure:
        raise RunFailure(
            f"--rollout_server {ask.url} is not in developer mode, so weights cannot follow; start it by "
            "python -m lightrlhf.serve, or with VLLM_SERVER_DEV_MODE=1"
        ) from None
    config = answer.get("vllm_config") if isinstance(answer, dict) else None
    settings = config.get("model_config") if isinstance(config, dict) else None
    server.settings = settings if isinstance(settings, dict) else {}


def checked_response(ids: Any, logprobs: Any, end: Any, args: SamplingArgs, ends: Sequence[int]) -> Response:
    """A response as a server gave it. Raises: Wrong unless it is one that the model could have sampled."""
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise Wrong("a response without token ids; is the server too old to return them?")
    if len(ids) > args.max_new_tokens:
        raise Wrong(f"a response of {len(ids)} tokens, {args.max_new_tokens} were asked for")
    if not {*ids[:-1]}.isdisjoint([*ends, *args.eos_ids]):
        raise Wrong("a response that goes on after an end token")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids):
        raise Wrong("a response without one log-probability for each token")
    if not all(type(x) in (int, float) and -1e9 < x <= 1e-3 for x in logprobs):  # NaN and infinite ones neither
        raise Wrong("log-probabilities that are no numbers of at most 0")
    last_is_end = ids[-1] in ends or ids[-1] in args.eos_ids
    if end == "length" and len(ids) == args.max_new_tokens:
        return Response(ids, [float(x) for x in logprobs], not last_is_end)
    if end == "stop" and (last_is_end or args.stop_strings):
        return Response(ids, [float(x) for x in logprobs], False)
    if end == "stop":
        raise Wrong(f"a response that ended at token {ids[-1]}, which is no end token of the policy")
    raise Wrong(f"a response of {len(ids)} tokens with finish_reason {one_line(str(end))[:50]!r}")


# ------------------------------------------------------------------------------------------------------------- servers
class RolloutServers:
    """The servers of `--rollout_server`, as one sampler.

    vocabulary: number of token ids that the model has; a response with another one is refused.
    Raises: RunFailure when one does not answer within `--health_timeout`, is neither vLLM nor `lightrlhf.serve`, or
    refuses the key.
    """

    def __init__(self, args: ServerArgs, vocabulary: int = 2**31) -> None:
        self.args, self.vocabulary = args, vocabulary
        self.servers = [Server(url.rstrip("/").removesuffix("/v1")) for url in args.rollout_server]
        self.http = HttpThread(args.request_timeout)
        self.target: Target | None = None
        self._revivals: set[asyncio.Task[None]] = set()  # a loop keeps no task alive by itself
        try:
            self.http.start(self._connect()).result()
        except BaseException:
            self.http.close()
            raise

    def close(self) -> None:
        """End what is under way."""
        self.http.close()

    def load(self, target: Target) -> None:
        """Load weights into all servers; one that fails is left out. Raises: RunFailure when one fails at the first."""
        self.http.start(self._load_all(target)).result()

    def start(
        self,
        prompts: Sequence[list[int]],
        args: SamplingArgs,
        ends: Sequence[int],
        uniforms: Tensor,
        allowed: Sequence[list[int]] | None = None,
    ) -> Future[Completions]:
        """Sample one response to each prompt; equal prompts that are next to each other are read once.

        uniforms: (B, max_new_tokens); our own server samples with them, others draw numbers of their own; allowed: the
        only tokens that may be sampled, for each prompt, log-probabilities are then over them.
        The future raises: ServersGone when no server is left for `--health_timeout`, RunFailure for what no server
        would answer.
        """
        return self.http.start(self._sample(list(prompts), args, ends, uniforms, allowed))

    def sample(
        self,
        prompts: Sequence[list[int]],
        args: SamplingArgs,
        ends: Sequence[int],
        uniforms: Tensor,
        allowed: Sequence[list[int]] | None = None,
    ) -> Completions:
        """As `start`, waiting for the responses."""
        return self.start(prompts, args, ends, uniforms, allowed).result()

    def sleep(self, asleep: bool) -> None:
        """Have all servers free the accelerator's memory, or take it again."""
        self.http.start(self._sleep(asleep)).result()

    def settings(self) -> list[tuple[str, dict[str, Any]]]:
        """Address and settings of each server that is not left out."""
        return [(server.url, server.settings) for server in self.servers if not server.is_out]

    def score(self, texts: Sequence[list[int]]) -> list[tuple[str, list[list[float]]]]:
        """Address, and log-probability of each token after the first, read without cached prefixes, at temperature 1.

        Of each server that is not left out and can do so.
        """
        return self.http.start(self._score(list(texts))).result()

    # ------------------------------------------------------------------------------------- in the requests' thread
    async def _score(self, texts: list[list[int]]) -> list[tuple[str, list[list[float]]]]:
        found = []
        for server in self.servers:
            if server.dialect is not None and not server.is_out and not server.adapter:  # vLLM on a CPU would end
                try:
                    found.append((server.url, await server.dialect.score(self._ask(server), server, texts)))
                except (Busy, RunFailure):  # a server without this route explains nothing
                    continue
        return found

    def _ask(self, server: Server) -> Ask:
        return Ask(self.http, server.url, self.args.request_timeout)

    async def _connect(self) -> None:
        await asyncio.gather(*(self._wait_for(server) for server in self.servers))

    async def _wait_for(self, server: Server) -> None:
        """Wait until a server is up, and find out what it is."""
        end = time.monotonic() + self.args.health_timeout
        while True:
            try:
                return await self._look_at(server)
            except Busy as problem:
                if time.monotonic() > end:
                    raise RunFailure(
                        f"--rollout_server {server.url} did not answer within {self.args.health_timeout:g} s "
                        f"({message_of(problem)}); start a server at this address, or give a longer --health_timeout"
                    ) from None
            await asyncio.sleep(min(PROBE_SECONDS, self.args.health_timeout / 10))

    async def _look_at(self, server: Server) -> None:
        """Raises: Busy while a server is not ready."""
        response = await self.http.send("GET", server.url + "/health", SHORT_DEADLINE)
        if response.status_code != 200:
            raise Busy(f"/health answered with status {response.status_code}")
        await identify(self._ask(server), server)

    async def _load_all(self, target: Target) -> None:
        is_first, self.target = self.target is None, target
        waiting = [server for server in self.servers if not server.is_out]
        results = await asyncio.gather(*(self._load(server) for server in waiting), return_exceptions=True)
        for server, problem in zip(waiting, results):
            if problem is None:
                continue
            if is_first or not isinstance(problem, Busy | RunFailure):
                raise problem if isinstance(problem, RunFailure) else RunFailure(_failed(server, problem)) from problem
            self._leave_out(server, problem)

    async def _load(self, server: Server) -> None:
        """Give a server the current weights, and check that it has them."""
        assert self.target is not None and server.dialect is not None
        ask = self._ask(server)
        async with server.loading:
            await server.dialect.load(ask, server, self.target)
            found = await server.dialect.version(ask, server)
        if found != self.target.version:
            raise RunFailure(
                f"--rollout_server {server.url} was given weights of version {self.target.version} and says that it "
                f"has {one_line(found)[:80]}; does another trainer use it?"
            )

    def _leave_out(self, server: Server, problem: BaseException) -> None:
        """Leave a server out until `_revive` has given it the current weights."""
        if server.is_out:  # another call found it out before
            return
        server.is_out, server.reason = True, message_of(problem)
        others = sum(not other.is_out for other in self.servers)
        print(f"warning: {_failed(server, problem)}; it is left out, {others} go on", file=sys.stderr, flush=True)
        task = asyncio.create_task(self._revive(server))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, server: Server) -> None:
        """Take a server back as soon as it answers, with the weights that are current then."""
        while server.is_out:
            await asyncio.sleep(PROBE_SECONDS)
            target = self.target
            try:
                await self._look_at(server)
                if target is not None:
                    await self._load(server)
            except Exception as problem:  # whatever a server can make of an answer: it stays out
                server.reason = message_of(problem)
                continue
            if target is self.target:
                server.is_out = False
                print(f"--rollout_server {server.url} is back", file=sys.stderr, flush=True)

    async def _sleep(self, asleep: bool) -> None:
        for server in self.servers:
            if not server.is_out and server.dialect is not None:
                try:
                    await server.dialect.sleep(self._ask(server), server, asleep)
                except Busy as problem:
                    self._leave_out(server, problem)

    async def _sample(
        self,
        prompts: list[list[int]],
        args: SamplingArgs,
        ends: Sequence[int],
        uniforms: Tensor,
        allowed: Sequence[list[int]] | None,
    ) -> Completions:
        chunks = chunks_of(prompts, uniforms, len(self.servers))
        if allowed is not None:
            chunks = [chunk._replace(allowed=[allowed[row] for row in chunk.rows]) for chunk in chunks]
        work = _Work(deque(range(len(chunks))), [None] * len(chunks))
        tasks = [asyncio.create_task(self._work(server, chunks, work, args, ends)) for server in self.servers]
        try:
            await _first_failure(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        rows = [row for responses in work.done for row in responses or []]
        columns = ([row.ids for row in rows], [row.logprobs for row in rows], [row.truncated for row in rows])
        return Completions(*columns, removed_mass=0.0)

    async def _work(
        self, server: Server, chunks: list[Chunk], work: _Work, args: SamplingArgs, ends: Sequence[int]
    ) -> None:
        """Sample chunks at one server until all are done, by whichever server."""
        while not work.is_done:
            if server.is_out:
                self._check_any(work)
                await work.wait(PROBE_SECONDS)
                continue
            work.last_seen = time.monotonic()
            if not work.todo:
                await work.wait(PROBE_SECONDS)  # another may fail and give its chunk back
                continue
            number = work.todo.popleft()
            try:
                work.finish(number, await self._sample_chunk(server, chunks[number], args, ends))
            except (Busy, Refused) as problem:
                self._leave_out(server, problem)
                if not work.give_back(number, MAX_RETURNS * len(self.servers)):
                    raise ServersGone(f"{_failed(server, problem)}, as others at the same prompts") from None

    async def _sample_chunk(
        self, server: Server, chunk: Chunk, args: SamplingArgs, ends: Sequence[int]
    ) -> list[Response]:
        """The responses of one request, all by the current weights. Raises: Busy after some attempts."""
        dialect, ask = server.dialect, self._ask(server)
        assert dialect is not None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                await self._check_version(server)
                responses: list[Response] = await dialect.sample(ask, server, chunk, args, ends)
                await self._check_version(server)
                largest = max(max(response.ids) for response in responses)
                if largest >= self.vocabulary:
                    raise Wrong(f"a response with the token {largest}, the model has {self.vocabulary}")
                return responses
            except (OtherVersion, Late):  # other servers may be faster
                raise
            except Busy as problem:
                if attempt == MAX_ATTEMPTS:
                    raise
                wait = RETRY_SECONDS * attempt if problem.seconds is None else problem.seconds
                await asyncio.sleep(min(wait, LONGEST_PAUSE))
        raise AssertionError("the last attempt returns or raises")

    async def _check_version(self, server: Server) -> None:
        """Raises: Busy when a server has other weights than it was given, as after a restart."""
        assert server.dialect is not None
        if self.target is None:
            return
        found = await server.dialect.version(self._ask(server), server)
        if found != self.target.version:
            raise OtherVersion(f"it has weights of version {one_line(found)[:80]}, not {self.target.version}")

    def _check_any(self, work: _Work) -> None:
        """Raises: ServersGone when all servers have been out for long."""
        seconds = time.monotonic() - work.last_seen
        if all(server.is_out for server in self.servers) and seconds > self.args.health_timeout:
            reasons = "; ".join(f"{server.url}: {server.reason}" for server in self.servers)
            raise ServersGone(f"no --rollout_server has answered for {self.args.health_timeout:g} s ({reasons})")


class _Work:
    """The chunks of one call: which are to do, and the responses to those that are done."""

    def __init__(self, todo: deque[int], done: list[list[Response] | None]) -> None:
        self.todo, self.done = todo, done
        self.returns = [0] * len(done)  # how often each chunk was given back
        self.last_seen = time.monotonic()  # when some server was in use
        self._changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return all(responses is not None for responses in self.done)

    def finish(self, number: int, responses: list[Response]) -> None:
        self.done[number] = responses
        self._tell()

    def give_back(self, number: int, most: int) -> bool:
        """Returns whether it was given back at most so often."""
        self.last_seen = time.monotonic()
        self.returns[number] += 1
        self.todo.appendleft(number)
        self._tell()
        return self.returns[number] <= most

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Wait until a chunk is done or given back, at most so long."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            pass


async def _first_failure(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all tasks. Raises: what the first one to fail raised."""
    for task in asyncio.as_completed(tasks):
        await task


def chunks_of(prompts: list[list[int]], uniforms: Tensor, num_servers: int) -> list[Chunk]:
    """Cut prompts into requests: one for a single server, else some for each; a group of equal prompts stays whole."""
    most = len(prompts) if num_servers == 1 else math.ceil(len(prompts) / (CHUNKS_PER_SERVER * num_servers))
    most = min(most, MOST_ROWS, max(1, MOST_NOISE // uniforms.shape[1]))
    ends: list[int] = []
    start = 0
    for _, rows in itertools.groupby(prompts):
        end = start + len(list(rows))
        if ends and end - (ends[-2] if len(ends) > 1 else 0) <= most:
            ends[-1] = end
        else:
            ends.append(end)
        start = end
    starts = [0, *ends[:-1]]
    return [Chunk(range(a, b), prompts[a:b], uniforms[a:b]) for a, b in zip(starts, ends)]


def _failed(server: Server, problem: BaseException) -> str:
    return f"--rollout_server {server.url} failed: {message_of(problem)}"
