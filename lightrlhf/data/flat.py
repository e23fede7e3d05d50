"""Flat rows: the rows of a split as a few flat tensors with offsets, each row a dict that is made when it is read.

A split's file is one dict that `torch.load(path, weights_only=True, mmap=True)` reads: all token ids one after the
other, the offsets of the rows among them, a tensor for each number, and JSON for the rest. All processes that map a
file share its pages, so a million rows take hardly any memory of a process. For its checks of all rows a program reads
facts that are stored in the file, and lengths, but not the rows.

    {"layout": 1, "stage": "finetune",
     "numbers": {"prompt_len": int32 (N,)},                      label: bool; rewards: float64; differ_at: int32
     "ragged": {"input_ids": (int32 (sum of lengths,), int64 offsets (N+1,)),      masks: bool; rest: uint8, JSON
                "targets": (int32 [start, end) of the counted tokens, offsets)},   turn_spans likewise
     "facts": {"ids": [smallest, largest], "counted": tokens, "columns": {name: finite numbers}, "digest": SHA-256}}

A file is replaced as a whole, never changed, so rows that are mapped stay what they are. Left out: compression.
"""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.data import plain_json
from lightrlhf.data.schema import FIELDS, IGNORE_INDEX, Row

LAYOUT = 1
NUMBERS = {
    "prompt_len": torch.int32,
    "label": torch.bool,
    "chosen_reward": torch.float64,
    "rejected_reward": torch.float64,
    "differ_at": torch.int32,  # place of the first token in which a pair's sides differ, of equal ones their length
}
SPANS = ("targets", "turn_spans")  # stored as [start, end) of tokens
REST = "rest"  # JSON of a row's other fields


