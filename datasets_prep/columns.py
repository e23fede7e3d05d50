"""Names of columns: which a format has, and how `--columns` maps others."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice
from typing import Any

from datasets_prep.reading import Raw
from lightrlhf.cli.errors import UsageError

FORMATS = {
    ("input", "preferred_output", "non_preferred_output"): "OpenAI's pairs",
    ("prompt", "completions", "labels"): "steps",
    ("prompt", "completion", "label"): "unpaired feedback",
    ("prompt", "chosen", "rejected"): "pairs",
    ("chosen", "rejected"): "pairs",
    ("prompt", "completion"): "prompt and completion",
    ("messages", "label"): "unpaired feedback",
    ("messages",): "dialogues",
    ("prompt",): "prompts",
    ("text",): "text",
}
STEPS = ("prompt", "completions", "labels")
ALIASES = {  # of columns with values of one type
    "conversations": ("messages", object),
    "context_messages": ("prompt", object),
    "contents": ("messages", list),  # Gemini's
    "systemInstruction": ("system", dict),
    "system_prompt": ("system", str),
    "kto_tag": ("label", bool),  # LLaMA-Factory's
}
ALPACA = ("instruction", "input", "history", "output")
OURS = tuple(dict.fromkeys([*(name for names in FORMATS for name in names), *ALPACA, "system", "tools"]))
# columns that must not be left unread: with them a row means something else
DECISIVE = ("prompt", "completion", "chosen", "rejected", "messages", "preferred_output", "non_preferred_output")
SYNONYMS = {  # for the nearest format of columns that no format has
    "prompt": "question query instruction problem human user task input request post context document article".split(),
    "completion": "answer response output solution reply assistant bot gpt target summary".split(),
    "chosen": "preferred accepted winner better best good positive".split(),
    "rejected": "dispreferred loser worse worst bad negative".split(),
    "messages": "conversation dialogue dialogues dialog chat turns trajectory".split(),
    "text": "content document body passage article story".split(),
}


def parse_columns(pairs: Iterable[str]) -> dict[str, str]:
    """`{our name: column of the data}` from pairs such as `prompt=question`. Raises: ValueError."""
    pairs = list(pairs)
    flag = f"--columns {','.join(pairs)}"
    mapping: dict[str, str] = {}
    for pair in pairs:
        given, _, theirs = (part.strip() for part in pair.partition("="))
        if not (given and theirs):
            raise ValueError(f"{flag}: {pair!r} is not a pair such as prompt=question")
        name = ours(given)
        if name not in OURS:
            hint = f"did you mean {theirs}={given}?" if theirs in OURS else f"the names are {', '.join(OURS)}"
            raise ValueError(f"{flag}: {given} is not a column that is read; {hint}")
        if name in mapping or theirs in mapping.values():
            raise ValueError(f"{flag}: {given if name in mapping else theirs} occurs twice")
        mapping[name] = theirs
    needed = mapping.keys() & set(DECISIVE)
    if not any(needed <= set(names) for names in FORMATS):
        raise ValueError(f"{flag}: no format has {' and '.join(sorted(needed))}")
    return mapping


def check_columns(mapping: dict[str, str], rows: Iterable[Raw], look: int = 1000) -> None:
    """Raises: UsageError for a column of `mapping` that none of the first `look` rows has."""
    found = dict.fromkeys(name for raw in islice(rows, look if mapping else 0) for name in raw.values)
    for ours, theirs in mapping.items():
        if found and theirs not in found:
            near = difflib.get_close_matches(theirs, found, n=1)
            hint = f"; did you mean {ours}={near[0]}?" if near else ""
            raise UsageError(f"--columns {ours}={theirs}: no column {theirs} among {some(found)}{hint}")


def ours(column: str, value: Any = None) -> str:
    """Our name of a column, by its value where that is given."""
    name, kind = ALIASES.get(column, (column, object))
    return name if value is None or isinstance(value, kind) else column


def two_formats(one: list[str], other: list[str]) -> str:
    flags = ["--columns " + ",".join(f"{name}={name}" for name in names) for names in (one, other)]
    return f"two formats: {', '.join(one)} and {', '.join(other)}; choose one: {' or '.join(flags)}"


def some(names: Iterable[str]) -> str:
    """The first of many names."""
    names = list(names)
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
