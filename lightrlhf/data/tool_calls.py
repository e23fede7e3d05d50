"""Tool calls in a response: which of the known forms a chat template writes them in, and reading them back.

The form is found by the template's own rendering: the first one that reads known calls back from what the template
writes. A tokenizer that brings a `response_template` of transformers is read by that. The parser is transformers'; a
form of ours is one of its response templates with a reader of the calls.

What cannot be read is content, and the reason is said beside it: nothing sampled is lost, nothing is guessed.

Left out: calls of built-in tools.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.data.call_forms import FORMS, HARMONY, Call, Form, Json
from lightrlhf.data.chat import ROLES, Messages, template_of
from lightrlhf.data.rendering import (
    ANSWERED,
    ARGUMENT,
    ASKED,
    CALL_ID,
    NAME,
    TOOLS,
    VALUE,
    Unrendered,
    called,
    render_shown,
    said,
)
from lightrlhf.data.thinking import AT_END, CLOSED, OPENED, Asked, answer_behind
from lightrlhf.data.turn_ends import end_tokens, without_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Json] | None
REMEDY = "give another one by --chat_template, such as --chat_template tools"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class Parsed(NamedTuple):
    """A response, read: `problem` says why a part of the content was not read as a call; None if all was."""

    content: str
    reasoning: str
    tool_calls: list[Json]  # in OpenAI's form: id, type, function with name and arguments as JSON text
    problem: str | None

    def as_message(self) -> Json:
        """The assistant's message that a chat template renders for it."""
        message: Json = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [with_object(call) for call in self.tool_calls]
        return message


def with_object(call: Json) -> Json:
    """A call in OpenAI's form, with its arguments as an object, as templates take them."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def in_order(messages: Messages) -> list[Json]:
    """Messages with the results of each turn's calls in the order of its calls, and with the functions' names.

    A template that writes no ids tells calls by their order.
    Raises: UsageError when a result is missing or has no call, or two calls have one id.
    """
    found: list[Json] = []
    waiting: dict[str, dict[str, Any] | None] = {}  # results by call, in the order of the calls
    names: dict[str, str] = {}

    def close() -> None:
        if lacking := [name for name, result in waiting.items() if result is None]:
            raise UsageError(f"the call {lacking[0][:60]} has no result; send a message of role tool for each call")
        found.extend(result for result in waiting.values() if result is not None)
        waiting.clear()

    for number, message in enumerate(messages):
        role, identifier = ROLES.get(message["role"]), message.get("tool_call_id")
        if role == "tool" and (waiting or identifier is not None):
            if identifier not in waiting or waiting[identifier] is not None:
                words = "has no tool_call_id" if identifier is None else f"answers the call {identifier[:60]!r}"
                raise UsageError(f"messages {number} {words}; the calls before it are {', '.join(waiting) or 'none'}")
            waiting[identifier] = {"name": names[identifier], **message}
            continue
        close()
        found.append(message)
        calls = message.get("tool_calls") or []
        names = {call["id"]: call["function"]["name"] for call in calls}
        if len(names) < len(calls):
            raise UsageError(f"messages {number} has two calls of one id")
        waiting.update(dict.fromkeys(names))
    close()
    return found


def call_id(*parts: object) -> str:
    """An id of nine letters and digits, as some templates want it, the same for the same parts."""
    number = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")
    return "".join(LETTERS[number // len(LETTERS) ** place % len(LETTERS)] for place in range(9))


# -------------------------------------------------------------------------------------------------------------- schemas
class Schema(NamedTuple):
    """How the responses of a tokenizer's template are read."""

    template: Json  # as transformers' parser takes it
    form: Form | None  # None: the template gives calls itself
    kept: frozenset[int]  # special tokens that the parser looks for
    dropped: frozenset[int] = frozenset()


def _schema(tokenizer: PreTrainedTokenizerBase, name: str) -> Schema:
    form = FORMS[name]
    plain: Json = {"content": "text", "content_args": {"strip": False}, "repeats": True}
    groups = ["opened", *re.compile(form.opened).groupindex]
    calls = plain | {"open_pattern": f"(?P<opened>{form.opened})"}
    calls |= {"transform": {group: f"{{{group}}}" for group in groups} | {"body": "{content}"}}
    calls |= {"close_pattern": form.closed} if form.closed else {}
    joined = plain | {"join": ""}
    fields = {"reasoning_content": joined | {"open_pattern": OPENED, "close_pattern": CLOSED}, "content": joined}
    if name == "harmony":
        fields = {
            field: joined | {"open_pattern": opened, "close_pattern": closed}
            for field, (opened, closed) in HARMONY.items()
        }
    template = {"start_anchor": "\0", "fields": fields | {"tool_calls": calls}}
    dropped = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    ids = frozenset(dropped[text] for text in form.dropped if text in dropped)
    return Schema(template, form, _kept(tokenizer, f"{template} {form.marks}"), ids)


