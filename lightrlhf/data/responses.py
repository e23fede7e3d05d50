"""Rows of responses, as `lightrlhf.generate` and `lightrlhf.annotate` write them, checked where a program reads them.

Only the columns that a program reads are checked, so files of other tools may hold more. 10,000 rows with the
ids of four responses of 256 tokens take 0.6 s.

Left out: the data's own columns, which may be any JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.jsonl import Row, open_jsonl
from lightrlhf.storage.lazy import Lazy, map_lazily


def are_identical(one: str, other: str) -> bool:
    """Whether two texts differ at most in whitespace at their ends: such a pair is a tie, which no judge need see."""
    return one.strip() == other.strip()


def is_prompt(value: Any) -> bool:
    """Whether a value is a text, or a list of messages with a role and a content, which may be null beside calls."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    has_both = isinstance(value, dict) and {"role", "content"} <= value.keys()
    return has_both and isinstance(value["role"], str) and isinstance(value["content"], str | list | None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e308


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int} and min(value, default=0) >= 0


def _or_null(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _each(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


TEXT, NUMBER = (_or_null(_is_text), "a text, or null"), (_or_null(_is_number), "a finite number, or null")
IDS = (_are_ids, "a list of token ids")
COLUMNS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "index": (_is_whole, "a whole number"),
    "prompt": (is_prompt, "a text or a list of messages with role and content"),
    "responses": (_each(_or_null(_is_text)), "a list of texts, null for a missing one"),
    "truncated": (_each(lambda value: isinstance(value, bool)), "a list of true and false"),
    "prompt_ids": IDS,
    "response_ids": (_each(_or_null(_are_ids)), "lists of token ids"),
    "rewards": (_each(_or_null(_is_number)), "a list of finite numbers, null for a missing one"),
    "response": TEXT,
    "reward": NUMBER,
    "errors": (_each(_is_text), "a list of texts"),
    "ref_ids": IDS,
    "rejected_ids": IDS,
    "ref_response": TEXT,
    "ref_reward": NUMBER,
    "rejected_response": TEXT,
    "rejected_reward": NUMBER,
}
ROW = tuple(COLUMNS)  # the columns of a row, in their order; all others are the data's own
OF_EACH = ("truncated", "response_ids", "rewards")  # as long as `responses`


def read_responses(path: str | Path, needs: Sequence[str], optional: Sequence[str] = ()) -> Lazy[Row]:
    """Rows of a file of responses, read from it one by one.

    needs, optional: the columns that the caller reads; an optional null means none.

    A data column of any row is in all rows, as None where it was missing.
    Raises: UsageError naming the file when it has no rows; row and column, too, when one is missing or of another type.
    """
    names: dict[str, None] = {}

    def each(number: int, row: Row) -> None:
        check_row(number, row, path, needs, optional)
        names.update(dict.fromkeys(name for name in row if name not in ROW))

    rows = open_jsonl(path, needs, each)
    if not rows:
        raise UsageError(f"{path} has no rows")
    return map_lazily(rows, partial(_with_columns, names))


def with_all_columns(rows: Sequence[Row]) -> list[Row]:
    """The rows with the same data columns in each, None where one is missing, since a function gets all of them."""
    names = dict.fromkeys(name for row in rows for name in row if name not in ROW)
    return [_with_columns(names, row) for row in rows]


def _with_columns(names: Iterable[str], row: Row) -> Row:
    return row | {name: None for name in names if name not in row}


def check_responses(rows: Iterable[Row], path: str | Path, needs: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raises: UsageError naming the file, the first bad row and its column."""
    for number, row in enumerate(rows, start=1):
        check_row(number, row, path, needs, optional)


def check_row(number: int, row: Row, path: str | Path, needs: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raises: UsageError naming the file, this row and its first bad column."""
    for name in (*needs, *(name for name in optional if row.get(name) is not None)):
        check, kind = COLUMNS[name]
        where = f"{path}: row {number} has"
        if name not in row or not check(row[name]):
            found = repr(row[name])[:60] if name in row else "no value"
            raise UsageError(f"{where} under {name!r} {found}, not {kind}; mend the row or write the file again")
        responses = row.get("responses")
        if name in OF_EACH and isinstance(responses, list) and len(row[name]) != len(responses):
            raise UsageError(
                f"{where} {len(responses)} responses but {len(row[name])} values under {name!r}; "
                "mend the row or write the file again"
            )
