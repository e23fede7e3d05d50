"""Read the file of an offline W&B run, with the package's own messages, which has no reader for it.

The file is a LevelDB log: a header of 7 bytes, then blocks of 32 KiB of chunks, each with CRC-32, length and kind. A
record is one chunk (kind 1), or a first (2), middle (3) and last one (4).
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, CHUNK_HEADER = 32768, struct.Struct("<IHB")


def chunks(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and content of each chunk."""
    at = 7
    while at + CHUNK_HEADER.size <= len(content):
        if BLOCK - at % BLOCK < CHUNK_HEADER.size:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
        _, length, kind = CHUNK_HEADER.unpack_from(content, at)
        at += CHUNK_HEADER.size
        yield kind, content[at : at + length]
        at += length


def records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    parts = b""
    for kind, part in chunks(path.read_bytes()):
        parts += part
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def read_run(folder: Path) -> dict[str, Any]:
    """Project, id, config and logged rows of an offline run."""
    (path,) = folder.glob("*.wandb")
    found: dict[str, Any] = {"config": {}, "rows": []}
    for record in records(path):
        if record.HasField("run"):
            found |= {"project": record.run.project, "id": record.run.run_id, "name": record.run.display_name}
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            items = record.history.item
            found["rows"].append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found