def _kept(tokenizer: PreTrainedTokenizerBase, text: str) -> frozenset[int]:
    """The special tokens that occur in a schema's text."""
    bare = text.replace("\\", "")
    return frozenset(i for i in tokenizer.all_special_ids if str(tokenizer.convert_ids_to_tokens(i)) in bare)


def schema_of(tokenizer: PreTrainedTokenizerBase) -> Schema:
    """How calls are read in responses of a tokenizer's chat template.

    Raises: UsageError when the template writes no tools, or its calls in none of the known forms.
    """
    own = getattr(tokenizer, "response_template", None)
    schema = _schema_of(tokenizer, template_of(tokenizer, TOOLS), json.dumps(own, sort_keys=True) if own else "")
    if isinstance(schema, str):
        raise UsageError(schema)
    return schema


@functools.lru_cache(maxsize=16)
def _schema_of(tokenizer: PreTrainedTokenizerBase, template: str, own: str) -> Schema | str:
    if not template:
        return "this model's tokenizer has no chat template; give one by --chat_template"
    known = _known(tokenizer)
    if isinstance(known, str):
        return known
    if own:
        return Schema(json.loads(own), None, _kept(tokenizer, own))
    for name in FORMS:
        schema = _schema(tokenizer, name)
        if all(_reads(tokenizer, schema, *one) for one in known):
            return schema
    return f"the chat template writes tool calls in a form that is not read here; {REMEDY}"


Known = tuple[str, str, str, list[Call]]  # prompt, response, and the content and calls that it has


def _known(tokenizer: PreTrainedTokenizerBase) -> list[Known] | str:
    """Responses as the template writes them; else the reason why it writes none."""
    asked, values = [said("user", ASKED)], [(VALUE,), ('a "quoted"\nline',), (VALUE, "second-value")]
    found: list[Known] = []
    try:
        prompt = render_shown(tokenizer, asked, TOOLS, add_generation_prompt=True)
        if NAME not in prompt:
            return f"the chat template writes no tools; {REMEDY}"
        place = Asked(tokenizer, prompt, asked, TOOLS)
        found.append((prompt, answer_behind(place, said("assistant", ANSWERED)), ANSWERED, []))
        for number, given in enumerate(values):
            try:
                text = answer_behind(place, called(*given))
            except Unrendered:
                if number < 2:
                    raise
                continue  # it takes one call a turn
            if all(value in text for value in given[1:]):  # else it leaves out all calls but one
                found.append((prompt, text, "", [(NAME, {ARGUMENT: value}) for value in given]))
        results = [{"role": "tool", "content": ANSWERED, "name": NAME, "tool_call_id": CALL_ID}]
        if ANSWERED not in render_shown(tokenizer, [*asked, called(VALUE), *results], TOOLS):
            return f"the chat template leaves out results of tools; {REMEDY}"
    except Unrendered as problem:
        return f"the chat template writes no tool calls ({problem}); {REMEDY}"
    return found


def _reads(tokenizer: PreTrainedTokenizerBase, schema: Schema, prompt: str, text: str, said: str, calls: list) -> bool:
    """Whether a schema reads a known response."""
    # Raw text: known exchanges.
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    parser = Parser(tokenizer, schema, prompt, TOOLS, call_id)
    parser.add(str(tokenizer.decode(visible(tokenizer, schema, ids), clean_up_tokenization_spaces=False)))
    parser.end()
    found = parser.parsed()
    return not found.problem and found.content == said and [_as_call(call) for call in found.tool_calls] == calls


def _as_call(call: Json) -> Call:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


# -------------------------------------------------------------------------------------------------------------- parsing
def visible(tokenizer: PreTrainedTokenizerBase, schema: Schema, ids: Sequence[int]) -> list[int]:
    """Ids of a response without the special tokens that a schema does not look for, nor those that end a turn."""
    hidden = (end_tokens(tokenizer) | {*tokenizer.all_special_ids}) - schema.kept
    hidden |= {tokenizer.eos_token_id, *schema.dropped}
    return [index for index in ids if index not in hidden]


def parse(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], prompt: str = "", tools: Tools = None, seed: object = 0
) -> Parsed:
    """Content, reasoning and calls of a response's ids.

    prompt: its rendered text, which may open thinking; seed: what the ids of the calls are made of.
    Raises: UsageError, see `schema_of`.
    """
    schema = schema_of(tokenizer)
    parser = Parser(tokenizer, schema, prompt, tools, functools.partial(call_id, seed))
    shown = visible(tokenizer, schema, without_end(tokenizer, ids))
    parser.add(str(tokenizer.decode(shown, clean_up_tokenization_spaces=False)))
    parser.end()
    return parser.parsed()


Delta = tuple[str, Any]  # "content" or "reasoning_content" with a text, or "tool_calls" with a call


