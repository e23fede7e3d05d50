"""Evaluation by episodes: its results are those of its records, and training's rewards."""

import json
from statistics import mean

import pytest
from helpers.agent_runs import KEEPS, Game, model_of
from helpers.episodes import LocalPool
from helpers.errors import refused
from helpers.templates import ZOO

from lightrlhf import evaluate, evaluate_episodes
from lightrlhf.data.splits import save_split
from lightrlhf.data.tokens import encode_prompt
from lightrlhf.evaluation import frame
from lightrlhf.maths.passes import pass_at_k
from lightrlhf.models.tokenizer import store_tokenizer
from lightrlhf.storage.jsonl import read_jsonl

SIZES = ["--num_generations", "4", "--max_new_tokens", "5", "--max_turns", "2", "--rollout_mini_batch_size", "8"]
SIZES += ["--accelerator", "cpu"]


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """Flags of three held-out prompts and a model, and games in this process."""
    monkeypatch.setattr(evaluate_episodes, "make_pool", lambda args: LocalPool(Game, size=4))
    tokenizer = ZOO[KEEPS].tokenizer
    prompts = [(word, encode_prompt(tokenizer, [{"role": "user", "content": word}])) for word in ("tea", "a", "milk")]
    rows = [{"prompt_len": len(ids), "input_ids": ids, "columns": {"word": word}} for word, ids in prompts]
    save_split(tmp_path / "data", "prompts", "test", rows)
    store_tokenizer(tokenizer, tmp_path / "data")
    model_of(KEEPS).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    given = ["--env", "helpers.episodes:Told", "--data_dir", str(tmp_path / "data"), *SIZES]
    return [*given, "--model_name", str(tmp_path / "model")]


def test_results_are_those_of_the_records(flags, monkeypatch, capsys):
    kept = []
    monkeypatch.setattr(frame, "records_of", lambda args, model: kept)
    monkeypatch.setattr(frame, "write", lambda *given: None)
    finish = Game.finish
    monkeypatch.setattr(Game, "finish", lambda self, why: finish(self, why) / (self.seed % 4 > 0 or self.word != "a"))
    (row,) = evaluate.main([*flags, "--pass_k", "1", "3", "--pass_threshold", "6"])
    facts = [record["episode"] for record in kept]
    scores = [record["reward"] for record in kept if record["reward"] is not None]
    assert row["episodes"] == 12 == len(kept) and [record["index"] for record in kept] == [i // 4 for i in range(12)]
    assert row["reward"] == pytest.approx(mean(scores)) and row.get("reward_missing", 0) == 12 - len(scores)
    low, high = row["reward_interval"]
    assert low < row["reward"] < high
    for k in (1, 3):
        won = [sum(record["passed"] for record in kept if record["index"] == n) for n in range(3)]
        assert row[f"pass@{k}"] == pytest.approx(mean(pass_at_k(4, one, k) for one in won))
    for name in ("turns", "tokens", "rows"):
        assert row[name] == pytest.approx(mean(one[name] for one in facts))
    assert row["calls"] == pytest.approx(mean(one["counts"].get("calls", 0) for one in facts)) and row["calls"] > 0
    assert row["no_reward_ratio"] == pytest.approx((12 - len(scores)) / 12)
    for reason in ("done", "turns"):
        assert 0 < row[f"stop_{reason}_ratio"] == mean(one["stop_reason"] == reason for one in facts)
    assert all(record["messages"][-1]["content"] or True for record in kept)
    shown = capsys.readouterr().out
    assert "pass@3" in shown and "stop turns ratio" in shown and "stop context ratio" not in shown


def test_all_models_play_the_same_games_with_the_same_noise(flags, tmp_path):
    flags = [*flags[:-1], flags[-1], flags[-1]]
    one, other = evaluate.main(flags)
    assert {**one, "model": ""}.items() <= {**other, "model": ""}.items() and other["win_rate"] == 0.5


@pytest.mark.slow
def test_tools_are_evaluated_by_functions_and_written_into_an_experiment_dir(flags, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(frame, "is_experiment_dir", lambda name: True)
    words = ["--tools", "calculator", *flags[2:], "--env_workers", "1", "--reward_function", "helpers.rewards:length"]
    (row,) = evaluate.main(words)
    stored = json.loads((tmp_path / "model" / "eval" / "test_episodes.json").read_text())
    assert stored["reward"] == row["reward"] > 0
    records = read_jsonl(tmp_path / "model" / "eval" / "test_episodes.jsonl")
    assert mean(record["rewards"]["length"] for record in records) == pytest.approx(row["reward"])


@pytest.mark.parametrize(
    ("more", "fact"),
    [
        (["--pass_k", "5"], "--pass_k 5 needs --num_generations"),
        (["--env", "ches"], "--env ches is unknown"),
        (["--do_sample", "False"], "--num_generations 4: greedy"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_a_model_is_loaded(more, fact, flags, capsys, monkeypatch):
    monkeypatch.setattr(frame, "load_policy", None)
    assert fact in refused(capsys, evaluate.main, *flags, *more)


def test_an_environment_without_prompts_is_another_program_s():
    assert evaluate.program_for(["--env", "dangerous_taxi", "--model_name", "m"])[0] is evaluate.evaluate_env.main
    assert evaluate.program_for(["--env=my_env.py:Class"])[0] is evaluate.evaluate_env.main
    for words in (
        ["--env=sums", "--data_dir=d"],
        ["--tools", "calculator"],
        ["--mcp", "c"],
        ["--env", "sums"],
        ["--env=ws://host:1"],
        ["--env", "my_env.py:Class", "--data_dir", "d"],
    ):
        assert evaluate.program_for(words)[0] is evaluate_episodes.main
