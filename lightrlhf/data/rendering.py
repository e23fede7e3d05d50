"""Messages as a chat template writes them, in the shape in which the template takes them.

Templates differ in what they take: a content as text or as a list of parts, a call's arguments as an object or as JSON
text, an empty content or None beside calls, tools that must be a list. The usual shape is tried first, on known
exchanges; where the template raises or leaves their words out, another one is. Whatever a template raises becomes
`Unrendered`.

Left out: a template's own arguments other than those by which `data.thinking` lets it think.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.data.chat import ESCAPED, MARK, Messages, shown_messages, shown_tools, template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING_TAG = re.compile(rf"<{MARK}?/?think(?:ing)?>")
# known exchanges, by which a template is read
ASKED, ANSWERED, THOUGHT = "user-turn-words", "assistant-turn-words", "reasoning-words"
NAME, ARGUMENT, VALUE = "known_function", "known_argument", "known-value"
CALL_ID = "known0000"  # of nine letters and digits, as some templates want it
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "A function.",
            "parameters": {"type": "object", "properties": {ARGUMENT: {"type": "string", "description": "A text."}}},
        },
    }
]


class Unrendered(Exception):
    """Why a chat template cannot write messages, in one line; `reason` is what the report counts by."""

    def __init__(self, line: str, reason: str = "refused_by_chat_template") -> None:
        super().__init__(line)
        self.reason = f"{reason} ({line[:100]})"


class Shape(NamedTuple):
    """The shape of messages that a template takes; the defaults are the usual one."""

    empty_tools: bool = False  # no tools are an empty list
    parts: bool = False  # a content is a list of parts
    null_content: bool = False  # beside calls an empty content is None
    text_arguments: bool = False  # the arguments of a call are JSON text

    def of_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message in this shape."""
        shaped = dict(message)
        calls, content = message.get("tool_calls"), message.get("content")
        if calls and self.null_content and not content:
            shaped["content"] = None
        elif self.parts and isinstance(content, str):
            shaped["content"] = [{"type": "text", "text": content}]
        if calls and self.text_arguments:
            shaped["tool_calls"] = [{**call, "function": _with_text_arguments(call["function"])} for call in calls]
        return shaped

    def of_tools(self, tools: list[Any] | None) -> list[Any] | None:
        """Tools in this shape."""
        return [] if self.empty_tools and not tools else tools


USUAL = Shape()


