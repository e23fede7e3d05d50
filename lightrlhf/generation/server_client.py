"""HTTP client of servers of models, in a separate thread: one deadline for a whole reply, and a largest size.

Each request has its own connection, so that no surplus answer can pass for the next one; that costs
0.2 to 0.4 ms a request to a server on the same machine. Its deadline runs from connecting to the last byte. Its id
holds a hash of its body: a reply that repeats the id of another request is invalid. The key is read from OPENAI_API_KEY
and never written.

Left out: HTTP/2, and connections that are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

from lightrlhf.cli.addresses import KEY
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.patience import SERVER

if TYPE_CHECKING:
    import httpx2
    from tenacity import RetryCallState

Result = TypeVar("Result")
LONGEST_REPLY = 16 * 2**20  # bytes after decompression: far above any completion
LONGEST_RETRY_AFTER = 600.0  # seconds
LONGEST_WAIT = 60.0  # seconds between two attempts, without a Retry-After
SHORT_DEADLINE, HEALTH_DEADLINE = 30.0, 10.0  # seconds, of requests that compute nothing
PROBE_SECONDS = 1.0  # between two looks at a server that is not ready
REQUEST_ID = re.compile(r"lightrlhf-([0-9a-f]{16})-")


# -------------------------------------------------------------------------------------------------------------- errors
class Busy(Exception):
    """A temporary failure, worth a retry; `seconds` is the server's Retry-After."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


class Late(Busy):
    """The reply was incomplete at the deadline."""


class InvalidResponse(Busy):
    """A reply that does not match the request."""


class UnusableServer(RunFailure):
    """A permanent failure of a server: a wrong key or address."""


class NoRoute(UnusableServer):
    """A server without the route that was asked for."""


class RefusedRequest(RunFailure):
    """A request that a server refuses whenever it is sent; `reason` is the status and the server's message."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


# ------------------------------------------------------------------------------------------------------------ requests
class HttpThread:
    """A thread with an event loop in which requests run; `start` gives it coroutines from any other thread.

    Raises: UsageError when the key has characters that no key has.
    """

    def __init__(self, connect_timeout: float) -> None:
        import httpx2  # a run without servers needs no client

        key = os.environ.get(KEY, "").strip()
        if not (key.isascii() and (key.isprintable() or not key)):
            raise UsageError(f"{KEY} has characters that no key has; set it again")
        self.client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=min(30.0, connect_timeout)),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        self.loop, self.is_closed = asyncio.new_event_loop(), asyncio.Event()
        self.thread = threading.Thread(target=self._run, name="requests", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Cancel the requests and end the thread."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.is_closed.set)
            self.thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self.is_closed.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)  # some send a last request, so before the client's end
        await self.client.aclose()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def send(self, method: str, url: str, deadline: float, longest: int, **more: Any) -> httpx2.Response:
        """The whole response. Raises: Late when it is incomplete at the deadline, Busy when nothing was received."""
        import httpx2

        content = bytearray()
        try:
            async with asyncio.timeout(deadline), self.client.stream(method, url, **more) as response:
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > longest:
                        raise Busy(f"a reply of more than {longest:,} bytes")
        except TimeoutError:
            raise Late(f"no whole reply within {deadline:g} s") from None
        except httpx2.RequestError as problem:
            raise Busy(message_of(problem)) from None
        raw = response.headers.raw  # bytes, in any encoding
        headers = [(name, value) for name, value in raw if name.lower() != b"content-encoding"]
        return httpx2.Response(response.status_code, headers=headers, content=bytes(content), request=response.request)


class ServerClient:
    """Requests to one server. They raise Busy on temporary errors, RunFailure on permanent ones.

    flag: names the server in errors, with its address.
    """

    def __init__(self, http: HttpThread, url: str, flag: str) -> None:
        self.http, self.url = http, url.rstrip("/")
        self.root = self.url.removesuffix("/v1")
        self.api = self.url.removeprefix(self.root)  # what precedes the paths of OpenAI
        self.name = f"{flag} {self.url}"

    async def ask(
        self,
        path: str,
        body: Any = None,
        deadline: float = SHORT_DEADLINE,
        longest: int = LONGEST_REPLY,
        method: str | None = None,
    ) -> Any:
        """The JSON answer to a POST of `body`, or without one to a GET; the text of a reply of another type.

        path: after `root`; deadline: seconds; longest: bytes of the reply; method: another than these two.
        Raises, besides: UsageError for a body that is not valid Unicode or JSON.
        """
        content, headers, digest = None, {}, ""
        if body is not None:
            try:
                content = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
            except ValueError as problem:  # half of a surrogate pair, NaN
                raise UsageError(f"a request to {self.name} cannot be written: {one_line(str(problem))}") from None
            digest = hashlib.sha256(content).hexdigest()[:16]
            request_id = f"lightrlhf-{digest}-{secrets.token_hex(4)}"
            headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        method = method or ("GET" if body is None else "POST")
        response = await self.http.send(method, self.root + path, deadline, longest, content=content, headers=headers)
        self._check_status(path.partition("?")[0], response)
        try:
            answer = json.loads(response.content)
        except (ValueError, RecursionError):
            answer = text_of(response)
            if "json" in response.headers.get("content-type", "").lower():
                raise InvalidResponse(f"a reply that is not JSON: {one_line(answer)[:200]!r}") from None
        echoes = [response.headers.get("x-request-id", ""), str(answer.get("id", "")) if type(answer) is dict else ""]
        if digest and any((echo := REQUEST_ID.search(text)) and echo[1] != digest for text in echoes):
            raise InvalidResponse("the reply to another request")
        return answer

    def _check_status(self, route: str, response: httpx2.Response) -> None:
        status = response.status_code
        if status == 200:
            return
        reason = reason_of(response)
        if status in (408, 409, 425, 429) or status >= 500:
            raise Busy(f"{route} answered with status {status}: {reason}", retry_after(response))
        if status in (400, 413, 422):
            raise RefusedRequest(f"{self.name} refused {route}: {reason}", f"status {status}: {reason}")
        if status in (401, 403):
            raise UnusableServer(f"{self.name} refused the key (status {status}); set {KEY}")
        elsewhere = one_line(response.headers.get("location", ""))
        said = f", a redirection to {elsewhere}" if elsewhere else f": {reason}"
        said += "; does the address end in /v1?" if status == 404 and not self.api and "completions" in route else ""
        error = NoRoute if status == 404 else UnusableServer
        raise error(f"{self.name} answered {route} with status {status}{said}")

    async def check_health(self, deadline: float = HEALTH_DEADLINE) -> None:
        """Raises: Busy when the server is not ready, UnusableServer when it refuses the key."""
        try:
            await self.ask("/health", deadline=deadline)
        except UnusableServer:  # every server has the other path
            try:
                await self.ask(self.api + "/models", deadline=deadline)
            except NoRoute as problem:  # as a proxy answers before there is a server behind it
                raise Busy(str(problem)) from None

    async def wait_until(self, look: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Repeat `look` while it raises Busy, and say once that it waits. Raises: RunFailure after `seconds`."""
        end, has_said = time.monotonic() + seconds, False
        while True:
            try:
                return await look()
            except Busy as problem:
                if time.monotonic() > end:
                    raise RunFailure(
                        f"{self.name} did not answer within {seconds:g} s ({message_of(problem)}); "
                        f"start a server at this address, or set a longer {SERVER}"
                    ) from None
                if not has_said:
                    said = f"waiting up to {seconds:g} s for {self.name} ({message_of(problem)})"
                    print(said, file=sys.stderr, flush=True)
                has_said = True
            await asyncio.sleep(min(PROBE_SECONDS, seconds / 10))


