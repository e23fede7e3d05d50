"""The freeze tells what differs between two commits; its runs are made by `make freeze`."""

import torch

from tests.freeze import cases, compare

WEIGHTS = torch.tensor([0.5, -0.0])


def record(**changes) -> dict:
    """A record of a run of one step; changes: by the last word of their names."""
    found = {
        "logs run 0 metrics.jsonl row 0 train/loss": 0.25,
        "logs run 0 rollouts.jsonl row 0 response": "a tea",
        "logs run 0 args.json seed": "42",
        "logs run 0 checkpoint-000001 model.safetensors weight": WEIGHTS,
        "logs run 0 checkpoint-000001 resume.pt extra order": [3, 1, 2],
        "logs run 0 checkpoint-000001 resume.pt learned critic bias": WEIGHTS,
    }
    return {name: changes.get(name.split()[-1].split("/")[-1], value) for name, value in found.items()}


def test_equal_records_do_not_differ():
    assert not compare.differences(record(), record())


def test_each_file_that_differs_is_told_once_with_its_first_difference():
    zero = torch.tensor([0.5, 0.0])  # another bit of sign
    for change in (
        {"loss": 0.25000000000000006},
        {"response": "a te"},
        {"weight": zero},
        {"bias": zero},
        {"seed": "1"},
    ):
        (line,) = compare.differences(record(), record(**change))
        assert next(iter(change)) in line, change
    assert len(compare.differences(record(), record(loss=1.0, weight=zero))) == 2
    (line,) = compare.differences(record(), {name: value for name, value in record().items() if "loss" not in name})
    assert "only in the base" in line


def test_the_loops_own_state_may_move_and_flags_may_come_and_go():
    moved = record()
    moved["logs run 0 checkpoint-000001 resume.pt extra sampler order"] = moved.pop(
        "logs run 0 checkpoint-000001 resume.pt extra order"
    )
    assert not compare.differences(record(), moved | {"logs run 0 args.json new_flag": "1"})
    moved["logs run 0 checkpoint-000001 resume.pt extra sampler order"] = [3, 2, 1]
    assert compare.differences(record(), moved)


def test_printed_times_do_not_differ_and_other_words_do():
    name = "printed 0 line 3"
    assert not compare.differences({name: "took 0.3 s of 2 steps"}, {name: "took 12.0 s of 2 steps"})
    assert compare.differences({name: "took 0.3 s of 2 steps"}, {name: "took 0.3 s of 3 steps"})


def test_a_flag_of_another_name_in_the_base_is_mapped(monkeypatch):
    monkeypatch.setattr(cases, "FLAGS", [("ppo|grpo", "--new 1", "--old one"), ("sft", "--more", "")])
    step = cases.Step("ppo", ("--new", "1", "--seed", "2"))
    assert cases.in_tree(step, True) == cases.Step("ppo", ("--old", "one", "--seed", "2"))
    assert cases.in_tree(step, False) == step


def test_names_of_cases_differ():
    names = [case.name for case in cases.CASES]
    assert len(names) == len(set(names))
