"""Conversations whose token ids are kept as they were read and sampled, in rows that are only ever appended to.

Each request brings the whole conversation. Where it continues a sampled turn, the ids of that turn's row are kept and
the rendered suffix is appended (`data.suffix`); nothing sampled is tokenised again. Elsewhere a new row begins and is
counted: a turn was edited or dropped, is asked again, the tools changed, or the chat template rewrites history. Each
sampled token is in the mask of exactly one row.

Left out: several choices a turn, and pictures.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.chat import MARK
from lightrlhf.data.rendering import render
from lightrlhf.data.suffix import Rewritten, suffix_ids
from lightrlhf.data.tokens import encode_text, prompt_text
from lightrlhf.data.types import Tokenizer

Json = dict[str, Any]
Message = dict[str, Any]
Began = Literal["first", "new_conversation", "edited", "branched", "tools", "template"]  # why a row began


@dataclass(eq=False)
class Row:
    """Token ids that are only ever appended to."""

    began: Began
    why: str = ""  # of a template that rewrites history, which part
    ids: list[int] = field(default_factory=list)
    shares: tuple[int, int] | None = None  # the row that it goes on from, and how many of its ids


@dataclass(eq=False)
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
    stop_reason: str  # stop, length, tool_calls, cancelled or failed
    version: str  # of the weights
    details: Json  # of the server; cached: tokens of the prompt whose keys and values were known

    def leads_to(self, messages: list[Message]) -> bool:
        """Whether a conversation goes on from this turn."""
        count = len(self.messages)
        is_longer = len(messages) > count + 1 and self.stop_reason not in ("cancelled", "failed")
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
        self.size = 0  # bytes or so of all requests and ids
        self.interned: dict[str, Any] = {}  # parts of requests by their JSON: each is kept once

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
        elif "cached" in details:
            self.counts["tokens_read_again"] += max(len(plan.row.ids) - details["cached"], 0)
        start, end = len(plan.ids), len(plan.ids) + len(ids)
        self.counts[f"stopped_by_{stop_reason}"] += 1
        self.size += 32 * (end - len(plan.row.ids)) + len(plan.prompt)
        plan.row.ids[:] = [*plan.ids, *ids]
        request = {name: self._intern(value) for name, value in request.items()}
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
        """An equal value that is kept already, else this one; the messages of a list one by one."""
        if isinstance(value, list):
            return [self._intern(one) for one in value]
        text = json.dumps(value)
        self.size += len(text)
        return self.interned.setdefault(text, value)

    def trace(self) -> Json:
        """Rows of ids, masks and log-probabilities, turns with their requests, counts, and the last turn's messages."""
        rows = []
        for number, row in enumerate(self.rows):
            mask, logprobs = [0] * len(row.ids), [0.0] * len(row.ids)  # of sampled ids, of the others 0
            for turn in self.turns:
                if turn.row == number:
                    mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
                    logprobs[turn.start : turn.end] = turn.logprobs
            shares = row.shares and {"row": row.shares[0], "tokens": row.shares[1]}
            rows.append(
                {"ids": [*row.ids], "mask": mask, "logprobs": logprobs, "began": row.began, "why": row.why}
                | {"shares": shares}
            )
        names = ("number", "row", "start", "end", "stop_reason", "version", "reply", "request")
        turns = [{name: getattr(turn, name) for name in names} | turn.details for turn in self.turns]
        messages = [message for turn in self.turns[-1:] for message in (*turn.messages, turn.reply)]
        return {"rows": rows, "turns": turns, "counts": dict(self.counts), "messages": messages}

    def render_rows(self, rows: list[Json]) -> None:
        """Add to each row of a trace what the chat template writes now for its last turn, beside the ids' own text.

        `rendering`: pairs of pieces, in order, equal where both texts agree; None where the template refuses it. The
        last pair has what the template writes behind a turn, which is read with the next one.
        """
        last = {turn.row: turn for turn in self.turns}
        for number, row in enumerate(rows):
            own = str(self.tokenizer.decode(row["ids"], clean_up_tokenization_spaces=False))
            try:
                text = render(self.tokenizer, [*last[number].messages, last[number].reply], last[number].tools)
                row["rendering"] = [*pieces(own, text.replace(MARK, ""))]
            except UsageError:
                row["rendering"] = None


def pieces(one: str, other: str) -> Iterator[tuple[str, str]]:
    """Two texts in pairs of pieces, equal ones where they agree in words."""
    ours, theirs = (re.findall(r"(?s)\w+|.", text) for text in (one, other))
    for _, start, end, first, last in SequenceMatcher(None, ours, theirs).get_opcodes():
        yield "".join(ours[start:end]), "".join(theirs[first:last])


def plain(message: Message) -> Message:
    """A message without fields that say nothing, so that the same one sent in two ways is equal."""
    content = message.get("content") or ""
    rest = {name: value for name, value in message.items() if value not in (None, []) and name != "content"}
    return {**rest, "content": content}
