"""Sessions of programs that speak OpenAI's chat: pinned settings, a key, and a conversation with its rows.

A session's key opens its own chat route and nothing else. Its keys and values are in the engine's cache as any other
prefix; where they were evicted, the ids are read again.

Left out: sessions that outlive the server.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.conversations import Conversation
from lightrlhf.serving.bodies import MOST_TOKENS, YES, ChatBody, Json, Refusal

MOST_SESSIONS = 4096
LONGEST_IDLE = 6 * 3600.0  # seconds without a request after which a session ends by itself
LARGEST_RECORD = 64 * 2**20  # bytes or so of the requests and ids of a session
ROUTE = "/v1/chat/completions"  # behind /sessions/{id}
# fields that a trained session takes with their default only: others change what is sampled
PINNED = ("top_p", "top_k", "min_p", "repetition_penalty", "allowed_token_ids", "ignore_eos", "seed", "noise")


# ------------------------------------------------------------------------------------------------------------ settings
class Settings(BaseModel):
    """Settings of a session, pinned for its life; the body of `POST /sessions`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = Field(None, description="a text")  # the model or an adapter; whatever a request names
    train: bool = Field(True, description=YES)  # whether what changes the distribution is refused
    temperature: float = Field(1.0, ge=1e-6, le=1e3, description="a number from 1e-6 to 1000")
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="a whole number of at least 1")  # of a turn
    seed: int = Field(  # of the noise of its turns
        default_factory=lambda: secrets.randbits(62), ge=0, lt=2**63, description="a whole number of at least 0"
    )
    hold_weights: bool = Field(False, description=YES)  # whether new weights wait until the session has ended

    def pinned(self, body: ChatBody) -> ChatBody:
        """A request's body with the settings in it. Raises: Refusal naming a field that differs."""
        if body.n != 1:
            raise Refusal("n is 1 in a session, which is one conversation; leave it out, or open several sessions")
        settings: Json = {"model": self.model}
        if "temperature" not in body.model_fields_set:
            settings["temperature"] = self.temperature
        elif self.train and body.temperature != self.temperature:
            raise Refusal(f"temperature is {self.temperature} in this session, not {body.temperature}; leave it out")
        for name in PINNED if self.train else ():
            if getattr(body, name) != ChatBody.model_fields[name].default:
                raise Refusal(f"{name} is not taken in a session that is trained on; leave it out")
        if body.tool_choice != "none":
            settings["tool_choice"] = "auto"  # a turn is one sample; a forced call takes several
        return body.model_copy(update=settings)


# ------------------------------------------------------------------------------------------------------------ sessions
class Session:
    """A conversation with a key and settings; `lock` is held by the request that runs."""

    def __init__(self, tokenizer: Tokenizer, settings: Settings) -> None:
        self.id, self.key = secrets.token_hex(16), secrets.token_urlsafe(32)
        self.settings, self.conversation = settings, Conversation(tokenizer)
        self.lock, self.ended = asyncio.Lock(), asyncio.Event()
        self.jobs: set[asyncio.Future[Any]] = set()  # requests that run or wait
        self.last_job: asyncio.Future[Any] | None = None
        self.failed_requests, self.last_used = 0, 0.0  # by this side; by the clock of `Sessions`

    def check_size(self) -> None:
        """Raises: Refusal when the record takes too much memory."""
        if self.conversation.size > LARGEST_RECORD:
            raise Refusal(f"the requests of this session have {LARGEST_RECORD} bytes; end it, and open another", 413)

    def trace(self) -> Json:
        """Settings, rows, turns and counts, and whether the last request was answered, also by an error."""
        is_answered = self.last_job is None or (self.last_job.done() and not self.last_job.cancelled())
        told = {"failed_requests": self.failed_requests, "is_answered": is_answered}
        return {"id": self.id, "settings": self.settings.model_dump(), **self.conversation.trace(), **told}


class Sessions:
    """The open sessions of a server."""

    def __init__(self, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokenizer, self.clock = tokenizer, clock
        self.open: dict[str, Session] = {}

    def begin(self, settings: Settings) -> Session:
        """A new session. Raises: Refusal when there are too many."""
        self.drop_idle()
        if len(self.open) >= MOST_SESSIONS:
            raise Refusal(f"{MOST_SESSIONS} sessions are open; end some by DELETE /sessions/ID", 429)
        session = Session(self.tokenizer, settings)
        session.last_used = self.clock()
        self.open[session.id] = session
        return session

    def find(self, identifier: str) -> Session:
        """An open session. Raises: Refusal."""
        if identifier not in self.open:
            raise Refusal(f"no session {identifier[:40]!r} is open; open one by POST /sessions", 404)
        return self.open[identifier]

    def end(self, identifier: str) -> None:
        """End a session and the request that runs in it. Raises: Refusal when it is not open."""
        session = self.find(identifier)
        del self.open[identifier]
        session.ended.set()
        for job in session.jobs:
            job.cancel()

    def drop_idle(self) -> None:
        """End sessions without a request for a long time."""
        for session in [*self.open.values()]:
            if self.clock() - session.last_used > LONGEST_IDLE and not session.jobs:
                self.end(session.id)

    def holding(self, seconds: float) -> list[Session]:
        """Sessions for which new weights wait: those that ask for it and were used in the last seconds."""
        used = [one for one in self.open.values() if one.jobs or self.clock() - one.last_used < seconds]
        return [session for session in used if session.settings.hold_weights]

    def opens(self, path: str, given: bytes) -> bool:
        """Whether a value of the header Authorization is the key of the session whose own chat route a path is."""
        identifier = path.removeprefix("/sessions/").removesuffix(ROUTE)
        session = self.open.get(identifier)
        if session is None or path != f"/sessions/{identifier}{ROUTE}":
            return False
        return hmac.compare_digest(given, f"Bearer {session.key}".encode())
