"""Packing: lists of rows become flat tensors, in memory or row by row into the file of a split (`flat.py`)."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.data import plain_json
from lightrlhf.data.flat import LAYOUT, NUMBERS, REST, Digest, Facts, FlatRows, Ragged, check_flat
from lightrlhf.data.schema import FIELDS, IGNORE_INDEX, BadRow, Column, Row, bad_row, check_columns, check_rows
from lightrlhf.storage.temporary import temporary_path
from lightrlhf.storage.writing import make_folder, save_tensors, writing

CHUNK = 1024  # rows that are checked and packed at once
SIDES = ("chosen_input_ids", "rejected_input_ids")


def pack(rows: Sequence[Any], stage: str, source: str = "", vocab_size: int | None = None) -> FlatRows:
    """Rows from a list of dicts, checked; in memory. source, vocab_size, and raises: as `check_rows`."""
    pieces = [
        pack_chunk(rows[first : first + CHUNK], stage, source, vocab_size, first)
        for first in range(0, len(rows), CHUNK)
    ]
    numbers = {name: torch.cat([piece.numbers[name] for piece in pieces]) for name in pieces[0].numbers}
    ragged = {}
    for name in pieces[0].ragged:
        lengths = torch.cat([piece.ragged[name].lengths() for piece in pieces])
        ragged[name] = Ragged(torch.cat([piece.ragged[name].values for piece in pieces]), offsets_of(lengths))
    facts = pieces[0].facts()
    for piece in pieces[1:]:
        facts = facts.merge(piece.facts())
    return FlatRows(stage, numbers, ragged, [rest for piece in pieces for rest in cast(list[Row], piece.rest)], facts)


def pack_chunk(
    rows: Sequence[Any], stage: str, source: str = "", vocab_size: int | None = None, first: int = 0
) -> FlatRows:
    """As `pack`, in tensors of the number of tokens; first: number of the first of these rows in the split."""
    columns = check_rows(rows, stage, source, vocab_size, first)
    names = FIELDS[stage]
    numbers = {
        name: torch.tensor([row[name] for row in rows], dtype=NUMBERS[name]) for name in names if name in NUMBERS
    }
    if stage == "preference":
        numbers["differ_at"] = _differ_at(columns["chosen_input_ids"], columns["rejected_input_ids"])
    ragged = {}
    for name, column in columns.items():
        if name == "targets":
            ragged[name] = _counted_spans(column)
        else:
            values = column.values if column.values.dtype == torch.bool else column.values.int()
            ragged[name] = Ragged(values, offsets_of(column.lengths))
    if stage == "dialogue":
        spans = [[int(place) for span in row["turn_spans"] for place in span] for row in rows]
        flat = torch.tensor([place for one in spans for place in one], dtype=torch.int32)
        ragged["turn_spans"] = Ragged(flat, offsets_of(torch.tensor([len(one) for one in spans])))
    rest = [{name: value for name, value in row.items() if name not in numbers and name not in ragged} for row in rows]
    return FlatRows(stage, numbers, ragged, rest, _facts(ragged, rest))


def _facts(ragged: Mapping[str, Ragged], rest: Iterable[Row]) -> Facts:
    ids = [part.values for name, part in ragged.items() if name.endswith("input_ids")]
    counted = ragged["targets"].values.clamp(min=1) if "targets" in ragged else torch.zeros(0)  # not the first
    columns: dict[str, int] = {}
    for row in rest:
        for name, value in row.get("columns", {}).items():
            columns[name] = columns.get(name, 0) + (isinstance(value, int | float) and math.isfinite(value))
    bounds = min(int(one.min()) for one in ids), max(int(one.max()) for one in ids)
    return Facts(*bounds, int((counted[1::2] - counted[::2]).sum()), columns)


def offsets_of(lengths: Tensor) -> Tensor:
    """Offsets (N+1,) of rows by their lengths (N,)."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.long().cumsum(0)])