async def retry(
    work: Callable[[], Awaitable[Result]],
    attempts: int,
    first_wait: float,
    jitter: float = 0.0,
    longest_pause: float = LONGEST_RETRY_AFTER,
    unless: tuple[type[Busy], ...] = (),
) -> Result:
    """Repeat `work` while it raises Busy, but not of the kinds `unless`; wait as Retry-After says, else exponentially.

    first_wait, jitter, longest_pause: seconds. Without jitter Python's random state stays as it is.
    """
    import tenacity

    backoff: tenacity.wait.wait_base = tenacity.wait_exponential(first_wait, LONGEST_WAIT)
    if jitter:
        backoff += tenacity.wait_random(0, jitter)

    def seconds(state: RetryCallState) -> float:
        problem = state.outcome.exception() if state.outcome else None
        asked = problem.seconds if isinstance(problem, Busy) else None
        return backoff(state) if asked is None else min(asked, longest_pause)

    passes = tenacity.retry_if_exception_type(Busy) & tenacity.retry_if_not_exception_type(unless)
    stop = tenacity.stop_after_attempt(attempts)
    return await tenacity.AsyncRetrying(stop=stop, wait=seconds, retry=passes, reraise=True)(work)


# ----------------------------------------------------------------------------------------------- errors of a server
def reason_of(response: httpx2.Response) -> str:
    """A server's reason for a refusal, in one line."""
    try:
        body = json.loads(response.content)
        error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
        text = error.get("message", error) if isinstance(error, dict) else error
        text = text if isinstance(text, str) else json.dumps(text)
    except (ValueError, RecursionError):
        text = text_of(response)
    return one_line(text)[:300] or response.reason_phrase


def retry_after(response: httpx2.Response) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


def text_of(response: httpx2.Response) -> str:
    """The start of a body, whatever its Content-Type says of the encoding."""
    return response.content[:5000].decode("utf-8", "replace")


def message_of(problem: BaseException) -> str:
    """An exception's message in one line, or its name."""
    return one_line(str(problem))[:300] or type(problem).__name__


def one_line(text: str) -> str:
    """Text of a server without line breaks, control characters of terminals and halves of surrogate pairs."""
    return " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in text[:5000]).split())
