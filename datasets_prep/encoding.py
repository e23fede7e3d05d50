"""Batched encoding of rows of text as rows of token ids.

A row becomes *segments*: texts that are tokenised separately and joined as ids, because a token must never span the
border between a prompt and its response (BPE would merge across it, and the model would learn to continue a prompt that
it never sees). Messages are rendered by the chat template, once per prefix of a dialogue that grows by one message; the
text that a longer prefix adds is the next segment. So masks are sums of segment lengths, exact by construction, without
a search for markers among ids.

Left out: templates that rewrite earlier turns when a turn is added (such rows are dropped and counted).
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from jinja2 import TemplateError

from lightrlhf.data.splits import IGNORE_INDEX
from lightrlhf.data.tokens import adds_bos

Row = dict[str, Any]
Messages = list[dict[str, Any]]
STAGES = ("finetune", "preference", "prompts", "dialogue")


class BadRow(Exception):
    """The reason for dropping a row, by which the report counts."""


class Segment(NamedTuple):
    """A text that is tokenised separately."""

    text: str
    kind: str  # "text": plain prompt; "rendered": start of a template's text; "middle": later prompt; "response"


@dataclass
class Example:
    """One tokenised row of one stage."""

    stage: str
    prompt_len: int
    place: Place
    ids: list[np.ndarray]  # int32: the row; or chosen and rejected
    spans: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of each response
    cut: bool = False  # whether max_length truncated it, so that it has no end token
    key: int = 0  # hash that identifies equal inputs: of the prompt's ids, or of a dialogue's user turns and columns
    extra: Any = None  # the columns of a prompt or a pair, the messages of a dialogue
    columns: Row = field(default_factory=dict)  # of a dialogue
    row: Row | None = None  # kept if skipped examples are saved


@dataclass
class Dropped:
    """A dropped row and the reason."""

    reason: str
    source: str
    stage: str | None = None  # None: dropped before its stage was known
    row: Row | None = None  # kept if skipped examples are saved


class Place(NamedTuple):
    """The split and stages of a row."""

    group: int  # rows of one group never cross splits or stages
    split: str
    stages: frozenset[str]
    source: str  # file:line, for error messages


def is_messages(value: Any) -> TypeGuard[Messages]:
    """Whether `value` is a list of `{role, content}`."""
    return isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)


class Encoder:
    """Encodes a chunk of rows; picklable for worker processes."""

    def __init__(self, args: Any, tokenizer: Any, place: Callable[[Row], Place]) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.place = place
        self.bos = tokenizer.bos_token_id if adds_bos(tokenizer) else None
        # An added token is always split off first, so the text after it is tokenised as a continuation: there a
        # SentencePiece tokenizer inserts no space of its own, as it does at the start of a text.
        self.anchor = tokenizer.eos_token
        self.rendered: dict[Any, str] = {}  # of the current row, whose stages need the same texts
        self.special = [token for token in set(tokenizer.all_special_tokens) if token]

    def __call__(self, rows: list[Row]) -> tuple[list[Example], list[Dropped]]:
        """The examples of `rows`, in order, and dropped rows."""
        plans: list[tuple[str, Row, Place, list[Segment]]] = []
        dropped: list[Dropped] = []
        for row in rows:
            self.rendered.clear()
            try:
                place = self.place(row)
                if not place.stages:
                    dropped.append(Dropped("belongs_to_another_stage", place.source))
                plans += [(stage, row, place, segments) for stage, segments in self._plan(row, place.stages)]
            except BadRow as bad:
                dropped.append(self._drop(bad, row))
        ids = self._tokenise({segment for *_, segments in plans for segment in segments})
        examples = []
        for stage, row, place, segments in plans:
            try:
                example = self._build(stage, place, [ids[segment] for segment in segments])
            except BadRow as bad:
                dropped.append(self._drop(bad, row, stage))
                continue
            example.row = row if self.args.save_skipped_examples else None
            self._describe(example, row)
            examples.append(example)
        return examples, dropped

    def _drop(self, bad: BadRow, row: Row, stage: str | None = None) -> Dropped:
        return Dropped(str(bad), row.get("source", "row"), stage, row if self.args.save_skipped_examples else None)

    def _describe(self, example: Example, row: Row) -> None:
        prompt = example.ids[0][: example.prompt_len].tobytes()
        if example.stage == "dialogue":
            messages = row.get("messages") or self._dialogue_of(row)
            example.extra = [{"role": m["role"], "content": m["content"]} for m in messages]
            example.columns = row.get("columns", {})
            user_turns = [m["content"] for m in example.extra if m["role"] != "assistant"]
            prompt = repr([user_turns, example.columns] if example.columns else user_turns).encode()
        elif example.stage in ("prompts", "preference"):
            example.extra = row.get("columns", {})
        example.key = hash_of(prompt)

    # ------------------------------------------------------------------------------------------------ rows to segments
    def _plan(self, row: Row, stages: frozenset[str]) -> list[tuple[str, list[Segment]]]:
        """The segments of each stage of a row. Raises: BadRow."""
        plans: list[tuple[str, list[Segment]]] = []
        if "messages" in row:
            if stages == {"prompts"} and row["messages"] and row["messages"][-1]["role"] == "user":
                return [("prompts", [self._start(row["messages"])])]
            turns = self._turns(row["messages"])
            plans += [(stage, turns) for stage in ("finetune", "dialogue") if stage in stages]
            if "prompts" in stages:
                plans.append(("prompts", turns[:1]))
            return plans
        prompt = self._wrap(row["prompt"])
        start = self._start(prompt)
        answers = {name: row[name] for name in ("completion", "chosen", "rejected") if name in row}
        if "preference" in stages:
            if self.args.remove_same_responses and answers["chosen"] == answers["rejected"]:
                raise BadRow("same_responses")
            sides = [self._response(prompt, start, answers[name]) for name in ("chosen", "rejected")]
            plans.append(("preference", [start, *sides]))
        if "finetune" in stages:
            best = answers["chosen" if "chosen" in answers else "completion"]
            plans.append(("finetune", [start, self._response(prompt, start, best)]))
        if "prompts" in stages:
            plans.append(("prompts", [start]))
        if "dialogue" in stages:
            plans.append(("dialogue", self._turns(self._dialogue_of(row))))
        return plans

    def _dialogue_of(self, row: Row) -> Messages:
        answer = row.get("chosen", row.get("completion"))
        return [*self._wrap(row["prompt"]), {"role": "assistant", "content": answer}]

    def _wrap(self, prompt: str | Messages) -> str | Messages:
        if isinstance(prompt, str) and self.args.chat_template:
            return [{"role": "user", "content": prompt}]
        return prompt

    def _start(self, prompt: str | Messages) -> Segment:
        if isinstance(prompt, str):
            _check_text(prompt, "prompt")
            if self.anchor in prompt.removeprefix(self.tokenizer.bos_token or ""):
                raise BadRow("special_token_in_text")
            return Segment(prompt, "text")
        self._check_messages(prompt, last="user")
        return Segment(self._render(prompt, add_generation_prompt=True), "rendered")

    def _response(self, prompt: str | Messages, start: Segment, response: str) -> Segment:
        self._check_response(response)
        if isinstance(prompt, str):
            return Segment(response, "response")
        full = self._render([*prompt, {"role": "assistant", "content": response}])
        return Segment(_added(start.text, full).rstrip(), "response")

    def _turns(self, messages: Messages) -> list[Segment]:
        """`[prompt, response, prompt, response, …]` of a dialogue that ends with the assistant."""
        self._check_messages(messages, last="assistant")
        segments: list[Segment] = []
        before = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            self._check_response(message["content"])
            prompt = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1]).rstrip()
            segments.append(Segment(_added(before, prompt), "middle" if segments else "rendered"))
            segments.append(Segment(_added(prompt, after), "response"))
            before = after
        return segments

    def _render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        key = (len(messages), messages[-1]["content"], add_generation_prompt)  # unique within a row
        if key not in self.rendered:
            try:
                self.rendered[key] = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            except TemplateError:
                raise BadRow("refused_by_chat_template") from None
        return self.rendered[key]

    def _check_messages(self, messages: Messages, last: str) -> None:
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        if not turns or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(turns)) or turns[-1] != last:
            raise BadRow("role_order_broken")
        for message in messages:
            _check_text(message["content"], "message")
            if any(token in message["content"] for token in self.special):
                raise BadRow("special_token_in_text")

    def _check_response(self, response: str) -> None:
        _check_text(response, "response")
        if len(response.strip()) < self.args.minimum_response_length:
            raise BadRow("response_too_short")
        if any(token in response for token in self.special):
            raise BadRow("special_token_in_text")

    # ------------------------------------------------------------------------------------------------- segments to ids
    def _tokenise(self, segments: set[Segment]) -> dict[Segment, np.ndarray]:
        """Ids of each segment, equal to those of `encode_prompt` and `encode_response`."""
        ordered = list(segments)
        texts = [s.text if s.kind in ("text", "rendered") else self.anchor + s.text for s in ordered]
        if not texts:
            return {}
        return {segment: self._finish(segment.kind, ids) for segment, ids in zip(ordered, self._ids(texts))}

    def _ids(self, texts: list[str]) -> Iterable[list[int]]:
        if not self.tokenizer.is_fast:
            return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        backend = self.tokenizer.backend_tokenizer  # faster: no offsets, no masks
        backend.no_truncation()
        backend.no_padding()
        return (encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False))

    def _finish(self, kind: str, ids: list[int]) -> np.ndarray:
        eos = self.tokenizer.eos_token_id
        if kind == "text" and self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        if kind in ("middle", "response"):
            ids = ids[1:]
        if kind == "response" and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return np.array(ids, dtype=np.int32)

    # ------------------------------------------------------------------------------------------------- ids to examples
    def _build(self, stage: str, place: Place, ids: list[np.ndarray]) -> Example:
        """Joined ids with their spans, truncated to `max_length`. Raises: BadRow."""
        prompt_len = len(ids[0])
        longest = self.args.max_length
        if stage == "dialogue":
            return self._build_dialogue(place, ids)
        if prompt_len == 0:
            raise BadRow("empty_prompt")
        if prompt_len > self.args.max_prompt_length:
            raise BadRow("prompt_too_long")
        if stage == "prompts":
            return Example(stage, prompt_len, place, [ids[0]])
        if prompt_len >= longest:
            raise BadRow("no_trained_tokens")
        if stage == "preference":
            sides = [np.concatenate([ids[0], response]) for response in ids[1:]]
            chosen, rejected = (side[:longest] for side in sides)
            if self.args.remove_same_responses and np.array_equal(chosen, rejected):
                raise BadRow("same_responses_after_cut")
            return Example(stage, prompt_len, place, [chosen, rejected], cut=any(len(side) > longest for side in sides))
        whole = np.concatenate(ids)
        spans = [(start, min(end, longest)) for start, end in _spans(ids) if start < longest]
        return Example(stage, prompt_len, place, [whole[:longest]], spans, cut=len(whole) > longest)

    def _build_dialogue(self, place: Place, ids: list[np.ndarray]) -> Example:
        prompts, responses = ids[::2], ids[1::2]
        if len(prompts) > self.args.max_turns:
            raise BadRow("too_many_turns")
        longest_prompt = limit_for(self.args.turn_prompt_length, len(prompts))
        longest_response = limit_for(self.args.turn_response_length, len(prompts))
        if max(map(len, prompts)) > longest_prompt:
            raise BadRow("prompt_too_long")
        if max(map(len, responses)) > longest_response:
            raise BadRow("response_too_long")
        if sum(map(len, ids)) > self.args.max_dialogue_length:
            raise BadRow("dialogue_too_long")
        return Example("dialogue", len(ids[0]), place, [np.concatenate(ids)], _spans(ids))


def hash_of(data: bytes) -> int:
    """A 64-bit hash, equal in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def targets_of(example: Example, mask_prompt: bool) -> np.ndarray:
    """(T,) int32: the ids that carry loss, `IGNORE_INDEX` elsewhere."""
    ids = example.ids[0]
    if not mask_prompt:
        return ids.copy()
    targets = np.full_like(ids, IGNORE_INDEX)
    for start, end in example.spans:
        targets[start:end] = ids[start:end]
    return targets