def _counted_spans(targets: Column) -> Ragged:
    """[start, end) of the tokens with a target, without a copy of the ids."""
    counted, ends = targets.values != IGNORE_INDEX, targets.lengths.cumsum(0)
    before, after = counted.roll(1), counted.roll(-1)
    before[ends - targets.lengths], after[ends - 1] = False, False
    first, last = counted & ~before, counted & ~after
    places = targets.places()
    spans = torch.stack([places[first], places[last] + 1], 1).flatten()
    return Ragged(spans.int(), offsets_of(2 * torch.bincount(targets.rows()[first], minlength=len(targets.lengths))))


def _differ_at(one: Column, other: Column) -> Tensor:
    """The first place in which two texts differ, (N,) int32; of equal ones their length."""
    both = torch.minimum(one.lengths, other.lengths)
    common = Column(torch.arange(int(both.sum())), both)
    rows, places = common.rows(), common.places()

    def ids(column: Column) -> Tensor:
        return column.values[(column.lengths.cumsum(0) - column.lengths)[rows] + places].long()

    differs = ids(one) != ids(other)
    first = both.clone()
    first.scatter_reduce_(0, rows[differs], places[differs], "amin")
    return first.int()


def _encoded(rest: Sequence[Row], source: str, first: int) -> list[bytes]:
    """JSON of the other fields of rows. Raises: UsageError naming a row that holds anything but plain values."""
    encoded = []
    for index, row in enumerate(rest):
        try:
            encoded.append(plain_json.encode(row) if row else b"")
        except (TypeError, ValueError, RecursionError) as problem:
            raise bad_row(BadRow(index, f"cannot be written ({problem})"), source, first) from None
    return encoded


# ---------------------------------------------------------------------------------------------------------- writing
def write_rows(path: Path, stage: str, rows: Iterable[Row]) -> None:
    """Write the file of a split. Raises: as `FlatWriter`."""
    with FlatWriter(path, stage) as file:
        file.extend(rows)


