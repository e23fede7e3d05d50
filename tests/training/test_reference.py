"""Rows that are scored before training: those that the steps read, once, whatever was killed, resumed or stored."""

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, weights
from helpers.killed import forked

from lightrlhf import dpo, refuel
from lightrlhf.data.splits import load_split, save_split
from lightrlhf.models.tokenizer import store_tokenizer
from lightrlhf.training import reference

STEPS = ["--mini_batch_size", "4", "--eval_interval", "0", "--lr_scheduler_type", "constant"]


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of one step each, all of which are kept."""
    for name, value in (("PART_ROWS", 4), ("KEPT_ROWS", 0), ("WRITE_SECONDS", 0.0)):
        monkeypatch.setattr(reference, name, value)


@pytest.fixture
def pairs_dir(cafe_data, tokenizer, tmp_path) -> Path:
    """The café's pairs, in a folder that other tests do not read."""
    folder = tmp_path / "data" / "cafe"
    for split in ("train", "validation"):
        save_split(folder, "preference", split, load_split(cafe_data, "preference", split))
    store_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture
def dialogues_dir(pairs_dir, tokenizer, tmp_path) -> Path:
    """The same as pairs of replies for REFUEL."""
    rows = []
    for pair in load_split(pairs_dir, "preference", "train"):
        row: dict = {}
        for number, side in enumerate(("chosen", "rejected")):
            ids = torch.as_tensor(pair[f"{side}_input_ids"])
            row |= {f"{side}_input_ids": ids, f"{side}_action_mask": torch.arange(1, len(ids)) >= pair["prompt_len"]}
            row |= {f"{side}_reward": float(number)}
        rows.append(row)
    save_split(tmp_path / "data" / "dialogues", "refuel", "train", rows)
    store_tokenizer(tokenizer, tmp_path / "data" / "dialogues")
    return tmp_path / "data" / "dialogues"


@pytest.fixture(params=["dpo", "refuel"])
def program(request, base_model, tmp_path, monkeypatch, small_parts):
    """A function that trains for some steps, and the numbers of rows of its scoring passes before training."""
    module = {"dpo": dpo, "refuel": refuel}[request.param]
    data = request.getfixturevalue("pairs_dir" if request.param == "dpo" else "dialogues_dir")
    passes: list[int] = []
    original = reference.score_rows

    def counted(run, model, rows, *more):
        if not run.learners.by_name:  # before training
            passes.append(len(rows))
        if os.environ.get("KILLED_AT") == str(len(passes)):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(run, model, rows, *more)

    monkeypatch.setattr(reference, "score_rows", counted)

    def train(steps: int, resume_from: str = "", micro_batch_size: int = 2) -> str:
        passes.clear()
        flags = ["--data_dir", str(data), "--model_name", str(base_model), "--log_dir", str(tmp_path / "logs"), *CPU]
        flags += [*STEPS, "--micro_batch_size", str(micro_batch_size)]
        return module.main([*(["--resume_from", resume_from] if resume_from else flags), "--max_steps", str(steps)])

    return train, passes, data


def test_rows_that_no_step_reads_are_not_scored(program):
    train, passes, _ = program
    train(3)
    assert 2 + 3 * 4 - 2 <= sum(passes) <= 2 + 3 * 4  # the rows of the first check may be among those of the steps


@pytest.mark.slow
def test_a_resumed_run_scores_the_further_rows_and_equals_a_whole_one(program):
    train, passes, data = program
    whole, part = train(4), train(2)
    for file in data.glob("logprobs-*.pt"):
        file.unlink()
    train(4, part)
    assert 0 < sum(passes) <= 2 * 4
    assert weights(last_checkpoint(part)) == weights(last_checkpoint(whole))


@pytest.mark.slow
def test_what_a_killed_run_has_scored_is_not_scored_again(program, tmp_path, monkeypatch):
    train, passes, data = program
    monkeypatch.setenv("KILLED_AT", "4")
    assert forked(lambda: train(6), tmp_path / "output") == -signal.SIGKILL
    monkeypatch.delenv("KILLED_AT")
    killed = train(6)
    assert len(passes) == 1 + 6 - 3
    (file,) = data.glob("logprobs-*.pt")
    values = torch.load(file, weights_only=True)
    torch.save({key: (logps + 1, sha256) for key, (logps, sha256) in values.items()}, file)
    whole = train(6)
    assert len(passes) == 1 + 6  # none of those that have changed
    assert weights(last_checkpoint(killed)) == weights(last_checkpoint(whole))


@pytest.mark.slow
def test_parts_of_another_numeric_setting_are_not_taken(program):
    train, passes, data = program
    train(2)
    train(2, micro_batch_size=4)
    assert len(passes) == 1 + 2 and len(list(data.glob("logprobs-*.pt"))) == 2


def test_a_file_that_cannot_be_written_ends_no_run(program, capsys):
    train, _, data = program
    train(2)
    (file,) = data.glob("logprobs-*.pt")
    file.unlink()
    file.mkdir()
    train(2)
    assert "starts scoring again" in capsys.readouterr().out and file.is_dir()


def test_scores_of_more_steps_than_are_left_are_ignored():
    found = reference.by_place({"places": [0, 5], "logps": [1.0, 2.0]}, 3)
    assert found.shape == (1, 3) and found[0, 0] == 1 and found[0, 1:].isnan().all()
