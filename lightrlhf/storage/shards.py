"""Shards: the parts of a file's rows that several ranks write at the same time, and that are merged into it.

A shard is `{name}.part-0-of-4.jsonl` beside the file; with one rank it is the file itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightrlhf.cli.errors import RunFailure
from lightrlhf.storage.jsonl import Row, check_settings, open_jsonl, seal_rows, write_jsonl

Item = TypeVar("Item")


class Shard(NamedTuple):
    """The part of one rank."""

    rank: int
    world_size: int

    def span(self, num_rows: int) -> slice:
        """Its contiguous part of `num_rows` rows; sizes of parts differ by at most one."""
        return slice(*(num_rows * i // self.world_size for i in (self.rank, self.rank + 1)))

    def of(self, rows: Sequence[Item]) -> Sequence[Item]:
        """Its part of the rows."""
        return rows[self.span(len(rows))]

    def path(self, output: Path) -> Path:
        """The file of its rows."""
        if self.world_size == 1:
            return output
        return output.with_name(f"{output.stem}.part-{self.rank}-of-{self.world_size}.jsonl")


WHOLE = Shard(0, 1)  # of a single rank


def merge(output: Path, settings: Row, shard: Shard, num_rows: int) -> None:
    """Write the rows of all shards to `output` once all of them are complete; nothing to do for a single one.

    The last rank does it; two at the same time write the same. Raises: RunFailure for a missing or duplicate row.
    """
    if shard.world_size == 1:
        return
    paths = [Shard(rank, shard.world_size).path(output) for rank in range(shard.world_size)]
    if not all(path.is_file() for path in paths):
        return
    parts = [open_jsonl(path) for path in paths]
    if sum(map(len, parts)) < num_rows:
        return
    if any(row.get("index") != number for number, row in enumerate(chain(*parts))) or sum(map(len, parts)) > num_rows:
        raise RunFailure(f"{paths[0]} and the other parts do not have each prompt once; remove them and start again")
    write_jsonl(output, chain(*parts), settings)


def is_complete(output: Path, settings: Row, num_rows: int) -> bool:
    """Whether a file has all rows, which then are sealed. Raises: UsageError when its rows have other settings."""
    if not output.is_file() or not output.stat().st_size:
        return False
    check_settings(output, settings)
    with output.open("rb") as file:
        if sum(line.endswith(b"\n") for line in file) != num_rows:
            return False
    seal_rows(output)
    return True
