"""The experiments on a real model: they run at tiny size, resume, and claim what their rows say."""

import gzip
import json
from types import ModuleType

import pytest

from datasets_prep.cafe.pretrain_base import BASE_DIR
from examples.experiments import real_dialogues, real_distillation, real_model, real_reasoning, verified
from lightrlhf.storage.jsonl import read_jsonl

TINY = ["--model_name", str(BASE_DIR), "--precision", "32-true", "--smoke", "True"]


def test_a_row_falls_into_the_half_of_its_prompt_at_every_stage():
    pair = {"prompt_len": 2, "chosen_input_ids": [5, 6, 7], "rejected_input_ids": [5, 6, 8]}
    halves = set()
    for first in range(20):
        pair["chosen_input_ids"] = [first, 6, 7]
        prompt = {"prompt_len": 2, "input_ids": [first, 6]}
        assert real_dialogues.half_of(pair) == real_dialogues.half_of(prompt)
        halves.add(real_dialogues.half_of(pair))
    assert halves == set(real_dialogues.HALVES)


def made(arm: str, seed: int, **read: float) -> dict:
    return {"arm": arm, "seed": seed, "wall_seconds": 9.0, "cpu_seconds": 9.0, "peak_gib": 1.0} | read


@pytest.mark.parametrize("judged, claimed", [(0.55, False), (0.65, True)])
def test_no_win_rate_is_claimed_by_a_weak_judge(judged, claimed, capsys):
    scored = {"accuracy_interval": [0.5, 0.7]}
    rows = [made("judge", seed, accuracy=judged + seed / 1000, **scored) for seed in (1, 2, 3)]
    rows += [made("dpo", seed, length_controlled_win_rate=0.7 + seed / 1000, kl=1.0) for seed in (1, 2, 3)]
    claims = real_dialogues.show_results(rows)
    assert claims == ({"dpo wins against sft at equal length": True} if claimed else {})
    assert ("no win rate is claimed" in capsys.readouterr().out) is not claimed


def test_two_seeds_claim_nothing():
    scored = {"accuracy_interval": [0.6, 0.7]}
    rows = [made("rm", seed, accuracy=0.65 + seed / 1000, **scored) for seed in (1, 2, 3)]
    assert list(real_dialogues.show_results(rows).values()) == [True]
    assert real_dialogues.show_results(rows[:2]) == {}


def test_arms_are_compared_on_the_seeds_that_both_have():
    def row(arm: str, seed: int, share: float) -> dict:
        read = dict.fromkeys(("greedy", "pass_1", "pass_8"), share) | {"kl": 0.0, "length": 2.0, "items": 9}
        return made(arm, seed, **read) | {"task": "gcd"}

    rows = [row("base", 0, 0.2), row("GRPO", 4, 0.0)]
    for seed in (3, 2, 1):
        rows += [row("RAFT", seed, 0.2 + seed / 100), row("GRPO", seed, 0.4 + seed / 100)]
    claims = real_reasoning.show_results(rows, ["gcd", "letter_counting"])
    held = {claim.partition(": ")[2] for claim, is_held in claims.items() if is_held}
    assert held == {"GRPO > base", "GRPO > RAFT"} and len(claims) == 9


@pytest.mark.parametrize(
    "reached, spread, held", [(0.35, 0.001, [True] * 3), (0.25, 0.001, [False, True, False]), (0.2, 0.1, [False] * 3)]
)
def test_a_student_is_compared_with_what_grpo_gained(reached, spread, held, capsys):
    read = dict.fromkeys(("greedy", "pass_8"), 0.5) | {"kl": 0.0, "length": 2.0, "items": 9}
    rows = [made("base", 0, pass_1=0.2, **read)]
    for seed in (1, 2, 3):
        steps = [{"step": step, "pass_1": reached + seed * spread} | read for step in real_distillation.READ_AT]
        rows += [made("GRPO", seed, pass_1=0.4 + seed / 1000, **read)]
        rows += [made("distilled", seed) | {"read": steps, "kl_to_teacher": 0.1, "kl_of_teacher": 0.2}]
    claims = real_distillation.show_results(rows)
    names = (
        "12 steps: more than half of the gain",
        "12 steps: distilled > base",
        "24 steps: more than half of the gain",
    )
    assert claims == dict(zip(names, held))
    assert real_distillation.show_results(rows[:5]) == {} and "of the gain" in capsys.readouterr().out


