"""Shards of a file: who writes which rows, and who merges them."""

import json
import os

import pytest

from lightrlhf.storage.jsonl import read_jsonl, write_jsonl
from lightrlhf.storage.shards import Shard, merge


@pytest.mark.parametrize("num_rows", [0, 1, 5, 12])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_each_row_is_of_one_rank_and_parts_differ_by_at_most_one(num_rows, world_size):
    parts = [Shard(rank, world_size).of(range(num_rows)) for rank in range(world_size)]
    assert [row for part in parts for row in part] == list(range(num_rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("after", range(3))
def test_two_ranks_may_merge_at_the_same_time(after, tmp_path, monkeypatch):
    """The second rank merges everything before the first one's renaming of a file, after so many others."""
    output, settings, replace = tmp_path / "out.jsonl", {"seed": 1}, os.replace
    for rank in (0, 1):
        write_jsonl(Shard(rank, 2).path(output), [{"index": rank, "responses": ["a"], "truncated": [False]}])

    renamed = []

    def interrupted(source, target):
        renamed.append(target)
        if len(renamed) == after + 1:
            merge(output, settings, Shard(1, 2), 2)
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)  # Path.replace calls it
    merge(output, settings, Shard(0, 2), 2)
    assert len(renamed) > after
    assert [row["index"] for row in read_jsonl(output)] == [0, 1]
    assert json.loads(output.with_suffix(".args.json").read_text()).items() >= settings.items()
