"""Columns that only some rows have: a function gets them in every batch, None where a row has none."""

import pytest
import torch
from helpers import rewards, tiny_model
from helpers.data import write_lines

from lightrlhf import GRPOArgs, PPOArgs, annotate, check_reward, grpo, judge, ppo
from lightrlhf.annotate import AnnotateArgs
from lightrlhf.data.rows import load_rows
from lightrlhf.data.splits import load_prompts, save_split
from lightrlhf.evaluation.ranking import read_ranking
from lightrlhf.generation.dialogues import Dialogue, share_columns
from lightrlhf.rewards.verifiers import exact_answer

SMALL = {"accelerator": "cpu", "micro_batch_size": 2, "mini_batch_size": 2, "rollout_size": 2, "max_new_tokens": 3}
SMALL |= {"lr_warmup_steps": 0, "eval_interval": 1, "max_steps": 4}
ALL = frozenset({"answer", "unit", "hint"})


def model_of(tokenizer):
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return tiny_model("llama", vocab_size=len(tokenizer), **special)


def noting(calls: list):
    """A reward function that notes the columns of each call."""

    def reward(prompts, completions, **columns):
        calls.append(frozenset(columns))
        assert all(len(values) == len(completions) for values in columns.values())
        return [float(len(text)) for text in completions]

    return reward


def prompts_file(folder, tokenizer, **splits):
    """A folder of prompts with these columns, a dict a row."""
    tokenizer.save_pretrained(folder / "tokenizer")
    for split, columns in splits.items():
        rows = [{"prompt_len": 3, "input_ids": torch.tensor([5, 6, 7]), "columns": own} for own in columns]
        save_split(folder, "prompts", split, rows)
    return str(folder)


@pytest.mark.slow
def test_every_call_of_a_run_gets_the_columns_of_all_rows_and_splits(tokenizer, tmp_path):
    calls = []
    given = {"train": [{"prompt": "a", "answer": "4"}, *({"prompt": text} for text in "bcde")]}
    given |= {"train": [*given["train"], {"prompt": "f", "unit": "g"}], "validation": [{"prompt": "g", "hint": "h"}]}
    args = PPOArgs(log_dir=str(tmp_path), **SMALL)
    ppo.train(args, policy=model_of(tokenizer), tokenizer=tokenizer, prompts=given, reward=noting(calls))
    assert set(calls) == {ALL} and len(calls) > 4
    assert given["train"][1] == {"prompt": "b"}  # the caller's own rows stay as they are


@pytest.mark.slow
def test_sets_of_several_folders_have_the_columns_of_all(tokenizer, tmp_path):
    calls = []
    first = prompts_file(tmp_path / "a", tokenizer, train=[{"answer": "1"}] * 4, validation=[{}, {"hint": "h"}])
    second = prompts_file(tmp_path / "b", tokenizer, train=[{"unit": "g"}, {}] * 2, validation=[{}])
    sizes = {"num_generations": 2, "resample_rounds": 2, "data_dir": [first, second]}
    args = GRPOArgs(log_dir=str(tmp_path), **SMALL, **sizes)
    grpo.train(args, policy=model_of(tokenizer), tokenizer=tokenizer, reward=noting(calls))
    assert set(calls) == {ALL}


def test_rows_of_files_have_the_columns_of_all(tokenizer, tmp_path):
    folder = prompts_file(tmp_path / "a", tokenizer, train=[{"answer": "1"}, {}, {"unit": 2}])
    expected = [{"answer": "1", "unit": None}, {"answer": None, "unit": None}, {"answer": None, "unit": 2}]
    assert [row["columns"] for row in load_prompts(folder, "train")] == expected
    own = {"answer": "1"}
    rows = [{"prompt_len": 1, "input_ids": [5], "columns": columns} for columns in (own, {"unit": 2})]
    assert load_rows("prompts", "train", "", rows, tokenizer)[0]["columns"] == {"answer": "1", "unit": None}
    assert own == {"answer": "1"}
    lines = [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "b", "unit": 1},
    ]
    assert [row["unit"] for row in read_ranking(str(write_lines(tmp_path / "rank.jsonl", lines)))] == [None, 1]
    dialogues = {"train": [Dialogue(0, [], [], columns=own)], "validation": [Dialogue(0, [], [], columns={"unit": 2})]}
    assert share_columns(dialogues)["train"][0].columns == {"answer": "1", "unit": None}


def test_files_of_responses_are_scored_and_judged_with_all_columns(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(annotate, "CHUNK", 1)
    monkeypatch.setattr(judge, "CHUNK", 1)
    monkeypatch.setattr(rewards, "length", noting(calls))
    rows = [{"index": i, "prompt": f"p{i}", "responses": ["a", "bc"], **c} for i, c in enumerate([{"unit": 1}, {}])]
    first, second = (str(write_lines(tmp_path / f"{name}.jsonl", rows)) for name in "ab")
    scored = annotate.run(AnnotateArgs(responses_file=first, reward_function=["helpers.rewards:length"]))
    assert calls == [frozenset({"unit"})] * 2
    flags = ["--responses_file", first, second, "--judge", "helpers.rewards:length", "--output_file"]
    judge.main([*flags, str(tmp_path / "out.jsonl")])
    assert {"unit"} <= frozenset.intersection(*calls) and len(calls) == 6, scored


def test_the_right_answer_of_a_row_is_that_of_the_first_column_it_has(tokenizer, tmp_path):
    columns = {"answer": ["1", None, None], "solution": ["9", "2", None]}
    assert exact_answer(["p"] * 3, ["1", "2", "3"], **columns) == [1.0, 1.0, None]
    folder = prompts_file(tmp_path / "a", tokenizer, train=[{"answer": "1"}, {"solution": "2", "task": "t"}])
    args = check_reward.CheckRewardArgs(data_dir=folder, reward_function=["helpers.answers:exact"])
    read = check_reward.read_rows(args)
    assert {task: [row["answer"] for row in rows] for task, rows in read.items()} == {"": ["1"], "t": ["2"]}