def test_a_finished_run_is_not_trained_again(tmp_path):
    program = ModuleType("lightrlhf.fake")
    program.main = lambda words: words[words.index("--log_dir") + 1]
    run = real_model.trained(tmp_path / "arm", program, seed=1)
    assert run == str(tmp_path / "arm")
    program.main = None
    assert real_model.trained(tmp_path / "arm", program, seed=1) == run


def test_raft_goes_on_after_the_parts_that_it_has(tmp_path, monkeypatch):
    rows = [{"prompt_len": 1, "input_ids": [index], "columns": {}} for index in range(4)]
    monkeypatch.setattr(verified, "load_tokenizer", lambda *_: None)
    monkeypatch.setattr(verified, "load_split", lambda *_: rows)
    for number in (0, 1):
        found = {"step": number, "value": 0.5, "kept": 1, "seconds": 2.0}
        (tmp_path / f"part-{number}").mkdir()
        (tmp_path / f"part-{number}" / "done.json").write_text(json.dumps([f"policy-{number}", found]))
    policy, curve = verified.run_raft(tmp_path, "base", "data", 1, {}, verified.Shape(4, 2, 2, 8))
    assert policy == "policy-1" and [part["step"] for part in curve] == [0, 1]


@pytest.mark.thorough
def test_reasoning_runs_and_a_second_call_runs_nothing_again(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    flags = [*TINY, "--output_dir", str(tmp_path), "--seeds", "7", "--tasks", "gcd"]
    claims = real_reasoning.main(flags)
    rows = read_jsonl(tmp_path / "results.jsonl")
    assert [(row["arm"], row["seed"]) for row in rows] == [("base", 0), ("RAFT", 7), ("GRPO", 7)]
    assert all(0 <= row["greedy"] <= 1 and row["peak_gib"] > 0 and row["versions"] for row in rows)
    assert not list((tmp_path / "runs").iterdir())
    monkeypatch.setattr(real_reasoning, "in_own_process", None)
    assert real_reasoning.main(flags) == claims


@pytest.mark.nightly
def test_an_adapter_is_distilled_and_a_second_call_runs_nothing_again(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    flags = [*TINY, "--output_dir", str(tmp_path), "--seeds", "7"]
    claims = real_distillation.main(flags)
    rows = read_jsonl(tmp_path / "results.jsonl")
    assert [(row["arm"], row["seed"]) for row in rows] == [("base", 0), ("GRPO", 7), ("distilled", 7)]
    assert (
        [one["step"] for one in rows[2]["read"]] == [1]
        and rows[2]["curve"]
        and not list((tmp_path / "runs/7").glob("*"))
    )
    monkeypatch.setattr(real_distillation, "in_own_process", None)
    assert real_distillation.main(flags) == claims


@pytest.mark.nightly
def test_dialogues_run_and_a_second_call_runs_nothing_again(tmp_path, monkeypatch):
    texts = [f"\n\nHuman: a small tea number {index}\n\nAssistant: " for index in range(60)]
    pairs = [{"chosen": f"{text}yes, one tea", "rejected": f"{text}no"} for text in texts]
    with gzip.open(tmp_path / "pairs.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(pair) + "\n" for pair in pairs)
    flags = [*TINY, "--output_dir", str(tmp_path / "out"), "--dataset_name", str(tmp_path / "pairs.jsonl.gz")]
    claims = real_dialogues.main([*flags, "--seeds", "7"])
    rows = read_jsonl(tmp_path / "out" / "results.jsonl")
    assert [row["arm"] for row in rows] == list(real_dialogues.FLAGS)
    assert all(abs(row["kl"]) < 1 for row in rows if row["arm"] in real_dialogues.POLICIES)
    monkeypatch.setattr(real_dialogues, "in_own_process", None)
    assert real_dialogues.main([*flags, "--seeds", "7"]) == claims
