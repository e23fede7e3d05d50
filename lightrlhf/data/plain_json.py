"""Plain values as JSON, exactly: tuples, keys that are not texts, NaN and lone surrogates come back as they were."""

from __future__ import annotations

import json
from typing import Any

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
LEAVES = frozenset({str, int, float, bool, type(None)})
TAG = "__python__"  # {TAG: ["tuple", parts]} and {TAG: ["dict", pairs]} stand for what JSON lacks


def encode(value: Any) -> bytes:
    """The JSON of a plain value. Raises: TypeError or ValueError for any other."""
    text = ENCODER.encode(value if _is_json(value) else _tagged(value))
    return text.encode("utf-8", "surrogatepass")


def decode(stored: bytes) -> Any:
    """The value of `encode`. Raises: ValueError."""
    text = stored.decode("utf-8", "surrogatepass")
    return json.loads(text, object_hook=_restored if TAG in text else None)


def _is_json(value: Any) -> bool:
    """Whether a value is one of JSON, as most are."""
    kind = type(value)
    if kind is dict:
        if TAG in value or not all([type(key) is str for key in value]):
            return False
        value = value.values()
    elif kind is not list:
        return kind in LEAVES
    return all([type(one) in LEAVES or _is_json(one) for one in value])


def _tagged(value: Any) -> Any:
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: _tagged(one) for key, one in value.items()}
        return {TAG: ["dict", [[key, _tagged(one)] for key, one in value.items()]]}
    if isinstance(value, tuple):
        return {TAG: ["tuple", [_tagged(one) for one in value]]}
    return [_tagged(one) for one in value] if isinstance(value, list) else value


def _restored(value: dict[str, Any]) -> Any:
    if TAG not in value:
        return value
    kind, parts = value[TAG]
    return tuple(parts) if kind == "tuple" else dict(parts)
