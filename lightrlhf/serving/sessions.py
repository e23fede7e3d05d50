"""Sessions: conversations of programs whose token ids are kept as they were read and sampled.

A program asks for turns as it asks any server of OpenAI's chat: it sends the whole conversation each time. Where it
goes on from a turn of the session, the ids of that turn's row are kept and the rendered suffix is appended
(`data.suffix`); nothing sampled is tokenised again. Where it does not go on, a new row begins and is counted: the
program edited or dropped a turn, asks a turn again, changed the tools, or the chat template rewrites history. Each
sampled token is in the mask of exactly one row.

Left out: sessions that outlive the server, several choices a turn, and pictures.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from lightrlhf.data.suffix import Rewritten, suffix_ids
from lightrlhf.data.tokens import encode_text, prompt_text
from lightrlhf.data.types import Tokenizer
from lightrlhf.serving.requests import Refusal

Json = dict[str, Any]
Message = dict[str, Any]
Began = Literal["first", "new_conversation", "edited", "branched", "tools", "template"]  # why a row began
MOST_SESSIONS = 4096
LONGEST_IDLE = 6 * 3600.0  # seconds without a request after which a session ends by itself
LARGEST_RECORD = 64 * 2**20  # characters of the requests of a session
ROUTE = "/v1/chat/completions"  # behind /sessions/{id}
# fields that a trained session takes with these values, or null, only: others change what is sampled
PINNED: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "seed": (),
    "noise": (),
}


# ------------------------------------------------------------------------------------------------------------ settings
class Settings(BaseModel):
    """Settings of a session, pinned for its life; the body of `POST /sessions`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None  # the model or an adapter of the server; whatever a request names
    train: bool = True  # whether what changes the distribution is refused
    temperature: float = Field(1.0, ge=1e-6, le=1e3)
    max_tokens: int | None = Field(None, ge=1, le=2**26)  # of a turn, at most
    seed: int = Field(default_factory=lambda: secrets.randbits(62), ge=0, lt=2**63)  # of the noise of its turns
    hold_weights: bool = False  # whether new weights wait until the session has ended

    def checked(self, body: Json) -> Json:
        """A request's body with the settings in it. Raises: Refusal naming a field that differs."""
        if body.get("n") not in (None, 1):
            raise Refusal("n is 1 in a session, which is one conversation; leave it out, or open several sessions")
        body = {name: value for name, value in body.items() if name not in ("model", "n")}
        given = body.get("temperature")
        if self.train and given is not None and given != self.temperature:
            raise Refusal(f"temperature is {self.temperature} in this session, not {str(given)[:30]}; leave it out")
        for name, values in PINNED.items() if self.train else ():
            if body.get(name) is not None and body[name] not in values:
                raise Refusal(f"{name} is not taken in a session that is trained on; leave it out")
        if given is None:
            body["temperature"] = self.temperature
        asked = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
        if self.max_tokens is not None and (not asked or _is_above(asked[0], self.max_tokens)):
            body = {name: value for name, value in body.items() if name != "max_completion_tokens"}
            body["max_tokens"] = self.max_tokens
        return body


def _is_above(value: Any, most: int) -> bool:
    return type(value) is int and value > most


# ---------------------------------------------------------------------------------------------------------------- rows
@dataclass
class Row:
    """Token ids that are only ever appended to."""

    began: Began
    why: str = ""  # of a template that rewrites history, which part
    ids: list[int] = field(default_factory=list)
    shares: tuple[int, int] | None = None  # the row that it goes on from, and how many of its ids


@dataclass
class Turn:
    """One sampled turn: [start, end) of its row."""

    number: int  # of the session's samples, from which its noise is
    request: Json  # as the program sent it
    messages: list[Message]
    tools: list[Any] | None
    prompt: str  # text that the chat template wrote
    row: int
    start: int
    end: int
    logprobs: list[float]
    reply: Message
    stop_reason: str  # stop, length, tool_calls or cancelled
    version: str  # of the weights
    details: Json  # of the server, such as tokens read again

    def leads_to(self, messages: list[Message]) -> bool:
        """Whether a conversation goes on from this turn."""
        count = len(self.messages)
        is_longer = len(messages) > count + 1 and self.stop_reason != "cancelled"
        return is_longer and messages[:count] == self.messages and messages[count] == self.reply


class Plan(NamedTuple):
    """A turn to be sampled: what the policy reads, and where the row comes from."""

    number: int
    ids: list[int]  # the whole prompt
    prompt: str
    row: Row  # a new row, or the row of the turn before
    is_new: bool


