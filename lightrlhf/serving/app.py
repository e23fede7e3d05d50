"""The routes: vLLM's that a trainer needs, and OpenAI's completions and chat, as one ASGI app.

All but /health ask for the key. Bodies are read beside the event loop, which stays free to answer, long ones apart from
short ones. While the server is paused requests wait for /resume; where too many wait, a further one is refused with a
time. A client that goes away ends its request before the next step.

Left out: /tokenize and other routes that no trainer calls.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import lightrlhf
from lightrlhf.cli.errors import first_line
from lightrlhf.generation.response_texts import Texts
from lightrlhf.serving.answers import (
    TRIES,
    Answer,
    Json,
    Streamed,
    all_events,
    error,
    event,
    head_of,
    lacks_call,
    whole,
)
from lightrlhf.serving.bodies import AdapterFolder, AdapterName, NewVersion, Refusal, WeightsFolder, read, read_json
from lightrlhf.serving.content import read_body, read_content
from lightrlhf.serving.engine import Engine
from lightrlhf.serving.requests import Completion, further_noise, read_completion
from lightrlhf.serving.session_routes import SessionRoutes

LONG_BODY = 2**16  # bytes, from which a body takes long to read
MOST_WAITING = 256  # requests


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

        self.sessions = SessionRoutes(self)
        self.routes = [*routes, *self.sessions.routes]
        handlers: Any = {Refusal: on_refusal, HTTPException: not_served, ClientDisconnect: gone, Exception: on_failure}
        app = Starlette(routes=self.routes, exception_handlers=handlers)
        self.asgi: ASGIApp = KeyCheck(app, key, self.sessions.opens)

    @cached_property
    def texts(self) -> Texts:
        """The texts of the tokenizer's ids."""
        return Texts(self.engine.tokenizer)

    # ------------------------------------------------------------------------------------------------------ completions
    async def completions(self, request: Request, chat: bool) -> Response:
        """Completions of prompts, or of messages."""
        content = await read_content(request)
        self.check_queue()
        reader = self.readers[len(content) > LONG_BODY]
        asked = await in_thread(reader, lambda: read_completion(read_json(content), self.engine.limits(), chat))
        head = head_of(asked)
        if asked.stream and asked.wanted is None:
            return StreamingResponse(self._events(asked, head), media_type="text/event-stream")
        answer = await unless_gone(request, self._complete(asked))
        if asked.stream:
            return StreamingResponse(all_events(self.texts, asked, head, answer), media_type="text/event-stream")
        return await in_thread(None, lambda: JSONResponse(whole(self.texts, asked, head, answer)))

    async def _complete(self, asked: Completion) -> Answer:
        """All choices; those that lack the call that is wanted are sampled again, up to `TRIES` times in all."""
        async with self.entered():
            answer = await self.engine.complete(asked)
            for number in range(1, TRIES if asked.wanted is not None else 1):
                lacking = [i for i, choice in enumerate(answer.choices) if lacks_call(self.texts, asked, choice)]
                if not lacking:
                    break
                noise = further_noise(asked.noise, number)[: len(lacking)]
                more = await self.engine.complete(replace(asked, n=len(lacking), noise=noise))
                for place, choice in zip(lacking, more.choices):
                    answer.choices[place] = choice
            return answer

    async def _events(self, asked: Completion, head: Json) -> AsyncIterator[str]:
        """Server-sent events: what each token adds, [DONE] at the end, or an error."""
        streamed = Streamed(self.texts, asked, head)
        try:
            async with self.entered(), aclosing(self.engine.stream(asked)) as parts:
                async for index, choice, about in parts:
                    for row in streamed.rows(index, choice, about):
                        yield event(row)
            if asked.include_usage:
                yield event(streamed.usage())
            yield "data: [DONE]\n\n"
        except Refusal as problem:
            yield event(error(str(problem), problem.status, problem.param))

    def check_queue(self) -> None:
        """Raises: Refusal with a time when too many requests wait."""
        waiting = self.engine.scheduler.num_waiting() + self.num_held
        if waiting >= MOST_WAITING:
            seconds = min(1 + int(self.seconds * waiting), 60)
            raise Refusal(f"{waiting} requests wait already; try again in {seconds} s", 429, seconds)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
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
        folder = read(WeightsFolder, given if isinstance(given, dict) else {}).weights_path
        await self.sessions.released()
        await self._change(partial(self.engine.reload, folder))
        return JSONResponse({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget the prefixes of earlier requests, when those that run have ended."""
        await self._change(lambda: None)
        return JSONResponse({"success": True})

    async def update_weight_version(self, request: Request) -> Response:
        version = read(NewVersion, await read_body(request)).new_version
        await self.engine.rename(version)
        return JSONResponse({"message": "weight version updated", "weight_version": version})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.engine.version})

    async def load_lora_adapter(self, request: Request) -> Response:
        asked = read(AdapterFolder, await read_body(request))
        await self._change(partial(self.engine.load_adapter, asked.lora_name, asked.lora_path))
        return JSONResponse({"message": f"adapter {asked.lora_name} is loaded"})

    async def unload_lora_adapter(self, request: Request) -> Response:
        name = read(AdapterName, await read_body(request)).lora_name
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
    """ASGI middleware that asks for the key on all routes but /health; opens: whether another key opens a path."""

    def __init__(self, app: ASGIApp, key: str, opens: Callable[[str, bytes], bool]) -> None:
        self.app, self.expected, self.opens = app, f"Bearer {key}".encode(), opens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http" and scope["path"] != "/health":
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            is_own = len(given) == 1 and hmac.compare_digest(given[0], self.expected)
            if not is_own and not (len(given) == 1 and self.opens(scope["path"], given[0])):
                refusal = JSONResponse(
                    error("the key is missing or wrong; send it as: Authorization: Bearer KEY", 401), 401
                )
                return await refusal(scope, receive, send)
        await self.app(scope, receive, send)


# ------------------------------------------------------------------------------------------------------------- requests
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


def report(problem: BaseException) -> str:
    """One line on an unexpected failure, also on standard error."""
    line = f"{type(problem).__name__}: {first_line(problem)[:300]}"
    print(f"a request failed: {line}", file=sys.stderr, flush=True)
    return line


async def on_refusal(request: Request, problem: Refusal) -> Response:
    return JSONResponse(error(str(problem), problem.status, problem.param), problem.status, problem.headers)


async def not_served(request: Request, problem: HTTPException) -> Response:
    line = f"{request.method} {request.url.path[:200]} is not served"
    return JSONResponse(error(line, problem.status_code), problem.status_code)


async def gone(request: Request, problem: ClientDisconnect) -> Response:
    return Response(status_code=499)  # the client has gone


async def on_failure(request: Request, problem: Exception) -> Response:
    return JSONResponse(error(report(problem), 500), 500)
