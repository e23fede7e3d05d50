"""Entries of reasoning-gym as JSON and back, for data preparation, which stores them, and the scorer, which reads them.

JSON has no tuples, and two tasks (`arc_agi`, `rearc`) pay a right answer .05 when their boards come back as lists. So
tuples may be kept, as `{"tuple": […]}`. Left out: keys that are not texts, which no scorer reads.
"""

from __future__ import annotations

import json
from typing import Any

TUPLE = "tuple"


def entry_text(entry: dict[str, Any], keep_tuples: bool = False) -> str:
    """JSON of an entry; without `keep_tuples` its tuples become lists, and any reader of JSON can read it."""
    return json.dumps(_marked(entry) if keep_tuples else entry)


def read_entry(text: str) -> dict[str, Any]:
    """The entry of a text of `entry_text`. Raises: ValueError when it is not JSON."""
    return json.loads(text, object_hook=lambda value: tuple(value[TUPLE]) if value.keys() == {TUPLE} else value)


def _marked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {TUPLE: [_marked(item) for item in value]}
    return [_marked(item) for item in value] if isinstance(value, list) else value
