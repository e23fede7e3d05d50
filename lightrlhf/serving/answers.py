"""Answers in OpenAI's form, with vLLM's additions: whole ones, and the parts of streamed ones.

With tools a response is read as reasoning, content and calls. A call is streamed when all of it is there, its name
first; where one cannot be read it is content, and `tool_call_problem` beside the choice says why.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from lightrlhf.data.tool_calls import Delta, Parser, call_id, schema_of
from lightrlhf.generation.response_texts import Growing, Texts, begun
from lightrlhf.serving.requests import Completion

LEAST = -9999.0  # log-probability of a token whose probability is 0 by rounding, as OpenAI has it; JSON has no -inf
TRIES = 8  # samples until a call comes that has to
Json = dict[str, Any]


class Choice(NamedTuple):
    """One response, complete or so far."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str | None  # None: not complete


class Answer(NamedTuple):
    """The answer to a request."""

    choices: list[Choice]
    scores: list[list[dict[int, float]]] | None  # by id, at each token of a prompt after its first
    version: str  # of the weights
    cached: int = 0  # tokens of the prompts that another request had read


def head_of(asked: Completion) -> Json:
    """What all parts of an answer have in common."""
    identifier = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(16)}"
    return {"id": identifier, "created": int(time.time()), "model": asked.model}


def object_of(asked: Completion, streamed: bool) -> str:
    """OpenAI's name for the kind of an answer."""
    if asked.chat:
        return "chat.completion.chunk" if streamed else "chat.completion"
    return "text_completion"


def usage(asked: Completion, sampled: int, cached: int) -> Json:
    """Token counts, in OpenAI's form; cached: tokens of the prompts that an earlier request had read."""
    prompt = sum(map(len, asked.prompts))
    counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


