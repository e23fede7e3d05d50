"""Nulls that a table's schema adds to tool schemas and arguments, in files that were written from tables.

A table gives each struct every key of any row, with null where a row lacks it. The readers of tables remove such nulls;
JSON lines from `to_json`, and JSON text in cells, still have them. A row counts as filled if a null is in a place where
an author would not write one: as a property of a tool (`"properties": {"town": null}`), inside a property except for
values that may be null, or as a key such as `tool_calls` of a message that is not the assistant's. In a filled row all
nulls inside tools and calls are removed; in other rows all are kept, such as a null argument.
"""

from __future__ import annotations

import json
from typing import Any

from datasets_prep.messages import ROLES

TOOLS = ("tools", "functions")
LISTS = ("messages", "preferred_output", "non_preferred_output")  # whose text is read as JSON
DIALOGUES = (*LISTS, "prompt", "completion", "chosen", "rejected")
CALLS = ("tool_calls", "function_call")
VALUES = ("default", "const", "enum", "example", "examples")  # of a schema: what they hold may be null


def without_fill(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row without the nulls that a table added."""
    if "preferred_output" not in row and not any(_may_be_filled(name, value) for name, value in row.items()):
        return row
    nested = _parsed(row["input"]) if "preferred_output" in row and "input" in row else {}  # of OpenAI's pairs
    both = [
        {name: value if name not in (*TOOLS, *LISTS) else _parsed(value) for name, value in columns.items()}
        for columns in (row, nested if isinstance(nested, dict) else {})
    ]
    if not any(_is_filled(name, value) for columns in both for name, value in columns.items()):
        return row
    cleaned, nested = ({name: _cleaned(name, value) for name, value in columns.items()} for columns in both)
    return cleaned | ({"input": nested} if nested else {})


def _may_be_filled(name: str, value: Any) -> bool:
    """Whether a column has to be looked into; messages without any null need not."""
    if name not in DIALOGUES or isinstance(value, str):
        return name in (*TOOLS, *LISTS)
    return any(type(part) is not dict or None in part.values() for part in (value if type(value) is list else [value]))


def _parsed(value: Any) -> Any:
    """A value, parsed if it is JSON text with nulls or a list of such texts."""
    if isinstance(value, list):
        return [_parsed(inner) for inner in value]
    if not isinstance(value, str) or "null" not in value or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _is_filled(name: str, value: Any) -> bool:
    """Whether a column of tools or messages has a null that an author would not write."""
    parts = value if isinstance(value, list) else [value]
    if name not in (*TOOLS, *DIALOGUES):
        return False
    if name in TOOLS:
        return any(_has_filled_property(part) for part in parts)
    others = (part for part in parts if isinstance(part, dict) and _role(part) not in (None, "assistant"))
    return any(part[key] is None for part in others for key in part if key not in ("content", "name"))


def _role(message: dict[str, Any]) -> str | None:
    role = message.get("role") or message.get("from")
    return ROLES.get(role) if isinstance(role, str) else None


def _has_filled_property(schema: Any, is_within: bool = False) -> bool:
    """Whether a property of a schema is null, or a key of one that is not a value; `is_within`: inside a property."""
    if isinstance(schema, list):
        return any(_has_filled_property(inner, is_within) for inner in schema)
    if not isinstance(schema, dict):
        return False
    properties = schema.get("properties")
    if isinstance(properties, dict) and any(
        inner is None or _has_filled_property(inner, True) for inner in properties.values()
    ):
        return True
    rest = {key: inner for key, inner in schema.items() if key not in VALUES and key != "properties"}
    return any((inner is None and is_within) or _has_filled_property(inner, is_within) for inner in rest.values())


def _cleaned(name: str, value: Any) -> Any:
    """Tools, or messages with their calls, without nulls; other columns unchanged."""
    if name in TOOLS:
        return _without_nulls(value)
    if name not in DIALOGUES:
        return value
    if isinstance(value, list):
        return [_cleaned(name, inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(inner) if key in CALLS else inner for key, inner in value.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
