"""Rows of JSON: one object a line, one array of objects, `{"data": [...]}`, or objects over several lines each.

A list of messages on a line is a dialogue, and a comma behind an object is no damage.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from typing import Any, cast

from datasets_prep.messages import is_turn
from datasets_prep.tables import repeated

PIECE = 1 << 20  # characters of a JSON array at a time
DATA = re.compile(rb'\{\s*"data"\s*:\s*\[\s*[{\]]')
NOT_JSON = (  # (a line, what it is and what to do)
    (r"\s*[{\[]\s*'|.*: (None|True|False)\b", "Python's notation, not JSON: write rows with json.dumps"),
    (r"\s*(//|#)", "a comment, which JSON does not have: remove it"),
    (r".*,\s*[}\]]\s*$", "a comma before a closing bracket: remove it"),
    (r"\s*[\w\"' -]+,[^{\[]+$", "separated values, perhaps: a CSV file's name ends in .csv"),
    (r".*\}\s*\{", "several objects: one object a line is expected"),
)


class BadLine(Exception):
    """A damaged line, with its number if it does not follow the last row.

    kind: what the report counts where such lines are skipped; None where nothing after it can be trusted.
    """

    def __init__(self, words: str, line: int | None = None, kind: str | None = None) -> None:
        super().__init__(words)
        self.line, self.kind = line, kind


Parsed = Iterator[tuple[int, dict[str, Any] | BadLine]]  # (line, values)


def json_rows(stream: io.BufferedReader, first: bytes, is_several: bool) -> Parsed:
    """Rows of a stream from its begin; first: its first full line, or the begin of it; is_several: others follow."""
    first = first.strip()
    ends = first.rstrip(b",")[-1:]
    if first.startswith(b"[") and not (is_several and ends == b"]"):
        return _objects(stream, r"\s*\[", "]")
    start = stream.peek(PIECE)[:4096].removeprefix(codecs.BOM_UTF8).lstrip()
    if DATA.match(start) and not (is_several and ends == b"}"):
        return _objects(stream, r'\s*\{\s*"data"\s*:\s*\[', "]}")
    return _objects(stream, "", "") if first == b"{" else _lines(stream)


def first_line_of(stream: io.BufferedReader) -> tuple[bytes, bool]:
    """The first line that is not blank, at most PIECE of it, and whether it ends and others follow."""
    lines = (line.removeprefix(codecs.BOM_UTF8) for line in iter(lambda: stream.readline(PIECE), b""))
    full = (line for line in lines if not line.isspace())
    first = next(full, b"")
    return first, first.endswith(b"\n") and next(full, None) is not None


def _lines(stream: io.BufferedReader) -> Parsed:
    for number, line in enumerate(stream, start=1):
        if line.isspace():
            continue
        values: dict[str, Any] | BadLine
        try:
            values = _line(line, number)
        except BadLine as problem:
            values = problem
        yield number, values


def _line(line: bytes, number: int) -> dict[str, Any]:
    """The object of a line. Raises: BadLine."""
    text = ""
    try:
        text = line.decode("utf-8-sig").rstrip().removesuffix(",")
        values = json.loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError as problem:
        raise BadLine(not_utf8(problem.start), number, "bad_line (not UTF-8)") from None
    except BadLine as problem:
        raise BadLine(str(problem), number, "bad_line (a key occurs twice)") from None
    except (ValueError, RecursionError) as problem:
        expected = f"not a JSON object ({str(problem)[:80]}); one object a line is expected"
        said = next((said for begin, said in NOT_JSON if re.match(begin, text[:PIECE])), expected)
        raise BadLine(said, number, "bad_line (not JSON)") from None
    try:
        return _object(values, number)
    except BadLine as problem:
        raise BadLine(str(problem), number, "bad_line (no JSON object)") from None


def _objects(stream: io.BufferedReader, opening: str, closing: str) -> Parsed:
    """Objects between `opening`, a regular expression, and `closing`; some pieces of the stream are in memory."""
    decode, parse = codecs.getincrementaldecoder("utf-8-sig")().decode, json.JSONDecoder(object_pairs_hook=_unique)
    text, at, line, end = "", 0, 1, closing[:1]

    def read() -> bool:
        """Read as much again as is there, so that a long object costs linear time; False at the end of the file."""
        nonlocal text, at
        piece = stream.read(max(PIECE, len(text) - at))
        try:
            text, at = text[at:] + decode(piece, final=not piece), 0
        except UnicodeDecodeError as problem:
            where = line + text.count("\n", at) + problem.object.count(b"\n", 0, problem.start)
            raise BadLine("bytes that are not UTF-8; convert the file to UTF-8", where) from None
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
    while (mark := seen()) != end:
        if not first and (closing or mark == ","):
            if mark != ",":
                raise BadLine("the array of rows is not closed, or its rows are not separated by commas", line)
            move(at + 1)
            if seen() == end:
                break
        first = False
        while True:
            try:
                values, behind = parse.raw_decode(text, at)
                break
            except BadLine as problem:
                raise BadLine(f"{problem} in the object that begins here", line) from None
            except json.JSONDecodeError as problem:  # perhaps only because the object goes on
                where = line + text.count("\n", at, problem.pos)
                if not read():
                    raise BadLine(f"not JSON ({problem.msg})", where) from None
            except (ValueError, RecursionError) as problem:
                raise BadLine(f"not JSON ({str(problem)[:80]})", line) from None
        yield line, _object(values, line)
        move(behind)
    for mark in closing:
        if seen() != mark:
            raise BadLine(f"{mark} is expected behind the array of rows", line)
        move(at + 1)
    if seen():
        raise BadLine("text behind the end of the array of rows", line)


def _match(pattern: str, text: str, at: int = 0) -> int:
    """Where the match of a pattern that does match ends."""
    return cast(re.Match[str], re.compile(pattern).match(text, at)).end()


def _object(values: Any, line: int) -> dict[str, Any]:
    if isinstance(values, list) and values and all(isinstance(value, dict) and is_turn(value) for value in values):
        return {"messages": values}
    if isinstance(values, str):
        is_json = values.lstrip().startswith("{")
        remedy = "write the object itself" if is_json else 'write {"text": …}, or {"prompt": …}, for each'
        raise BadLine(f"{'JSON within a text' if is_json else 'a text'}, not an object: {remedy}", line)
    if not isinstance(values, dict):
        raise BadLine(f'a JSON {type(values).__name__}, not an object with names, such as {{"prompt": …}}', line)
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise BadLine(f"the key {repeated([name for name, _ in pairs])!r} occurs twice")
    return values


def not_utf8(start: int) -> str:
    """What is wrong with a line that cannot be decoded."""
    return f"byte {start + 1} is not UTF-8; convert the file to UTF-8"