# ---------------------------------------------------------------------------------------------------------------- whole
def whole(texts: Texts, asked: Completion, head: Json, found: Answer) -> Json:
    """The answer with all choices."""
    rows = []
    for index, (choice, prompt) in enumerate(zip(found.choices, asked.rows)):
        shown = Shown(texts, asked, prompt, call_seed(head, index))
        shown.more(choice)
        row: Json = {"index": index, "finish_reason": shown.reason(choice)}
        if asked.chat:
            row["message"] = shown.message()
            row |= shown.problem()
        else:
            row["text"] = shown.text
        row["logprobs"] = format_logprobs(texts, choice, 0, 0, asked.chat) if asked.logprobs else None
        if asked.return_token_ids:
            row["token_ids"] = choice.ids
            if not asked.chat:
                row["prompt_token_ids"] = prompt
        if found.scores is not None:
            row["prompt_logprobs"] = format_scores(texts, found.scores[index // asked.n])
        rows.append(row)
    sums = usage(asked, sum(len(choice.ids) for choice in found.choices), found.cached)
    answer = {**head, "object": object_of(asked, False), "choices": rows, "usage": sums}
    if asked.chat and asked.return_token_ids:
        answer["prompt_token_ids"] = asked.prompts[0]
    return {**answer, "weight_version": found.version}


def all_events(texts: Texts, asked: Completion, head: Json, found: Answer) -> Iterator[str]:
    """The server-sent events of an answer that is whole already."""
    streamed = Streamed(texts, asked, head)
    for index, choice in enumerate(found.choices):
        yield from map(event, streamed.rows(index, choice, found))
    if asked.include_usage:
        yield event(streamed.usage())
    yield "data: [DONE]\n\n"


# ------------------------------------------------------------------------------------------------------------- a choice
def lacks_call(texts: Texts, asked: Completion, choice: Choice) -> bool:
    """Whether a complete choice lacks the call that is wanted."""
    shown = Shown(texts, asked, asked.prompts[0], "")
    shown.more(choice)
    return not shown.has_call()


def call_seed(head: Json, index: int) -> str:
    """What the ids of a choice's calls are made of."""
    return f"{head['id']}/{index}"


class Shown:
    """What was shown of a choice; with tools it is read as reasoning, content and calls."""

    def __init__(self, texts: Texts, asked: Completion, prompt: list[int], seed: str) -> None:
        self.texts, self.asked = texts, asked
        self.stops = [] if asked.include_stop else asked.sampling.stop_strings
        self.parser: Parser | None = None
        self.decoded: Callable[[list[int]], str] = lambda ids: texts.of_ids(ids, asked.skip_special_tokens)
        if asked.reads_calls:
            tokenizer, schema = texts.tokenizer, schema_of(texts.tokenizer)
            before = str(tokenizer.decode(prompt if schema.form is None else prompt[-64:]))
            self.parser = Parser(tokenizer, schema, before, asked.tools, partial(call_id, seed))
            self.decoded = texts.of_turn
        self.growing = Growing(self.decoded)
        self.text = ""  # as far as it is known
        self.sent, self.num_ids = 0, 0  # characters, tokens
        self.offset = 0  # characters of the tokens, one by one

    def more(self, choice: Choice) -> list[Delta]:
        """What is new; what further tokens may change, such as the start of a stop text, is held back."""
        if choice.finish_reason is not None:
            self.text = self.texts.of_response(choice.ids, self.decoded, self.stops)
            end = len(self.text)
        else:
            before = len(self.text)
            self.text += self.growing.add(choice.ids[self.num_ids :])
            found = [at for stop in self.stops if (at := self.text.find(stop, max(before - len(stop) + 1, 0))) >= 0]
            end = min(found, default=len(self.text) - begun(self.text, self.stops))
        self.num_ids = len(choice.ids)
        sent, self.sent = self.sent, max(self.sent, end)
        more = self.text[sent:end]
        if self.parser is None:
            return [("content", more)] if more else []
        return self.parser.add(more) + (self.parser.end() if choice.finish_reason is not None else [])

    def message(self) -> Json:
        """The assistant's message of a complete choice."""
        if self.parser is None:
            return {"role": "assistant", "content": self.text}
        parsed = self.parser.parsed()
        message: Json = {"role": "assistant", "content": parsed.content or (None if parsed.tool_calls else "")}
        message |= {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
        return message | ({"tool_calls": parsed.tool_calls} if parsed.tool_calls else {})

    def problem(self) -> Json:
        """A field on why a part of the content was not read as a call, or the wanted call did not come."""
        if self.parser is None:
            return {}
        problem = self.parser.problem
        if self.asked.wanted is not None and not self.has_call():
            problem = f"no call of {self.asked.wanted or 'a function'} in {TRIES} samples"
        return {"tool_call_problem": problem} if problem else {}

    def has_call(self) -> bool:
        """Whether there is a call, of the function that is wanted."""
        calls = self.parser.given["tool_calls"] if self.parser else []
        return any(self.asked.wanted in (None, "", call["function"]["name"]) for call in calls)

    def reason(self, choice: Choice) -> str | None:
        """Why the choice ended."""
        has_calls = self.parser is not None and self.parser.given["tool_calls"]
        return "tool_calls" if has_calls and choice.finish_reason == "stop" else choice.finish_reason


# ------------------------------------------------------------------------------------------------------------- streamed
class Streamed:
    """A streamed answer."""

    def __init__(self, texts: Texts, asked: Completion, head: Json) -> None:
        self.texts, self.asked, self.head = texts, asked, {**head, "object": object_of(asked, True)}
        self.shown: dict[int, Shown] = {}
        self.cached = 0

    def rows(self, index: int, choice: Choice, about: Answer) -> Iterator[Json]:
        """The parts of a choice that are new; none if nothing shows yet."""
        is_first, self.cached = index not in self.shown, about.cached
        if is_first:
            seed = call_seed(self.head, index)
            self.shown[index] = Shown(self.texts, self.asked, self.asked.rows[index], seed)
        shown = self.shown[index]
        count = shown.num_ids
        deltas = shown.more(choice)
        if not deltas and count == len(choice.ids) and choice.finish_reason is None:
            return
        parts = [one for delta in deltas for one in self._parts(shown, delta)] or [{"content": ""}]
        for number, part in enumerate(parts):
            row: Json = {"index": index, "finish_reason": None, "logprobs": None}
            if self.asked.chat:
                row["delta"] = ({"role": "assistant"} if is_first and not number else {}) | part
            else:
                row["text"] = part["content"]
            if not number:  # the tokens come with the first part
                row |= self._tokens(shown, index, choice, count)
            if number == len(parts) - 1 and choice.finish_reason is not None:
                row |= {"finish_reason": shown.reason(choice)} | shown.problem()
            answer = {**self.head, "choices": [row], "weight_version": about.version}
            if is_first and not number and self.asked.chat and self.asked.return_token_ids:
                answer["prompt_token_ids"] = self.asked.prompts[0]
            yield answer

    def _parts(self, shown: Shown, delta: Delta) -> list[Json]:
        """The deltas in OpenAI's form: a call's name comes first, then its arguments."""
        name, value = delta
        if name != "tool_calls":
            return [{name: value}]
        assert shown.parser is not None
        place = {"index": [call["id"] for call in shown.parser.given["tool_calls"]].index(value["id"])}
        function = value["function"]
        named = {**place, **value, "function": {**function, "arguments": ""}}
        rest = {**place, "function": {"arguments": function["arguments"]}}
        return [{"tool_calls": [named]}, {"tool_calls": [rest]}]

    def _tokens(self, shown: Shown, index: int, choice: Choice, count: int) -> Json:
        """The fields of the tokens from `count` on."""
        row: Json = {}
        if self.asked.logprobs:
            row["logprobs"] = format_logprobs(self.texts, choice, count, shown.offset, self.asked.chat)
            shown.offset += sum(len(self.texts.of_token(one)) for one in choice.ids[count:])
        if self.asked.return_token_ids:
            row["token_ids"] = choice.ids[count:]
            if not count and not self.asked.chat:
                row["prompt_token_ids"] = self.asked.rows[index]
        return row

    def usage(self) -> Json:
        """The last part: how many tokens there were."""
        sampled = sum(shown.num_ids for shown in self.shown.values())
        return {**self.head, "choices": [], "usage": usage(self.asked, sampled, self.cached)}


# ---------------------------------------------------------------------------------------------------------------- parts
def format_logprobs(texts: Texts, choice: Choice, start: int, offset: int, chat: bool) -> Json:
    """Log-probabilities of a choice's tokens from `start` on, whose text begins at `offset`, in OpenAI's form."""
    values = [max(value, LEAST) for value in choice.logprobs[start:]]
    tokens = [texts.of_token(index) for index in choice.ids[start:]]
    if chat:
        content = [
            {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
            for token, value in zip(tokens, values)
        ]
        return {"content": content}
    offsets = list(itertools.accumulate(map(len, tokens), initial=offset))[:-1]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def format_scores(texts: Texts, scores: list[dict[int, float]]) -> list[Json | None]:
    """Log-probabilities at a prompt's tokens, in vLLM's form: by id, none of the first."""
    return [None] + [
        {str(index): {"logprob": max(one, LEAST), "decoded_token": texts.of_token(index)} for index, one in at.items()}
        for at in scores
    ]


def event(row: Json) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(row)}\n\n"


def error(line: str, status: int, param: str | None = None) -> Json:
    """The body of a refusal, in OpenAI's form."""
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 413: "BadRequestError"}
    kinds[429] = "RateLimitError"
    return {
        "error": {"message": line, "type": kinds.get(status, "InternalServerError"), "param": param, "code": status}
    }
