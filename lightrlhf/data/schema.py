"""Schema of the rows of each stage, checked once: as a split is written, as a list of rows is read, or from Python.

Many rows are checked at once, their ids in one tensor: on one core 160,000 demonstrations of 300 tokens take 1.4
seconds, as many pairs 7.

Left out: what a program needs beyond the schema, such as both labels for kto.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.jsonl import Row

IGNORE_INDEX = -100
FIELDS = {  # in their order in a row
    "finetune": ("prompt_len", "input_ids", "targets"),
    "preference": ("prompt_len", "chosen_input_ids", "rejected_input_ids"),
    "unpaired": ("prompt_len", "input_ids", "label", "columns"),
    "prompts": ("prompt_len", "input_ids", "columns"),
    "dialogue": ("messages", "input_ids", "turn_spans"),
    "refuel": (
        *(f"{side}_{name}" for side in ("chosen", "rejected") for name in ("input_ids", "action_mask")),
        *("chosen_reward", "rejected_reward"),
    ),
}
COLUMNS = {stage: set(names) for stage, names in FIELDS.items()}
TEXTS = {  # what rows are prepared from
    "finetune": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion"),
    "prompts": ("prompt",),
}
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
DEEPEST = 32  # levels of a column's value


class BadRow(Exception):
    """What is wrong with a row: (its index, what)."""


class Column(NamedTuple):
    """A column of 1-D tensors, of N rows."""

    values: Tensor  # (sum of lengths,)
    lengths: Tensor  # (N,) int64

    def rows(self) -> Tensor:
        """The row of each value: (sum of lengths,) int64."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    def places(self) -> Tensor:
        """The place of each value in its row: (sum of lengths,) int64."""
        starts = self.lengths.cumsum(0) - self.lengths
        return torch.arange(len(self.values)) - torch.repeat_interleave(starts, self.lengths)

    def first(self, wrong: Tensor) -> tuple[int, int, Any]:
        """Row, place and value of the first one that is wrong; wrong: (sum of lengths,) bool."""
        index = int(wrong.nonzero()[0])
        row = int(torch.searchsorted(self.lengths.cumsum(0), index, right=True))
        return row, index - int(self.lengths[:row].sum()), self.values[index].item()


def check_rows(
    rows: Sequence[Any], stage: str, source: str = "", vocab_size: int | None = None, first: int = 0
) -> dict[str, Column]:
    """Check rows of a split; returns their columns of tensors.

    source: the split's file, empty for rows given from Python; vocab_size: of the tokenizer; first: number of the first
    of these rows in the split.
    Raises: UsageError naming the file, the first bad row and its field.
    """
    try:
        return _check(rows, stage, vocab_size, is_stored=bool(source))
    except BadRow as bad:
        raise bad_row(bad, source, first) from None


def bad_row(bad: BadRow, source: str, first: int = 0) -> UsageError:
    """The error of a bad row; source, first: as `check_rows`."""
    index, what = bad.args
    where = f"{source}: row {first + index}" if source else f"given row {first + index}"
    return UsageError(f"{where} {what}; {'prepare it again' if source else 'mend the row'}")


def share_columns(rows: Iterable[Row]) -> None:
    """Give all rows the same keys in `columns`, with None where a row lacks one.

    A function then gets the same columns in every batch, whichever rows are in it.
    """
    rows = list(rows)
    names: Row = dict.fromkeys(name for row in rows for name in row.get("columns", {}))
    for row in rows if names else ():
        row["columns"] = names | row.get("columns", {})


