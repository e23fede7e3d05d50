"""How routes handle a request: its body, its place in the queue, streams, refusals, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from lightrlhf.cli.errors import RunFailure, UsageError, first_line
from lightrlhf.serving.bodies import Json, Refusal, read_object

LARGEST_BODY = 64 * 2**20  # bytes; the noise of a rollout is the largest part
LONG_BODY = 2**16  # bytes, from which a body takes long to read
MOST_WAITING = 256  # requests
KINDS = {401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError"}  # of refusals, by status
T = TypeVar("T")


class Intake:
    """What requests pass before the engine: the reading of their bodies, a bounded queue, and a pause.

    num_waiting: how many wait in the engine. Bodies are read beside the event loop, which stays free to answer, long
    ones apart from short ones.
    """

    def __init__(self, num_waiting: Callable[[], int]) -> None:
        self.num_waiting = num_waiting
        self.readers = [ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("short bodies", "long bodies")]
        self.resumed, self.idle = asyncio.Event(), asyncio.Event()
        self.resumed.set()
        self.idle.set()
        self.num_running = self.num_held = 0  # requests in the engine, and before a pause ends
        self.seconds = 1.0  # between two answers of late
        self.answered = time.monotonic()

    async def read(self, request: Request, work: Callable[[Json], T]) -> T:
        """What some work makes of a body. Raises: Refusal, also for one that is too large or no JSON object."""
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > LARGEST_BODY:
                raise Refusal(f"a body may have {LARGEST_BODY} bytes; send several requests", 413)
        reader = self.readers[len(content) > LONG_BODY]
        return await asyncio.get_running_loop().run_in_executor(reader, lambda: work(read_object(bytes(content))))

    def check_queue(self) -> None:
        """Raises: Refusal with a time when too many requests wait."""
        waiting = self.num_waiting() + self.num_held
        if waiting >= MOST_WAITING:
            seconds = min(1 + int(self.seconds * waiting), 60)
            raise Refusal(f"{waiting} requests wait already; try again in {seconds} s", 429, seconds)

    @asynccontextmanager
    async def entered(self, passes: bool = False) -> AsyncIterator[None]:
        """Context manager: a request that runs, after a pause unless it passes. Raises: Refusal for what fails."""
        self.num_held += 1
        try:
            while not (passes or self.resumed.is_set()):
                await self.resumed.wait()
        finally:
            self.num_held -= 1
        self.num_running += 1
        self.idle.clear()
        try:
            with refusing():
                yield
        finally:
            self.num_running -= 1
            now = time.monotonic()
            self.seconds, self.answered = 0.9 * self.seconds + 0.1 * (now - self.answered), now
            if not self.num_running:
                self.idle.set()


# ------------------------------------------------------------------------------------------------------------- refusals
@contextmanager
def refusing() -> Iterator[None]:
    """Context manager. Raises: Refusal for what fails inside."""
    try:
        yield
    except Exception as problem:
        raise as_refusal(problem) from None


def as_refusal(problem: Exception) -> Refusal:
    """A refusal for invalid input; another failure, such as too little memory, is also said on standard error."""
    if isinstance(problem, Refusal):
        return problem
    if isinstance(problem, UsageError) and not isinstance(problem, RunFailure):
        return Refusal(str(problem))
    line = f"{type(problem).__name__}: {first_line(problem)[:300]}"
    print(f"a request failed: {line}", file=sys.stderr, flush=True)
    return Refusal(line, 500)


def error(refusal: Refusal) -> Json:
    """The body of a refusal, in OpenAI's form."""
    kind = KINDS.get(refusal.status, "BadRequestError" if refusal.status in (400, 413) else "InternalServerError")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.status}}


def refuse(refusal: Refusal) -> Response:
    """The answer of a refusal."""
    return JSONResponse(error(refusal), refusal.status, refusal.headers)


async def on_failure(request: Request, problem: Exception) -> Response:
    return refuse(as_refusal(problem))


async def on_unknown(request: Request, problem: HTTPException) -> Response:
    return refuse(Refusal(f"{request.method} {request.url.path[:200]} is not served", problem.status_code))


async def on_leaving(request: Request, problem: ClientDisconnect) -> Response:
    return Response(status_code=499)  # the client has gone


HANDLERS: Any = {HTTPException: on_unknown, ClientDisconnect: on_leaving}
HANDLERS |= dict.fromkeys((UsageError, Exception), on_failure)


# -------------------------------------------------------------------------------------------------------------- answers
def stream(rows: AsyncGenerator[Json, None]) -> Response:
    """A streamed answer: a server-sent event of each row, [DONE] at the end, or an error."""

    async def events() -> AsyncIterator[str]:
        try:
            async with aclosing(rows):
                async for row in rows:
                    yield f"data: {json.dumps(row)}\n\n"
            yield "data: [DONE]\n\n"
        except UsageError as problem:
            yield f"data: {json.dumps(error(as_refusal(problem)))}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
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
