"""Client of OpenAI-compatible servers: vLLM, SGLang, `transformers serve`, or hosted ones.

Requests go to the servers in turn, several at a time, and replies are returned in the order of the requests. After a
busy server (429, 5xx), a time-out or a broken connection a request is retried, at the next server if there are several,
with exponential backoff or after the server's Retry-After. The key is read from OPENAI_API_KEY and never written.

Left out: streaming, tools, images, and starting servers.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx2
import tenacity

from lightrlhf.cli.args import RARE, check_at_least, check_positive
from lightrlhf.cli.errors import RunFailure

KEY = "OPENAI_API_KEY"
LONGEST_WAIT = 60.0  # seconds between two attempts, without a Retry-After
LONGEST_RETRY_AFTER = 600.0  # seconds
MAX_REFUSALS = 8  # refused requests, without a reply to any, after which the program fails


@dataclass(frozen=True, kw_only=True)
class RemoteArgs:
    """OpenAI-compatible servers."""

    base_url: list[str] = field(default_factory=list)
    """Addresses of the servers up to `/v1`, used in turn; the key is read from OPENAI_API_KEY."""
    max_workers: int = field(default=16, metadata=RARE)
    """Concurrent requests."""
    max_attempts: int = field(default=8, metadata=RARE)
    """Attempts per request until the program fails."""
    request_timeout: float = field(default=600.0, metadata=RARE)
    """Seconds until an unanswered request counts as failed."""
    health_timeout: float = field(default=600.0, metadata=RARE)
    """Seconds to wait until every server is up."""

    def check_remote(self) -> None:
        """Raises: ValueError, one line, when an address or a limit cannot be used."""
        for url in self.base_url:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"--base_url {url} is not an address such as http://localhost:8000/v1")
            if parts.username or parts.password:
                raise ValueError(f"--base_url at {parts.hostname} contains a password; put it into {KEY}")
        for name in ("max_workers", "max_attempts"):
            check_at_least(self, name, 1)
        check_positive(self, "request_timeout", "health_timeout")


@dataclass(frozen=True)
class Reply:
    """Reply of a server; `error` is its reason for refusing this request (status 400, 413, 422)."""

    text: str = ""
    truncated: bool = False  # stopped by length
    error: str | None = None


class Busy(Exception):
    """A failure after which a retry may succeed; `seconds` is the server's Retry-After."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


