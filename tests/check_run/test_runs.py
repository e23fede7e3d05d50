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
from lightrlhf.programs import TRAINING

PROGRAMS = ("sft", "dpo", "ppo", "grpo")
MEANT = {"sft": {"weights"}, "dpo": {"start", "weights"}, "ppo": {"mask", "start", "weights", "trainer"}}
MEANT["grpo"] = {"mask", "members", "advantages", "weights", "trainer"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cafe_data, talk_data, tokenizer):
    folder = tmp_path_factory.mktemp("runs")
    made = TinyRuns(folder, cafe_data, talk_data, tokenizer)
    flags = "--disable_dropout=True", "--log_rollouts=100"
    flags_of = {name: made.flags(name, folder / name, *flags[: 1 + (name in ("ppo", "grpo"))]) for name in PROGRAMS}
    return {name: Path(main_of(name)(flags_of[name])) for name in PROGRAMS}


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
    ],
)
def test_a_wrong_start_is_named(runs, tmp_path, program, metric, value, fault):
    edit(runs[program], tmp_path / "run", "metrics.jsonl", lambda row: row.update({metric: value}))
    assert {one.fault for one in verdicts_of(tmp_path / "run") if one.says == "wrong"} == {fault}


@pytest.mark.parametrize("fault", ["weights did not change", "weights are not finite"])
def test_weights_that_stand_still_or_burst_are_named(runs, tmp_path, fault):
    shutil.copytree(runs["sft"], tmp_path / "run")
    first, last = (tmp_path / "run" / f"checkpoint-{step:06}" / "model.safetensors" for step in (2, 6))
    weights = load_file(first)
    if fault == "weights are not finite":
        weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    save_file(weights, last)
    assert {one.fault for one in verdicts_of(tmp_path / "run") if one.says == "wrong"} == {fault}


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
