"""Routes of sessions: opening and ending one, its chat, and its trace; see `sessions`.

Requests of one session run one after another, in the order in which they came: the n-th sample's noise and the row
that it goes on depend on that order, and a program that asks for several things at once works as elsewhere. A turn is
recorded when it has been sampled, whether or not its client reads the answer. One whose client went away, or whose
session was ended, stops and is recorded as far as it came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import replace
from typing import Protocol

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.batch import mix_seed, seeded_noise
from lightrlhf.generation.conversations import Json, Plan
from lightrlhf.generation.response_texts import Texts
from lightrlhf.serving.answers import LEAST, Answer, Choice, Streamed, error, event, head_of, whole
from lightrlhf.serving.bodies import Refusal
from lightrlhf.serving.content import read_body
from lightrlhf.serving.engine import Engine
from lightrlhf.serving.requests import read_completion, read_conversation, read_message
from lightrlhf.serving.sessions import Session, Sessions, Settings

MOST_WAITING = 16  # requests of one session
LONGEST_HOLD = 600.0  # seconds without a request after which a session holds new weights no longer


class Requests(Protocol):
    """What sessions need of the app."""

    engine: Engine

    @property
    def texts(self) -> Texts: ...

    def check_queue(self) -> None: ...

    def entered(self) -> AbstractAsyncContextManager[None]: ...


class SessionRoutes:
    """The routes of an app's sessions."""

    def __init__(self, app: Requests) -> None:
        self.app, self.sessions = app, Sessions(app.engine.tokenizer)
        self.routes = [
            Route("/sessions", self.begin, methods=["POST"]),
            Route("/sessions/{id}", self.end, methods=["DELETE"]),
            Route("/sessions/{id}/trace", self.trace),
            Route("/sessions/{id}/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def begin(self, request: Request) -> Response:
        """Open a session: its id, its key, the address for OpenAI's clients and its settings."""
        try:
            settings = Settings.model_validate(await read_body(request))
        except ValidationError as problem:
            first = problem.errors()[0]
            raise Refusal(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        served = self.app.engine.limits().models
        if settings.model is not None and settings.model not in served:
            raise Refusal(f"unknown model {settings.model[:100]!r}; here are {', '.join(served)}")
        session = self.sessions.begin(settings)
        told = {"id": session.id, "key": session.key, "base_url": f"/sessions/{session.id}/v1"}
        return JSONResponse({**told, "settings": settings.model_dump()})

    async def end(self, request: Request) -> Response:
        """End a session, and the request that runs in it."""
        self.sessions.end(request.path_params["id"])
        return JSONResponse({"id": request.path_params["id"], "deleted": True})

    async def trace(self, request: Request) -> Response:
        """Rows and turns so far; without the turn that runs."""
        return JSONResponse(self.sessions.find(request.path_params["id"]).trace())

    def opens(self, path: str, given: bytes) -> bool:
        """Whether a value of the header Authorization is the key of the session whose own chat route a path is."""
        return self.sessions.opens(path, given)

    async def released(self) -> None:
        """Wait until no session holds new weights."""
        while held := self.sessions.holding(LONGEST_HOLD):
            with suppress(TimeoutError):
                await asyncio.wait_for(held[0].ended.wait(), 1.0)

    # ------------------------------------------------------------------------------------------------------------ chat
    async def chat(self, request: Request) -> Response:
        """The next turn of a session."""
        session = self.sessions.find(request.path_params["id"])
        turn = SessionTurn(self.app, session, await read_body(request))
        turn.start()
        answered = turn.begun if turn.is_streamed else turn.job
        leaving = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait([answered, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                turn.job.cancel()
                raise ClientDisconnect
            if turn.is_streamed and not turn.has_failed():
                return StreamingResponse(turn.events(), media_type="text/event-stream")
            return JSONResponse(turn.answer())  # or a refusal with its own status
        finally:
            leaving.cancel()


class SessionTurn:
    """One request of a session, from its body to its record; `job` samples it and returns the whole answer."""

    def __init__(self, app: Requests, session: Session, body: Json) -> None:
        self.app, self.session, self.body = app, session, body
        self.checked = {**session.settings.checked(body), "model": session.settings.model}
        self.messages, self.tools = read_conversation(self.checked)
        self.is_streamed = self.checked.get("stream") is True
        self.pieces = asyncio.Queue[Json | None]()  # of a stream
        self.begun = asyncio.get_running_loop().create_future()  # when the first token was sampled, or it has failed
        self.choice, self.about = Choice([], [], None), Answer([], None, app.engine.version)

    def start(self) -> None:
        """Queue it. Raises: Refusal when too many wait, or the session takes too much memory."""
        session = self.session
        session.check_size()
        if len(session.jobs) > MOST_WAITING:
            raise Refusal(f"{MOST_WAITING} requests of this session wait; ask again when some are answered", 429)
        self.app.check_queue()
        session.last_used = time.monotonic()
        self.job = asyncio.ensure_future(self._run())
        session.jobs.add(self.job)
        self.job.add_done_callback(self._finish)

    def has_failed(self) -> bool:
        """Whether it ended without an answer."""
        return self.job.done() and (self.job.cancelled() or self.job.exception() is not None)

    def answer(self) -> Json:
        """The whole answer. Raises: Refusal."""
        if self.job.cancelled():
            raise Refusal("the session has ended", 404)
        return self.job.result()

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events: what each token adds, [DONE] at the end, or an error."""
        try:
            while (row := await self.pieces.get()) is not None:
                yield event(row)
            self.answer()
            if self.asked.include_usage:
                yield event(self.streamed.usage())
            yield "data: [DONE]\n\n"
        except Refusal as problem:
            yield event(error(str(problem), problem.status, problem.param))
        finally:
            self.job.cancel()

    async def _run(self) -> Json:
        """The whole answer, when the requests before it have ended. Raises: Refusal."""
        async with self.session.lock:
            plan = await asyncio.to_thread(self._plan)
            stop_reason = "failed"
            try:
                async with self.app.entered(), aclosing(self.app.engine.stream(self.asked)) as parts:
                    async for _, choice, about in parts:
                        self._take(choice, about)
                stop_reason = self.choice.finish_reason or "failed"
            except asyncio.CancelledError:
                stop_reason = "cancelled"
                raise
            finally:
                answer = self._record(plan, stop_reason)
        return answer

    def _plan(self) -> Plan:
        """The ids that are read, and the request to sample behind them, with the session's noise. Raises: Refusal."""
        settings, served = self.session.settings, self.app.engine.limits()
        try:
            plan = self.session.conversation.begin(self.messages, self.tools)
        except UsageError as problem:
            raise Refusal(str(problem)) from None
        asked = read_completion(self.checked, served, True, plan.ids)
        most = asked.sampling.max_new_tokens
        if settings.max_tokens is not None:
            most = min(most, settings.max_tokens)
        noise = asked.noise[:, :most]
        if settings.train or (self.body.get("seed") is None and self.body.get("noise") is None):
            noise = seeded_noise(mix_seed(settings.seed, plan.number), 1, most)
        self.asked = replace(asked, sampling=replace(asked.sampling, max_new_tokens=most), noise=noise)
        self.head = head_of(self.asked)
        self.streamed = Streamed(self.app.texts, self.asked, self.head)
        return plan

    def _take(self, choice: Choice, about: Answer) -> None:
        """Take the response so far, and queue what is new of it."""
        self.choice, self.about = choice, about
        if self.is_streamed:
            for row in self.streamed.rows(0, choice, about):
                self.pieces.put_nowait(row)
        if not self.begun.done():
            self.begun.set_result(None)

    def _record(self, plan: Plan, stop_reason: str) -> Json:
        """Record the turn as far as it was sampled, and return the whole answer."""
        choice, about = self.choice, self.about
        answer = whole(self.app.texts, self.asked, self.head, about._replace(choices=[choice]))
        (row,) = answer["choices"]
        message = row["message"]
        if choice.ids:
            self.session.conversation.end(
                plan,
                self.body,
                self.messages,
                self.tools,
                [*choice.ids],
                [max(value, LEAST) for value in choice.logprobs],
                read_message(message | {"content": message.get("content") or ""}, "the reply"),
                row["finish_reason"] if stop_reason in ("stop", "length") else stop_reason,
                about.version,
                model=self.asked.model,
                cached=about.cached,
            )
        return answer

    def _finish(self, job: asyncio.Future[Json]) -> None:
        """End the stream; the job's failure is raised where it is awaited."""
        self.session.jobs.discard(job)
        self.session.last_used = time.monotonic()
        self.pieces.put_nowait(None)
        if not self.begun.done():
            self.begun.set_result(None)
        if not job.cancelled():
            job.exception()
