"""Work in progress of a preparation: encoded rows on disk, one after the other, in a few files that are only appended.

Each example is a record of numbers (`RECORD`); its ids and spans, its other values and its source lie in two further
files. So memory holds a chunk of rows, and a few bytes a row at the end. All files are flushed every few seconds,
and their sizes noted behind them in a journal: a preparation that was killed goes on from the last note.

    index.bin     a RECORD an example          ids.bin       int32: ids of each side, then spans
    texts.bin     JSON of values and sources   kinds.jsonl   formats and notes that occur, once each
    dropped.jsonl a line a dropped row         journal.jsonl what the files are of; then sizes, and rows read

Left out: more than one writer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datasets_prep.encoding import STAGES, Dropped, Example, Place
from lightrlhf.data import plain_json
from lightrlhf.data.splits import SPLITS
from lightrlhf.storage.temporary import remove
from lightrlhf.storage.writing import make_folder

FOLDER = ".preparing"  # in the destination
SECONDS = 5  # between notes in the journal
FILES = ("index.bin", "ids.bin", "texts.bin", "kinds.jsonl", "dropped.jsonl")
LABELS = (None, False, True)
RECORD = np.dtype(
    [
        *((name, "u1") for name in ("stage", "split", "cut", "label")),  # places in STAGES, SPLITS, LABELS
        ("columns", "u1"),  # whether it has any
        *((name, "u4") for name in ("kind", "prompt_len", "first", "second", "spans")),  # lengths of sides; 2 a span
        *((name, "u8") for name in ("key", "group", "ids", "values", "source")),  # hashes; places in the files
        *((name, "u4") for name in ("values_len", "source_len")),
    ]
)
COLUMNS = RECORD.names or ()
_STAGES, _SPLITS = ({name: number for number, name in enumerate(names)} for names in (STAGES, SPLITS))
NO_COLUMNS = plain_json.encode({"columns": {}})


class Packed(NamedTuple):
    """A chunk of encoded rows in flat arrays, in which it crosses the border of a process."""

    records: np.ndarray  # (examples,) RECORD, with places within this chunk
    ids: np.ndarray  # int32
    texts: bytes
    kinds: list[tuple[str | None, tuple[str, ...]]]  # format and notes, by the number of a record
    dropped: list[Dropped]


class Part(NamedTuple):
    """Some examples of one stage in flat arrays."""

    records: np.ndarray  # (N,) RECORD
    sides: list[np.ndarray]  # int32: all ids of each side, one example after the other
    spans: np.ndarray  # int32: [start, end) of each response
    rest: list[bytes]  # JSON of the other fields of each row (`plain_json`)


def pack(examples: list[Example], dropped: list[Dropped]) -> Packed:
    """Pack examples in flat arrays; ids that several stages share are there once."""
    numbers: list[tuple[int, ...]] = []
    arrays: list[np.ndarray] = []
    texts: list[bytes] = []
    size = text_size = 0
    kinds: dict[tuple[str | None, tuple[str, ...]], int] = {}
    places: dict[tuple[int, tuple[int, ...]], int] = {}  # of ids and spans, by the array, which lives as long
    source: tuple[Example, int, int] | None = None
    for e in examples:
        first, second = e.ids[0], e.ids[1] if len(e.ids) > 1 else None
        spans = tuple([place for span in e.spans for place in span])
        start = places.get((id(first), spans)) if second is None else None
        if start is None:
            places[id(first), spans] = start = size
            arrays += [first, *([] if second is None else [second]), *([np.array(spans, np.int32)] if spans else [])]
            size += len(first) + (0 if second is None else len(second)) + len(spans)
        if source is None or source[0].place.source != e.place.source or source[0].row is not e.row:
            text = json.dumps([e.place.source, e.row], default=str).encode("utf-8", "surrogatepass")
            source = (e, text_size, len(text))
            texts.append(text)
            text_size += len(text)
        rest = _rest_of(e)
        if rest:
            texts.append(rest)
        numbers.append(
            (
                _STAGES[e.stage], _SPLITS[e.place.split], e.cut, LABELS.index(e.label),
                bool(e.columns or (e.extra and e.stage != "dialogue")),
                kinds.setdefault((e.read_as, e.notes), len(kinds)),
                e.prompt_len, len(first), 0 if second is None else len(second), len(spans),
                e.key, e.place.group, start, text_size, source[1], len(rest), source[2],
            )
        )  # fmt: skip
        text_size += len(rest)
    table = np.array(numbers, dtype=np.uint64).reshape(len(numbers), len(COLUMNS))
    records = np.empty(len(numbers), dtype=RECORD)
    for place, name in enumerate(COLUMNS):
        records[name] = table[:, place]
    flat = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
    return Packed(records, flat, b"".join(texts), list(kinds), dropped)


def _rest_of(e: Example) -> bytes:
    """JSON of the fields of an example's row that are no numbers."""
    if e.stage == "finetune":
        return b""
    if e.stage == "dialogue":
        return plain_json.encode({"messages": e.extra} | ({"columns": e.columns} if e.columns else {}))
    return plain_json.encode({"columns": e.extra}) if e.extra else b"" if e.stage == "preference" else NO_COLUMNS