class Ragged(NamedTuple):
    """Values of N rows of different lengths."""

    values: Tensor  # (sum of lengths,)
    offsets: Tensor  # (N+1,) int64

    def part(self, index: int) -> Tensor:
        """The values of a row."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def lengths(self) -> Tensor:
        """(N,) int64"""
        return self.offsets.diff()


class Facts(NamedTuple):
    """What holds for all rows of a split."""

    smallest: int  # token id
    largest: int
    counted: int  # targets that the loss counts
    columns: dict[str, int]  # number of rows in which each column is a finite number

    def merge(self, other: Facts) -> Facts:
        """The facts of both together."""
        ids = min(self.smallest, other.smallest), max(self.largest, other.largest)
        names = {**self.columns, **other.columns}
        columns = {name: self.columns.get(name, 0) + other.columns.get(name, 0) for name in names}
        return Facts(*ids, self.counted + other.counted, columns)


# ------------------------------------------------------------------------------------------------------------- rows
class Rows(Sequence[Row]):
    """Rows that are made when they are read; slices and selections make no row."""

    texts: tuple[str, ...]  # fields of token ids, of a pair the chosen ones first

    def row(self, index: int) -> Row:
        """A new dict of the row at an index from 0."""
        raise NotImplementedError

    def column(self, name: str) -> Tensor:
        """The numbers (N,) of a field; of a field of `texts` its lengths in tokens."""
        raise NotImplementedError

    def lengths(self) -> Tensor:
        """Tokens of each row (N,), of both sides for a pair."""
        return torch.stack([self.column(name) for name in self.texts]).sum(0)

    def facts(self) -> Facts:
        """Facts of the rows; after a selection they hold for more."""
        raise NotImplementedError

    def digest(self) -> str:
        """Hash of the rows' content and order."""
        raise NotImplementedError

    def share(self, names: Mapping[str, Any]) -> None:
        """Give all rows these `columns`, None where a row lacks one."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.select(torch.arange(*index.indices(len(self))))
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"row {place} of {len(self)}")
        return self.row(place % len(self))

    def __iter__(self) -> Iterator[Row]:
        return map(self.row, range(len(self)))

    def select(self, index: Tensor) -> View:
        """The rows at some places (n,) int64, in this order."""
        return View([self], index)

    def to_list(self) -> list[Row]:
        """All rows, in memory."""
        return list(self)


class View(Rows):
    """Rows of several parts one after the other, or some of them in any order, changed as they are read.

    places: (N,) int64 among the rows of all parts; None: all. change: returns a row's changed copy; key: names the
    change in the digest. columns: numbers (N,) that the rows get; of a field of `texts` the changed lengths. added:
    facts of what the change adds.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[Any]],
        places: Tensor | None = None,
        change: Callable[[Row], Row] | None = None,
        key: str = "",
        columns: Mapping[str, Tensor] | None = None,
        added: Facts | None = None,
    ) -> None:
        self.parts, self.places, self.change, self.key, self.added = list[Any](parts), places, change, key, added
        self.columns, self.shared = dict(columns or {}), dict[str, Any]()
        self.ends = list(accumulate(map(len, self.parts)))
        self.texts = next((part.texts for part in self.parts if isinstance(part, Rows)), ())

    def __len__(self) -> int:
        return (self.ends or [0])[-1] if self.places is None else len(self.places)

    def row(self, index: int) -> Any:
        place = index if self.places is None else int(self.places[index])
        number = bisect_right(self.ends, place)
        row = self.parts[number][place - (self.ends[number - 1] if number else 0)]
        row = self.change(row) if self.change else row
        added = {name: values[index].item() for name, values in self.columns.items() if name not in self.texts}
        if self.shared:
            added["columns"] = self.shared | row.get("columns", {})
        return {**row, **added} if added else row

    def column(self, name: str) -> Tensor:
        if name in self.columns:
            return self.columns[name]
        parts = [part.column(name) for part in self.parts if len(part)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
        return whole if self.places is None else whole[self.places]

    def facts(self) -> Facts:
        first, *others = (part.facts() for part in self.parts if len(part))
        others += [self.added] if self.added else []
        for other in others:
            first = first.merge(other)
        return first

    def digest(self) -> str:
        found = hashlib.sha256(repr([part.digest() for part in self.parts]).encode())
        if self.places is not None:
            found.update(self.places.numpy().tobytes())
        found.update(self.key.encode())
        return found.hexdigest()

    def share(self, names: Mapping[str, Any]) -> None:
        if self.change:
            self.shared = dict(names)
        else:
            for part in self.parts:
                part.share(names)


class FlatRows(Rows):
    """Rows of a stage in flat tensors; `rest` has their other fields as JSON, or in memory as a list of dicts.

    path: of the mapped file; None: in memory.
    """

    def __init__(
        self,
        stage: str,
        numbers: dict[str, Tensor],
        ragged: dict[str, Ragged],
        rest: Ragged | list[Row],
        facts: Facts,
        digest: str = "",
        path: str | None = None,
    ) -> None:
        self.stage, self.numbers, self.ragged, self.rest, self.path = stage, numbers, ragged, rest, path
        self.texts = tuple(sorted(name for name in ragged if name.endswith("input_ids")))
        self.shared: dict[str, Any] = {}  # columns of all rows
        self._facts, self._digest = facts, digest

    def __len__(self) -> int:
        return len(self.ragged[self.texts[0]].offsets) - 1

    def __reduce__(self) -> Any:
        """Another process maps the file again."""
        return (_mapped, (self.path, self.stage, self.shared)) if self.path else super().__reduce__()

    def row(self, index: int) -> Row:
        found: Row = {name: values[index].item() for name, values in self.numbers.items()}
        found |= {name: part.part(index) for name, part in self.ragged.items()}
        if "targets" in found:
            found["targets"] = _targets(found["input_ids"], found["targets"].tolist())
        if "turn_spans" in found:
            ends = found["turn_spans"].tolist()
            found["turn_spans"] = list(zip(ends[::2], ends[1::2]))
        rest = self._rest(index)
        row = {name: rest[name] if name in rest else found[name] for name in FIELDS[self.stage]} | rest
        return {**row, "columns": self.shared | row.get("columns", {})} if self.shared else row

    def _rest(self, index: int) -> Row:
        if isinstance(self.rest, list):
            return self.rest[index]
        stored = self.rest.part(index).numpy().tobytes()
        try:
            found = plain_json.decode(stored) if stored else {}
            kinds = {"messages": list, "columns": dict}
            wrong = [name for name, kind in kinds.items() if name in found and not isinstance(found[name], kind)]
            if wrong or any(name in kinds and name not in found for name in FIELDS[self.stage]):
                raise ValueError
        except (ValueError, TypeError, RecursionError):
            raise UsageError(f"{self.path}: row {index} is damaged; prepare it again") from None
        return cast(Row, found)

    def column(self, name: str) -> Tensor:
        return self.ragged[name].lengths() if name in self.texts else self.numbers[name]

    def facts(self) -> Facts:
        return self._facts

    def digest(self) -> str:
        if not self._digest:
            content = Digest()
            content.update(self, [_json(row) for row in cast(list[Row], self.rest)])
            self._digest = content.hexdigest()
        return self._digest

    def share(self, names: Mapping[str, Any]) -> None:
        self.shared = dict(names)


def _targets(ids: Tensor, ends: list[int]) -> Tensor:
    targets = torch.full_like(ids, IGNORE_INDEX)
    for start, end in zip(ends[::2], ends[1::2]):
        targets[start:end] = ids[start:end]
    return targets


def _json(rest: Row) -> bytes:
    try:
        return plain_json.encode(rest) if rest else b""
    except (TypeError, ValueError, RecursionError):  # an object that was given from Python
        return repr(rest).encode()


class Digest:
    """SHA-256 of rows that come in pieces, whatever their sizes."""

    def __init__(self) -> None:
        self.parts: dict[str, Any] = {}

    def update(self, rows: FlatRows, rest: Sequence[bytes]) -> None:
        """Add rows, with the JSON of their other fields."""
        for name, values in rows.numbers.items():
            self._add(name, values)
        for name, part in rows.ragged.items():
            self._add(name, part.values)
            self._add(f"{name} lengths", part.lengths())
        self._add(f"{REST} lengths", torch.tensor([len(one) for one in rest]))
        self.parts.setdefault(REST, hashlib.sha256()).update(b"".join(rest))

    def _add(self, name: str, values: Tensor) -> None:
        self.parts.setdefault(name, hashlib.sha256()).update(values.contiguous().numpy().tobytes())

    def hexdigest(self) -> str:
        """The hash of all that was added."""
        return hashlib.sha256(repr(sorted((n, one.hexdigest()) for n, one in self.parts.items())).encode()).hexdigest()


def chained(parts: Sequence[Sequence[Any]]) -> Any:
    """The rows of all parts, one after the other: `Rows`, or a list where a part is one."""
    if any(isinstance(part, list) for part in parts):
        return [row for part in parts for row in part]
    return View(parts)


def share_columns(sets: Sequence[Rows]) -> None:
    """Give the rows of all sets the same keys in `columns`, with None where a row lacks one.

    A function then gets the same columns in every batch, whichever rows are in it.
    """
    names: Row = dict.fromkeys(name for rows in sets if len(rows) for name in rows.facts().columns)
    for rows in sets:
        rows.share(names)


# ----------------------------------------------------------------------------------------------------------- reading
def from_stored(stored: dict[str, Any], stage: str, path: Path) -> FlatRows:
    """The rows of a loaded file. Raises: UsageError naming it when it is of another layout or stage, or damaged.

    Offsets, spans and lengths are compared with each other; the ids themselves are not read.
    """
    if stored.get("layout") != LAYOUT:
        raise UsageError(
            f"{path} has layout {stored.get('layout')!r}, not {LAYOUT}; prepare it again with this version"
        )
    if stored.get("stage") != stage:
        raise UsageError(f"{path} holds {stored.get('stage')} rows, not {stage} rows; prepare it again")
    try:
        return _checked(stored, stage, str(path))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as problem:
        raise UsageError(f"{path} is damaged ({problem}); prepare it again") from None


def _mapped(path: str, stage: str, shared: dict[str, Any]) -> FlatRows:
    rows = from_stored(torch.load(path, weights_only=True, mmap=True, map_location="cpu"), stage, Path(path))
    rows.share(shared)
    return rows


def _checked(stored: dict[str, Any], stage: str, path: str) -> FlatRows:
    fields = [*FIELDS[stage], *(["differ_at"] if stage == "preference" else [])]
    numbers = {name: _tensor(stored["numbers"][name], NUMBERS[name], name) for name in fields if name in NUMBERS}
    ragged = {}
    for name in [*(name for name in fields if name not in (*NUMBERS, "columns", "messages")), REST]:
        dtype = torch.uint8 if name == REST else torch.bool if name.endswith("mask") else torch.int32
        values, offsets = stored["ragged"][name]
        ragged[name] = Ragged(_tensor(values, dtype, name), _tensor(offsets, torch.int64, f"offsets of {name}"))
        if not _are_offsets(offsets, len(values)):
            raise ValueError(f"offsets of {name}")
    rest = ragged.pop(REST)
    facts, digest = dict(stored["facts"]), stored["facts"]["digest"]
    smallest, largest = map(int, facts["ids"])
    columns = {str(name): int(count) for name, count in facts["columns"].items()}
    rows = FlatRows(
        stage, numbers, ragged, rest, Facts(smallest, largest, int(facts["counted"]), columns), digest, path
    )
    check_flat(rows, rest.offsets)
    return rows


def _tensor(value: Any, dtype: torch.dtype, name: str) -> Tensor:
    is_flat = type(value) is Tensor and value.layout == torch.strided and value.device.type == "cpu"
    if not is_flat or value.dtype != dtype or value.dim() != 1 or not value.is_contiguous():
        raise ValueError(f"{name} is not a flat tensor of {dtype}")
    return cast(Tensor, value)


def _are_offsets(offsets: Tensor, end: int) -> bool:
    return len(offsets) > 0 and int(offsets[0]) == 0 and int(offsets[-1]) == end and bool((offsets.diff() >= 0).all())


def check_flat(rows: FlatRows, rest: Tensor) -> None:
    """Raises: ValueError naming the field whose rows do not belong to the others. rest: offsets of the JSON."""
    count, lengths = len(rows), {name: rows.column(name) for name in rows.texts}
    tensors = {**rows.numbers, **{name: part.offsets[1:] for name, part in rows.ragged.items()}, REST: rest[1:]}
    for name, values in tensors.items():
        if len(values) != count:
            raise ValueError(f"{count} rows, {len(values)} of {name}")
    for name, tokens in lengths.items():
        prompts = rows.numbers.get("prompt_len", torch.zeros(1))
        fits = prompts == tokens if rows.stage == "prompts" else prompts < tokens
        if not (fits & (prompts >= 0) & (tokens > 0)).all():
            raise ValueError(f"lengths of {name}")
        mask = rows.ragged.get(name.replace("input_ids", "action_mask"))
        if mask is not None and mask is not rows.ragged[name] and not torch.equal(mask.lengths(), tokens - 1):
            raise ValueError(f"lengths of the mask of {name}")
    for name in SPANS:
        if name in rows.ragged:
            _check_spans(rows.ragged[name], lengths["input_ids"], name)


def _check_spans(spans: Ragged, lengths: Tensor, name: str) -> None:
    counts = spans.lengths()
    ends = spans.values.unflatten(0, (-1, 2)) if len(spans.values) % 2 == 0 else spans.values
    if ends.dim() != 2 or (counts % 2).any():
        raise ValueError(f"{name} are not spans")
    inside = ends[:, 1] <= torch.repeat_interleave(lengths, counts // 2)
    if not (inside & (ends[:, 0] >= 0) & (ends[:, 0] < ends[:, 1])).all():
        raise ValueError(f"spans of {name}")
