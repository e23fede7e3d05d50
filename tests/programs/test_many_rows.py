"""Many rows: a start reads facts and columns, but hardly a row, and what is evaluated takes a few bytes a row."""

import tracemalloc
from collections.abc import Callable

import pytest
import torch
from helpers import tiny_policy
from helpers.flat import made, plain

from lightrlhf import evaluate, evaluate_dialogues, judge, kto, online_refuel, rm
from lightrlhf.data.batch import row_length
from lightrlhf.data.flat import FlatRows, View
from lightrlhf.data.packing import pack, write_rows
from lightrlhf.data.tokens import pair_prompt, pair_rows
from lightrlhf.evaluation import answers
from lightrlhf.generation.dialogues import Dialogues, longest_lengths, share_columns
from lightrlhf.models.tokenizer import store_tokenizer
from lightrlhf.storage.jsonl import write_jsonl
from lightrlhf.storage.seals import seal
from lightrlhf.training.beginning import describe_rows, hash_rows

ROWS = 300


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """The places of the rows that were made from flat tensors."""
    places = []
    row = FlatRows.row
    monkeypatch.setattr(FlatRows, "row", lambda self, index: places.append(index) or row(self, index))
    return places


def folder_of(tmp_path, stage: str) -> str:
    write_rows(tmp_path / f"{stage}_train.pt", stage, made(stage, ROWS))
    return str(tmp_path)


def test_a_model_that_compares_pairs_makes_no_pair_before_it_is_read(tmp_path, tokenizer, read):
    flags = {"eval_interval": 0, "loss_type": "pair", "verify": False}
    splits = rm.load_comparisons(rm.RMArgs(data_dir=folder_of(tmp_path, "preference"), **flags), None, tokenizer)
    (pairs,) = splits.sets
    describe_rows(pairs)
    assert isinstance(pairs, View) and not read
    assert pairs.lengths().tolist() == [row_length(row) for row in pairs]
    ids = [index for row in pairs for side in ("chosen", "rejected") for index in row[f"{side}_input_ids"]]
    assert pairs.facts()[:2] == (min(ids), max(ids)) and len(read) == 2 * len(pairs)


def test_pairs_that_are_compared_hold_both_orders(tokenizer):
    rows = pack(made("preference", 20), "preference")
    pairs = pair_rows(tokenizer, rows)
    for row, pair in zip(rows, pairs, strict=True):
        start, ids = row["prompt_len"], [row[f"{side}_input_ids"].tolist() for side in ("chosen", "rejected")]
        better, worse = (one[start:] for one in ids)
        assert pair["chosen_input_ids"] == pair_prompt(tokenizer, ids[0][:start], better, worse)
        assert pair["rejected_input_ids"] == pair_prompt(tokenizer, ids[0][:start], worse, better)
        assert plain(pair["prompt_len"]) == plain(start)
    assert not pair_rows(tokenizer, View([])) and pairs.digest() != rows.digest()


def test_both_labels_and_two_prompts_are_found_without_a_pass_over_the_rows(tmp_path, tokenizer, read):
    args = kto.KTOArgs(data_dir=folder_of(tmp_path, "unpaired"), eval_interval=0, verify=False)
    kto.load_responses(args, None, tokenizer)
    assert len(read) <= 4


def test_dialogues_are_chosen_by_columns(tmp_path, tokenizer, read):
    flags = {"rm_experiment_dir": None, "reward_function": ["helpers.rewards:vowels"], "model_name": "tiny"}
    flags |= {"max_new_tokens": 20, "total_length": 50, "eval_interval": 0, "accelerator": "cpu", "verify": False}
    args = online_refuel.OnlineRefuelArgs(data_dir=folder_of(tmp_path, "dialogue"), **flags)
    (dialogues,) = online_refuel.load_splits(args, None, tokenizer).sets
    policy = tiny_policy("llama", vocab_size=500)
    online_refuel.check_dialogues(args, policy, dialogues)
    run = type("Run", (), {"args": args, "print0": print})
    fitting = online_refuel.with_room(run, policy, dialogues)
    describe_rows(fitting)
    assert not read and 0 < len(fitting) < len(dialogues)
    listed = list(dialogues)
    assert longest_lengths(dialogues, 20).tolist() == longest_lengths(listed, 20).tolist()
    assert list(fitting) == list(online_refuel.with_room(run, policy, listed))
    assert fitting[0].index == next(i for i, n in enumerate(longest_lengths(listed, 20).tolist()) if n <= 50)


