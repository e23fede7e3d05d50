"""Names of columns: which a format has, how `--columns` maps others, and what to say of rows without a format."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from itertools import islice
from typing import Any

from datasets_prep.messages import holds_turns
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
ALIASES = {"conversations": "messages", "context_messages": "prompt"}
ALPACA = ("instruction", "input", "history", "output")
OURS = tuple(dict.fromkeys([*(name for names in FORMATS for name in names), *ALPACA, "system", "tools"]))
# columns that must not be left unread: with them a row means something else
DECISIVE = ("prompt", "completion", "chosen", "rejected", "messages", "preferred_output", "non_preferred_output")
SYNONYMS = {  # for the nearest format of columns that no format has
    "prompt": "question query instruction problem task user input request post context".split(),
    "completion": "answer response output solution reply assistant target summary".split(),
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
        ours, _, theirs = (part.strip() for part in pair.partition("="))
        if not (ours and theirs):
            raise ValueError(f"{flag}: {pair!r} is no pair such as prompt=question")
        name = ALIASES.get(ours, ours)
        if name not in OURS:
            hint = f"did you mean {theirs}={ours}?" if theirs in OURS else f"the names are {', '.join(OURS)}"
            raise ValueError(f"{flag}: {ours} is no column that is read; {hint}")
        if name in mapping or theirs in mapping.values():
            raise ValueError(f"{flag}: {ours if name in mapping else theirs} occurs twice")
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
            raise UsageError(f"--columns {ours}={theirs}: no column {theirs} among {_some(found)}{hint}")


def no_format(values: dict[str, Any], nulls: set[str], columns: list[str]) -> str:
    """The columns found and the nearest format, with the flag that maps them to it."""
    found = [name for name in values if isinstance(values[name], (str, list, dict))]
    turns = [name for name in found if name not in DECISIVE and holds_turns(values[name])]
    decisive = {name for name in found if name in DECISIVE}
    formats = [f for f in FORMATS if f != STEPS and decisive <= set(f)] or [f for f in FORMATS if f != STEPS]

    def assigned(names: tuple[str, ...]) -> dict[str, str]:
        result: dict[str, str] = {}
        for name in names:
            free = [column for column in found if column not in result.values() and column not in names]
            free = [column for column in free if column not in turns or name == "messages"]
            like = {name, *SYNONYMS.get(name, [])}
            words = {column: set(re.split(r"[\W_]+", column.lower())) for column in free}
            match = name if name in values else next((column for column in free if words[column] & like), None)
            if match:
                result[name] = match
        return result

    def closeness(names: tuple[str, ...]) -> tuple[bool, int, int]:
        count = len(assigned(names))
        return count == len(names), count, -len(names)

    if (
        "instruction" in found
        and not decisive
        and (answered := assigned(("instruction", "completion")).get("completion"))
    ):
        given = "" if "input" in found or "context" not in found else ",input=context"
        given += "".join(f",history={name}" for name in turns[:1] if name != "history")
        flag = f"--columns output={answered}{given}"
        return f"no known format: columns {_some(columns)}; nearest: instruction, input, output ({flag})"
    best = max(formats, key=closeness)
    near = assigned(best)
    if null := sorted((set(best) - near.keys()) & nulls, key=OURS.index) or ([] if near else sorted(nulls)):
        return f"{null[0]}_is_null"
    if not near:
        best = ("prompt", "completion")
    pairs = [f"{name}={near.get(name, 'COLUMN')}" for name in best if near.get(name) != name]
    pairs += [f"history={name}" for name in turns[:1] if "prompt" in best and name != "history"]
    flag = ",".join(pairs or [f"{name}={name}" for name in best])
    return f"no known format: columns {_some(columns) or 'none'}; nearest: {', '.join(best)} (--columns {flag})"


def two_formats(one: list[str], other: list[str]) -> str:
    flags = ["--columns " + ",".join(f"{name}={name}" for name in names) for names in (one, other)]
    return f"two formats: {', '.join(one)} and {', '.join(other)}; choose one: {' or '.join(flags)}"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
