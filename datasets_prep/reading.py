"""Raw rows of a dataset: from a hub id, a local file or a folder of files, one at a time.

Files are streamed, so they may be of any size. A damaged file (a truncated gzip stream, bytes that are not UTF-8, a
line that is not a JSON object, a duplicate key) is refused with its name and the line, since nothing after the damage
can be trusted. The contents of rows are checked later, row by row.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import RunFailure, UsageError, first_line

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"} | {
    "dev": "validation",
    "eval": "validation",
    "test": "test",
}


@dataclass(frozen=True)
class Raw:
    """A raw row and its source."""

    values: dict[str, Any]
    source: str  # file:line, or hub id/split:index
    split: str | None  # the split of its file, None if the source has only one


class Source:
    """Iterable over the raw rows of `name`.

    `given` are the held-out splits of the source, which need not be carved out of train.
    Raises: UsageError if there is no such file, folder or hub dataset.
    """

    def __init__(self, name: str, config: str | None = None, revision: str | None = None) -> None:
        self.name = name
        path = Path(name).expanduser()
        if path.exists():
            files = _files_of(path)
            self._parts = [(_split_of(file, root=path), _reader(file)) for file in files]
        elif name.endswith(SUFFIXES) or name.startswith((".", "/", "~")):
            raise UsageError(f"--dataset_name {name}: no such file or folder")
        else:
            self._parts = _hub_parts(name, config, revision)
        splits = {split for split, _ in self._parts}
        alone = len(splits) == 1
        self._parts = [(None if alone else split, reader) for split, reader in self._parts]
        self.given = frozenset(split for split in splits if split not in (None, "train") and not alone)

    def __iter__(self) -> Iterator[Raw]:
        for split, reader in self._parts:
            for source, values in reader:
                yield Raw(values, source, split)


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise UsageError(f"--dataset_name {path}: its name must end in {', '.join(SUFFIXES)}")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
    files = [file for file in files if file.name not in ("dataset_info.json", "state.json", "dataset_infos.json")]
    if not files:
        raise UsageError(f"--dataset_name {path}: the folder has no file that ends in {', '.join(SUFFIXES)}")
    return files


def _split_of(file: Path, root: Path) -> str | None:
    """The split named at the start of the file name or of a folder above it."""
    for part in reversed(file.relative_to(root).parts if file != root else (file.name,)):
        word = part.replace("_", "-").replace(".", "-").split("-")[0].lower()
        if word in SPLIT_NAMES:
            return SPLIT_NAMES[word]
    return None


def _reader(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    return _read_parquet(file) if file.name.endswith(".parquet") else _read_json_lines(file)


def _read_json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield f"{file}:{number}", _parse(line)
    except _BadLine as problem:
        raise RunFailure(f"{file}:{number}: {problem}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise RunFailure(f"{file}:{number + 1}: the gzip stream is damaged or truncated ({problem})") from None
    except OSError as problem:
        raise RunFailure(f"{file}: cannot be read ({problem.strerror or problem})") from None


class _BadLine(Exception):
    pass


def _parse(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_unique)
    except UnicodeDecodeError as problem:
        raise _BadLine(f"byte {problem.start + 1} is not UTF-8; convert the file to UTF-8") from None
    except (ValueError, RecursionError) as problem:
        raise _BadLine(f"not a JSON object ({str(problem)[:80]}); one object a line is expected") from None
    if not isinstance(values, dict):
        raise _BadLine(f"a JSON {type(values).__name__}; one object a line is expected")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _BadLine(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


def _read_parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1000):
            for values in batch.to_pylist():
                number += 1
                yield f"{file}:{number}", values
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        raise RunFailure(f"{file}: not a readable parquet file, after row {number} ({first_line(problem)})") from None


def _hub_parts(name: str, config: str | None, revision: str | None) -> list[tuple[str | None, Any]]:
    import datasets

    try:
        splits = datasets.load_dataset(name, config, revision=revision)
    except Exception as problem:  # the hub client, its network library and the builder raise errors of their own
        line = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise UsageError(
            f"--dataset_name {name}: no such file or folder, and loading it from the hub failed ({line})"
        ) from None
    known = {split: SPLIT_NAMES.get(split.split("_")[0], "train") for split in splits}
    return [(known[split], _read_hub(f"{name}/{split}", splits[split])) for split in splits]


def _read_hub(name: str, rows: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, values in enumerate(rows):
        yield f"{name}:{index}", values
