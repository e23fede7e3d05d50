"""Raw rows of tables: parquet and arrow files, folders of `save_to_disk`, and data sets of the hub, by `datasets`.

Arrow gives each of its structs every key that occurs in any row, null where the row has none: such nulls inside a
column are left out, so that a message or the arguments of a tool call have the keys that were written.

Left out: the type inference of hub datasets that are JSON or CSV files (download those and name the folder).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import RunFailure, UsageError, first_line
from lightrlhf.storage.file_kinds import check_is_data, head_of

Rows = Iterator[tuple[str, dict[str, Any]]]  # (source, values)
CHUNK = 1000  # rows of a parquet or arrow file at a time


def read_table(file: Path) -> Rows:
    """Rows of a parquet or arrow file, of which one batch is in memory."""
    import pyarrow

    check_is_data(file, head_of(file))
    number = 0
    try:
        for batch in _arrow_batches(file) if file.name.lower().endswith(".arrow") else _parquet_batches(file):
            for values in _decode(pyarrow.Table.from_batches([batch])):
                number += 1
                yield f"{file}:{number}", values
    except (pyarrow.ArrowException, OSError, ValueError) as problem:
        kind = file.suffix.removeprefix(".")
        raise RunFailure(f"{file}: not a readable {kind} file, after row {number} ({first_line(problem)})") from None


def _parquet_batches(file: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        yield from table.iter_batches(batch_size=CHUNK)


def _arrow_batches(file: Path) -> Iterator[Any]:
    import pyarrow

    _check_arrow_end(file)
    with pyarrow.memory_map(str(file)) as memory:
        try:
            batches: Any = pyarrow.ipc.open_stream(memory)
        except pyarrow.ArrowInvalid:  # the other of arrow's two formats
            opened = pyarrow.ipc.open_file(memory)
            batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
        for batch in batches:
            batch.validate(full=True)
            yield from (batch.slice(start, CHUNK) for start in range(0, len(batch), CHUNK))


def _check_arrow_end(file: Path) -> None:
    """Raises: ValueError for a file cut short, of which pyarrow reads the batches before the cut without a word."""
    with file.open("rb") as stream:
        stream.seek(max(file.stat().st_size - 8, 0))
        end = stream.read()
    if end != b"\xff\xff\xff\xff\0\0\0\0" and not end.endswith(b"ARROW1"):
        raise ValueError("it has no end mark, so it is truncated")


def read_saved(folder: Path) -> Rows:
    """Rows of a folder written by `Dataset.save_to_disk`."""
    import datasets
    import pyarrow

    number = 0
    try:
        rows = datasets.load_from_disk(str(folder))
        for file in rows.cache_files:
            _check_arrow_end(Path(file["filename"]))
        for values in _present(rows):
            number += 1
            yield f"{folder}:{number}", values
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as problem:
        raise RunFailure(
            f"{folder}: not a readable folder of save_to_disk, after row {number} ({first_line(problem)})"
        ) from None


def _decode(table: Any) -> Iterator[dict[str, Any]]:
    """Rows of an arrow table, decoded as its types for `datasets` say."""
    import datasets

    if (twice := repeated(table.column_names)) is not None:
        raise ValueError(f"the column {twice!r} occurs twice")
    return _present(datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="unused"))


def repeated(names: list[str]) -> str | None:
    """The first of several equal names."""
    return next((name for name in names if names.count(name) > 1), None)


def _present(rows: Any) -> Iterator[dict[str, Any]]:
    """Rows of a `datasets.Dataset` without the nulls that fill its structs."""
    features = rows.features
    for values in rows:
        yield {name: _without_fill(value, features[name]) for name, value in values.items()}


def _without_fill(value: Any, feature: Any) -> Any:
    if isinstance(feature, dict) and isinstance(value, dict):
        return {name: _without_fill(inner, feature[name]) for name, inner in value.items() if inner is not None}
    if isinstance(value, list) and (inside := getattr(feature, "feature", None)) is not None:
        return [_without_fill(inner, inside) for inner in value]
    return value


# ---------------------------------------------------------------------------------------------------------------- hub
def read_hub(name: str, config: str | None, revision: str | None) -> list[tuple[str, Callable[[], Rows]]]:
    """The splits of a data set of the hub by name, each with what reads it. Raises: UsageError."""
    import datasets

    try:
        splits = datasets.load_dataset(name, config, revision=revision)
    except Exception as problem:  # the hub client, its network library and the builder raise errors of their own
        raise UsageError(
            f"--dataset_name {name}: no such file or folder, and loading it from the hub failed ({first_line(problem)})"
        ) from None
    return [(split, partial(_read_split, f"{name}/{split}", splits[split])) for split in splits]


def _read_split(name: str, rows: Any) -> Rows:
    for index, values in enumerate(_present(rows)):
        yield f"{name}:{index}", values