def _with_text_arguments(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


@functools.lru_cache(maxsize=16)
def _shape_of(tokenizer: PreTrainedTokenizerBase, template: str) -> Shape:
    """The first shape in which the template writes the words of each known exchange; else the usual one."""
    shape, asked = Shape(), said("user", ASKED)
    exchanges: list[tuple[list[dict[str, Any]], list[Any] | None, set[str], tuple[str, str]]] = [
        ([asked, said("assistant", ANSWERED)], None, {ASKED, ANSWERED}, ("empty_tools", "parts")),
        ([asked, called(VALUE)], TOOLS, {NAME, VALUE}, ("null_content", "text_arguments")),
    ]
    for messages, tools, words, (first, second) in exchanges:
        for switched in ((), (first,), (second,), (first, second)):
            tried = shape._replace(**dict.fromkeys(switched, True))
            try:
                text, _ = _apply(tokenizer, tried, messages, tools)
            except Unrendered:
                continue
            if all(word in text for word in words):
                shape = tried
                break
    return shape


def said(role: str, words: str) -> dict[str, Any]:
    """A message of known words."""
    return {"role": role, "content": words}


def called(*values: str) -> dict[str, Any]:
    """An assistant message of a call for each value."""
    calls = [
        {"id": CALL_ID, "type": "function", "function": {"name": NAME, "arguments": {ARGUMENT: value}}}
        for value in values
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


# ---------------------------------------------------------------------------------------------------------- rendering
def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Sequence[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """Text of messages by the tokenizer's chat template, with marks (see `data.tokens.encode_text`).

    Raises: UsageError when the template refuses the messages.
    """
    try:
        shown = shown_messages(tokenizer, messages)
        return render_shown(tokenizer, shown, shown_tools(tokenizer, tools), add_generation_prompt)
    except Unrendered as problem:
        raise UsageError(f"the chat template refuses these messages ({problem})") from None


def render_shown(
    tokenizer: PreTrainedTokenizerBase,
    shown: Sequence[dict[str, Any]],
    tools: list[Any] | None = None,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """`render` of messages and tools that are protected already, with variables of the template. Raises: Unrendered."""
    shape = _shape_of(tokenizer, template_of(tokenizer, tools))
    text, _ = _apply(tokenizer, shape, shown, tools, add_generation_prompt=add_generation_prompt, **variables)
    if ESCAPED in text:  # such as a template that writes a tool as Python does
        raise Unrendered("the chat template escapes characters of the contents")
    return text


def render_plain(
    tokenizer: PreTrainedTokenizerBase, shown: Sequence[dict[str, str]], special_tokens: Mapping[str, Any]
) -> str:
    """`render_shown` of messages of a role and a text alone, which need no copies; faster by half.

    special_tokens: the tokenizer's map of them, which is made anew each time it is asked for. Raises: Unrendered.
    """
    from transformers.utils import chat_template_utils

    template = template_of(tokenizer)
    compiled = getattr(chat_template_utils, "_compile_jinja_template", None)  # not public: it may be gone one day
    if compiled is None or _shape_of(tokenizer, template) != USUAL:
        return render_shown(tokenizer, shown)
    try:
        given = {"messages": shown, "tools": None, "documents": None, "add_generation_prompt": False, **special_tokens}
        return str(compiled(template).render(given))
    except Exception as problem:  # as in `_apply`
        raise Unrendered(first_line(problem)) from None


def generated_spans(
    tokenizer: PreTrainedTokenizerBase, shown: Sequence[dict[str, Any]], tools: list[Any] | None, **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """The text of `render_shown`, and its characters within `{% generation %}` tags. Raises: Unrendered."""
    shape = _shape_of(tokenizer, template_of(tokenizer, tools))
    return _apply(tokenizer, shape, shown, tools, return_assistant_tokens_mask=True, **variables)


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    shape: Shape,
    messages: Sequence[dict[str, Any]],
    tools: list[Any] | None,
    **details: Any,
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and spans where they are asked for, of `apply_chat_template`, which drops a content of None."""
    from transformers.utils.chat_template_utils import render_jinja_template

    shaped = [shape.of_message(message) for message in messages]
    given: Any = {"tools": shape.of_tools(tools), "chat_template": template_of(tokenizer, tools)}
    given |= tokenizer.special_tokens_map | details
    try:
        # Raw text: behind marks, or known exchanges.
        rendered: Any = render_jinja_template([shaped], **given)  # lists of texts and of spans, declared as a text
    except Exception as problem:  # a template is a program of others, and raises what it likes
        raise Unrendered(first_line(problem)) from None
    (text,), spans = rendered
    return text, [*spans[0]] if spans else []


def has_generation_tags(tokenizer: PreTrainedTokenizerBase, tools: Any = None) -> bool:
    """Whether the chat template says by `{% generation %}` tags what of an answer carries loss."""
    return _has_generation_tags(template_of(tokenizer, tools))


@functools.lru_cache(maxsize=64)
def _has_generation_tags(template: str) -> bool:
    return GENERATION_TAG.search(template) is not None


def writes_date(tokenizer: PreTrainedTokenizerBase, has_tools: bool = False) -> bool:
    """Whether the chat template writes the current date into a dialogue, where it is stored."""
    name, asked = "strftime_now", said("user", ASKED)
    tools = TOOLS if has_tools else None
    if name not in template_of(tokenizer, tools):
        return False

    def text(messages: Messages, **date: Any) -> str | None:
        try:
            return render_shown(tokenizer, messages, tools, **date)
        except Unrendered:
            return None

    dialogues = ([asked], [said("system", "text"), asked])
    return any(text(messages) != text(messages, **{name: lambda _: "another day"}) for messages in dialogues)


# --------------------------------------------------------------------------------------------------- what is left out
def left_out_of_prompt(text: str, shown: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> str:
    """What a rendered prompt lacks of its (protected) messages and tools; empty if it has all of them.

    The reasoning of past answers is not looked for, since templates may remove it.
    """
    for message in shown:
        content = message.get("content") or ""
        if message["role"] == "assistant":
            content = REASONING_TAG.split(content)[-1]
        if not _occurs(content, text):
            return f"{message['role']}_message"
        if not all(_occurs(call["function"]["name"], text) for call in message.get("tool_calls") or []):
            return "tool_calls"
    names = [tool.get("function", tool).get("name", "") for tool in tools or []]
    return "" if all(_occurs(name, text) for name in names) else "tools"


def left_out_of_answer(text: str, message: dict[str, Any]) -> str:
    """What a rendered answer lacks of its (protected) message; empty if it has all of it."""
    if not all(_occurs(part, text) for part in REASONING_TAG.split(message.get("content") or "")):
        return "part_of_the_answer"
    if not _occurs(message.get("reasoning_content") or "", text):
        return "reasoning"
    functions = [call["function"] for call in message.get("tool_calls") or []]
    leaves = [leaf for function in functions for leaf in (function["name"], *_leaves(function["arguments"]))]
    return "" if all(_occurs(leaf, text) for leaf in leaves) else "tool_calls"


def _occurs(part: str, text: str) -> bool:
    """Whether a template wrote this text, trimmed or as JSON."""
    part = part.strip()
    return part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in (str(key), *_leaves(inner))]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in _leaves(inner)]
    return [value] if isinstance(value, str) else []  # numbers and truth values have more than one spelling