def test_dialogues_of_two_splits_have_the_same_columns():
    one, two = (Dialogues(pack(made("dialogue", 3), "dialogue")) for _ in range(2))
    two.rows.rest[1]["columns"] = {"mood": "glad"}
    two.rows._facts.columns["mood"] = 0
    shared = share_columns({"train": one, "validation": two})
    assert [list(row.columns) for split in shared.values() for row in split] == [["mood", "user_turns"]] * 6
    assert [row.columns["mood"] for row in shared["validation"]] == [None, "glad", None]
    listed = share_columns({split: list(ones) for split, ones in shared.items()})
    assert listed == {split: list(ones) for split, ones in shared.items()}


def test_a_run_of_an_earlier_version_is_compared_by_its_own_hash():
    rows = pack(made("dialogue", 5), "dialogue")
    before = f"5 rows, sha256 {hash_rows(rows.to_list())}"
    assert describe_rows(rows, before) == before != describe_rows(rows)
    assert torch.equal(rows.column("input_ids"), torch.tensor([len(row["input_ids"]) for row in rows]))


# -------------------------------------------------------------------------------------------------------- evaluations
def growth(work: Callable[[int], object], few: int, many: int) -> float:
    """Bytes a row that the memory at the peak grows by, from few rows to many."""
    work(few)  # imports
    peaks = []
    for rows in (few, few, many):  # the first fills caches
        tracemalloc.start()
        work(rows)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return (peaks[2] - peaks[1]) / (many - few)


@pytest.fixture
def parts(monkeypatch):
    """Small parts, so that few rows are many parts."""
    monkeypatch.setattr(answers, "PART", 16)
    monkeypatch.setattr(evaluate_dialogues, "PART", 16)


LONG = "word " * 200  # of a prompt or response: 1,000 bytes


def test_evaluated_files_and_their_win_rates_take_some_bytes_a_response(tmp_path, parts):
    def work(rows: int) -> None:
        files = [tmp_path / f"{name}{rows}.jsonl" for name in "ab"]
        for file in files:
            write_jsonl(file, ({"prompt": f"{i} {LONG}", "response": f"{i} {LONG}"} for i in range(rows)))
        flags = ["--responses_file", *map(str, files), "--reward_function", "helpers.rewards:length", "--pass_k", "1"]
        evaluate.main([*flags, "--accelerator", "cpu"])

    assert growth(work, 300, 2300) < 900


def test_judged_files_take_some_bytes_a_pair(tmp_path):
    def work(rows: int) -> None:
        files = [tmp_path / f"{name}{rows}.jsonl" for name in "ab"]
        for file in files:
            write_jsonl(file, ({"prompt": f"{i} {LONG}", "response": f"{i} {LONG}"} for i in range(rows)))
        output = tmp_path / f"{rows}-verdicts.jsonl"
        output.unlink(missing_ok=True)
        judge.main(
            ["--responses_file", *map(str, files), "--judge", "helpers.rewards:length", "--output_file", str(output)]
        )

    assert growth(work, 600, 2600) < 900


def test_a_model_that_is_evaluated_takes_some_bytes_a_prompt(tmp_path, cafe_data, base_model, tokenizer, parts):
    row = {"prompt_len": 3, "input_ids": torch.tensor([5, 6, 7]), "columns": {"text": LONG}}
    write_rows(tmp_path / "prompts_test.pt", "prompts", [row] * 400)
    store_tokenizer(tokenizer, tmp_path)
    seal(tmp_path, ["prompts_test.pt"])

    def work(rows: int) -> None:
        flags = ["--model_name", str(base_model), str(base_model), "--data_dir", str(tmp_path), "--verify", "False"]
        flags += ["--reward_function", "helpers.rewards:length", "--num_samples", str(rows), "--max_new_tokens", "2"]
        evaluate.main([*flags, "--accelerator", "cpu", "--rollout_mini_batch_size", "16"])

    assert growth(work, 80, 400) < 900


def test_parts_of_an_evaluation_have_the_noise_of_the_whole():
    noise = torch.Generator().manual_seed(3)
    parts = [torch.rand(rows, 7, generator=noise) for rows in (16, 1, 40)]
    assert torch.equal(torch.cat(parts), torch.rand(57, 7, generator=torch.Generator().manual_seed(3)))
