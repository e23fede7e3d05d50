"""As much of Go's text templates as an exported Modelfile uses: fields, `if`, `else if`, `range`, `eq`, a variable."""

import re
from typing import Any

ACTION = re.compile(r"\{\{ (.*?) \}\}", re.DOTALL)


def render(template: str, messages: list[dict[str, str]]) -> str:
    """The text of a dialogue, as Ollama gives its fields: `.System`, and `.Messages` with `.Role` and `.Content`."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    pieces = ACTION.split(template)  # texts and actions in turns
    tree, rest = _block([("action" if i % 2 else "text", piece) for i, piece in enumerate(pieces)])
    assert not rest, "an end too many"
    values: dict[str, Any] = {".System": system, ".Messages": messages}
    return "".join(_run(tree, values))


def _block(tokens: list[tuple[str, str]]) -> tuple[list[Any], list[tuple[str, str]]]:
    """Nodes up to an `end` or `else`, and the tokens from there on."""
    nodes: list[Any] = []
    while tokens:
        (kind, text), *rest = tokens
        word = text.split(" ")[0]
        if kind == "action" and word in ("end", "else"):
            return nodes, tokens
        if kind == "action" and word in ("if", "range"):
            node, rest = _branches(text, rest)
            nodes.append(node)
        else:
            nodes.append((kind, text))
        tokens = rest
    return nodes, []


def _branches(text: str, tokens: list[tuple[str, str]]) -> tuple[Any, list[tuple[str, str]]]:
    word, _, condition = text.partition(" ")
    body, ((_, stop), *rest) = _block(tokens)
    other: list[Any] = []
    if stop.startswith("else if "):
        node, rest = _branches(stop.removeprefix("else "), rest)
        other = [node]
    elif stop == "else":
        other, ((_, stop), *rest) = _block(rest)
        assert stop == "end"
    return (word, condition, body, other), rest


def _run(nodes: list[Any], values: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for node in nodes:
        match node:
            case ("text", text):
                found.append(text)
            case ("if", condition, body, other):
                found += _run(body if _value(condition, values) else other, values)
            case ("range", over, body, _):
                for message in values[over]:
                    values |= {".Role": message["role"], ".Content": message["content"]}
                    found += _run(body, values)
            case ("action", text):
                name, is_assigned, value = re.fullmatch(r"(\S+)(?: :?(=) (true|false))?", text).groups()  # type: ignore[union-attr]
                if is_assigned:
                    values[name] = value == "true"
                else:
                    found.append(str(_value(name, values)))
    return found


def _value(text: str, values: dict[str, Any]) -> Any:
    if compared := re.fullmatch(r'eq (\S+) "(\w+)"', text):
        return values[compared[1]] == compared[2]
    return text[1:-1] if text.startswith('"') else values[text]