class Conversation:
    """The rows and turns of a session."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.rows: list[Row] = []
        self.turns: list[Turn] = []
        self.counts: Counter[str] = Counter()
        self.num_samples = 0
        self.size = 0  # characters of all different messages
        self.interned: dict[str, Any] = {}  # messages by their JSON: each is kept once

    def begin(self, messages: Sequence[Message], tools: list[Any] | None) -> Plan:
        """Where the ids of a request's conversation come from. Raises: UsageError when the template refuses it."""
        messages = [plain(message) for message in messages]
        text = prompt_text(self.tokenizer, messages, tools)
        self.num_samples += 1
        number = self.num_samples - 1
        before, began, why = self._before(messages, tools), self._why(messages, tools), ""
        if before is not None:
            row = self.rows[before.row]
            try:
                kept = row.ids[: before.end]
                ids = kept + suffix_ids(self.tokenizer, before.prompt, kept[before.start :], text)
                if before.end == len(row.ids):
                    return Plan(number, ids, text, row, False)
                return Plan(number, ids, text, Row("branched", shares=(before.row, before.end)), True)
            except Rewritten as problem:
                began, why = "template", str(problem)
        return Plan(number, encode_text(self.tokenizer, text), text, Row(began, why), True)

    def end(
        self,
        plan: Plan,
        request: Json,
        messages: Sequence[Message],
        tools: list[Any] | None,
        ids: list[int],
        logprobs: list[float],
        reply: Message,
        stop_reason: str,
        version: str,
        **details: Any,
    ) -> Turn:
        """Append a sampled turn to its row, which begins here if it is new."""
        if plan.is_new:
            self.rows.append(plan.row)
            self.counts[f"rows_{plan.row.began}"] += 1
        start, end = len(plan.ids), len(plan.ids) + len(ids)
        plan.row.ids[:] = [*plan.ids, *ids]
        self.counts[f"stopped_by_{stop_reason}"] += 1
        request = {**request, "messages": [self._intern(message) for message in request.get("messages") or []]}
        turn = Turn(
            plan.number,
            request,
            [self._intern(plain(message)) for message in messages],
            tools and self._intern(tools),
            plan.prompt,
            self.rows.index(plan.row),
            start,
            end,
            logprobs,
            self._intern(plain(reply)),
            stop_reason,
            version,
            details,
        )
        self.turns.append(turn)
        return turn

    def _before(self, messages: list[Message], tools: list[Any] | None) -> Turn | None:
        """The last of the longest turns that a conversation goes on from."""
        turns = [turn for turn in self.turns if turn.tools == tools and turn.leads_to(messages)]
        return max(turns, key=lambda turn: (len(turn.messages), turn.number), default=None)

    def _why(self, messages: list[Message], tools: list[Any] | None) -> Began:
        """Why a conversation that goes on from no turn begins a row."""
        if not self.turns:
            return "first"
        if any(turn.leads_to(messages) for turn in self.turns):
            return "tools"
        if any(turn.messages == messages and turn.tools == tools for turn in self.turns):
            return "branched"
        return "edited" if any(turn.messages[0] == messages[0] for turn in self.turns) else "new_conversation"

    def _intern(self, value: Any) -> Any:
        text = json.dumps(value, sort_keys=True)
        if text not in self.interned:
            self.interned[text] = value
            self.size += len(text)
        return self.interned[text]

    def trace(self) -> Json:
        """Rows of ids, masks and log-probabilities, turns with their requests, and counts."""
        rows = []
        for number, row in enumerate(self.rows):
            mask, logprobs = [0] * len(row.ids), [0.0] * len(row.ids)  # of sampled ids, of the others 0
            for turn in self.turns:
                if turn.row == number:
                    mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
                    logprobs[turn.start : turn.end] = turn.logprobs
            shares = row.shares and {"row": row.shares[0], "tokens": row.shares[1]}
            rows.append(
                {"ids": row.ids, "mask": mask, "logprobs": logprobs, "began": row.began, "why": row.why}
                | {"shares": shares}
            )
        names = ("number", "row", "start", "end", "stop_reason", "version", "reply", "request")
        turns = [{name: getattr(turn, name) for name in names} | turn.details for turn in self.turns]
        return {"rows": rows, "turns": turns, "counts": dict(self.counts)}


def plain(message: Message) -> Message:
    """A message without fields that say nothing, so that the same one sent in two ways is equal."""
    content = message.get("content") or ""
    rest = {name: value for name, value in message.items() if value not in (None, []) and name != "content"}
    return {**rest, "content": content}


# ------------------------------------------------------------------------------------------------------------ sessions
class Session:
    """A conversation with a key and settings; `lock` is held by the request that runs."""

    def __init__(self, tokenizer: Tokenizer, settings: Settings) -> None:
        self.id, self.key = secrets.token_hex(16), secrets.token_urlsafe(32)
        self.settings, self.conversation = settings, Conversation(tokenizer)
        self.lock = asyncio.Lock()
        self.last_used = 0.0  # by the clock of `Sessions`
        self.ended = asyncio.Event()

    def trace(self) -> Json:
        settings = self.settings.model_dump()
        return {"id": self.id, "settings": settings, **self.conversation.trace()}


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
        self.find(identifier).ended.set()
        del self.open[identifier]

    def drop_idle(self) -> None:
        """End sessions without a request for a long time."""
        for session in [*self.open.values()]:
            if self.clock() - session.last_used > LONGEST_IDLE and not session.lock.locked():
                self.end(session.id)

    def opens(self, path: str, given: bytes) -> bool:
        """Whether a value of the header Authorization is the key of the session whose own chat route a path is."""
        identifier = path.removeprefix("/sessions/").removesuffix(ROUTE)
        session = self.open.get(identifier)
        if session is None or path != f"/sessions/{identifier}{ROUTE}":
            return False
        return hmac.compare_digest(given, f"Bearer {session.key}".encode())
