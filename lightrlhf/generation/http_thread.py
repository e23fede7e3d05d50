"""HTTP requests to servers of models, by a thread of their own: one deadline for a whole reply, and a largest size.

Each request has a connection of its own, so that no surplus answer can pass for that of the next request; that costs
0.2 to 0.4 ms a request to a server on the same machine. It has one deadline from connecting to the last byte. The key
is read from OPENAI_API_KEY and never written.

Left out: HTTP/2, and connections that are kept.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from lightrlhf.cli.addresses import KEY
from lightrlhf.cli.errors import UsageError

if TYPE_CHECKING:
    import httpx2

LONGEST_REPLY = 16 * 2**20  # bytes after decompression: far above any completion
LONGEST_RETRY_AFTER = 600.0  # seconds


class Busy(Exception):
    """A failure after which a retry may succeed; `seconds` is the server's Retry-After."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


class Late(Busy):
    """No whole reply at the deadline."""


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
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="requests", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End what is under way and the thread of the requests."""
        if self.thread.is_alive():
            self.start(self._end()).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.client.aclose()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def send(
        self, method: str, url: str, deadline: float, longest: int = LONGEST_REPLY, **more: Any
    ) -> httpx2.Response:
        """The whole response. Raises: Late when it is not complete at the deadline, Busy when it is no reply."""
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


# ------------------------------------------------------------------------------------------------ what a server said
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
