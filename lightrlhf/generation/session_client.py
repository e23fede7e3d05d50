"""Sessions of `lightrlhf.serve` from a trainer's side: open one, give its address to a program, read its trace.

A program gets the address and the key of its session, which open its chat alone; the trainer's key stays here.

Left out: other servers' ways to return token ids.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from lightrlhf.generation.conversations import Began
from lightrlhf.generation.server_client import InvalidResponse, ServerClient

LONGEST_TRACE = 2**30  # bytes


class SessionTurn(NamedTuple):
    """A sampled turn: [start, end) of its row's ids, the weights' version, and why it stopped."""

    row: int
    start: int
    end: int
    version: str
    stop_reason: str
    request: dict[str, Any]
    reply: dict[str, Any]


class SessionRow(NamedTuple):
    """Ids as they were read and sampled; `mask` is 1 and `logprobs` count where they were sampled in this row."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    began: Began


class Trace(NamedTuple):
    """All of a session."""

    rows: list[SessionRow]
    turns: list[SessionTurn]
    counts: dict[str, int]
    messages: list[dict[str, Any]]  # of the last turn with its reply, as chat templates take them
    failed_requests: int  # by the server's side
    is_answered: bool  # the last request, whether well or with an error


class ServedSession(NamedTuple):
    """An open session: `base_url` and `key` are for a program's OpenAI client."""

    client: ServerClient
    id: str
    key: str
    base_url: str

    async def trace(self) -> Trace:
        """The session so far. Raises: InvalidResponse when it is not a trace."""
        answer = await self.client.ask(f"/sessions/{self.id}/trace", longest=LONGEST_TRACE)
        try:
            rows = [SessionRow(*(row[name] for name in SessionRow._fields)) for row in answer["rows"]]
            turns = [SessionTurn(*(turn[name] for name in SessionTurn._fields)) for turn in answer["turns"]]
            told = answer["messages"], int(answer["failed_requests"]), bool(answer["is_answered"])
            trace = Trace(rows, turns, dict(answer["counts"]), *told)
            is_sound = all(len(row.ids) == len(row.mask) == len(row.logprobs) for row in rows) and all(
                0 <= turn.start < turn.end <= len(rows[turn.row].ids) for turn in turns
            )
            spans = [rows[turn.row].mask[turn.start : turn.end] for turn in turns]
            is_sound &= all(map(all, spans)) and sum(map(len, spans)) == sum(sum(row.mask) for row in rows)
        except (TypeError, KeyError, IndexError):
            is_sound = False
        if not is_sound:
            raise InvalidResponse(f"{self.client.name} sent a trace of another form; use the same version there")
        return trace

    async def end(self) -> None:
        """End it, and what runs in it."""
        await self.client.ask(f"/sessions/{self.id}", method="DELETE")


async def open_session(client: ServerClient, **settings: Any) -> ServedSession:
    """A new session; settings: of `POST /sessions`. Raises: see `ask`; InvalidResponse for another answer."""
    answer = await client.ask("/sessions", settings)
    fields: dict[str, Any] = answer if isinstance(answer, dict) else {}
    told, key, path = (fields.get(name) for name in ("id", "key", "base_url"))
    if not (isinstance(told, str) and isinstance(key, str) and isinstance(path, str)):
        raise InvalidResponse(f"{client.name} opened a session of another form; use the same version there")
    return ServedSession(client, told, key, client.root + path)


@asynccontextmanager
async def session_of(client: ServerClient, **settings: Any) -> AsyncIterator[ServedSession]:
    """Context manager: a session as `open_session` opens it, which ends with the block."""
    session = await open_session(client, **settings)
    try:
        yield session
    finally:
        await session.end()
