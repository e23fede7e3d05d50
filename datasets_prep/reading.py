"""Raw rows of a dataset: from a hub id, a local file or a folder of files, one at a time.

| files | read by |
|---|---|
| `.jsonl`, `.ndjson`, `.json` | `json_files` |
| `.csv`, `.tsv` (every cell stays text) | Python's `csv` |
| `.parquet`, `.arrow`, folders of `save_to_disk`, hub ids | `datasets`, see `tables` |

Text files may be compressed (gzip, bz2, xz, zstd). They are not read by `datasets`, because its readers change values
without a word: from JSON, "2024-05-01" becomes a timestamp and 1 becomes 1.0 beside 1.5; from CSV, 007 becomes 7, NA
becomes null, and a row with one cell too many loses its first one. Files are streamed, so they may be of any size. A
damaged file (a truncated stream, bytes that are not UTF-8, a line that is not a JSON object, a duplicate key, a row of
too many cells) is refused with its name and the line, and text files are read to their end before any other work
(`check`). A line of JSON lines and a row of too many or too few cells may be skipped; after other damage nothing can be
trusted. The contents of rows are checked later, row by row.

Nulls with which a table fills its structs are left out (`tables`); those in JSON that was written from a table are
found by their contents (`nulls`).

Left out: `.txt`.
"""

from __future__ import annotations

import csv
import lzma
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from datasets_prep.json_files import BadLine, Parsed, first_line_of, json_rows, not_utf8
from datasets_prep.tables import read_hub, read_saved, read_table, repeated
from lightrlhf.cli.errors import RunFailure, UsageError
from lightrlhf.storage.file_kinds import COMPRESSED, HEAD, check_is_data, foreign, head_of, open_bytes

TEXT = (".jsonl", ".json", ".csv", ".tsv", ".ndjson")
SUFFIXES = (*TEXT, *(suffix + end for suffix in TEXT for end in COMPRESSED), ".parquet", ".arrow")
KINDS = f'{", ".join(TEXT)} (also with {", ".join(COMPRESSED)}), .parquet or .arrow; of a text write {{"text": …}}'
SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"} | {
    "dev": "validation",
    "eval": "validation",
    "test": "test",
}
NO_ROWS = ("dataset_info.json", "state.json", "dataset_infos.json", "dataset_dict.json")  # of `datasets` itself
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, OSError)  # of compressed files
Rows = Iterator[tuple[str, dict[str, Any] | BadLine]]  # (source, values)


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
        self.version = (config, revision)
        self.paths: list[Path] = []
        self._texts: list[Callable[[], Rows]] = []
        path = Path(name).expanduser()
        self._parts: list[tuple[str | None, Callable[[], Rows]]]
        if path.exists():
            self.paths = _files_of(path)
            files = [(file, partial(_read, file, skip_bad_lines)) for file in self.paths]
            self._parts = [(_split_of(file, root=path), read) for file, read in files]
            self._texts = [read for file, read in files if not is_table(file)]
        elif name.lower().endswith(SUFFIXES) or name.startswith((".", "/", "~")):
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
                if isinstance(values, BadLine):
                    yield Raw({}, source, split, values.kind)
                else:
                    yield Raw(values, source, split)

    def files(self) -> list[list[Any]]:
        """What is read: each file with its size and date; of the hub its name and revision."""
        if not self.paths:
            return [[self.name, *self.version]]
        every = [one for path in self.paths for one in ([path] if path.is_file() else sorted(path.rglob("*")))]
        stats = [(str(path.resolve()), path.stat()) for path in every]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]

    def check(self, num_samples: int | None = None) -> None:
        """Read all text files, or a limited number of rows. Raises: RunFailure for a damaged file."""
        rows = (row for read in self._texts for row in read())
        deque(islice(rows, num_samples), maxlen=0)


# -------------------------------------------------------------------------------------------------------------- files
def _files_of(path: Path) -> list[Path]:
    """The files of a folder, with a folder of `save_to_disk` in place of its files."""
    if path.is_file():
        if not _is_named(path):
            said = foreign(head_of(path))
            raise UsageError(f"--dataset_name {path}{f' is {said}' if said else f': its name must end in {KINDS}'}")
        return [path]
    found = (file for file in path.rglob("*") if file.is_file() and _is_named(file))
    shown = (file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))
    places = {file.parent if _is_saved(file.parent) else file for file in shown}
    files = sorted(place for place in places if place.name not in NO_ROWS)
    if not files:
        raise UsageError(f"--dataset_name {path}: the folder has no file that ends in {KINDS}")
    return files


def _is_named(file: Path) -> bool:
    return file.name.lower().endswith(SUFFIXES)


def is_table(file: Path) -> bool:
    """Whether a file or a folder of `save_to_disk` is read by `datasets`."""
    return file.is_dir() or file.name.lower().endswith((".parquet", ".arrow")) or head_of(file)[:4] == b"PAR1"


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
    return read_table(file) if is_table(file) else _read_text(file, skip_bad_lines)


def _read_text(file: Path, skip_bad_lines: bool | None) -> Rows:
    """Rows of JSON or CSV. Raises: RunFailure with file and line."""
    line = 0
    try:
        with open_bytes(file) as stream:
            for line, values in _parsed(file, stream):
                if isinstance(values, BadLine) and not skip_bad_lines:
                    hint = "" if skip_bad_lines is None else "; --skip_bad_lines True leaves such lines out"
                    raise BadLine(f"{values}{hint}", line)
                yield f"{file}:{line}", values
    except BadLine as problem:
        raise RunFailure(f"{file}:{problem.line or line + 1}: {problem}") from None
    except DAMAGE as problem:
        if not isinstance(problem, OSError) or problem.errno is None:  # of a decompressor
            raise RunFailure(f"{file}:{line + 1}: the compressed stream is damaged or truncated ({problem})") from None
        raise RunFailure(f"{file}: cannot be read ({problem.strerror or problem})") from None


def _parsed(file: Path, stream: BufferedReader) -> Parsed:
    """(line, values) of a stream, as CSV by its name, or as JSON by that or by its first line. Raises: RunFailure."""
    name = file.name.lower()
    is_csv = (name.rpartition(".")[0] if name.endswith(COMPRESSED) else name).endswith((".csv", ".tsv"))
    first, is_several = b"", False
    with suppress(*DAMAGE), open_bytes(file) as begin:  # which is told with its line, behind the rows before it
        check_is_data(file, begin.peek(HEAD)[:HEAD])
        first, is_several = first_line_of(begin)
    if is_csv and not first.startswith((b'{"', b"[{")):
        return _csv_rows(stream, name)
    return json_rows(stream, first, is_several)


# ---------------------------------------------------------------------------------------------------------------- CSV
def _csv_rows(stream: BufferedReader, name: str) -> Parsed:
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
            raise BadLine(f"not a row of separated values ({problem}); is a quote left open?", line) from None
        if cells is None:
            return
        if names is None:
            names = [cell.strip() for cell in cells]
            if (twice := repeated(names)) is not None:
                raise BadLine(f"the column {twice!r} occurs twice", line)
        elif cells:
            if len(cells) == len(names):
                yield line, dict(zip(names, cells))
            else:
                words = f"{len(cells)} cells for {len(names)} columns; quote cells with a {separator!r}"
                yield line, BadLine(words, line, "bad_line (too many or too few cells)")
        line = rows.line_num + 1


def _decoded(stream: BufferedReader) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as problem:
            raise BadLine(not_utf8(problem.start), number) from None


def _chain(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest
