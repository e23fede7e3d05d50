"""The benchmarks of many rows, on few of them."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from helpers.flat import made, plain, write

from benchmarks import scale, starts
from lightrlhf.data.flat import from_stored


def test_chats_depend_on_the_seed_alone_and_have_one_to_four_turns():
    chats = list(itertools.islice(scale.chats(200), 200))
    assert chats == list(scale.chats(200)) and chats[:50] == list(scale.chats(50))
    assert {len(chat) for chat in chats} == {2, 4, 6, 8}
    assert all([message["role"] for message in chat[:2]] == ["user", "assistant"] for chat in chats)


@pytest.mark.parametrize("stage", ["finetune", "preference", "unpaired", "dialogue", "refuel"])
def test_repeated_rows_are_the_rows_in_turn(stage, tmp_path):
    rows = made(stage, 7)
    small = write(tmp_path / f"{stage}_train.pt", stage, rows)
    stored = starts.repeated(torch.load(tmp_path / f"{stage}_train.pt", weights_only=True), 17)
    found = from_stored(stored, stage, tmp_path / "made.pt")
    assert plain(found.to_list()) == plain([rows[number % 7] for number in range(17)])
    assert found.facts()[:2] == small.facts()[:2] and found.digest() != small.digest()


@pytest.mark.nightly
def test_each_part_is_measured_and_shown(tmp_path, capsys):
    results = tmp_path / "scale.json"
    scale.main(["--rows", "200", "--turns", "1", "--folder", str(tmp_path), "--results_file", str(results)])
    found = json.loads(results.read_text())["rows"]["200"]
    assert found.keys() == {"prepare", "start", "ranks", "order"}
    assert found["order"] == {"rows": found["order"]["rows"], "same_rows": True, "same_weights": True}
    assert found["prepare"]["tokens"] > 200 * 20 and found["prepare"]["peak_bytes"] > 2**25
    assert 0 < found["start"]["first_step"] <= found["start"]["seconds"]
    assert min(found["ranks"].values()) > 2**25
    assert "| start to first step |" in capsys.readouterr().out
