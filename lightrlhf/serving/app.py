"""The routes: vLLM's that a trainer needs, and OpenAI's completions and chat, as one ASGI app.

All but /health ask for the key. While the server is paused requests wait for /resume; where too many wait, a further
one is refused with a time. A client that goes away ends its request before the next step.

Left out: /tokenize and other routes that no trainer calls.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import lightrlhf
from lightrlhf.generation.response_texts import Texts
from lightrlhf.serving.answers import TRIES, Answer, Choice, Writer
from lightrlhf.serving.bodies import AdapterFolder, AdapterName, Json, NewVersion, Refusal, Reload, read
from lightrlhf.serving.engine import Engine
from lightrlhf.serving.handling import HANDLERS, Intake, refuse, refusing, stream, unless_gone
from lightrlhf.serving.requests import Completion, further_noise, read_completion
from lightrlhf.serving.session_routes import SessionRoutes


class App:
    """State of the routes; `asgi` is the app."""

    def __init__(self, engine: Engine, key: str) -> None:
        self.engine, self.texts, self.created = engine, Texts(engine.tokenizer), int(time.time())
        self.intake = Intake(lambda: engine.scheduler.num_waiting())
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
        self.sessions = SessionRoutes(engine, self.texts, self.intake)
        self.routes = [*routes, *self.sessions.routes]
        app = Starlette(routes=self.routes, exception_handlers=HANDLERS)
        self.asgi: ASGIApp = KeyCheck(app, key, self.sessions.sessions.opens)

    # ------------------------------------------------------------------------------------------------------ completions
    async def completions(self, request: Request, chat: bool) -> Response:
        """Completions of prompts, or of messages."""

        def read(body: Json) -> Completion:
            self.intake.check_queue()
            return read_completion(body, self.engine.limits(), chat)

        asked = await self.intake.read(request, read)
        writer = Writer(self.texts, asked)
        if asked.body.stream:
            return stream(self._parts(asked, writer))
        answer = await unless_gone(request, self._complete(asked))
        return await asyncio.to_thread(lambda: JSONResponse(writer.whole(answer)))

    async def _complete(self, asked: Completion) -> Answer:
        """All choices; those that lack the call that is wanted are sampled again, up to `TRIES` times in all."""
        writer = Writer(self.texts, asked)
        async with self.intake.entered():
            answer = await self.engine.complete(asked)
            for number in range(1, TRIES if asked.wanted is not None else 1):
                lacking = [i for i, choice in enumerate(answer.choices) if writer.lacks_call(choice)]
                if not lacking:
                    break
                noise = further_noise(asked.noise, number)[: len(lacking)]
                more = await self.engine.complete(replace(asked, n=len(lacking), noise=noise))
                for place, choice in zip(lacking, more.choices):
                    answer.choices[place] = choice
            return answer

    async def _parts(self, asked: Completion, writer: Writer) -> AsyncGenerator[Json, None]:
        """What each token adds, and how many there were."""
        async with aclosing(self._choices(asked)) as choices:
            async for index, choice, about in choices:
                for part in writer.parts(index, choice, about):
                    yield part
        for part in writer.usage():
            yield part

    async def _choices(self, asked: Completion) -> AsyncGenerator[tuple[int, Choice, Answer], None]:
        """Each choice so far; whole ones where a call must come."""
        if asked.wanted is not None:
            answer = await self._complete(asked)
            for index, choice in enumerate(answer.choices):
                yield index, choice, answer
            return
        async with self.intake.entered(), aclosing(self.engine.stream(asked)) as parts:
            async for part in parts:
                yield part

    async def _change(self, work: Callable[[], None]) -> None:
        """Change weights. Raises: Refusal for what fails."""
        with refusing():
            await self.engine.change(work)

    # ---------------------------------------------------------------------------------------------------------- weights
    async def pause(self, request: Request) -> Response:
        """Let what runs end; answers when it has. New requests wait for /resume, but in sessions that hold weights."""
        if (mode := request.query_params.get("mode", "wait")) != "wait":
            raise Refusal(f"mode {mode[:100]} is not served; use mode=wait")
        self.intake.resumed.clear()
        await self.intake.idle.wait()
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.intake.resumed.set()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": not self.intake.resumed.is_set()})

    async def collective_rpc(self, request: Request) -> Response:
        """`reload_weights` of a folder; no other method."""
        folder = (await self.intake.read(request, partial(read, Reload))).kwargs.weights_path
        await unless_gone(request, self.sessions.released())
        await self._change(partial(self.engine.reload, folder))
        return JSONResponse({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget the prefixes of earlier requests, when those that run have ended."""
        await self._change(lambda: None)
        return JSONResponse({"success": True})

    async def update_weight_version(self, request: Request) -> Response:
        version = (await self.intake.read(request, partial(read, NewVersion))).new_version
        await self.engine.rename(version)
        return JSONResponse({"message": "weight version updated", "weight_version": version})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.engine.version})

    async def load_lora_adapter(self, request: Request) -> Response:
        asked = await self.intake.read(request, partial(read, AdapterFolder))
        await self._change(partial(self.engine.adapters.load, asked.lora_name, asked.lora_path))
        return JSONResponse({"message": f"adapter {asked.lora_name} is loaded"})

    async def unload_lora_adapter(self, request: Request) -> Response:
        name = (await self.intake.read(request, partial(read, AdapterName))).lora_name
        await self._change(partial(self.engine.adapters.unload, name))
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
        names += [(name, adapter.folder, engine.name) for name, adapter in engine.adapters.by_name.items()]
        fixed = {"object": "model", "created": self.created, "owned_by": "lightrlhf"}
        fixed |= {"max_model_len": engine.limits().positions}
        data = [{"id": name, "root": root, "parent": parent, **fixed} for name, root, parent in names]
        return JSONResponse({"object": "list", "data": data})

    async def server_info(self, request: Request) -> Response:
        """Settings that a trainer compares with its own, by vLLM's names."""
        config = {"model": self.engine.root, "dtype": str(self.engine.dtype), "logprobs_mode": "processed_logprobs"}
        limit = {"max_model_len": self.engine.limits().positions}
        return JSONResponse({"vllm_config": {"model_config": config | limit}})

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
                refusal = Refusal("the key is missing or wrong; send it as: Authorization: Bearer KEY", 401)
                return await refuse(refusal)(scope, receive, send)
        await self.app(scope, receive, send)