class Parser:
    """A response that is read while it grows; `problem`: why a part of its content was not read as a call."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        schema: Schema,
        prompt: str,
        tools: Tools,
        make_id: Callable[[int], str],
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        own: dict[str, Any] = {"tools": list(tools)} if tools and schema.form is None else {}
        self.form, self.make_id = schema.form, make_id
        self.problem: str | None = None
        self.parameters = parameters_of(tools)
        opened = AT_END.search(prompt[-64:])
        before = prompt if schema.form is None else (opened[0] if opened and not opened["closed"] else "")
        self.parser: Any = ResponseParser(schema.template, prefix=before if schema.form is None else "", **own)
        if schema.form is not None and before.strip():
            self.parser.feed(before)
        self.raw: str | None = None  # text since a call began; None outside of one
        self.total, self.read = "", 0  # all text; characters of it up to the last call that was no call
        self.held = {"content": "", "reasoning_content": ""}  # white space at the end of what was given
        self.given: dict[str, list[Any]] = {"content": [], "reasoning_content": [], "tool_calls": []}

    def add(self, text: str) -> list[Delta]:
        """What further text adds."""
        if self.parser is None:
            return [*self._text("content", text)]
        self.total += text
        try:
            events = self.parser.feed(text)
        except Exception as problem:  # of a template that reads calls itself
            return [*self._broken(text, problem)]
        self.raw = None if self.raw is None else self.raw + text
        deltas = [delta for event in events for delta in self._deltas(event)]
        if any(event["type"] == "region_open" and event["field"] == "tool_calls" for event in events):
            self.raw = text
        return deltas

    def end(self) -> list[Delta]:
        """What the end of the response adds."""
        if self.parser is None:
            return []
        try:
            _, events = self.parser.finalize()
        except Exception as problem:
            return [*self._broken("", problem)]
        deltas = [delta for event in events for delta in self._deltas(event)]
        if self.form and self.form.mark and self.form.mark in "".join(self.given["content"]):
            self._fail(ValueError(f"{self.form.mark} is not followed by a name and arguments"))
        return deltas

    def parsed(self) -> Parsed:
        """All that was given, after the end."""
        content, reasoning = ("".join(self.given[name]) for name in ("content", "reasoning_content"))
        return Parsed(content, reasoning, self.given["tool_calls"], self.problem)

    def _deltas(self, event: Json) -> Iterator[Delta]:
        if event["type"] == "region_chunk" and event["field"] in self.held:
            yield from self._text(event["field"], event["text"])
        elif event["type"] == "region_close" and event["field"] == "tool_calls":
            self.raw = None
            value = event["value"]
            try:
                calls = self._calls(value)
            except (ValueError, RecursionError) as problem:
                self._fail(problem)
                yield from self._text("content", self._written(value["opened"] + value["body"]))
                return
            for call in calls:
                self.given["tool_calls"].append(call)
                yield "tool_calls", call

    def _calls(self, value: Any) -> list[Json]:
        """The calls of a region, in OpenAI's form. Raises: ValueError."""
        if self.form is not None:
            found = self.form.read(value.get("name", ""), value["body"], self.parameters)
        else:
            values = value if isinstance(value, list) else [value]
            found = [(one["function"]["name"], one["function"]["arguments"]) for one in values]
        calls: list[Json] = []
        for name, arguments in found:
            if not isinstance(name, str) or not name.strip():
                raise ValueError("the name of a call is not a text")
            if not isinstance(arguments, dict):
                raise ValueError(f"the arguments of {name[:60]} are not an object")
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            (name + text).encode()  # raises for halves of surrogate pairs
            index = len(self.given["tool_calls"]) + len(calls)
            call = {"id": self.make_id(index), "type": "function", "function": {"name": name, "arguments": text}}
            calls.append(call)
        return calls

    def _written(self, text: str) -> str:
        """A call's text, with what closed it."""
        end = self.total.find(text, self.read) + len(text)
        closing = re.match(self.form.closed, self.total[end : end + 64]) if self.form and self.form.closed else None
        self.read = end
        return text + (closing[0] if closing else "")

    def _fail(self, problem: BaseException) -> None:
        self.problem = self.problem or f"a tool call cannot be read: {first_line(problem)[:200]}"

    def _broken(self, text: str, problem: Exception) -> Iterator[Delta]:
        """All text since the call that broke the parser began is content, and all that follows."""
        self._fail(problem)
        self.parser = None
        yield from self._text("content", (self.raw or "") + text)

    def _text(self, name: str, text: str) -> Iterator[Delta]:
        """A text without white space around all of it."""
        text = self.held[name] + text
        text = text if self.given[name] else text.lstrip()
        shown = text.rstrip()
        self.held[name] = text[len(shown) :]
        if shown:
            self.given[name].append(shown)
            yield name, shown


def parameters_of(tools: Tools) -> Json:
    """The parameters of tools by the functions' names."""
    found = {}
    for tool in tools or []:
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties")
        found[function.get("name")] = properties if isinstance(properties, dict) else {}
    return found
