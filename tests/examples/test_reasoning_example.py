"""The experiment on tasks with verifiers: it runs at tiny size, resumes, and claims what its rows say."""

import json

import pytest

from examples.experiments import hinted_reasoning, reasoning, verified
from lightrlhf.storage.jsonl import read_jsonl

pytest.importorskip("reasoning_gym")


def test_only_full_pay_is_solved():
    entry = json.dumps({"answer": "1", "question": "?", "metadata": {}})
    columns = {"task": ["count_bits"] * 3, "entry": [entry] * 3, "answer": ["1"] * 3}
    assert verified.solved(["?"] * 3, ["1", "12", "2"], **columns) == [1, 0, 0]


def test_no_range_of_the_base_is_that_of_a_task():
    assert reasoning.BASE.keys() == reasoning.TASKS.keys()
    for task, ranges in reasoning.BASE.items():
        assert reasoning.TASKS[task] not in ranges


def row(task: str, arm: str, seed: int, accuracy: float) -> dict:
    curve = [] if arm == "base" else [{"step": 1, "value": accuracy}]
    return {"task": task, "arm": arm, "seed": seed, "accuracy": accuracy, "curve": curve, "seconds": 1.0}


@pytest.mark.parametrize("grpo, held", [(0.95, True), (0.85, False)])
def test_the_claims_compare_means_over_seeds(grpo, held, tmp_path, capsys):
    tasks = ["chain_sum", "gcd", "count_bits"]
    rows = [row(task, "base", 0, 0.2) for task in tasks]
    for seed in (2, 1):
        for task in tasks:
            low = row(task, "SFT", seed, 0.6 + seed / 100), row(task, "RAFT", seed, 0.99)
            rows += [*low, row(task, "GRPO", seed, grpo + seed / 100)]
    claims = reasoning.show_results(rows, tasks, 2)
    assert list(claims.values()) == [held, True, False]
    assert "0.200" in capsys.readouterr().out
    reasoning.draw(rows, tasks, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").is_file()


@pytest.mark.thorough
def test_it_runs_and_a_second_call_runs_nothing_again(tmp_path, monkeypatch, capsys):
    flags = ["--output_dir", str(tmp_path), "--smoke", "True", "--tasks", "chain_sum", "--seeds", "7"]
    claims = reasoning.main(flags)
    rows = read_jsonl(tmp_path / "results.jsonl")
    assert [(one["arm"], one["seed"]) for one in rows] == [("base", 0), ("SFT", 7), ("RAFT", 7), ("GRPO", 7)]
    assert all(one["items"] == 4 and one["versions"] and 0 <= one["accuracy"] <= 1 for one in rows)
    assert rows[2]["curve"][0].keys() == {"step", "value", "kept", "seconds"} and rows[3]["curve"]
    monkeypatch.setattr(reasoning, "run_job", None)
    assert reasoning.main(flags) == claims
    assert not list((tmp_path / "runs").iterdir())


def test_a_hint_is_a_step_of_the_way():
    asked = "State the final answer to the following arithmetic problem: 3 - 9 + 4 ="
    assert hinted_reasoning.hint_of("chain_sum", asked) == "-6 + 4"
    asked = "How many 1 bits are there in the binary representation of the number 300?"
    assert hinted_reasoning.hint_of("count_bits", asked) == "100101100"


@pytest.mark.parametrize("hinted, held", [(0.5, True), (0.3, False)])
def test_a_hint_is_compared_with_grpo_and_the_base(hinted, held):
    read = {"cpu_seconds": 1.0, "kl": 0.1, "kl_of_teacher": 0.1}
    rows = [row("chain_sum", "base", 0, 0.2) | {"with_hints": 0.8}]
    for seed in (1, 2, 3):
        for arm, accuracy in (("hint", hinted), ("GRPO", 0.4), ("labels", 0.6)):
            rows.append(row("chain_sum", arm, seed, accuracy + seed / 100) | read)
    claims = hinted_reasoning.show_results(rows, ["chain_sum"])
    assert claims == {"chain_sum: hint > GRPO": held, "chain_sum: hint > base": True}


@pytest.mark.nightly
def test_hints_run_and_a_second_call_runs_nothing_again(tmp_path, monkeypatch):
    flags = ["--output_dir", str(tmp_path), "--smoke", "True", "--tasks", "chain_sum", "--seeds", "7"]
    claims = hinted_reasoning.main(flags)
    rows = read_jsonl(tmp_path / "results.jsonl")
    assert [one["arm"] for one in rows if one["seed"]] == [*hinted_reasoning.ARMS]
    assert [one["arm"] for one in rows if "score" in one] == [*hinted_reasoning.ARMS]
    assert all(one["kl"] > 0 and one["kl_of_teacher"] > 0 for one in rows if one["seed"])  # the teacher reads more
    monkeypatch.setattr(hinted_reasoning, "run_job", None)
    assert hinted_reasoning.main(flags) == claims
