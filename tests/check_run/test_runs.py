"""Runs of our own programs have no fault; faults planted in their files are named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import reseal
from helpers.agent_runs import KEEPS, trained
from helpers.programs import main_of
from helpers.tiny_runs import TinyRuns
from safetensors.torch import load_file, save_file

from lightrlhf import check_run
from lightrlhf.checks.runs import read_run
from lightrlhf.programs import TRAINING

PROGRAMS = ("sft", "dpo", "kto", "ppo", "grpo", "distill")
SAMPLING = ("ppo", "grpo", "distill")
LONG = "--max_new_tokens=12", "--rollout_size=6", "--mini_batch_size=6", "--num_generations=1"
OF_GROUPS = "--max_new_tokens=12", "--num_generations=4", "--mini_batch_size=12", "--ppo_epochs=1"
OWN = {"ppo": LONG[:3], "grpo": OF_GROUPS, "distill": LONG}
MEANT = {"sft": {"weights"}, "dpo": {"start", "weights"}, "kto": {"start", "weights"}}
MEANT["ppo"] = {"mask", "members", "samples", "advantages", "loss", "start", "weights", "trainer"}
MEANT["grpo"] = MEANT["ppo"]
MEANT["distill"] = {"mask", "members", "samples", "weights", "kl"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer):
    folder = tmp_path_factory.mktemp("runs")
    made = TinyRuns(folder, cafe_data, talk_data, tokenizer)
    flags = "--disable_dropout=True", "--log_rollouts=100"
    found = {}
    for name in PROGRAMS:
        more = (*flags[: 1 + (name in SAMPLING)], *OWN.get(name, ()))
        found[name] = Path(main_of(name)(made.flags(name, folder / name, *more)))
    return found


OTHERS = [name for name in TRAINING if name not in PROGRAMS]


def verdicts_of(folder):
    return check_run.run(check_run.CheckRunArgs(run=str(folder)))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_of_a_program_has_no_fault(runs, program):
    says = {one.name: one.says for one in verdicts_of(runs[program])}
    assert "wrong" not in says.values()
    assert {name for name, one in says.items() if one == "right"} == MEANT[program]


def test_no_run_of_another_program_has_a_fault(tmp_path, cafe_data, talk_data, tokenizer):
    made = TinyRuns(tmp_path, cafe_data, talk_data, tokenizer)
    for name in OTHERS:
        says = {one.name: one.says for one in verdicts_of(main_of(name)(made.flags(name, tmp_path / name)))}
        assert "wrong" not in says.values() and says["weights"] == "right", name


@pytest.mark.slow
def test_a_run_of_agents_has_no_fault(tmp_path):
    flags = {"env": "guess_number", "env_options": ["turns=3"], "env_workers": 2, "save_interval": 1, "log_rollouts": 6}
    found = verdicts_of(trained(KEEPS, tmp_path, init_kl_coeff=0.1, **flags))
    assert "wrong" not in {one.says for one in found}


def logged(folder, rows, **args):
    """An experiment dir of a step of GRPO with `rows` (group, score, advantage, rows of the episode)."""
    folder.mkdir()
    args = {"program": "grpo", "num_generations": 3, "advantage": "mean", "kl_placement": "loss"} | args
    (folder / "args.json").write_text(json.dumps(args | {"init_kl_coeff": 0.0, "log_interval": 2}))
    made = []
    for number, (group, score, advantage, count) in enumerate(rows):
        row = {"step": 1, "group": group, "prompt_ids": [1], "response_ids": [number, 5], "mask": [1, 1]}
        row |= {"score": score, "advantages": [advantage] * 2, "truncated": False}
        row |= dict.fromkeys(("log_ratio", "values")) | {"columns": count and {"episode": {"rows": count}}}
        made.append(json.dumps(row) + "\n")
    (folder / "rollouts.jsonl").write_text("".join(made))
    (found,) = (one for one in check_run.check_steps(read_run(str(folder))) if one.name == "advantages")
    return found


def test_groups_of_which_episodes_may_be_cut_off_are_not_judged(tmp_path):
    high, low = (1.0, 0.66667), (0.0, -0.33333)
    whole = [(0, *high, 1), (0, *low, 1), (0, *low, 1)]
    cut = [(1, *high, 2), (1, *high, 2), (1, *low, 1)]  # and another episode of the group
    assert logged(tmp_path / "a", whole + cut, env="search").says == "right"
    assert logged(tmp_path / "b", cut, env="search").says == "cannot tell"
    unknown = [(*row[:3], None) for row in cut]
    assert logged(tmp_path / "c", unknown, env="search").says == "cannot tell"
    assert logged(tmp_path / "d", [*whole[:2], (0, *high, 1)], env="search").says == "wrong"


def test_advantages_that_are_not_finite_are_not_judged(tmp_path):
    rows = [(0, 1.0, None, None), (0, 0.0, -0.33333, None), (0, 0.0, -0.33333, None)]
    assert logged(tmp_path / "run", rows).says == "cannot tell"


def without_end(row):
    row["truncated"] = False


def sign(row):
    row["advantages"] = [-value for value in row["advantages"]]


def stale(row):
    row["log_ratio"] = [value + 0.002 * (-1) ** i for i, value in enumerate(row["log_ratio"])]


@pytest.mark.parametrize(
    "fault, change", [("sign", sign), ("end token missing", without_end), ("rounded to half precision", stale)]
)
def test_a_fault_of_rollouts_is_named(runs, tmp_path, fault, change):
    edit(runs["grpo"], tmp_path / "run", "rollouts.jsonl", change)
    faults = {one.fault for one in verdicts_of(tmp_path / "run") if one.says == "wrong"}
    assert faults == {fault}


def edit(run, copy, name, change):
    """Copy a run and change each row of a file of it."""
    shutil.copytree(run, copy)
    rows = [json.loads(line) for line in (copy / name).read_text().splitlines()]
    for row in rows:
        change(row)
    (copy / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    "program, metric, value, fault",
    [
        ("ppo", "policy/ratio", 1.02, "ratio not 1 at the first pass"),
        ("dpo", "train/preference_loss", 0.75, "reference is not the start"),
        ("kto", "train/loss", 0.6, "reference is not the start"),
        ("grpo", "policy/loss", 7.7, "differs from every known formula"),
    ],
)
def test_a_wrong_start_is_named(runs, tmp_path, program, metric, value, fault):
    edit(runs[program], tmp_path / "run", "metrics.jsonl", lambda row: row.update({metric: value}))
    assert {one.fault for one in verdicts_of(tmp_path / "run") if one.says == "wrong"} == {fault}


@pytest.mark.parametrize(
    "program, fault", [("ppo", {"advantages": "sign, whitened"}), ("distill", {"kl": "sign of exact"})]
)
def test_advantages_of_the_wrong_sign_are_named(runs, tmp_path, program, fault):
    edit(runs[program], tmp_path / "run", "rollouts.jsonl", sign)
    found = {one.name: one.fault for one in verdicts_of(tmp_path / "run") if one.says == "wrong"}
    assert found == fault


@pytest.mark.parametrize(
    "program, changed, check",
    [
        ("dpo", {"ref_model": "another"}, "start"),
        ("dpo", {"length_alpha": 0.1}, "start"),
        ("kto", {"desirable_weight": 1.5}, "start"),
        ("grpo", {"disable_dropout": False}, "loss"),
        ("grpo", {"precision": "bf16-mixed"}, "loss"),
        ("grpo", {"ppo_epochs": 2}, "loss"),
        ("grpo", {"devices": 2}, "loss"),
        ("grpo", {"loss_type": "reinforce"}, "loss"),
        ("grpo", {"overlong_filter": True}, "advantages"),
        ("ppo", {"ngram": 2}, "advantages"),
        ("ppo", {"log_interval": 2}, "advantages"),
        ("distill", {"precision": "bf16-mixed"}, "kl"),
        ("distill", {"own_teacher": "average", "teacher": None}, "kl"),
        ("distill", {"privileged_column": "answer"}, "kl"),
    ],
)
def test_what_settings_leave_open_is_not_judged(runs, tmp_path, program, changed, check):
    shutil.copytree(runs[program], tmp_path / "run")
    args = json.loads((tmp_path / "run" / "args.json").read_text())
    (tmp_path / "run" / "args.json").write_text(json.dumps(args | changed))
    reseal(tmp_path / "run")
    assert {one.name: one.says for one in verdicts_of(tmp_path / "run")}[check] == "cannot tell"


@pytest.mark.parametrize("fault", ["weights did not change", "weights are not finite"])
def test_weights_that_stand_still_or_burst_are_named(runs, tmp_path, fault):
    shutil.copytree(runs["sft"], tmp_path / "run")
    first, last = (tmp_path / "run" / f"checkpoint-{step:06}" / "model.safetensors" for step in (2, 6))
    weights = load_file(first)
    if fault == "weights are not finite":
        weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    save_file(weights, last)
    assert {one.fault for one in verdicts_of(tmp_path / "run") if one.says == "wrong"} == {fault}


def test_decisions_that_read_other_prompts_are_not_judged_as_one_text(tmp_path, cafe_data, talk_data, tokenizer):
    made = TinyRuns(tmp_path, cafe_data, talk_data, tokenizer)
    flags = made.flags("reflect_rl", tmp_path / "run", "--init_kl_coeff=0.1", "--log_rollouts=8", steps=4)
    says = {one.name: one.says for one in verdicts_of(main_of("reflect_rl")(flags))}
    assert "wrong" not in says.values() and says["trainer"] == "cannot tell"


def test_frozen_layers_that_changed_are_named(runs, tmp_path):
    shutil.copytree(runs["sft"], tmp_path / "run")
    args = json.loads((tmp_path / "run" / "args.json").read_text())
    (tmp_path / "run" / "args.json").write_text(json.dumps(args | {"finetune_mode": "last_layer"}))
    reseal(tmp_path / "run")
    for step in (2, 6):
        path = tmp_path / "run" / f"checkpoint-{step:06}" / "model.safetensors"
        weights = load_file(path)
        save_file(weights | {"model.layers.7.mlp.weight": torch.full((2,), float(step))}, path)
    assert {one.fault for one in verdicts_of(tmp_path / "run") if one.says == "wrong"} == {"frozen weights changed"}


def test_the_checkpoint_gives_the_log_probabilities_of_a_run(tmp_path, cafe_data, talk_data, tokenizer):
    made = TinyRuns(tmp_path, cafe_data, talk_data, tokenizer)
    run = Path(main_of("grpo")(made.flags("grpo", tmp_path / "grpo", "--log_rollouts=100", "--temperature=0.8")))
    (clean,) = (one for one in verdicts_of(run) if one.name == "trainer")
    assert clean.says == "right" and "recomputed" in clean.evidence

    def half(row):
        row["log_ratio"] = [value / 2 for value in row["log_ratio"]]

    edit(run, tmp_path / "half", "rollouts.jsonl", half)
    (found,) = (one for one in verdicts_of(tmp_path / "half") if one.name == "trainer")
    assert (found.says, found.fault) == ("wrong", "differs from the weights")
    (run / "checkpoint-000004" / "model.safetensors").write_bytes(b"")
    (lost,) = (one for one in verdicts_of(run) if one.name == "trainer")
    assert lost.says == "cannot tell" and "checkpoint-000004" in lost.evidence
