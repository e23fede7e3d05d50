"""Client of OpenAI-compatible servers of texts: vLLM, `transformers serve`, or hosted ones.

Requests go to the servers in turn, several at a time, and replies are returned in the order of the requests. After a
busy server (429, 5xx), a time-out, a broken connection or an invalid reply a request is retried, at the next server if
there are several, with exponential backoff or after the server's Retry-After.

Only one choice, with text and an ordinary end, counts as an answer. For token ids and weights that follow see
`server_pool`.

Left out: streaming, tools, images, and starting servers.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightrlhf.cli.addresses import check_address
from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.fields import Args, at_least, flag
from lightrlhf.cli.patience import REQUEST, SERVER, patience
from lightrlhf.generation.server_client import (
    HEALTH_DEADLINE,
    Busy,
    HttpThread,
    InvalidResponse,
    RefusedRequest,
    ServerClient,
    message_of,
    one_line,
    retry,
)

MAX_ATTEMPTS = 8  # at a request, after which the program fails
MAX_REFUSALS = 8  # refused requests, without a reply to any, after which the program fails
# by finish_reason: of OpenAI, TGI (eos_token, stop_sequence), Together (eos), xAI (end_turn) and Mistral
TRUNCATED = {"stop": False, "eos_token": False, "stop_sequence": False, "eos": False, "end_turn": False}
TRUNCATED |= {"length": True, "model_length": True}
NO_ANSWER = ("content_filter", "tool_calls", "function_call")  # ends that another attempt would not change


@dataclass(frozen=True, kw_only=True)
class RemoteArgs(Args):
    """OpenAI-compatible servers."""

    base_url: list[str] = flag([], check=partial(check_address, example="http://localhost:8000/v1"))
    """Addresses of the servers up to `/v1`, used in turn; the key is read from OPENAI_API_KEY."""
    max_workers: int = at_least(1, 16, show="rarely")
    """Concurrent requests."""


@dataclass(frozen=True)
class Reply:
    """Reply of a server; `error` is why it has no answer: a refusal (status 400, 413, 422, a filter), or no text."""

    text: str = ""
    truncated: bool = False  # stopped by length
    error: str | None = None


class Unanswered(InvalidResponse):
    """A completion without usable text; when retries do not help, it is reported like a refusal."""


class Servers:
    """One model at one or several addresses."""

    def __init__(self, args: RemoteArgs, model: str, first_wait: float = 1.0) -> None:
        self.args, self.model, self.first_wait = args, model, first_wait
        self.http = HttpThread(patience(REQUEST))
        self.clients = [ServerClient(self.http, url, "--base_url") for url in args.base_url]
        self.told: set[str] = set()  # other models' names in answers
        self.slots = asyncio.Semaphore(args.max_workers)

    def close(self) -> None:
        """Cancel pending requests."""
        self.http.close()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_healthy(self) -> None:
        """Wait until every server answers `/health`, or `/v1/models` where there is no such path.

        Raises: RunFailure naming a server that does not in time, or that refuses the key.
        """
        timeout = patience(SERVER)
        for client in self.clients:
            look = partial(client.check_health, min(HEALTH_DEADLINE, timeout))
            self.http.start(client.wait_until(look, timeout)).result()

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
                    raise RunFailure(f"{self.clients[0].name} refuses every request: {reply.error}")
                for number, request in itertools.islice(numbered, 1):
                    waiting.append(self.http.start(self._ask(number, request)))
                yield reply
        finally:
            for future in waiting:  # of replies that are not needed any more
                future.cancel()

    async def _ask(self, number: int, request: dict[str, Any]) -> Reply:
        turns = itertools.count(number)
        client = self.clients[number % len(self.clients)]

        async def attempt() -> Reply:
            nonlocal client
            client = self.clients[next(turns) % len(self.clients)]
            return await self._ask_once(client, request)

        async with self.slots:
            try:
                return await retry(attempt, MAX_ATTEMPTS, self.first_wait, jitter=self.first_wait)
            except Unanswered as problem:
                return Reply(error=str(problem))
            except Busy as problem:
                raise RunFailure(
                    f"{client.name} failed {MAX_ATTEMPTS} times, last with: {message_of(problem)}; "
                    "complete rows are kept, run the same command to resume"
                ) from None

    async def _ask_once(self, client: ServerClient, request: dict[str, Any]) -> Reply:
        chat = "messages" in request
        path = client.api + ("/chat/completions" if chat else "/completions")
        try:
            answer = await client.ask(path, {"model": self.model, **request}, patience(REQUEST))
        except RefusedRequest as problem:
            return Reply(error=problem.reason)
        reply = reply_of(answer, chat)
        name = answer.get("model")
        if isinstance(name, str) and name.partition("@")[0] != self.model and name not in self.told:  # name@revision
            self.told.add(name)
            print(f"{client.name} answers as {one_line(name)}, asked for {self.model}", file=sys.stderr)
        return reply


def reply_of(answer: Any, chat: bool) -> Reply:
    """The reply in an answer. Raises: InvalidResponse unless there is just one; Unanswered without usable text."""
    said = one_line(str(answer))[:200]
    found = answer.get("choices") if isinstance(answer, dict) else None
    choices = found if isinstance(found, list) else []
    choice = choices[0] if choices else None
    message = None
    if isinstance(choice, dict):
        message = choice.get("message") if chat else {"content": choice.get("text")}
    if not isinstance(choice, dict) or not isinstance(message, dict) or message.get("role") not in (None, "assistant"):
        raise InvalidResponse(f"a reply that is not a completion: {said!r}")
    index, end = choice.get("index"), choice.get("finish_reason")
    if len(choices) > 1 or (index is not None and (type(index) is not int or index != 0)):
        raise InvalidResponse(f"an answer that was not asked for: {said!r}")
    refusal = message.get("refusal") or message.get("tool_calls")
    if refusal or (isinstance(end, str) and end in NO_ANSWER):
        why = f": {refusal}" if isinstance(refusal, str) else ""
        return Reply(error=one_line(f"not answered, finish_reason {end}{why}")[:300])
    if not isinstance(end, str) or end not in TRUNCATED:
        raise InvalidResponse(one_line(f"an answer with finish_reason {end!r}")[:200])
    text = message.get("content")
    if text is None and TRUNCATED[end]:  # a model that was still reasoning
        return Reply(error="not answered, no text before finish_reason length")
    if text is None:
        raise Unanswered("not answered, no text")
    if not isinstance(text, str):
        raise InvalidResponse(f"a text that is a {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Unanswered("not answered, half of a surrogate pair in the text") from None
    return Reply(text, TRUNCATED[end])
