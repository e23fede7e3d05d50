"""Client of OpenAI-compatible servers: vLLM, `transformers serve`, or hosted ones.

Requests go to the servers in turn, several at a time, and replies are returned in the order of the requests. After a
busy server (429, 5xx), a time-out, a broken connection or a reply that is no answer a request is retried, at the next
server if there are several, with exponential backoff or after the server's Retry-After.

Only one choice, with text and an ordinary end, counts as an answer. For token ids and weights that follow see
`rollout_servers`.

Left out: streaming, tools, images, and starting servers.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightrlhf.cli.addresses import KEY, check_address
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.cli.fields import at_least, flag
from lightrlhf.cli.groups import TimeoutArgs
from lightrlhf.generation.http_thread import (
    Busy,
    HttpThread,
    message_of,
    one_line,
    reason_of,
    retry_after,
    text_of,
)

if TYPE_CHECKING:
    from tenacity import RetryCallState

LONGEST_WAIT = 60.0  # seconds between two attempts, without a Retry-After
MAX_REFUSALS = 8  # refused requests, without a reply to any, after which the program fails
HEALTH_DEADLINE = 10.0  # seconds
# by finish_reason: those of OpenAI, TGI (eos_token, stop_sequence), Together (eos), xAI (end_turn) and Mistral
TRUNCATED = {"stop": False, "eos_token": False, "stop_sequence": False, "eos": False, "end_turn": False}
TRUNCATED |= {"length": True, "model_length": True}
NO_ANSWER = ("content_filter", "tool_calls", "function_call")  # ends that another attempt would not change
REQUEST_ID = re.compile(r"lightrlhf-([0-9a-f]{16})-")  # the hash of its body, which an echo must repeat


@dataclass(frozen=True, kw_only=True)
class RemoteArgs(TimeoutArgs):
    """OpenAI-compatible servers."""

    base_url: list[str] = flag([], check=partial(check_address, example="http://localhost:8000/v1"))
    """Addresses of the servers up to `/v1`, used in turn; the key is read from OPENAI_API_KEY."""
    max_workers: int = at_least(1, 16, show="rarely")
    """Concurrent requests."""
    max_attempts: int = at_least(1, 8, show="rarely")
    """Attempts per request until the program fails."""


@dataclass(frozen=True)
class Reply:
    """Reply of a server; `error` is why it has no answer: a refusal (status 400, 413, 422, a filter), or no text."""

    text: str = ""
    truncated: bool = False  # stopped by length
    error: str | None = None


class Unanswered(Busy):
    """A completion without usable text; when retries do not help, it is reported like a refusal."""


class Servers:
    """One model at one or several addresses."""

    def __init__(self, args: RemoteArgs, model: str, first_wait: float = 1.0) -> None:
        self.args, self.model, self.first_wait = args, model, first_wait
        self.urls = [url.rstrip("/") for url in args.base_url]
        self.told: set[str] = set()  # other models' names in answers
        self.http = HttpThread(args.request_timeout)
        self.slots = asyncio.Semaphore(args.max_workers)

    def close(self) -> None:
        """End what is under way."""
        self.http.close()

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
            while problem := self.http.start(self._health_problem(url)).result():
                if time.monotonic() > end:
                    raise RunFailure(
                        f"--base_url {url} did not answer within {self.args.health_timeout:g} s ({problem}); "
                        "start a server at this address, or give a longer --health_timeout"
                    )
                time.sleep(min(self.first_wait, 1.0))

    def replies(self, requests: Iterable[dict[str, Any]]) -> Iterator[Reply]:
        """Yield one reply per request, in order; later requests are sent ahead.

        A request is the body of a chat completion (`messages`) or a plain one (`prompt`), without `model`.
        Raises: RunFailure when a server keeps failing, does not have the model, or refuses the key or all requests;
            UsageError for a request that is not valid Unicode or JSON.
        """
        waiting: deque[Future[Reply]] = deque()
        numbered = enumerate(requests)
        answered = refused = 0
        try:
            for number, request in itertools.islice(numbered, 4 * self.args.max_workers):
                waiting.append(self.http.start(self._ask(number, request)))
            while waiting:
                reply = waiting.popleft().result()
                answered, refused = answered + (reply.error is None), refused + (reply.error is not None)
                if not answered and refused >= MAX_REFUSALS:
                    raise RunFailure(f"--base_url {self.urls[0]} refuses every request: {reply.error}")
                for number, request in itertools.islice(numbered, 1):
                    waiting.append(self.http.start(self._ask(number, request)))
                yield reply
        finally:
            for future in waiting:  # replies that are no longer needed
                future.cancel()

    async def _ask(self, number: int, request: dict[str, Any]) -> Reply:
        import tenacity  # a run without servers needs no client

        attempts = itertools.count(number)
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.args.max_attempts),
            wait=self._seconds_to_wait,
            retry=tenacity.retry_if_exception_type(Busy),
            reraise=True,
        )
        url = self.urls[number % len(self.urls)]
        async with self.slots:
            try:
                async for attempt in retrying:
                    with attempt:
                        url = self.urls[next(attempts) % len(self.urls)]
                        return await self._ask_once(url, request)
            except Unanswered as problem:
                return Reply(error=str(problem))
            except Busy as problem:
                raise RunFailure(
                    f"--base_url {url} failed {self.args.max_attempts} times, last with: {message_of(problem)}; "
                    "complete rows are kept, run the same command to resume"
                ) from None
        raise AssertionError("tenacity returns or raises")

    async def _ask_once(self, url: str, request: dict[str, Any]) -> Reply:
        chat = "messages" in request
        path = "/chat/completions" if chat else "/completions"
        try:
            text = json.dumps({"model": self.model, **request}, ensure_ascii=False, allow_nan=False)
            content = text.encode("utf-8")
        except ValueError as problem:  # half of a surrogate pair, NaN
            raise UsageError(f"a request to --base_url {url} cannot be written: {one_line(str(problem))}") from None
        asked = hashlib.sha256(content).hexdigest()[:16]
        headers = {"Content-Type": "application/json", "X-Request-Id": f"lightrlhf-{asked}-{secrets.token_hex(4)}"}
        response = await self.http.send("POST", url + path, self.args.request_timeout, content=content, headers=headers)
        status = response.status_code
        if status == 429 or status in (408, 409, 425) or status >= 500:
            raise Busy(f"status {status}: {reason_of(response)}", retry_after(response))
        if status in (400, 413, 422):
            return Reply(error=f"status {status}: {reason_of(response)}")
        if status in (401, 403):
            raise RunFailure(f"--base_url {url} refused the key (status {status}); set {KEY}")
        if status != 200:
            elsewhere = one_line(response.headers.get("location", ""))
            raise RunFailure(
                f"--base_url {url} answered {path} with status {status}"
                + (f", a redirection to {elsewhere}" if elsewhere else f": {reason_of(response)}")
            )
        try:
            body = json.loads(response.content)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise Busy(f"a reply that is not a completion: {one_line(text_of(response))[:200]!r}")
        for echo in (response.headers.get("x-request-id", ""), str(body.get("id", ""))):
            if (other := REQUEST_ID.search(echo)) and other[1] != asked:
                raise Busy("the reply to another request")
        reply = _reply(body, chat)
        self._tell_other_model(url, body.get("model"))
        return reply

    def _tell_other_model(self, url: str, name: object) -> None:
        """Say once that answers are of a model by another name than asked for."""
        if isinstance(name, str) and name.partition("@")[0] != self.model and name not in self.told:  # name@revision
            self.told.add(name)
            print(f"--base_url {url} answers as {one_line(name)}, asked for {self.model}", file=sys.stderr)

    def _seconds_to_wait(self, state: RetryCallState) -> float:
        from tenacity import wait_exponential_jitter

        problem = state.outcome.exception() if state.outcome else None
        if isinstance(problem, Busy) and problem.seconds is not None:
            return problem.seconds
        return wait_exponential_jitter(self.first_wait, LONGEST_WAIT, jitter=self.first_wait)(state)

    async def _health_problem(self, url: str) -> str | None:
        deadline = min(HEALTH_DEADLINE, self.args.health_timeout)
        try:
            response = await self.http.send("GET", url.removesuffix("/v1") + "/health", deadline)
            if response.status_code in (401, 403, 404, 405):  # no such path; every server has /models
                response = await self.http.send("GET", url + "/models", deadline)
        except Busy as problem:
            return message_of(problem)
        if response.status_code in (401, 403):
            raise RunFailure(f"--base_url {url} refused the key (status {response.status_code}); set {KEY}")
        return None if response.status_code == 200 else f"status {response.status_code}"


def _reply(body: dict[str, Any], chat: bool) -> Reply:
    """The one answer of a completion. Raises: Busy for anything else; Unanswered when it has no usable text."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise Busy(f"a reply that is not a completion: {one_line(json.dumps(body))[:200]!r}")
    choice, more = choices[0], len(choices) - 1
    if not isinstance(choice, dict):
        raise Busy(f"a reply that is not a completion: {one_line(json.dumps(body))[:200]!r}")
    index, message = choice.get("index"), choice.get("message" if chat else "text")
    if more or (index is not None and (type(index) is not int or index != 0)):
        raise Busy(f"an answer that was not asked for: {len(choices)} choices, the first with index {index!r}"[:200])
    if not isinstance(message, dict):  # of a plain completion it is the text
        message = {"content": None if chat else message, "role": "none" if chat else None}
    if message.get("role") not in (None, "assistant"):
        raise Busy(f"a reply that is not a completion: {one_line(json.dumps(body))[:200]!r}")
    text, end = message.get("content"), choice.get("finish_reason")
    refusal = message.get("refusal") or message.get("tool_calls")
    if refusal or (isinstance(end, str) and end in NO_ANSWER):
        why = f": {refusal}" if isinstance(refusal, str) else ""
        return Reply(error=one_line(f"not answered, finish_reason {end}{why}")[:300])
    if not isinstance(end, str) or end not in TRUNCATED:
        raise Busy(one_line(f"an answer with finish_reason {end!r}")[:200])
    if text is None and TRUNCATED[end]:  # a model that was still reasoning
        return Reply(error="not answered, no text before finish_reason length")
    if text is None:
        raise Unanswered("not answered, no text")
    if not isinstance(text, str):
        raise Busy(f"a text that is a {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Unanswered("not answered, half of a surrogate pair in the text") from None
    return Reply(text, TRUNCATED[end])
