"""Routes of sessions: opening and ending one, its chat, and its trace; see `sessions`.

Requests of one session run one after another, in the order in which they were read: the n-th sample's noise and the row
that it goes on depend on that order, and a program that asks for several things at once works as elsewhere. A turn is
recorded when it has been sampled, whether or not its client reads the answer; one that was stopped, as far as it came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.batch import mix_seed
from lightrlhf.generation.conversations import Plan
from lightrlhf.generation.response_texts import Texts
from lightrlhf.serving.answers import LEAST, Answer, Choice, Writer
from lightrlhf.serving.bodies import Json, Message, Refusal, read
from lightrlhf.serving.engine import Engine
from lightrlhf.serving.handling import Intake, stream, unless_gone
from lightrlhf.serving.requests import check_size, completion_of, read_chat
from lightrlhf.serving.sessions import Session, Sessions, Settings

MOST_WAITING = 16  # requests of one session
LONGEST_HOLD = 600.0  # seconds without a request after which a session holds new weights no longer


class SessionRoutes:
    """The routes of a server's sessions."""

    def __init__(self, engine: Engine, texts: Texts, intake: Intake) -> None:
        self.engine, self.texts, self.intake = engine, texts, intake
        self.sessions = Sessions(engine.tokenizer)
        self.routes = [
            Route("/sessions", self.begin, methods=["POST"]),
            Route("/sessions/{id}", self.end, methods=["DELETE"]),
            Route("/sessions/{id}/trace", self.trace),
            Route("/sessions/{id}/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def begin(self, request: Request) -> Response:
        """Open a session: its id, its key, the address for OpenAI's clients and its settings."""
        settings = await self.intake.read(request, partial(read, Settings))
        self.engine.limits().name_of(settings.model)
        session = self.sessions.begin(settings)
        told = {"id": session.id, "key": session.key, "base_url": f"/sessions/{session.id}/v1"}
        return JSONResponse({**told, "settings": settings.model_dump()})

    async def end(self, request: Request) -> Response:
        """End a session, and the request that runs in it."""
        self.sessions.end(request.path_params["id"])
        return JSONResponse({"id": request.path_params["id"], "deleted": True})

    async def trace(self, request: Request) -> Response:
        """Rows and turns so far, without the turn that runs; ?rendering: and what the template writes now."""
        session = self.sessions.find(request.path_params["id"])
        trace = session.trace()
        if "rendering" in request.query_params:
            await asyncio.to_thread(session.conversation.render_rows, trace["rows"])
        return JSONResponse(trace)

    async def released(self) -> None:
        """Wait until no session holds new weights."""
        while held := self.sessions.holding(LONGEST_HOLD):
            with suppress(TimeoutError):
                await asyncio.wait_for(held[0].ended.wait(), 1.0)

    async def chat(self, request: Request) -> Response:
        """The next turn of a session."""
        session = self.sessions.find(request.path_params["id"])
        turn = await self.intake.read(request, partial(SessionTurn, self, session))
        turn.start()
        try:
            await unless_gone(request, turn.begun)
        except ClientDisconnect:
            turn.job.cancel()
            raise
        if turn.is_streamed and not turn.has_failed():
            return stream(turn.parts())
        return JSONResponse(turn.answer())  # or a refusal with its own status


class SessionTurn:
    """One request of a session, from its body to its record; `job` samples it and returns the whole answer."""

    def __init__(self, routes: SessionRoutes, session: Session, given: Json) -> None:
        self.routes, self.session, self.given = routes, session, given
        body, self.messages, self.tools = read_chat(given)
        self.body = session.settings.pinned(body)
        self.is_streamed = body.stream
        self.pieces = asyncio.Queue[Json | None]()  # of a stream
        self.choice, self.about = Choice(), Answer([], None, routes.engine.version)

    def start(self) -> None:
        """Queue it. Raises: Refusal when too many wait, or the session takes too much memory."""
        session = self.session
        session.check_size()
        if len(session.jobs) > MOST_WAITING:
            raise Refusal(f"{MOST_WAITING} requests of this session wait; ask again when some are answered", 429)
        self.routes.intake.check_queue()
        session.last_used = time.monotonic()
        self.begun = asyncio.get_running_loop().create_future()  # when a part may be sent, or it has ended
        self.job = asyncio.ensure_future(self._run())
        session.jobs.add(self.job)
        session.last_job = self.job
        self.job.add_done_callback(self._finish)

    def has_failed(self) -> bool:
        """Whether it ended without an answer."""
        return self.job.done() and (self.job.cancelled() or self.job.exception() is not None)

    def answer(self) -> Json:
        """The whole answer. Raises: Refusal."""
        if self.job.cancelled():
            raise Refusal("the session has ended", 404)
        return self.job.result()

    async def parts(self) -> AsyncGenerator[Json, None]:
        """What each token adds, and how many there were. Raises: Refusal."""
        try:
            while (part := await self.pieces.get()) is not None:
                yield part
            self.answer()
            for part in self.writer.usage():
                yield part
        finally:
            self.job.cancel()

    async def _run(self) -> Json:
        """The whole answer, when the requests before it have ended. Raises: Refusal."""
        async with self.session.lock:
            plan = await asyncio.to_thread(self._plan)
            stop_reason = "failed"
            passes = self.session.settings.hold_weights  # a pause, in which new weights wait for the session's end
            try:
                running = self.routes.intake.entered(passes)
                async with running, aclosing(self.routes.engine.stream(self.asked)) as choices:
                    async for _, self.choice, self.about in choices:
                        self._show()
                stop_reason = self.choice.finish_reason or "failed"
            except asyncio.CancelledError:
                stop_reason = "cancelled"
                raise
            finally:
                answer = self._record(plan, stop_reason)
        return answer

    def _plan(self) -> Plan:
        """The ids that are read, and the request to sample behind them with the session's noise."""
        settings, body, served = self.session.settings, self.body, self.routes.engine.limits()
        check_size([self.messages, self.tools], served)
        plan = self.session.conversation.begin(self.messages, self.tools)
        if body.seed is None and body.noise is None:
            body = body.model_copy(update={"seed": mix_seed(settings.seed, plan.number)})
        self.asked = completion_of(body, [plan.ids], served, self.tools, settings.max_tokens)
        self.writer = Writer(self.routes.texts, self.asked)
        return plan

    def _show(self) -> None:
        """Queue what is new of a stream."""
        for part in self.writer.parts(0, self.choice, self.about) if self.is_streamed else ():
            self._put(part)

    def _put(self, part: Json | None) -> None:
        self.pieces.put_nowait(part)
        if not self.begun.done():
            self.begun.set_result(None)

    def _record(self, plan: Plan, stop_reason: str) -> Json:
        """Record the turn as far as it was sampled, and return the whole answer."""
        choice, about = self.choice, self.about
        answer = self.writer.whole(about._replace(choices=[choice]))
        (row,) = answer["choices"]
        if choice.ids:
            why = row["finish_reason"] if stop_reason in ("stop", "length") else stop_reason
            found = [*choice.ids], [max(value, LEAST) for value in choice.logprobs], reply_of(row["message"]), why
            turn = plan, self.given, self.messages, self.tools, *found, about.version
            self.session.conversation.end(*turn, model=self.asked.model, cached=about.cached)
        return answer

    def _finish(self, job: asyncio.Future[Json]) -> None:
        """End the stream; the job's failure is raised where it is awaited."""
        self.session.jobs.discard(job)
        self.session.last_used = time.monotonic()
        self._put(None)
        if not job.cancelled() and (problem := job.exception()) is not None:
            self.session.failed_requests += (
                not isinstance(problem, UsageError) or getattr(problem, "status", 400) >= 500
            )


def reply_of(message: Json) -> Json:
    """The model's own message as chat templates take it; as it was answered where no request may bring it back.

    Such a one has a NUL in the name of a call, or arguments that are nested too deep.
    """
    try:
        return Message.model_validate(message).shown()
    except ValidationError:
        return message
