"""Answers in OpenAI's form, with vLLM's additions: whole ones, and the parts of streamed ones.

With tools a response is read as reasoning, content and calls. A call is streamed when all of it is there, its name
first; where one cannot be read it is content, and `tool_call_problem` beside the choice says why.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from lightrlhf.data.tool_calls import Delta, Parser, call_id, schema_of
from lightrlhf.generation.response_texts import Growing, Texts, begun
from lightrlhf.generation.tickets import Token
from lightrlhf.serving.bodies import Json
from lightrlhf.serving.requests import Completion

LEAST = -9999.0  # log-probability of a token whose probability is 0 by rounding, as OpenAI has it; JSON has no -inf
TRIES = 8  # samples until a call comes that has to


@dataclass
class Choice:
    """One response, complete or so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # None: not complete

    def add(self, token: Token) -> None:
        """Add a token."""
        self.ids.append(token.token)
        self.logprobs.append(token.logprob)
        self.finish_reason = token.finish


class Answer(NamedTuple):
    """The answer to a request."""

    choices: list[Choice]
    scores: list[list[dict[int, float]]] | None  # by id, at each token of a prompt after its first
    version: str  # of the weights
    cached: int = 0  # tokens of the prompts that another request had read


class Shown:
    """What was shown of a choice; with tools it is read as reasoning, content and calls."""

    def __init__(self, texts: Texts, asked: Completion, prompt: list[int], seed: str) -> None:
        self.texts, self.asked = texts, asked
        self.stops = [] if asked.body.include_stop_str_in_output else asked.sampling.stop_strings
        self.parser: Parser | None = None
        self.decoded: Callable[[list[int]], str] = partial(
            texts.of_ids, skip_special_tokens=asked.body.skip_special_tokens
        )
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

    def calls(self) -> list[Json]:
        """The calls so far."""
        return self.parser.given["tool_calls"] if self.parser else []

    def has_call(self) -> bool:
        """Whether there is a call, of the function that is wanted."""
        return any(self.asked.wanted in (None, "", call["function"]["name"]) for call in self.calls())

    def end(self, choice: Choice) -> Json:
        """Why the choice ended, and why a part of it was not read as a call, or the wanted call did not come."""
        reason = "tool_calls" if self.calls() and choice.finish_reason == "stop" else choice.finish_reason
        problem = self.parser and self.parser.problem
        if self.asked.wanted is not None and not self.has_call():
            problem = f"no call of {self.asked.wanted or 'a function'} in {TRIES} samples"
        return {"finish_reason": reason} | ({"tool_call_problem": problem} if problem else {})


