"""Raw rows of a dataset: from a hub id, a local file or a folder of files, one at a time.

| files | read by |
|---|---|
| `.jsonl`, `.json` (one object a line, one array of objects, or `{"data": [...]}`) | Python's `json` |
| `.csv`, `.tsv` (every cell stays text) | Python's `csv` |
| `.parquet`, `.arrow`, folders of `save_to_disk`, hub ids | `datasets`, see `tables` |

Text files may be gzipped (`.gz`). They are not read by `datasets`, because its readers change values without a word:
from JSON, "2024-05-01" becomes a timestamp and 1 becomes 1.0 beside 1.5; from CSV, 007 becomes 7, NA becomes null, and
a row with one cell too many loses its first one. Files are streamed, so they may be of any size. A damaged file (a
truncated gzip stream, bytes that are not UTF-8, a line that is not a JSON object, a duplicate key, a row of too many
cells) is refused with its name and the line, and text files are read to their end before any other work (`check`). A
line of JSON lines and a row of too many or too few cells may be skipped; after other damage nothing can be trusted. The
contents of rows are checked later, row by row.

Nulls with which a table fills its structs are left out (`tables`); those in JSON that was written from a table are
found by their contents (`nulls`).

Left out: `.txt`.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from datasets_prep.tables import read_hub, read_saved, read_table, repeated
from lightrlhf.cli.errors import RunFailure, UsageError

TEXT = (".jsonl", ".json", ".csv", ".tsv")
SUFFIXES = (*TEXT, *(f"{suffix}.gz" for suffix in TEXT), ".parquet", ".arrow")
SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"} | {
    "dev": "validation",
    "eval": "validation",
    "test": "test",
}
NO_ROWS = ("dataset_info.json", "state.json", "dataset_infos.json", "dataset_dict.json")  # of `datasets` itself
PIECE = 1 << 20  # characters of a JSON array at a time
DATA = re.compile(rb'\{\s*"data"\s*:\s*\[\s*[{\]]')


class _BadLine(Exception):
    """A damaged line, with its number if it does not follow the last row.

    kind: what the report counts where such lines are skipped; None where nothing after it can be trusted.
    """

    def __init__(self, words: str, line: int | None = None, kind: str | None = None) -> None:
        super().__init__(words)
        self.line, self.kind = line, kind


Rows = Iterator[tuple[str, dict[str, Any] | _BadLine]]  # (source, values)
Parsed = Iterator[tuple[int, dict[str, Any] | _BadLine]]  # (line, values)


@dataclass(frozen=True)
class Raw:
    """A raw row and its source."""

    values: dict[str, Any]
    source: str  # file:line, or hub id/split:index
    split: str | None  # the split of its file, None if the source has only one
    broken: str | None = None  # the reason why a skipped line has no values


class Source:
    """Iterable over the raw rows of `name`, from the first row each time.

    `given` are the held-out splits of the source, which need not be carved out of train.
    skip_bad_lines: give lines that cannot be read as broken rows instead of raising RunFailure; None: a program without
        the flag.
    Raises: UsageError if there is no such file, folder or hub dataset.
    """

    def __init__(
        self, name: str, config: str | None = None, revision: str | None = None, skip_bad_lines: bool | None = None
    ) -> None:
        self.name = name
        self._texts: list[Callable[[], Rows]] = []
        path = Path(name).expanduser()
        self._parts: list[tuple[str | None, Callable[[], Rows]]]
        if path.exists():
            files = [(file, partial(_read, file, skip_bad_lines)) for file in _files_of(path)]
            self._parts = [(_split_of(file, root=path), read) for file, read in files]
            self._texts = [read for file, read in files if file.name.removesuffix(".gz").endswith(TEXT)]
        elif name.endswith(SUFFIXES) or name.startswith((".", "/", "~")):
            raise UsageError(f"--dataset_name {name}: no such file or folder")
        else:
            from_hub = read_hub(name, config, revision)
            self._parts = [(SPLIT_NAMES.get(split.split("_")[0], "train"), rows) for split, rows in from_hub]
        splits = {split for split, _ in self._parts}
        alone = len(splits) == 1
        self._parts = [(None if alone else split, read) for split, read in self._parts]
        self.given = frozenset(split for split in splits if split not in (None, "train") and not alone)

    def __iter__(self) -> Iterator[Raw]:
        for split, read in self._parts:
            for source, values in read():
                if isinstance(values, _BadLine):
                    yield Raw({}, source, split, values.kind)
                else:
                    yield Raw(values, source, split)

    def check(self, num_samples: int | None = None) -> None:
        """Read all text files, or a limited number of rows. Raises: RunFailure for a damaged file."""
        rows = (row for read in self._texts for row in read())
        deque(islice(rows, num_samples), maxlen=0)


# -------------------------------------------------------------------------------------------------------------- files
def _files_of(path: Path) -> list[Path]:
    """The files of a folder, with a folder of `save_to_disk` in place of its files."""
    kinds = ", ".join(SUFFIXES)
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise UsageError(f"--dataset_name {path}: its name must end in {kinds}")
        return [path]
    found = (file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
    shown = (file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))
    places = {file.parent if _is_saved(file.parent) else file for file in shown}
    files = sorted(place for place in places if place.name not in NO_ROWS)
    if not files:
        raise UsageError(f"--dataset_name {path}: the folder has no file that ends in {kinds}")
    return files


def _is_saved(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))


def _split_of(file: Path, root: Path) -> str | None:
    """The split named at the start of the file name or of a folder above it."""
    for part in reversed(file.relative_to(root).parts if file != root else (file.name,)):
        word = part.replace("_", "-").replace(".", "-").split("-")[0].lower()
        if word in SPLIT_NAMES:
            return SPLIT_NAMES[word]
    return None


def _read(file: Path, skip_bad_lines: bool | None) -> Rows:
    if file.is_dir():
        return read_saved(file)
    if file.name.endswith((".parquet", ".arrow")):
        return read_table(file)
    parse = _csv_rows if file.name.removesuffix(".gz").endswith((".csv", ".tsv")) else _json_rows
    return _read_text(file, parse, skip_bad_lines)


def _read_text(file: Path, parse: Callable[[IO[bytes], str], Parsed], skip_bad_lines: bool | None) -> Rows:
    """Rows of `parse(stream, name)`, which yields (line, values). Raises: RunFailure with file and line."""
    line = 0
    try:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
            for line, values in parse(cast(IO[bytes], stream), file.name):
                if isinstance(values, _BadLine) and not skip_bad_lines:
                    hint = "" if skip_bad_lines is None else "; --skip_bad_lines True leaves such lines out"
                    raise _BadLine(f"{values}{hint}", line)
                yield f"{file}:{line}", values
    except _BadLine as problem:
        raise RunFailure(f"{file}:{problem.line or line + 1}: {problem}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise RunFailure(f"{file}:{line + 1}: the gzip stream is damaged or truncated ({problem})") from None
    except OSError as problem:
        raise RunFailure(f"{file}: cannot be read ({problem.strerror or problem})") from None


# --------------------------------------------------------------------------------------------------------------- JSON
def _json_rows(stream: IO[bytes], name: str) -> Parsed:
    start = cast(io.BufferedReader, stream).peek(4096)[:4096].removeprefix(codecs.BOM_UTF8).lstrip()
    if start.startswith(b"["):
        return _array(stream, r"\s*\[", "]")
    if DATA.match(start) and not _is_first_of_lines(stream):
        return _array(stream, r'\s*\{\s*"data"\s*:\s*\[', "]}")
    return _lines(stream)


def _is_first_of_lines(stream: IO[bytes]) -> bool:
    """Whether the first line that is not blank may be an object of its own, with others below it."""
    full = (line for line in stream if not line.isspace())
    several = next(full, b"").rstrip().endswith(b"}") and next(full, None) is not None
    stream.seek(0)
    return several


def _lines(stream: IO[bytes]) -> Parsed:
    for number, line in enumerate(stream, start=1):
        if line.isspace():
            continue
        values: dict[str, Any] | _BadLine
        try:
            values = _line(line, number)
        except _BadLine as problem:
            values = problem
        yield number, values


def _line(line: bytes, number: int) -> dict[str, Any]:
    """The object of a line. Raises: _BadLine."""
    try:
        values = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique)
    except UnicodeDecodeError as problem:
        raise _BadLine(_not_utf8(problem.start), number, "bad_line (not UTF-8)") from None
    except _BadLine as problem:
        raise _BadLine(str(problem), number, "bad_line (a key occurs twice)") from None
    except (ValueError, RecursionError) as problem:
        words = f"not a JSON object ({str(problem)[:80]}); one object a line is expected"
        raise _BadLine(words, number, "bad_line (not JSON)") from None
    try:
        return _object(values, "one object a line is expected", number)
    except _BadLine as problem:
        raise _BadLine(str(problem), number, "bad_line (no JSON object)") from None


def _array(stream: IO[bytes], opening: str, closing: str) -> Parsed:
    """Elements of an array of objects, of which some pieces are in memory; `opening` is a regular expression."""
    decode, parse = codecs.getincrementaldecoder("utf-8-sig")().decode, json.JSONDecoder(object_pairs_hook=_unique)
    text, at, line = "", 0, 1

    def read() -> bool:
        """Read as much again as is there, so that a long object costs linear time; False at the end of the file."""
        nonlocal text, at
        piece = stream.read(max(PIECE, len(text) - at))
        try:
            text, at = text[at:] + decode(piece, final=not piece), 0
        except UnicodeDecodeError as problem:
            where = line + text.count("\n", at) + problem.object.count(b"\n", 0, problem.start)
            raise _BadLine("bytes that are not UTF-8; convert the file to UTF-8", where) from None
        return bool(piece)

    def move(to: int) -> None:
        nonlocal at, line
        line, at = line + text.count("\n", at, to), to

    def seen() -> str:
        """The next character that is not blank, "" at the end of the file."""
        while True:
            move(_match(r"\s*", text, at))
            if at < len(text) or not read():
                return text[at : at + 1]

    while not re.match(opening, text) and read():
        pass
    move(_match(opening, text))
    first = True
    while seen() != "]":
        if not first:
            if seen() != ",":
                raise _BadLine("the array of rows is not closed, or its rows are not separated by commas", line)
            move(at + 1)
            seen()
        first = False
        while True:
            try:
                values, end = parse.raw_decode(text, at)
                break
            except _BadLine as problem:
                raise _BadLine(f"{problem} in the object that begins here", line) from None
            except json.JSONDecodeError as problem:  # perhaps only because the object goes on
                where = line + text.count("\n", at, problem.pos)
                if not read():
                    raise _BadLine(f"not JSON ({problem.msg})", where) from None
            except (ValueError, RecursionError) as problem:
                raise _BadLine(f"not JSON ({str(problem)[:80]})", line) from None
        yield line, _object(values, "an array of objects is expected", line)
        move(end)
    for mark in closing:
        if seen() != mark:
            raise _BadLine(f"{mark} is expected behind the array of rows", line)
        move(at + 1)
    if seen():
        raise _BadLine("text behind the end of the array of rows", line)


def _match(pattern: str, text: str, at: int = 0) -> int:
    """Where the match of a pattern that does match ends."""
    return cast(re.Match[str], re.compile(pattern).match(text, at)).end()


def _object(values: Any, expected: str, line: int) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise _BadLine(f"a JSON {type(values).__name__}; {expected}", line)
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _BadLine(f"the key {repeated([name for name, _ in pairs])!r} occurs twice")
    return values


def _not_utf8(start: int) -> str:
    return f"byte {start + 1} is not UTF-8; convert the file to UTF-8"


# ---------------------------------------------------------------------------------------------------------------- CSV
def _csv_rows(stream: IO[bytes], name: str) -> Parsed:
    """Rows of text by the names in the first one; a `.csv` without any comma there is separated by semicolons."""
    csv.field_size_limit(sys.maxsize)
    head = _decoded(stream)
    first = next(head, "")
    separator = "\t" if ".tsv" in name else ";" if ";" in first and "," not in first else ","
    rows = csv.reader(_chain(first, head), delimiter=separator, strict=True)
    names: list[str] | None = None
    line = 1
    while True:
        try:
            cells = next(rows, None)
        except csv.Error as problem:
            raise _BadLine(f"not a row of separated values ({problem}); is a quote left open?", line) from None
        if cells is None:
            return
        if names is None:
            names = cells
            if (twice := repeated(names)) is not None:
                raise _BadLine(f"the column {twice!r} occurs twice", line)
        elif cells:
            if len(cells) == len(names):
                yield line, dict(zip(names, cells))
            else:
                words = f"{len(cells)} cells for {len(names)} columns; quote cells with a {separator!r}"
                yield line, _BadLine(words, line, "bad_line (too many or too few cells)")
        line = rows.line_num + 1


def _decoded(stream: IO[bytes]) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as problem:
            raise _BadLine(_not_utf8(problem.start), number) from None


def _chain(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest
