"""JSON lines that survive a kill: rows are appended in order, and a program that starts again goes on behind the last.

Beside `rows.jsonl` stands `rows.args.json` with the settings that made it, so that one file never holds rows of two
settings. Left out: databases, and writing from several processes into one file (each has a file of its own).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.checkpoint import write_text

Row = dict[str, Any]


def read_jsonl(path: str | Path, needs: Sequence[str] = ()) -> list[Row]:
    """The rows of a file of JSON objects, one a line; empty lines are skipped.

    Raises: UsageError naming file and line when it cannot be read, or a row lacks one of the columns `needs`.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")  # a text may hold U+2028, where splitlines would cut
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path} cannot be read: {problem}") from None
    rows = [_parse(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    for number, row in enumerate(rows, start=1):
        missing = [name for name in needs if name not in row]
        if missing:
            raise UsageError(f"{path}: row {number} has no {missing[0]!r}; it has {', '.join(sorted(row))}")
    return rows


def write_jsonl(path: str | Path, rows: Iterable[Row]) -> None:
    """A whole file at once: it is there complete or not at all."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(path), "".join(_line(row) for row in rows))


class JsonlWriter:
    """Appends rows to a file; `rows` are those an earlier start left there, complete and in order.

    settings: plain values; with others than those of the rows that are there the file is refused.
    Raises: UsageError when the file cannot be written, is no JSON lines, or holds rows of other settings.
    """

    def __init__(self, path: str | Path, settings: Row | None = None) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._claim()
            self.rows = self._whole_rows()
            if self.rows and settings is not None:
                check_settings(self.path, settings)
            elif settings is not None:
                write_settings(self.path, settings)
        except OSError as problem:
            raise UsageError(f"{self.path} cannot be written: {problem.strerror}") from None

    def append(self, *rows: Row) -> None:
        """Write rows in one piece and hand them to the system: a later kill does not lose them.

        Raises: UsageError when the disk takes no more; what was there before stays.
        """
        try:
            self._file.write("".join(_line(row) for row in rows).encode("utf-8"))
            self._file.flush()
        except OSError as problem:
            raise UsageError(f"{self.path} cannot be written: {problem.strerror}; the rows before are kept") from None
        self.rows += rows

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.path} is being written by another process; wait for it or end it") from None

    def _whole_rows(self) -> list[Row]:
        """The rows that are there; a last line that a kill cut is taken off the file."""
        content = self.path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            self._file.truncate(end)
        lines = content[:end].decode("utf-8", errors="replace").split("\n")[:-1]
        return [_parse(line, self.path, number) for number, line in enumerate(lines, start=1)]


def check_settings(path: Path, settings: Row) -> None:
    """Raises: UsageError when the rows of a file are of other settings than these."""
    beside = path.with_suffix(".args.json")
    try:
        stored = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(f"{path} holds rows already, and no {beside.name} tells of what") from None
    settings = json.loads(json.dumps(settings))
    changed = sorted(k for k in stored.keys() | settings.keys() if stored.get(k) != settings.get(k))
    if changed:
        name = changed[0]
        raise UsageError(
            f"{path} holds rows of other settings: {name} was {stored.get(name)}, now {settings.get(name)}; "
            "remove it or write elsewhere"
        )


def write_settings(path: Path, settings: Row) -> None:
    """Write down what made a file's rows, beside it."""
    write_text(path.with_suffix(".args.json"), json.dumps(settings, indent=1))


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _parse(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError as problem:
        raise UsageError(f"{path}:{number} is no JSON: {problem}") from None
    if not isinstance(row, dict):
        raise UsageError(f"{path}:{number} is no JSON object but a {type(row).__name__}")
    return row
