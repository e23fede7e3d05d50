"""Kinds of files by their first bytes: compressed text is opened; an error names what is not data."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import RunFailure

HEAD = 4096  # bytes
FOREIGN = (  # (first bytes, what the file is and what to do)
    (rb"version https://git-lfs", "a Git LFS pointer, not the data: fetch it with `git lfs pull` or `hf download`"),
    (rb"\s*<(!doctype|html|head|body|\?xml)", "a web page, not data: download the file itself (/resolve/ on the hub)"),
    (rb"PK\x03\x04.*xl/", "an Excel workbook: save its sheet as CSV in UTF-8"),
    (rb"PK\x03\x04.{0,99}/data\.pkl", "a file of torch: prepared splits are used as they are, by --data_dir FOLDER"),
    (rb"PK\x03\x04", "a zip archive: unpack it and name the folder"),
    (rb"\xff\xfe|\xfe\xff|([ -~]\0){4}|(\0[ -~]){4}", "UTF-16: convert it, iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    (rb"\x80[\x02-\x05]", "a pickle, which is never read: write its rows as JSON lines"),
)  # fmt: skip


def _open_zstd(path: Path) -> Any:
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


OPENERS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def head_of(path: Path) -> bytes:
    """The first bytes of a file, as they are stored; none of one that cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(HEAD)
    return b""


def open_bytes(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed where its first ones say so, whatever its name. Raises: OSError."""
    head = head_of(path)
    opener = next((opener for start, opener in OPENERS.items() if head.startswith(start)), None)
    stream: io.BufferedReader = path.open("rb") if opener is None else opener(path)
    return stream


def foreign(head: bytes) -> str | None:
    """Kind of a file and what to do, by its first bytes; None if it may be data."""
    return next((said for start, said in FOREIGN if re.match(start, head, re.DOTALL | re.IGNORECASE)), None)


def check_is_data(path: Path, head: bytes) -> None:
    """Raises: RunFailure for a file that is something else than data."""
    if said := foreign(head):
        raise RunFailure(f"{path} is {said}")
