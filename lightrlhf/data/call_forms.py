"""The forms in which chat templates of the public families write tool calls, and how each is read.

A form is a pair of patterns, of what opens and what closes a call, and a reader of the text between them.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

Json = dict[str, Any]
Call = tuple[str, Json]  # name and arguments


class Form(NamedTuple):
    """How calls are written: where one begins and ends, and what reads what stands between."""

    opened: str  # pattern, whose group `name` is the function's name where that stands there
    closed: str | None  # pattern; None: the response's end
    read: Callable[[str, str, Json], list[Call]]  # of name, text, and the tools' parameters by name
    mark: str = ""  # text that shows a call was meant where none was read
    marks: str = ""  # special tokens that `read` looks for
    dropped: tuple[str, ...] = ()  # tokens around calls, which say nothing


def _loads(text: str) -> Any:
    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number of JSON")

    return json.loads(text, parse_constant=constant)


def _objects(name: str, text: str, parameters: Json) -> list[Call]:
    """Calls of one JSON object with name and arguments, or of a list of them."""
    found = _loads(text.strip().rstrip(";"))
    rows = found if isinstance(found, list) else [found]
    calls = []
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"a call is a {type(row).__name__}, not an object")
        names = [row[key] for key in ("name", "tool_name") if key in row]
        arguments = [row[key] for key in ("arguments", "parameters") if key in row]
        if len(names) != 1 or len(arguments) != 1:
            raise ValueError("a call is an object with a name and arguments")
        calls.append((names[0], _loads(arguments[0]) if isinstance(arguments[0], str) else arguments[0]))
    return calls


def _arguments(name: str, text: str, parameters: Json) -> list[Call]:
    """A call whose arguments are a JSON object, fenced or not."""
    text = text.strip()
    return [(name, _loads(text.removeprefix("```json").removesuffix("```")))]


def _tagged(pattern: str) -> Callable[[str, str, Json], list[Call]]:
    """A reader of arguments between tags; by the tool's parameters they are text or JSON."""

    def read(name: str, text: str, parameters: Json) -> list[Call]:
        own, arguments = parameters.get(name, {}), {}
        for key, value in re.findall(pattern, text, re.DOTALL):
            kind = own.get(key, {}).get("type") if isinstance(own.get(key), dict) else None
            arguments[key] = value if kind in (None, "string") else _typed(value)
        if re.sub(pattern, "", text, flags=re.DOTALL).strip():
            raise ValueError("between the arguments stands other text")
        return [(name, arguments)]

    return read


def _typed(value: str) -> Any:
    try:
        return _loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


def _marked(name: str, text: str, parameters: Json) -> list[Call]:
    """A call in Gemma 4's JSON: keys without quotes, texts between marks."""
    from transformers.utils.chat_parsing.content_parsers import parse_content

    return [(name, parse_content(text, "json", {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}))]


def _python(name: str, text: str, parameters: Json) -> list[Call]:
    """Calls in a list as Python writes them, with named arguments; constants may be JSON's."""
    found = _parsed(text)
    if not isinstance(found, ast.List):
        raise ValueError("it is not a list of calls in Python")
    calls = []
    for one in found.elts:
        if not isinstance(one, ast.Call) or one.args or not isinstance(one.func, ast.Name | ast.Attribute):
            raise ValueError("a call is a function with named arguments")
        arguments = {str(keyword.arg): _plain(keyword.value) for keyword in one.keywords if keyword.arg}
        if len(arguments) < len(one.keywords):
            raise ValueError("an argument is given twice, or has no name")
        calls.append((ast.unparse(one.func), arguments))
    return calls


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as problem:
        raise ValueError(f"it cannot be read as Python ({type(problem).__name__})") from None


