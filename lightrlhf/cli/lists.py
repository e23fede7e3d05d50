"""List flags: `--seeds 1 2`, `--seeds 1,2` and `--seeds [1,2]` mean the same.

The field of a flag says how its words are split into items: names at commas, paths unless they exist, `name=value`
pairs before the next name, texts never.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable


def names(word: str) -> list[str]:
    """The comma-separated items in one word of a list flag."""
    return word.split(",")


def paths(word: str) -> list[str]:
    """Paths, which may hold commas: a word that exists is one path."""
    return [word] if os.path.exists(word) else word.split(",")


def pairs(word: str) -> list[str]:
    """name=value pairs, whose values may hold commas: split before the next name."""
    return re.split(r",(?=\s*[A-Za-z_]\w*=)", word)


def texts(word: str) -> list[str]:
    """Texts, which may hold anything: one in a word."""
    return [word]


def join_lists(words: list[str], splits: dict[str, Callable[[str], list[str]]]) -> list[str]:
    """`--seeds 1 2`, `--seeds 1,2` and `--seeds [1,2]` as the one word that jsonargparse takes for a list.

    splits: by list flag, what splits one word into items.
    """
    joined: list[str] = []
    values: list[str] | None = None
    for word in [*words, "--"]:
        if values is not None and not word.startswith("--"):
            values.append(word)
            continue
        if values is not None:
            joined[-1] += "=" + json.dumps(items_of(values, splits[joined[-1]]))
            values = None
        flag, equals, value = word.partition("=")
        joined.append(flag if flag in splits else word)
        if flag in splits:
            values = [value] if equals else []
    return joined[:-1]


def items_of(words: list[str], split: Callable[[str], list[str]]) -> list[str]:
    """The items of a list flag; a JSON list of texts (`["a, b", "c"]`) keeps commas that are part of an item."""
    text = " ".join(words).strip()
    in_brackets = text.startswith("[") and text.endswith("]") and (split is not texts or len(words) == 1)
    if in_brackets:
        with contextlib.suppress(ValueError):
            listed = json.loads(text)
            if all(isinstance(item, str) for item in listed):
                return listed
    if split is texts:
        return words
    if in_brackets:
        words = [text[1:-1]]
    items = []
    for word in words:  # kept if empty, so that it is refused
        items += [_unquote(item) for item in split(word) if item.strip()] or [word]
    return items


def _unquote(item: str) -> str:
    item = item.strip()
    return item[1:-1] if len(item) > 1 and item[0] == item[-1] and item[0] in "'\"" else item