def limit_for(limits: str, turns: int) -> int:
    """The limit for dialogues of `turns` turns, from "512" (all) or "1024,768,512" (by number of turns)."""
    numbers = [int(number) for number in limits.split(",")]
    return numbers[min(turns, len(numbers)) - 1]


def _spans(ids: list[np.ndarray]) -> list[tuple[int, int]]:
    """[start, end) of every second segment, the responses."""
    ends = list(accumulate(len(part) for part in ids))
    return list(zip(ends[0::2], ends[1::2]))


def _added(before: str, after: str) -> str:
    if not after.startswith(before):
        raise BadRow("template_rewrites_history")
    return after[len(before) :]


def _check_text(text: Any, what: str) -> None:
    if text is None:
        raise BadRow(f"{what}_is_null")
    if not isinstance(text, str):
        raise BadRow(f"{what}_is_{type(text).__name__}")
    if not text.strip():
        raise BadRow(f"empty_{what}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("lone_surrogate") from None


_encoders: list[Encoder] = []  # of a worker process: one, sent at its start instead of with each chunk


def start_worker(encoder: Encoder) -> None:
    """Initialise a worker process with its encoder."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed parent leaves no worker behind
        parent, by_server = multiprocessing.parent_process(), multiprocessing.get_start_method() == "forkserver"
        if parent and (not parent.is_alive() if by_server else os.getppid() != parent.pid):  # killed before
            os._exit(1)
    _encoders[:] = [encoder]


def work(rows: list[Row]) -> tuple[list[Example], list[Dropped]]:
    """Encode a chunk in a worker process."""
    return _encoders[0](rows)