def _plain(node: ast.expr) -> Any:
    """A value of JSON that is written in Python or JSON."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List):
        return [_plain(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key of an argument is not a text")
        return {str(key): _plain(value) for key, value in zip(keys, node.values)}
    try:
        value = ast.literal_eval(node)
    except (TypeError, MemoryError):
        raise ValueError("an argument is not a plain value") from None
    if type(value) not in (str, int, float, bool, type(None)) or (type(value) is float and not math.isfinite(value)):
        raise ValueError(f"an argument is a {type(value).__name__}, which JSON does not have")
    return value


def _unescaped(name: str, text: str, parameters: Json) -> list[Call]:
    """Calls in a list with texts between quotes and nothing escaped; a text with a quote in it cannot be told."""
    calls: list[Call] = []
    if re.fullmatch(rf"\[{BARE_CALL}(?:, {BARE_CALL})*\]", text.strip()) is None:
        raise ValueError("it is not a list of calls with plain arguments")
    for one in re.finditer(BARE_CALL, text):
        function, _, rest = one[0].partition("(")
        found = re.findall(rf"(\w+)=({BARE_VALUE})", rest)
        arguments = {key: value[1:-1] if value.startswith("'") else _plain(_parsed(value)) for key, value in found}
        if len(arguments) < len(found):
            raise ValueError("an argument is given twice")
        calls.append((function, arguments))
    return calls


CONSTANTS = {"true": True, "false": False, "null": None}
BARE_VALUE = r"'[^']*'|[\w.+-]+"
BARE_CALL = rf"[\w.-]{{1,256}}\((?:\w+=(?:{BARE_VALUE})(?:, (?=\w)|(?=\))))*\)"
WORD = r"(?P<name>[\w.-]{1,256})"
FORMS = {
    "hermes": Form(r"<tool_call>", r"</tool_call>", _objects),
    "qwen3_coder": Form(
        r"<tool_call>\s{0,9}<function=(?P<name>[^>\n]{1,256})>",
        r"</function>\s{0,9}</tool_call>",
        _tagged(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"),
        "<tool_call>",
    ),
    "glm": Form(
        rf"<tool_call>\s{{0,9}}{WORD}",
        r"</tool_call>",
        _tagged(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"),
        "<tool_call>",
    ),
    "llama3": Form(r"(?:\A\s{0,9}|<\|python_tag\|>)(?=\{\s{0,9}\"name\")", None, _objects),
    "mistral": Form(r"\[TOOL_CALLS\]", None, _objects),
    "mistral_args": Form(
        rf"\[TOOL_CALLS\]{WORD}(?:\[CALL_ID\]\w{{1,64}})?\[ARGS\]",
        r"(?=\[TOOL_CALLS\])",
        _arguments,
        "[TOOL_CALLS]",
    ),
    "actions": Form(r"(?:<\|START_ACTION\|>|<\|start_action\|>)", r"<\|END_ACTION\|>|<\|end_action\|>", _objects),
    "phi4": Form(r"<\|tool_call\|>", r"<\|/tool_call\|>", _objects),
    "deepseek": Form(
        rf"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{WORD}(?:<｜tool▁sep｜>|\n)",
        r"<｜tool▁call▁end｜>",
        _arguments,
        "<｜tool▁call▁begin｜>",
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "harmony": Form(
        rf"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? to=functions\.{WORD}"
        r"(?:<\|channel\|>commentary)?\s?(?:<\|constrain\|>)?(?:json)?<\|message\|>",
        r"<\|call\|>",
        _arguments,
    ),
    "gemma4": Form(rf"<\|tool_call>call:{WORD}", r"<tool_call\|>", _marked, "<|tool_call>", '<|"|>'),
    "python": Form(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", _python),
    "unescaped": Form(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", _unescaped),
    "named": Form(rf"(?:<call>|<start_call>){WORD} ?(?=\{{)", r"</call>|<end_call>", _arguments),
}
HARMONY = {  # a message for each channel; the headers between them are dropped
    "reasoning_content": (r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>", r"<\|end\|>"),
    "content": (r"(?:<\|start\|>assistant)?<\|channel\|>final<\|message\|>", r"<\|end\|>|<\|return\|>"),
}
