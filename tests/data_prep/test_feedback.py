"""Votes become the pairs that a reward model learns from, and that it does."""

import json

import pytest
from helpers import CPU
from helpers.flat import stored_rows
from helpers.votes import BAD, GOOD, STARTS, cast, vote

from datasets_prep.feedback.prepare_data import main
from lightrlhf import rm
from lightrlhf.data.tokens import decode, encode_prompt


@pytest.fixture
def votes(tmp_path):
    orders = [f"{start}, please, number {n}." for start in STARTS for n in range(6)]
    cast(tmp_path / "votes.jsonl", orders)
    cast(tmp_path / "votes.jsonl", orders[:3], rater="grace")
    cast(tmp_path / "votes.jsonl", orders[3:6], verdict="B", rater="grace")  # ada and grace are divided
    cast(tmp_path / "votes.jsonl", ["A tie?"], verdict="tie")
    cast(tmp_path / "votes.jsonl", ["What?", "How?"], verdict="skip")
    cast(tmp_path / "votes.jsonl", ["Long?"], cut=[False, True])
    return tmp_path / "votes.jsonl"


def prepare(votes, cafe_data, tmp_path, *flags: str):
    main(["--dataset_name", str(votes), "--tokenizer_name", str(cafe_data / "tokenizer"), "--num_proc", "1", *flags])


def test_votes_become_pairs_and_a_reward_model(votes, cafe_data, sft_dir, tokenizer, tmp_path):
    folder = tmp_path / "data" / "cafe" / "feedback"
    prepare(votes, cafe_data, tmp_path, "--destination_dir", str(folder))
    files = [folder / f"preference_{split}.pt" for split in ("train", "validation")]
    pairs = [row for file in files for row in stored_rows(file)]
    prompt = encode_prompt(tokenizer, [{"role": "user", "content": "x"}])
    for row in pairs:
        chosen, rejected = (row[f"{side}_input_ids"].tolist() for side in ("chosen", "rejected"))
        assert decode(tokenizer, chosen[row["prompt_len"] :]).strip() == GOOD
        assert decode(tokenizer, rejected[row["prompt_len"] :]).strip() == BAD
        assert chosen[-1] == rejected[-1] == tokenizer.eos_token_id
        assert decode(tokenizer, chosen[: row["prompt_len"]]).endswith(decode(tokenizer, prompt[-2:]))
        assert row["columns"]["model_chosen"] == "ppo step 1"
    twice = [row["columns"] for row in pairs if row["columns"]["votes"] == 2]
    assert all(columns["agree"] == 1 and columns["group"] == "several" for columns in twice)
    report = (folder / "report.json").read_text()
    assert all(f'"{reason}"' in report for reason in ("raters_are_divided", "skipped", "tie", "an_answer_was_cut"))
    flags = ["--max_steps", "2", "--micro_batch_size", "4", "--mini_batch_size", "4", *CPU]
    model = ["--sft_experiment_dir", sft_dir, "--log_dir", str(tmp_path / "logs")]
    assert rm.main(["--data_dir", str(folder), *model, *flags])


def test_files_of_several_pages_are_read_together_and_a_vote_counts_once(tmp_path, cafe_data, capsys):
    folder, orders = tmp_path / "votes", [f"{start}, please." for start in STARTS]
    cast(folder / "a.jsonl", orders)
    cast(folder / "b.jsonl", orders[:2], verdict="B")  # ada again, whose first vote stays
    cast(folder / "b.jsonl", [f"Hello. {order}" for order in orders], rater="grace")
    flags = ["--destination_dir", str(tmp_path / "out"), "--validation_percentage", "0", "--test_percentage", "0"]
    prepare(folder, cafe_data, tmp_path, *flags, "--stage", "preference")
    assert len(stored_rows(tmp_path / "out" / "preference_train.pt")) == 12
    assert "try --validation_percentage 0.4" in capsys.readouterr().out


def test_a_file_without_a_decision_or_without_votes_is_refused(tmp_path, cafe_data, capsys):
    (tmp_path / "votes.jsonl").write_text(json.dumps(vote(0, "skip")) + "\n")
    for file, words in ((tmp_path / "votes.jsonl", "skipped"), (tmp_path / "none.jsonl", "--dataset_name")):
        with pytest.raises(SystemExit):
            prepare(file, cafe_data, tmp_path, "--destination_dir", str(tmp_path / "out"))
        assert words in capsys.readouterr().err