class Servers:
    """One model at one or several addresses."""

    def __init__(self, args: RemoteArgs, model: str, first_wait: float = 1.0) -> None:
        self.args, self.model, self.first_wait = args, model, first_wait
        self.urls = [url.rstrip("/") for url in args.base_url]
        key = os.environ.get(KEY)
        self.client = httpx2.Client(
            timeout=httpx2.Timeout(args.request_timeout, connect=min(30.0, args.request_timeout)),
            limits=httpx2.Limits(max_connections=args.max_workers),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_healthy(self) -> None:
        """Wait until every server answers `/health`, or `/v1/models` where there is no such path.

        Raises: RunFailure naming a server that does not within `--health_timeout`, or that refuses the key.
        """
        end = time.monotonic() + self.args.health_timeout
        for url in self.urls:
            while problem := self._health_problem(url):
                if time.monotonic() > end:
                    raise RunFailure(
                        f"--base_url {url} did not answer within {self.args.health_timeout:g} s ({problem}); "
                        "start a server at this address, or give a longer --health_timeout"
                    )
                time.sleep(min(self.first_wait, 1.0))

    def replies(self, requests: Iterable[dict[str, Any]]) -> Iterator[Reply]:
        """Yield one reply per request, in order; later requests are sent ahead.

        A request is the body of a chat completion (`messages`) or a plain one (`prompt`), without `model`.
        Raises: RunFailure when a server keeps failing, does not have the model, or refuses the key or all requests.
        """
        stop = threading.Event()  # ends the waits of requests whose replies are no longer needed
        executor = ThreadPoolExecutor(self.args.max_workers, thread_name_prefix="request")
        waiting: deque[Any] = deque()
        numbered = enumerate(requests)
        answered = refused = 0
        try:
            for number, request in itertools.islice(numbered, 4 * self.args.max_workers):
                waiting.append(executor.submit(self._ask, number, request, stop))
            while waiting:
                reply = waiting.popleft().result()
                answered, refused = answered + (reply.error is None), refused + (reply.error is not None)
                if not answered and refused >= MAX_REFUSALS:
                    raise RunFailure(f"--base_url {self.urls[0]} refuses every request: {reply.error}")
                for number, request in itertools.islice(numbered, 1):
                    waiting.append(executor.submit(self._ask, number, request, stop))
                yield reply
        finally:
            stop.set()
            executor.shutdown(wait=False, cancel_futures=True)

    def _ask(self, number: int, request: dict[str, Any], stop: threading.Event) -> Reply:
        attempts = itertools.count(number)
        retrying = tenacity.Retrying(
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(self.args.max_attempts), tenacity.stop_when_event_set(stop)
            ),
            wait=self._seconds_to_wait,
            retry=tenacity.retry_if_exception_type((Busy, httpx2.TransportError)),
            sleep=tenacity.sleep_using_event(stop),
            reraise=True,
        )
        url = self.urls[number % len(self.urls)]
        try:
            for attempt in retrying:
                with attempt:
                    url = self.urls[next(attempts) % len(self.urls)]
                    return self._ask_once(url, request)
        except (Busy, httpx2.TransportError) as problem:
            raise RunFailure(
                f"--base_url {url} failed {self.args.max_attempts} times, last with: {_message(problem)}; "
                "complete rows are kept, run the same command to resume"
            ) from None
        raise AssertionError("tenacity returns or raises")

    def _ask_once(self, url: str, request: dict[str, Any]) -> Reply:
        path = "/chat/completions" if "messages" in request else "/completions"
        response = self.client.post(url + path, json={"model": self.model, **request})
        status = response.status_code
        if status == 429 or status in (408, 409, 425) or status >= 500:
            raise Busy(f"status {status}: {_reason(response)}", _retry_after(response))
        if status in (400, 413, 422):
            return Reply(error=f"status {status}: {_reason(response)}")
        if status in (401, 403):
            raise RunFailure(f"--base_url {url} refused the key (status {status}); set {KEY}")
        if status != 200:
            raise RunFailure(f"--base_url {url} answered {path} with status {status}: {_reason(response)}")
        try:
            choice = response.json()["choices"][0]
            text = choice["message"]["content"] if "messages" in request else choice["text"]
            return Reply(text or "", choice.get("finish_reason") == "length")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise Busy(f"a reply that is not a completion: {response.text[:200]!r}") from None

    def _seconds_to_wait(self, state: tenacity.RetryCallState) -> float:
        problem = state.outcome.exception() if state.outcome else None
        if isinstance(problem, Busy) and problem.seconds is not None:
            return problem.seconds
        return tenacity.wait_exponential_jitter(self.first_wait, LONGEST_WAIT, jitter=self.first_wait)(state)

    def _health_problem(self, url: str) -> str | None:
        try:
            response = self.client.get(url.removesuffix("/v1") + "/health", timeout=10.0)
            if response.status_code in (401, 403, 404, 405):  # no such path; every server has /models
                response = self.client.get(url + "/models", timeout=10.0)
        except httpx2.TransportError as problem:
            return _message(problem)
        if response.status_code in (401, 403):
            raise RunFailure(f"--base_url {url} refused the key (status {response.status_code}); set {KEY}")
        return None if response.status_code == 200 else f"status {response.status_code}"


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds of a Retry-After header: a number, or a date."""
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


def _reason(response: httpx2.Response) -> str:
    """A server's reason for a refusal, in one line."""
    try:
        body = response.json()
        error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:300] or response.reason_phrase


def _message(problem: Exception) -> str:
    return str(problem) or type(problem).__name__
