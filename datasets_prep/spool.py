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
from collections.abc import Iterable, Iterator
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
        *((name, "u4") for name in ("kind", "prompt_len", "first", "second", "spans")),  # lengths of sides; 2 a span
        *((name, "u8") for name in ("key", "group", "ids", "values", "source")),  # hashes; places in the files
        *((name, "u4") for name in ("values_len", "source_len")),
    ]
)


class Packed(NamedTuple):
    """A chunk of encoded rows in flat arrays, in which it crosses the border of a process."""

    records: np.ndarray  # (examples,) RECORD, with places within this chunk
    ids: np.ndarray  # int32
    texts: bytes
    kinds: list[tuple[str | None, tuple[str, ...]]]  # format and notes, by the number of a record
    dropped: list[Dropped]


def pack(examples: list[Example], dropped: list[Dropped]) -> Packed:
    """Pack examples in flat arrays; ids that several stages share are there once."""
    records, arrays, size, texts, text_size = [], [], 0, [], 0
    kinds: dict[tuple[str | None, tuple[str, ...]], int] = {}
    places: dict[tuple[int, int], int] = {}  # of ids and spans by their address, which lives as long as the examples
    source: tuple[Example, int, int] | None = None

    def add(text: bytes) -> tuple[int, int]:
        nonlocal text_size
        texts.append(text)
        text_size += len(text)
        return text_size - len(text), len(text)

    for e in examples:
        spans = [place for span in e.spans for place in span]
        address = (e.ids[0].__array_interface__["data"][0], hash(tuple(spans)) if spans else len(e.ids[0]))
        if len(e.ids) > 1 or address not in places:
            parts = [*e.ids, np.array(spans, dtype=np.int32)]
            places[address], size = size, size + sum(map(len, parts))
            arrays += parts
        if source is None or source[0].place.source != e.place.source or source[0].row is not e.row:
            text = json.dumps([e.place.source, e.row], default=str)
            source = (e, *add(text.encode("utf-8", "surrogatepass")))
        values = add(plain_json.encode([e.extra, e.columns])) if e.extra or e.columns else (0, 0)
        numbers = STAGES.index(e.stage), SPLITS.index(e.place.split), e.cut, LABELS.index(e.label)
        lengths = e.prompt_len, len(e.ids[0]), len(e.ids[1]) if len(e.ids) > 1 else 0, len(spans)
        kind = kinds.setdefault((e.read_as, e.notes), len(kinds))
        where = places[address], values[0], source[1], values[1], source[2]
        records.append((*numbers, kind, *lengths, e.key, e.place.group, *where))
    flat = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32)
    return Packed(np.array(records, dtype=RECORD), flat, b"".join(texts), list(kinds), dropped)


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
        extra, columns = plain_json.decode(self._text(values, lengths[0])) if lengths[0] else (None, {})
        name = STAGES[stage]
        if extra is None and name != "finetune":
            extra = {}
        read_as, notes = self.kinds[kind]
        place = Place(group, SPLITS[split], frozenset({name}), self.source(number)[0])
        pairs = list(zip(flat[::2], flat[1::2]))
        return Example(
            name, prompt_len, place, sides, pairs, bool(cut), key, extra, columns, LABELS[label], notes, read_as
        )

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


def batches(numbers: np.ndarray, size: int = 1000) -> Iterable[list[int]]:
    """Numbers, some at a time."""
    return (numbers[start : start + size].tolist() for start in range(0, len(numbers), size))
