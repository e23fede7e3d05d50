"""The routes: vLLM's that a trainer needs, and OpenAI's completions and chat, as one ASGI app.

All but /health ask for the key. Bodies are read beside the event loop, which stays free to answer, long ones apart from
short ones. While the server is paused requests wait for /resume; where too many wait, a further one is refused with a
time. A client that goes away ends its request before the next step.

Left out: /tokenize and other routes that no trainer calls.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import lightrlhf
from lightrlhf.cli.errors import first_line
from lightrlhf.serving.engine import Answer, Choice, Engine
from lightrlhf.serving.requests import Completion, Refusal, read_completion, read_json, read_required

LARGEST_BODY = 64 * 2**20  # bytes; the noise of a rollout is the largest part
LONG_BODY = 2**16  # bytes, from which a body takes long to read
MOST_WAITING = 256  # requests
LEAST = -9999.0  # log-probability of a token whose probability is 0 by rounding, as OpenAI has it; JSON has no -inf
Json = dict[str, Any]
Texts = Callable[[int], str]  # of token ids


class Shown(NamedTuple):
    """What of a choice a stream has sent."""

    text: str
    count: int  # of its tokens


class App:
    """State of the routes; `asgi` is the app."""

    def __init__(self, engine: Engine, key: str) -> None:
        self.engine, self.created = engine, int(time.time())
        self.readers = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("short bodies", "long bodies")]
        self.resumed, self.idle = asyncio.Event(), asyncio.Event()
        self.resumed.set()
        self.idle.set()
        self.num_running = self.num_held = 0  # requests in the engine, and before a pause ends
        self.seconds = 1.0  # between two answers of late
        self.answered = time.monotonic()
        routes = [
            Route("/health", self.health),
            Route("/version", self.show_version),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/server_info", self.server_info),
            Route("/v1/completions", partial(self.completions, chat=False), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.completions, chat=True), methods=["POST"]),
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/is_paused", self.is_paused),
            Route("/collective_rpc", self.collective_rpc, methods=["POST"]),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/update_weight_version", self.update_weight_version, methods=["POST"]),
            Route("/weight_info", self.weight_info),
            Route("/v1/load_lora_adapter", self.load_lora_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_lora_adapter, methods=["POST"]),
            Route("/sleep", self.nothing, methods=["POST"]),
            Route("/wake_up", self.nothing, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping),
        ]
        handlers: Any = {Refusal: on_refusal, HTTPException: not_served, ClientDisconnect: gone, Exception: on_failure}
        app = Starlette(routes=routes, exception_handlers=handlers)
        self.asgi: ASGIApp = KeyCheck(app, key)

    # ------------------------------------------------------------------------------------------------------ completions
    async def completions(self, request: Request, chat: bool) -> Response:
        """Completions of prompts, or of messages."""
        content = await read_content(request)
        self._check_queue()
        reader = self.readers[len(content) > LONG_BODY]
        asked = await in_thread(reader, lambda: read_completion(read_json(content), self.engine.limits(), chat))
        identifier = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(16)}"
        head = {"id": identifier, "created": int(time.time()), "model": asked.model}
        if asked.stream:
            return StreamingResponse(self._events(asked, head), media_type="text/event-stream")
        answer = await unless_gone(request, self._complete(asked))
        return await in_thread(None, lambda: JSONResponse(whole(self.engine.token_text, asked, head, answer)))

    async def _complete(self, asked: Completion) -> Answer:
        async with self._entered():
            return await self.engine.complete(asked)

    async def _events(self, asked: Completion, head: Json) -> AsyncIterator[str]:
        """Server-sent events: what each token adds, [DONE] at the end, or an error."""
        shown: dict[int, Shown] = {}
        cached = 0
        try:
            async with self._entered():
                async for index, choice, about in self.engine.stream(asked):
                    before, cached = shown.get(index), about.cached
                    if before is not None and len(choice.text) < len(before.text):
                        choice = choice._replace(text=before.text)  # an incomplete character may change earlier text
                    shown[index] = Shown(choice.text, len(choice.ids))
                    row = chunk(self.engine.token_text, asked, head, index, choice, before, about.version)
                    if row is not None:
                        yield event(row)
            if asked.include_usage:
                sums = usage(asked, sum(one.count for one in shown.values()), cached)
                yield event({**head, "object": object_of(asked, True), "choices": [], "usage": sums})
            yield "data: [DONE]\n\n"
        except Refusal as problem:
            yield event(error(str(problem), problem.status))

    def _check_queue(self) -> None:
        """Raises: Refusal with a time when too many requests wait."""
        waiting = self.engine.scheduler.num_waiting() + self.num_held
        if waiting >= MOST_WAITING:
            seconds = min(1 + int(self.seconds * waiting), 60)
            raise Refusal(f"{waiting} requests wait already; try again in {seconds} s", 429, seconds)

    @asynccontextmanager
    async def _entered(self) -> AsyncIterator[None]:
        """Context manager: a request that runs, after a pause has ended. Raises: Refusal for what the engine raises."""
        self.num_held += 1
        try:
            while not self.resumed.is_set():
                await self.resumed.wait()
        finally:
            self.num_held -= 1
        self.num_running += 1
        self.idle.clear()
        try:
            yield
        except (Refusal, GeneratorExit):
            raise
        except Exception as problem:  # such as too little memory
            raise Refusal(report(problem), 500) from None
        finally:
            self.num_running -= 1
            now = time.monotonic()
            self.seconds, self.answered = 0.9 * self.seconds + 0.1 * (now - self.answered), now
            if not self.num_running:
                self.idle.set()

    async def _change(self, work: Callable[[], None]) -> None:
        """Change weights. Raises: Refusal, also for what fails otherwise."""
        try:
            await self.engine.change(work)
        except Refusal:
            raise
        except Exception as problem:
            raise Refusal(report(problem), 500) from None

    # ---------------------------------------------------------------------------------------------------------- weights
    async def pause(self, request: Request) -> Response:
        """Let what runs end; answers when it has. New requests wait for /resume."""
        if (mode := request.query_params.get("mode", "wait")) != "wait":
            raise Refusal(f"mode {mode[:100]} is not served; use mode=wait")
        self.resumed.clear()
        await self.idle.wait()
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.resumed.set()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": not self.resumed.is_set()})

    async def collective_rpc(self, request: Request) -> Response:
        """`reload_weights` of a folder; no other method."""
        body = await read_body(request)
        if body.get("method") != "reload_weights":
            raise Refusal("method must be reload_weights; no other is served")
        given = body.get("kwargs")
        (folder,) = read_required(given if isinstance(given, dict) else {}, "weights_path")
        await self._change(partial(self.engine.reload, folder))
        return JSONResponse({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Nothing to do: no request leaves a cache behind."""
        return JSONResponse({"success": True})

    async def update_weight_version(self, request: Request) -> Response:
        (version,) = read_required(await read_body(request), "new_version")
        await self.engine.rename(version)
        return JSONResponse({"message": "weight version updated", "weight_version": version})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.engine.version})

    async def load_lora_adapter(self, request: Request) -> Response:
        name, folder = read_required(await read_body(request), "lora_name", "lora_path")
        await self._change(partial(self.engine.load_adapter, name, folder))
        return JSONResponse({"message": f"adapter {name} is loaded"})

    async def unload_lora_adapter(self, request: Request) -> Response:
        (name,) = read_required(await read_body(request), "lora_name")
        await self._change(partial(self.engine.unload_adapter, name))
        return JSONResponse({"message": f"adapter {name} is unloaded"})

    # ------------------------------------------------------------------------------------------------------ information
    async def health(self, request: Request) -> Response:
        return Response()

    async def metrics(self, request: Request) -> Response:
        """What the engine does and has done, as Prometheus reads it."""
        lines = [f"lightrlhf_{name} {value}" for name, value in self.engine.scheduler.metrics().items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def show_version(self, request: Request) -> Response:
        return JSONResponse({"version": f"lightrlhf {lightrlhf.__version__}"})

    async def models(self, request: Request) -> Response:
        """The model and its adapters."""
        engine = self.engine
        names: list[tuple[str, str, str | None]] = [(engine.name, engine.root, None)]
        names += [(name, adapter.folder, engine.name) for name, adapter in engine.adapters.items()]
        fixed = {"object": "model", "created": self.created, "owned_by": "lightrlhf"}
        fixed |= {"max_model_len": engine.limits().positions}
        data = [{"id": name, "root": root, "parent": parent, **fixed} for name, root, parent in names]
        return JSONResponse({"object": "list", "data": data})

    async def server_info(self, request: Request) -> Response:
        """Settings that a trainer compares with its own, by vLLM's names."""
        config: Json = {
            "model": self.engine.root,
            "dtype": str(self.engine.dtype),
            "logprobs_mode": "processed_logprobs",
        }
        config |= {"max_model_len": self.engine.limits().positions}
        return JSONResponse({"vllm_config": {"model_config": config}})

    async def nothing(self, request: Request) -> Response:
        """Sleep and wake up: this engine shares no memory with a trainer that it could give back."""
        return Response()

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": False})


class KeyCheck:
    """ASGI middleware that asks for the key on all routes but /health."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http" and scope["path"] != "/health":
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            if len(given) != 1 or not hmac.compare_digest(given[0], self.expected):
                refusal = JSONResponse(
                    error("the key is missing or wrong; send it as: Authorization: Bearer KEY", 401), 401
                )
                return await refusal(scope, receive, send)
        await self.app(scope, receive, send)


# ------------------------------------------------------------------------------------------------------------- requests
async def read_content(request: Request) -> bytes:
    """A body. Raises: Refusal when it is too large."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > LARGEST_BODY:
            raise Refusal(f"a body may have {LARGEST_BODY} bytes; send several requests", 413)
    return bytes(content)


async def read_body(request: Request) -> Json:
    """The JSON object in a body. Raises: Refusal when it is too large, or not one."""
    return read_json(await read_content(request))


async def in_thread(pool: ThreadPoolExecutor | None, work: Callable[[], Any]) -> Any:
    """What some work returns, done beside the event loop; pool: None for any thread."""
    return await asyncio.get_running_loop().run_in_executor(pool, work)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """What the work returns. Raises: ClientDisconnect, and cancels it, when the client goes away before."""
    job, leaving = asyncio.ensure_future(work), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([job, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnect
        return job.result()
    finally:
        job.cancel()
        leaving.cancel()


# -------------------------------------------------------------------------------------------------------------- answers
def object_of(asked: Completion, streamed: bool) -> str:
    """OpenAI's name for the kind of an answer."""
    if asked.chat:
        return "chat.completion.chunk" if streamed else "chat.completion"
    return "text_completion"


def usage(asked: Completion, sampled: int, cached: int) -> Json:
    """Token counts, in OpenAI's form; cached: tokens of the prompts that an earlier request had read."""
    prompt = sum(map(len, asked.prompts))
    counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


def whole(token_text: Texts, asked: Completion, head: Json, found: Answer) -> Json:
    """The answer with all choices."""
    rows = []
    for index, (choice, prompt) in enumerate(zip(found.choices, asked.rows)):
        row: Json = {"index": index, "finish_reason": choice.finish_reason}
        if asked.chat:
            row["message"] = {"role": "assistant", "content": choice.text}
        else:
            row["text"] = choice.text
        row["logprobs"] = format_logprobs(token_text, choice, 0, asked.chat) if asked.logprobs else None
        if asked.return_token_ids:
            row["token_ids"] = choice.ids
            if not asked.chat:
                row["prompt_token_ids"] = prompt
        if found.scores is not None:
            row["prompt_logprobs"] = format_scores(token_text, prompt, found.scores[index // asked.n])
        rows.append(row)
    sums = usage(asked, sum(len(choice.ids) for choice in found.choices), found.cached)
    answer = {**head, "object": object_of(asked, False), "choices": rows, "usage": sums}
    if asked.chat and asked.return_token_ids:
        answer["prompt_token_ids"] = asked.prompts[0]
    return {**answer, "weight_version": found.version}


def chunk(
    token_text: Texts, asked: Completion, head: Json, index: int, choice: Choice, before: Shown | None, version: str
) -> Json | None:
    """The part of a choice that is new; None if nothing shows yet."""
    text, count = before or Shown("", 0)
    more = choice.text[len(text) :]
    if not more and count == len(choice.ids) and choice.finish_reason is None:
        return None
    row: Json = {"index": index, "finish_reason": choice.finish_reason}
    if asked.chat:
        row["delta"] = ({} if before else {"role": "assistant"}) | {"content": more}
    else:
        row["text"] = more
    row["logprobs"] = format_logprobs(token_text, choice, count, asked.chat) if asked.logprobs else None
    if asked.return_token_ids:
        row["token_ids"] = choice.ids[count:]
        if before is None and not asked.chat:
            row["prompt_token_ids"] = asked.rows[index]
    answer = {**head, "object": object_of(asked, True), "choices": [row], "weight_version": version}
    if before is None and asked.chat and asked.return_token_ids:
        answer["prompt_token_ids"] = asked.prompts[0]
    return answer


def format_logprobs(token_text: Texts, choice: Choice, start: int, chat: bool) -> Json:
    """Log-probabilities of a choice's tokens from `start` on, in OpenAI's form."""
    values = [max(value, LEAST) for value in choice.logprobs[start:]]
    tokens = [token_text(index) for index in choice.ids[start:]]
    if chat:
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in zip(tokens, values)
        ]
        return {"content": content}
    offset = sum(len(token_text(index)) for index in choice.ids[:start])
    offsets = list(itertools.accumulate(map(len, tokens), initial=offset))[:-1]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def format_scores(token_text: Texts, prompt: list[int], values: list[float]) -> list[Json | None]:
    """Log-probabilities of a prompt's tokens, in vLLM's form: by id, none of the first."""
    return [None] + [
        {str(index): {"logprob": max(value, LEAST), "decoded_token": token_text(index)}}
        for index, value in zip(prompt[1:], values)
    ]


def event(row: Json) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(row)}\n\n"


def error(line: str, status: int) -> Json:
    """The body of a refusal, in OpenAI's form."""
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 413: "BadRequestError"}
    kinds[429] = "RateLimitError"
    return {"error": {"message": line, "type": kinds.get(status, "InternalServerError"), "param": None, "code": status}}


def report(problem: BaseException) -> str:
    """One line on an unexpected failure, also on standard error."""
    line = f"{type(problem).__name__}: {first_line(problem)[:300]}"
    print(f"a request failed: {line}", file=sys.stderr, flush=True)
    return line


async def on_refusal(request: Request, problem: Refusal) -> Response:
    return JSONResponse(error(str(problem), problem.status), problem.status, problem.headers)


async def not_served(request: Request, problem: HTTPException) -> Response:
    line = f"{request.method} {request.url.path[:200]} is not served"
    return JSONResponse(error(line, problem.status_code), problem.status_code)


async def gone(request: Request, problem: ClientDisconnect) -> Response:
    return Response(status_code=499)  # the client has gone


async def on_failure(request: Request, problem: Exception) -> Response:
    return JSONResponse(error(report(problem), 500), 500)