def _check(rows: Sequence[Any], stage: str, vocab_size: int | None, is_stored: bool) -> dict[str, Column]:
    needed = COLUMNS[stage]
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not needed <= row.keys():
            keys = sorted(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise BadRow(index, f"has {keys}, but the {stage} stage requires {sorted(needed)}")
        if "columns" in row:
            check_columns(row["columns"], index, is_stored)
    ids = {name: _ids(rows, name, vocab_size) for name in sorted(needed) if name.endswith("input_ids")}
    if "prompt_len" in needed:
        _check_prompts(rows, stage, ids)
    if stage == "finetune":
        ids["targets"] = _check_targets(rows, ids["input_ids"])
    elif stage == "preference":
        _check_same_prompts(rows, ids)
    elif stage == "unpaired":
        for index, row in enumerate(rows):
            if not isinstance(row["label"], bool):
                raise BadRow(index, f"has the label {_short(row['label'])}, which is neither True nor False")
    elif stage == "dialogue":
        for index, (row, length) in enumerate(zip(rows, ids["input_ids"].lengths.tolist())):
            _check_dialogue(row, length, index)
    elif stage == "refuel":
        ids |= _check_sides(rows, ids)
    return ids


def _column(rows: Sequence[Row], name: str, kinds: frozenset[torch.dtype], what: str) -> Column:
    parts = []
    for index, row in enumerate(rows):
        part = row[name]
        if not isinstance(part, Tensor):
            try:
                part = torch.as_tensor(part)
            except (TypeError, ValueError, RuntimeError):
                part = torch.empty(())
        if part.dim() != 1 or part.dtype not in kinds or part.layout != torch.strided or part.device.type != "cpu":
            raise BadRow(index, f"has {name} {_short(row[name])}, not a 1-D tensor or list of {what}")
        parts.append(part)
    return Column(torch.cat(parts), torch.tensor([len(part) for part in parts]))


def _ids(rows: Sequence[Row], name: str, vocab_size: int | None) -> Column:
    ids = _column(rows, name, INTEGERS, "token ids")
    if not ids.lengths.all():
        raise BadRow(int((ids.lengths == 0).nonzero()[0]), f"has no {name}")
    end = 2**31 if vocab_size is None else vocab_size
    if int(ids.values.min()) < 0 or int(ids.values.max()) >= end:
        row, place, value = ids.first((ids.values < 0) | (ids.values >= end))
        raise BadRow(row, f"has {name}[{place}] = {value}, but token ids lie in [0, {end:,})")
    return ids


def _check_prompts(rows: Sequence[Row], stage: str, ids: Mapping[str, Column]) -> None:
    for index, row in enumerate(rows):
        value = row["prompt_len"]
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise BadRow(index, f"has prompt_len {_short(value)}, not a whole number")
        if not 0 <= int(value) < 2**31:
            raise BadRow(index, f"has prompt_len {value}, which is below 0 or beyond every row")
    prompts = torch.tensor([int(row["prompt_len"]) for row in rows])
    for name, column in ids.items():
        if stage == "prompts":
            wrong, rule = prompts != column.lengths, "but {name} is the prompt alone and has {length} tokens"
        else:
            wrong, rule = prompts >= column.lengths, "but {name} has {length} tokens, prompt and response together"
        if wrong.any():
            first = int(wrong.nonzero()[0])
            said = rule.format(name=name, length=int(column.lengths[first]))
            raise BadRow(first, f"has prompt_len {int(prompts[first])}, {said}")


def _check_targets(rows: Sequence[Row], ids: Column) -> Column:
    targets = _column(rows, "targets", INTEGERS, "token ids")
    uneven = targets.lengths != ids.lengths
    if uneven.any():
        row = int(uneven.nonzero()[0])
        raise BadRow(row, f"has {int(ids.lengths[row])} input_ids but {int(targets.lengths[row])} targets")
    wrong = (targets.values != IGNORE_INDEX) & (targets.values != ids.values)
    if wrong.any():
        row, place, value = targets.first(wrong)
        raise BadRow(row, f"has targets[{place}] = {value}, neither {IGNORE_INDEX} nor the token there")
    return targets


def _check_same_prompts(rows: Sequence[Row], ids: Mapping[str, Column]) -> None:
    prompts = torch.tensor([int(row["prompt_len"]) for row in rows])
    chosen, rejected = (
        column.values[column.places() < torch.repeat_interleave(prompts, column.lengths)]
        for column in (ids["chosen_input_ids"], ids["rejected_input_ids"])
    )  # (sum of prompt lengths,) each
    if (chosen != rejected).any():
        row, place, _ = Column(chosen, prompts).first(chosen != rejected)
        raise BadRow(row, f"has chosen_input_ids and rejected_input_ids with other prompts, from token {place} on")


def _check_dialogue(row: Row, length: int, index: int) -> None:
    messages, spans = row["messages"], row["turn_spans"]
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in messages
    ):
        raise BadRow(index, "has messages that are not a list of dicts with role and content")
    if not isinstance(spans, list | tuple | Tensor) or not all(map(_is_span, spans)):
        raise BadRow(index, f"has turn_spans {_short(spans)}, not pairs of whole numbers")
    ends = [int(place) for span in spans for place in span]
    if any(start >= end for start, end in zip(ends[::2], ends[1::2])) or ends != sorted(ends):
        raise BadRow(index, f"has turn_spans {_short(spans)}, which are empty or out of order")
    if ends and not 0 <= ends[0] <= ends[-1] <= length:
        raise BadRow(index, f"has turn_spans {_short(spans)}, but {length} input_ids")
    turns = sum(message["role"] == "assistant" for message in messages)
    if not ends or len(ends) != 2 * turns:
        raise BadRow(index, f"has {len(ends) // 2} turn_spans for {turns} messages of the assistant")