class Spool:
    """The files of a preparation, in `folder`.

    about: what they are of; a folder that was begun of anything else is begun anew. None: always anew.
    """

    def __init__(self, folder: Path, about: dict[str, Any] | None) -> None:
        self.folder, self.rows = folder, 0  # read so far, dropped ones too
        head = json.dumps(about, sort_keys=True, default=str)
        begun, noted = self._begun()
        self.was_other = begun not in ("", head)  # whether another preparation had been begun
        if about is None or begun != head or noted is None:
            noted = None
            remove(folder)
            make_folder(folder)
            self._journal = (folder / "journal.jsonl").open("a", encoding="utf-8")
            self._journal.write(head + "\n")
        else:
            self._journal = (folder / "journal.jsonl").open("a", encoding="utf-8")
            self.rows = noted["rows"]
        self._files = {name: (folder / name).open("ab") for name in FILES}
        for name, file in self._files.items():
            file.truncate(noted["sizes"][name] if noted else 0)
            file.seek(0, os.SEEK_END)
        lines = (folder / "kinds.jsonl").read_text(encoding="utf-8").splitlines()
        self.kinds = {(name, tuple(notes)): number for number, (name, notes) in enumerate(map(json.loads, lines))}
        self._last = time.monotonic()

    def _begun(self) -> tuple[str, dict[str, Any] | None]:
        """What an earlier preparation was of, "" without one, and the last note of it."""
        try:
            first, *notes = (self.folder / "journal.jsonl").read_text(encoding="utf-8").split("\n")
            last = json.loads(notes[-2]) if len(notes) > 1 else None  # "" is behind a whole line
            fits = last and all((self.folder / n).stat().st_size >= size for n, size in last["sizes"].items())
        except (OSError, ValueError):
            return "", None
        return first, last if fits else None

    def append(self, packed: Packed, rows: int) -> None:
        """Add what some rows of the source gave. Raises: OSError."""
        index, numbers = packed.records.copy(), np.zeros(len(packed.kinds) + 1, dtype=np.uint32)
        for place, kind in enumerate(packed.kinds):
            if kind not in self.kinds:
                self.kinds[kind] = len(self.kinds)
                self._files["kinds.jsonl"].write(json.dumps(kind).encode() + b"\n")
            numbers[place] = self.kinds[kind]
        index["kind"] = numbers[index["kind"]]
        index["ids"] += np.uint64(self._files["ids.bin"].tell() // 4)
        for name in ("values", "source"):
            index[name] += np.uint64(self._files["texts.bin"].tell())
        lines = (json.dumps([d.reason, d.stage, d.source, d.row], default=str) + "\n" for d in packed.dropped)
        contents = index.tobytes(), packed.ids.tobytes(), packed.texts, b"", "".join(lines).encode()
        for file, content in zip(self._files.values(), contents):
            file.write(content)
        self.rows += rows
        if time.monotonic() - self._last >= SECONDS:
            self.note()

    def note(self) -> None:
        """Flush what was added, and note it in the journal. Raises: OSError."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        self._journal.write(json.dumps({"rows": self.rows, "sizes": sizes}) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._last = time.monotonic()

    def close(self) -> None:
        """Close the files, which stay."""
        for file in (*self._files.values(), self._journal):
            file.close()

    def remove(self) -> None:
        """Close and remove the files."""
        with suppress(OSError):  # of a full disk, which cannot take what is left to write
            self.close()
        remove(self.folder)


class Encoded:
    """What a spool holds: examples by their number, mapped from its files."""

    def __init__(self, spool: Spool) -> None:
        self.folder = spool.folder
        self.index = self._mapped("index.bin", RECORD)
        self._ids, self._texts = self._mapped("ids.bin", np.dtype(np.int32)), self._mapped("texts.bin", np.dtype("u1"))
        self.kinds = list(spool.kinds)

    def _mapped(self, name: str, dtype: np.dtype) -> np.ndarray:
        path = self.folder / name
        if not path.stat().st_size:
            return np.empty(0, dtype=dtype)
        return np.asarray(np.memmap(path, dtype, mode="c"))  # slices of a memmap itself cost several times as much

    def _text(self, start: int, length: int) -> bytes:
        return self._texts[start : start + length].tobytes()

    def example(self, number: int) -> Example:
        """An example, with ids that are views of the file."""
        (
            stage,
            split,
            cut,
            label,
            _,
            kind,
            prompt_len,
            first,
            second,
            spans,
            key,
            group,
            start,
            values,
            source,
            *lengths,
        ) = self.index[number].item()
        ends = start + first, start + first + second, start + first + second + spans
        sides = [self._ids[start : ends[0]], *([self._ids[ends[0] : ends[1]]] if second else [])]
        flat = self._ids[ends[1] : ends[2]].tolist()
        rest = plain_json.decode(self._text(values, lengths[0])) if lengths[0] else {}
        name = STAGES[stage]
        columns = rest.get("columns", {}) if name == "dialogue" else {}
        extra = None if name == "finetune" else rest["messages"] if name == "dialogue" else rest.get("columns", {})
        read_as, notes = self.kinds[kind]
        place = Place(group, SPLITS[split], frozenset({name}), self.source(number)[0])
        pairs = list(zip(flat[::2], flat[1::2]))
        return Example(
            name, prompt_len, place, sides, pairs, bool(cut), key, extra, columns, LABELS[label], notes, read_as
        )

    def part(self, numbers: Sequence[int] | np.ndarray) -> Part:
        """Some examples of one stage."""
        records = self.index[numbers]
        starts, first, second, spans = (records[n].astype(np.int64) for n in ("ids", "first", "second", "spans"))
        sides = [_gathered(self._ids, starts, first)]
        if second.any():
            sides.append(_gathered(self._ids, starts + first, second))
        texts = self._texts.data
        rest = [bytes(texts[a : a + n]) for a, n in zip(records["values"].tolist(), records["values_len"].tolist())]
        return Part(records, sides, _gathered(self._ids, starts + first + second, spans), rest)

    def source(self, number: int) -> tuple[str, Any]:
        """The source of an example, and its raw row where that is kept."""
        record = self.index[number]
        text = self._text(int(record["source"]), int(record["source_len"]))
        name, row = json.loads(text.decode("utf-8", "surrogatepass"))
        return name, row

    def dropped(self) -> Iterator[Dropped]:
        """Rows that were dropped as they were read or encoded."""
        with (self.folder / "dropped.jsonl").open(encoding="utf-8") as file:
            for line in file:
                reason, stage, source, row = json.loads(line)
                yield Dropped(reason, source, stage, row)


def _gathered(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Values at [start, start + length) of each row, one row after the other."""
    return np.concatenate([values[a:b] for a, b in zip(starts.tolist(), (starts + lengths).tolist())])


def batches(numbers: np.ndarray, size: int = 1000) -> Iterable[list[int]]:
    """Numbers, some at a time."""
    return (numbers[start : start + size].tolist() for start in range(0, len(numbers), size))