class Writer:
    """Writes the answer to a request, whole or in parts."""

    def __init__(self, texts: Texts, asked: Completion) -> None:
        self.texts, self.asked = texts, asked
        name = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(16)}"
        self.head: Json = {"id": name, "created": int(time.time()), "model": asked.model}
        self.head["object"] = "chat.completion" if asked.is_chat else "text_completion"
        self.shown: dict[int, Shown] = {}  # of a stream
        self.cached = 0

    def whole(self, found: Answer) -> Json:
        """The answer with all choices."""
        rows = []
        for index, choice in enumerate(found.choices):
            shown = self._unshown(index)
            shown.more(choice)
            row = {"index": index, **shown.end(choice)}
            row |= {"message": shown.message()} if self.asked.is_chat else {"text": shown.text}
            row |= self._tokens(shown, index, choice, 0)
            if found.scores is not None:
                row["prompt_logprobs"] = format_scores(self.texts, found.scores[index // self.asked.n])
            rows.append(row)
        sums = self._usage(sum(len(choice.ids) for choice in found.choices), found.cached)
        return {**self.head, **self._prompt_ids(), "choices": rows, "usage": sums, "weight_version": found.version}

    def lacks_call(self, choice: Choice) -> bool:
        """Whether a complete choice lacks the call that is wanted."""
        shown = self._unshown(0)
        shown.more(choice)
        return not shown.has_call()

    def parts(self, index: int, choice: Choice, about: Answer) -> list[Json]:
        """The parts of a choice that are new; none if nothing shows yet."""
        is_first, self.cached = index not in self.shown, about.cached
        if is_first:
            self.shown[index] = self._unshown(index)
        shown = self.shown[index]
        count = shown.num_ids
        deltas = shown.more(choice)
        if not deltas and count == len(choice.ids) and choice.finish_reason is None:
            return []
        rows: list[Json] = []
        for part in [one for delta in deltas for one in self._deltas(shown, delta)] or [{"content": ""}]:
            row: Json = {"index": index, "finish_reason": None, "logprobs": None}
            rows.append(row | ({"delta": part} if self.asked.is_chat else {"text": part["content"]}))
        if is_first and self.asked.is_chat:
            rows[0]["delta"] = {"role": "assistant", **rows[0]["delta"]}
        rows[0] |= self._tokens(shown, index, choice, count)  # the tokens come with the first part
        rows[-1] |= shown.end(choice) if choice.finish_reason is not None else {}
        answers: list[Json] = [{**self._chunk(), "choices": [row], "weight_version": about.version} for row in rows]
        answers[0] |= self._prompt_ids() if is_first else {}
        return answers

    def usage(self) -> list[Json]:
        """The last part of a stream: how many tokens there were, where that was asked for."""
        if self.asked.body.stream_options.get("include_usage") is not True:
            return []
        sampled = sum(shown.num_ids for shown in self.shown.values())
        return [{**self._chunk(), "choices": [], "usage": self._usage(sampled, self.cached)}]

    def _unshown(self, index: int) -> Shown:
        """A choice of which nothing was shown."""
        return Shown(self.texts, self.asked, self.asked.prompt_of(index), f"{self.head['id']}/{index}")

    def _chunk(self) -> Json:
        """What all parts of a stream have in common."""
        return {**self.head, "object": "chat.completion.chunk" if self.asked.is_chat else "text_completion"}

    def _prompt_ids(self) -> Json:
        """The field of a chat's prompt."""
        wants = self.asked.is_chat and self.asked.body.return_token_ids
        return {"prompt_token_ids": self.asked.prompts[0]} if wants else {}

    def _usage(self, sampled: int, cached: int) -> Json:
        """Token counts; cached: tokens of the prompts that an earlier request had read."""
        prompt = sum(map(len, self.asked.prompts))
        counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}

    def _deltas(self, shown: Shown, delta: Delta) -> list[Json]:
        """What is new, in OpenAI's form: a call's name comes first, then its arguments."""
        name, value = delta
        if name != "tool_calls":
            return [{name: value}]
        place = {"index": [call["id"] for call in shown.calls()].index(value["id"])}
        function = value["function"]
        named = {**place, **value, "function": {**function, "arguments": ""}}
        rest = {**place, "function": {"arguments": function["arguments"]}}
        return [{"tool_calls": [named]}, {"tool_calls": [rest]}]

    def _tokens(self, shown: Shown, index: int, choice: Choice, count: int) -> Json:
        """The fields of the tokens from `count` on."""
        row: Json = {"logprobs": None}
        if self.asked.wants_logprobs:
            tokens = [self.texts.of_token(one) for one in choice.ids[count:]]
            values = [max(value, LEAST) for value in choice.logprobs[count:]]
            *offsets, shown.offset = itertools.accumulate(map(len, tokens), initial=shown.offset)
            row["logprobs"] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
            if self.asked.is_chat:
                pairs = zip(tokens, values)
                more = [{"token": a, "logprob": b, "bytes": list(a.encode()), "top_logprobs": []} for a, b in pairs]
                row["logprobs"] = {"content": more}
        if self.asked.body.return_token_ids:
            row["token_ids"] = choice.ids[count:]
            if not count and not self.asked.is_chat:
                row["prompt_token_ids"] = self.asked.prompt_of(index)
        return row


def format_scores(texts: Texts, scores: list[dict[int, float]]) -> list[Json | None]:
    """Log-probabilities at a prompt's tokens, in vLLM's form: by id, none of the first."""
    return [None] + [
        {str(index): {"logprob": max(one, LEAST), "decoded_token": texts.of_token(index)} for index, one in at.items()}
        for at in scores
    ]
