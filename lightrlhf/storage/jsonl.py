"""Crash-safe JSONL: rows are appended in order, and a restarted program resumes after the last complete row.

`rows.args.json` next to `rows.jsonl` holds the settings that produced it, so that one file never mixes rows of two
settings, and, once the writer has closed the file, its SHA-256: who reads the rows notices if they have changed since.

Left out: databases, and several processes writing to one file (each writes its own).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import tempfile
import weakref
from array import array
from codecs import BOM_UTF8 as BOM
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.file_kinds import HEAD, foreign
from lightrlhf.storage.lazy import Lazy
from lightrlhf.storage.locks import lock_file
from lightrlhf.storage.writing import make_folder, replacing, sync_folder, write_text, writing

SEAL = ("sha256", "bytes")  # beside the settings
Row = dict[str, Any]  # of a file of data or results: values by column
Item = TypeVar("Item")


def read_jsonl(path: str | Path, needs: Sequence[str] = (), may_be_cut: bool = False) -> list[Row]:
    """Rows of a file with one JSON object per line; empty lines are skipped.

    may_be_cut: for a caller that knows how many rows there must be.

    Raises: UsageError naming file and line when it cannot be read, or a row lacks one of the columns `needs`.
    """
    _check_file(Path(path), may_be_cut)
    return [row for _, row in _parsed(Path(path), needs)]


def open_jsonl(
    path: str | Path,
    needs: Sequence[str] = (),
    each: Callable[[int, Row], object] | None = None,
    may_be_cut: bool = False,
) -> JsonlRows:
    """As `read_jsonl`, but a sequence that reads rows from the file when they are needed, for large files.

    Each row is checked once; each: called with its number, from 1, and the row.
    """
    path = Path(path)
    _check_file(path, may_be_cut)

    def starts() -> Iterator[int]:
        for number, (start, row) in enumerate(_parsed(path, needs), start=1):
            if each:
                each(number, row)
            yield start

    return JsonlRows(path, starts())


class JsonlRows(Lazy[Row]):
    """The rows of a file that only grows, parsed when they are read, by one thread: 8 bytes a row.

    starts: offset of each row, whose line ends at the next line break.
    """

    def __init__(self, path: Path, starts: Iterable[int]) -> None:
        self.starts = array("q", starts)
        self._file = path.open("rb")  # the rows stay readable where a new file replaces this one
        weakref.finalize(self, self._file.close)
        super().__init__(range(len(self.starts)), self._read)

    def grow(self, starts: Iterable[int]) -> None:
        """Add rows."""
        self.starts.extend(starts)
        self.places = range(len(self.starts))

    def _read(self, place: int) -> Row:
        self._file.seek(self.starts[place])
        row: Row = json.loads(self._file.readline())
        return row


def _check_file(path: Path, may_be_cut: bool) -> None:
    """Raises: UsageError when a file is not data, or not what was written."""
    try:
        with path.open("rb") as file:
            if said := foreign(file.read(HEAD)):
                raise UsageError(f"{path} is {said}")
        check_seal(path, may_be_cut)
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem}") from None


def _parsed(path: Path, needs: Sequence[str] = ()) -> Iterator[tuple[int, Row]]:
    """The rows of a file with the offsets of their lines. Raises: as `read_jsonl`."""
    with path.open("rb") as file:
        start = file.seek(len(BOM) if file.read(len(BOM)) == BOM else 0)
        count = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                row = _parse(line, path, number)
                count += 1
                if missing := [name for name in needs if name not in row]:
                    raise UsageError(f"{path}: row {count} has no {missing[0]!r}; it has {', '.join(sorted(row))}")
                yield start, row
            start += len(line)


def write_jsonl(path: str | Path, rows: Iterable[Row], settings: Row | None = None) -> None:
    """Write a whole file atomically, with its settings and seal where `settings` are given.

    Raises: RunFailure naming the file when it cannot be written.
    """
    path = Path(path)
    with writing(path):
        make_folder(path.parent)
    if settings is not None:
        write_settings(path, settings)  # a kill between both leaves no seal
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(map(_line, rows))
    if settings is not None:
        write_settings(path, settings | _seal_of(path))


class Records:
    """Rows that wait in a temporary file of a folder, which no name leads to, until all are there; without a folder
    only the first is kept.

    Raises: RunFailure naming the folder when they cannot be written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder, self.count = folder, 0
        self._first: list[Row] = []
        if folder is not None:
            with writing(folder):
                make_folder(folder)
                self._file = tempfile.TemporaryFile("w+", encoding="utf-8", dir=folder)

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows."""
        for row in map(dict, rows):
            self.count += 1
            if self.folder is None:
                self._first = self._first or [row]
            else:
                with writing(self.folder):
                    self._file.write(_line(row))

    def __iter__(self) -> Iterator[Row]:
        """Yields the rows, as often as it is called, one call after the other."""
        if self.folder is None:
            yield from self._first
            return
        with writing(self.folder):
            self._file.seek(0)
        yield from map(json.loads, self._file)


def to_json(value: Any, **options: Any) -> str:
    """JSON text; NaN and infinite numbers, which JSON does not have, become null."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_with_nulls(value), allow_nan=False, **options)


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nulls(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finite_metrics(metrics: Mapping[str, Any]) -> Row:
    """The metrics with finite values, for `metrics.jsonl`; the others are left out of their row."""
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def as_jsonl(rows: Iterable[Row]) -> str:
    """The text of a file of rows."""
    return "".join(map(_line, rows))


class JsonlWriter:
    """Appends rows to a file, under an exclusive lock; `rows` are the complete rows in it, read when they are needed.

    settings: plain values; a file with rows of other settings is refused.
    Raises: UsageError when the file cannot be written, is not JSONL, or has rows of other settings.
    """

    def __init__(self, path: str | Path, settings: Row | None = None) -> None:
        self.path, self._settings, self._changed = Path(path), settings, False
        with writing(path, error=UsageError):
            make_folder(self.path.parent)
            self._lock = lock_file(self.path)
            self._file = self.path.open("ab", buffering=0)
            try:
                sync_folder(self.path.parent)
                self.rows = self._complete_rows()
                if self.rows and settings is not None:
                    check_settings(self.path, settings)
                    self._changed = SEAL[0] not in read_settings(self.path)  # a kill came after its last row
                elif settings is not None:
                    write_settings(self.path, settings)
            except BaseException:
                self.close()
                raise

    def append(self, *rows: Row) -> None:
        """Write rows in one piece to the operating system, so that a later kill does not lose them.

        Raises: RunFailure when the disk is full; earlier rows are kept.
        """
        with writing(self.path, kept=lambda: "earlier rows are kept, the same command goes on after them"):
            if not self._changed and self._settings is not None:
                write_settings(self.path, self._settings)  # without the seal of the rows before
            self._changed = True
            lines = [_line(row).encode("utf-8") for row in rows]
            end = os.fstat(self._file.fileno()).st_size
            append_whole(self._file, b"".join(lines))
        self.rows.grow(itertools.accumulate(map(len, lines[:-1]), initial=end) if lines else ())

    def extend(
        self,
        items: Sequence[Item],
        chunk: int,
        work: Callable[[Sequence[Item]], Iterable[Row]],
        label: str = "",
        unit: str = " prompts",
        whole_chunks: bool = True,
    ) -> None:
        """Append the rows that `work` computes from `items`, one row per item, resuming after the rows in the file.

        `work` gets `chunk` items at a time. An interrupted chunk is computed again as a whole, in the same batches, so
        that its results are bitwise the same; only the missing rows are written. With `whole_chunks=False` only the
        missing items are computed. When `work` returns fewer rows than items, `extend` stops.

        label: text in front of the progress bar; no bar when empty.
        """
        from tqdm import tqdm

        with tqdm(total=len(items), initial=len(self.rows), desc=label, unit=unit, disable=not label) as bar:
            while (done := len(self.rows)) < len(items):
                start = done // chunk * chunk if whole_chunks else done
                part = items[start : start + chunk]
                for row in itertools.islice(work(part), done - start, len(part)):
                    self.append(row)
                    bar.update()
                if len(self.rows) < start + len(part):
                    return

    def close(self) -> None:
        """Close the file, and seal it unless it is sealed. Raises: RunFailure when the seal cannot be written."""
        try:
            self._file.close()
            if self._changed and self._settings is not None:
                write_settings(self.path, self._settings | _seal_of(self.path))
        finally:
            self._changed = False
            self._lock.release()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._changed = self._changed and kind is None  # after an error, such as a full disk, there is no seal
        self.close()

    def _complete_rows(self) -> JsonlRows:
        """Rows of the file; an incomplete last line is removed from it."""
        size = self.path.stat().st_size
        if size and self._settings is not None:
            read_settings(self.path)  # without them no writer made the file, and its last line is kept
        check_seal(self.path, may_be_cut=True)
        with self.path.open("rb") as file:
            end = 0
            for line in file:
                end += len(line) if line.endswith(b"\n") else 0
        if end < size:
            self._file.truncate(end)
        return JsonlRows(self.path, (start for start, _ in _parsed(self.path)))


def append_whole(file: FileIO, content: bytes) -> None:
    """Append to an unbuffered file opened for appending, or leave it as it was. Raises: OSError."""
    end, view = os.fstat(file.fileno()).st_size, memoryview(content)
    try:
        while view:  # an almost full disk takes a part
            view = view[file.write(view) :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


def append_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Append rows to a file that no other process writes, in one piece. Raises: RunFailure naming the file."""
    with writing(path):
        is_new = not path.exists()
        with path.open("ab", buffering=0) as file:
            append_whole(file, as_jsonl(rows).encode("utf-8"))
        if is_new:
            sync_folder(path.parent)


def read_settings(path: Path) -> Row:
    """The settings of a file's rows, with their seal. Raises: UsageError when they are missing."""
    stored_in = path.with_suffix(".args.json")
    try:
        return dict(json.loads(stored_in.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise UsageError(
            f"{path} has rows, but {stored_in.name} with their settings is missing; name another file, or remove it"
        ) from None


def seal_rows(path: Path) -> None:
    """Seal a file that has all its rows but no seal, as a kill after the last row leaves it. Raises: RunFailure."""
    stored = read_settings(path)
    if SEAL[0] not in stored:
        write_settings(path, stored | _seal_of(path))


def check_settings(path: Path, settings: Row) -> None:
    """Raises: UsageError when the rows of a file have other settings than these."""
    stored = {name: value for name, value in read_settings(path).items() if name not in SEAL}
    settings = json.loads(json.dumps(settings))
    changed = sorted(k for k in stored.keys() | settings.keys() if stored.get(k) != settings.get(k))
    if changed:
        name = changed[0]
        raise UsageError(
            f"{path} has rows of other settings: {name} was {stored.get(name)}, now {settings.get(name)}; "
            "remove it or write to another file"
        )


def check_seal(path: Path, may_be_cut: bool = False) -> None:
    """Raises: UsageError when a file with a seal has changed since it was written.

    may_be_cut: a shorter file passes, as one whose writer goes on after the last complete row.
    """
    sidecar = path.with_suffix(".args.json")
    try:
        stored = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if not isinstance(stored, dict) or SEAL[0] not in stored:
        return
    is_cut = isinstance(stored.get("bytes"), int) and path.stat().st_size < stored["bytes"]
    if {name: stored.get(name) for name in SEAL} != _seal_of(path) and not (may_be_cut and is_cut):
        raise UsageError(
            f"{path} is not what was written; remove it and {sidecar.name} and write it again, "
            f"or, if it was changed on purpose, remove {SEAL[0]} from {sidecar.name}"
        )


def write_settings(path: Path, settings: Row) -> None:
    """Write the settings of a file's rows to `{path}.args.json`, without the suffix `.jsonl`."""
    write_text(path.with_suffix(".args.json"), json.dumps(settings, indent=1))


def _seal_of(path: Path) -> Row:
    with path.open("rb") as file:
        return dict(zip(SEAL, (hashlib.file_digest(file, "sha256").hexdigest(), file.tell())))


def _line(row: Row) -> str:
    return to_json(row, ensure_ascii=False) + "\n"


def _parse(line: bytes, path: Path, number: int) -> Row:
    try:
        text = line.decode("utf-8")
        row = json.loads(text)
        if "\\ud" in text.lower():  # halves of surrogate pairs, which no tokenizer, server or file takes
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeError as problem:
        raise UsageError(f"{path}:{number} is not valid Unicode: {problem.reason}") from None  # type: ignore[attr-defined]
    except ValueError as problem:
        raise UsageError(f"{path}:{number} is not JSON: {problem}") from None
    except RecursionError:
        raise UsageError(f"{path}:{number} is nested too deeply") from None
    if not isinstance(row, dict):
        raise UsageError(f"{path}:{number} is not a JSON object but a {type(row).__name__}")
    return row