class FlatWriter:
    """Write the file of a split row by row, in constant memory; it appears whole as the `with` block ends.

        with FlatWriter(Path("data/mine/finetune_train.pt"), "finetune") as file:
            file.append({"prompt_len": 2, "input_ids": [5, 6, 7], "targets": [-100, -100, 7]})

    Rows are checked as `check_rows` does. Values wait in raw files of a hidden folder beside `path`, which goes with
    the block; after an error, an interrupt or a kill the earlier file is as it was.
    Raises: UsageError naming a bad row, or the file if it would be empty; RunFailure when the file cannot be written.
    """

    def __init__(self, path: Path, stage: str, vocab_size: int | None = None) -> None:
        self.path, self.stage, self.vocab_size = path, stage, vocab_size
        self.count = 0  # rows so far
        self._waiting: list[Any] = []
        self._facts: Facts | None = None
        self._digest = Digest()
        self._types: dict[str, torch.dtype] = {}
        self._ends: dict[str, int] = {}  # values so far, by ragged field
        self._files: dict[str, BinaryIO] = {}
        self._closing = ExitStack()

    def __enter__(self) -> FlatWriter:
        with writing(self.path):
            make_folder(self.path.parent)
            self._folder = temporary_path(self.path)
            self._folder.mkdir()
        self._closing.callback(shutil.rmtree, self._folder, ignore_errors=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with writing(self.path), self._closing:  # closing a file may fail again on a full disk
            if kind is None:
                self._finish()

    def append(self, row: Row) -> None:
        """Add a row."""
        self._waiting.append(row)
        self.count += 1
        if len(self._waiting) >= CHUNK:
            self._flush()

    def extend(self, rows: Iterable[Row]) -> None:
        """Add rows."""
        for row in rows:
            self.append(row)

    def _flush(self) -> None:
        first, source = self.count - len(self._waiting), str(self.path)
        rows = pack_chunk(self._waiting, self.stage, source, self.vocab_size, first)
        rest = _encoded(cast(list[Row], rows.rest), source, first)
        self._waiting = []
        self._write(rows, rest)

    def extend_flat(
        self,
        numbers: dict[str, Tensor],
        ragged: dict[str, Ragged],
        rest: Sequence[bytes],
        columns: Mapping[int, Row],
    ) -> None:
        """Add rows that are flat already, in the tensors of `flat.FlatRows`.

        rest: JSON of the other fields of each row (`plain_json`); columns: of the rows that have any, by their number
        among these. Raises: UsageError where a file of such rows would be refused.
        """
        if self._waiting:
            self._flush()
        if self.stage == "preference":
            sides = (Column(ragged[name].values, ragged[name].lengths()) for name in SIDES)
            numbers = numbers | {"differ_at": _differ_at(*sides)}
        rows = FlatRows(self.stage, numbers, ragged, [], _facts(ragged, [{"columns": one} for one in columns.values()]))
        try:
            for index, one in columns.items():
                check_columns(one, index, is_stored=True)
        except BadRow as bad:
            raise bad_row(bad, str(self.path), self.count) from None
        try:
            check_flat(rows, offsets_of(torch.tensor([len(one) for one in rest])))
            if rows.facts().smallest < 0:
                raise ValueError("token ids below 0")
        except ValueError as problem:
            raise UsageError(f"{self.path}: rows from {self.count} on cannot be written ({problem})") from None
        self.count += len(rows)
        self._write(rows, rest)

    def _write(self, rows: FlatRows, rest: Sequence[bytes]) -> None:
        self._facts = rows.facts() if self._facts is None else self._facts.merge(rows.facts())
        self._digest.update(rows, rest)
        with writing(self.path):
            for name, values in rows.numbers.items():
                self._spool(name, values)
            for name, part in rows.ragged.items():
                self._spool_ragged(name, part)
            flat = torch.frombuffer(bytearray(b"".join(rest)) or bytearray(1), dtype=torch.uint8)
            lengths = torch.tensor([len(one) for one in rest])
            self._spool_ragged(REST, Ragged(flat[: int(lengths.sum())], offsets_of(lengths)))

    def _spool_ragged(self, name: str, part: Ragged) -> None:
        if name not in self._ends:
            self._ends[name] = 0
            self._spool(f"{name} offsets", part.offsets[:1])
        self._spool(f"{name} offsets", part.offsets[1:] + self._ends[name])
        self._spool(f"{name} values", part.values)
        self._ends[name] += len(part.values)

    def _spool(self, name: str, values: Tensor) -> None:
        if name not in self._files:
            self._files[name] = self._closing.enter_context((self._folder / name).open("wb"))
            self._types[name] = values.dtype
        self._files[name].write(values.contiguous().numpy().tobytes())

    def _mapped(self, name: str) -> Tensor:
        """A spooled tensor, mapped from its file."""
        size, dtype = self._files[name].tell() // self._types[name].itemsize, self._types[name]
        if not size:
            return torch.empty(0, dtype=dtype)
        return torch.from_file(str(self._folder / name), shared=False, size=size, dtype=dtype)

    def _finish(self) -> None:
        if self._waiting:
            self._flush()
        if self._facts is None:
            raise UsageError(f"{self.path}: there are no rows to write")
        with writing(self.path):
            for file in self._files.values():
                file.flush()
        ragged = {name: (self._mapped(f"{name} values"), self._mapped(f"{name} offsets")) for name in self._ends}
        numbers = {name: self._mapped(name) for name in self._types if name in NUMBERS}
        stored = {"layout": LAYOUT, "stage": self.stage, "numbers": numbers, "ragged": ragged}
        smallest, largest, counted, columns = self._facts
        facts = {"ids": [smallest, largest], "counted": counted, "columns": columns}
        save_tensors(self.path, stored | {"facts": facts | {"digest": self._digest.hexdigest()}})