def _is_span(span: Any) -> bool:
    if not isinstance(span, list | tuple | Tensor) or (isinstance(span, Tensor) and span.dim() != 1) or len(span) != 2:
        return False
    return all(_is_whole(place.item() if isinstance(place, Tensor) else place) for place in span)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_sides(rows: Sequence[Row], ids: Mapping[str, Column]) -> dict[str, Column]:
    columns = {}
    for side in ("chosen", "rejected"):
        name, tokens = f"{side}_action_mask", ids[f"{side}_input_ids"]
        columns[name] = masks = _column(rows, name, frozenset({torch.bool}), "True and False")
        uneven = masks.lengths != tokens.lengths - 1
        if uneven.any():
            first = int(uneven.nonzero()[0])
            length = int(tokens.lengths[first])
            raise BadRow(first, f"has {int(masks.lengths[first])} values in {name}, not one less than its {length} ids")
        counted = torch.zeros(len(rows), dtype=torch.int64).index_add_(0, masks.rows(), masks.values.long())  # (N,)
        if not counted.all():
            raise BadRow(int((counted == 0).nonzero()[0]), f"has no True in {name}, so nothing to learn")
        for index, row in enumerate(rows):
            value = row[f"{side}_reward"]
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise BadRow(index, f"has {side}_reward {_short(value)}, not a finite number")
    return columns


def check_columns(columns: Any, index: int, is_stored: bool) -> None:
    """Check the `columns` of a row: of given rows they may hold any objects, which a reward function gets as they are.

    Raises: BadRow.
    """
    if not isinstance(columns, dict):
        raise BadRow(index, f"has columns {_short(columns)}, not a dict")
    for name, value in columns.items():
        if not isinstance(name, str):
            raise BadRow(index, f"has in columns the name {_short(name)}, not a text")
        if is_stored and (odd := next(_odd(value, DEEPEST), None)) is not None:
            raise BadRow(index, f"has in columns {name!r} {odd}; columns are texts, numbers, lists and dicts of them")


def _odd(value: Any, levels: int) -> Iterator[str]:
    """What in a value is not plain."""
    if value is None or isinstance(value, str | Real):
        return
    if levels == 0:
        yield f"more than {DEEPEST} levels"
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _odd(part, levels - 1)
    elif isinstance(value, dict) and all(isinstance(key, str | Real) or key is None for key in value):
        for part in value.values():
            yield from _odd(part, levels - 1)
    else:
        yield f"a {type(value).__name__}"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
