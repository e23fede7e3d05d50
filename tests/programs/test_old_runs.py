"""Runs of an older release (tests/fixtures/old_runs) are evaluated and resumed, with renamed flags as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers import ROOT, last_checkpoint, metrics, weights
from helpers.programs import args_class

from lightrlhf import evaluate, generate, ppo
from lightrlhf.cli.old_flags import NOT_FLAGS
from lightrlhf.cli.parser import parse
from lightrlhf.evaluate import EvaluateArgs
from lightrlhf.ppo import PPOArgs
from lightrlhf.storage.jsonl import read_jsonl

RUNS = {name: name for name in ("sft", "rm", "ppo", "dpo", "online_dpo", "reflect_rl")}  # the program of today
RUNS |= {"refuel": "iterative_refuel", "refuel_online": "online_refuel"}


@pytest.fixture
def old_runs(tmp_path, monkeypatch):
    """A copy of the folder, as working directory and on the path: all stored paths are relative to it."""
    folder = shutil.copytree(ROOT / "tests" / "fixtures" / "old_runs", tmp_path / "old_runs")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def change(file: str, **values) -> dict:
    """The values stored in a JSON file, after changing some."""
    changed = json.loads(Path(file).read_text()) | values
    Path(file).write_text(json.dumps(changed))
    return changed


# ----------------------------------------------------------------------------------------------------- a run of PPO
def test_it_is_resumed(old_runs):
    rows, start = metrics("ppo"), weights("ppo/checkpoint-000002")
    args = parse(PPOArgs, ["--resume_from", "ppo", "--max_steps", "4", "--epochs", "2"])
    assert Path(ppo.train(args)).resolve() == old_runs / "ppo"
    after = metrics("ppo")
    assert after[: len(rows)] == rows and [row["step"] for row in after[len(rows) :]] == [3, 4, 4]
    coefficients = [row["objective/kl_coeff"] for row in after if "objective/kl_coeff" in row]
    assert 0.1 == coefficients[0] > coefficients[1] > coefficients[2] > coefficients[3]  # its state was restored
    assert last_checkpoint("ppo").name == "checkpoint-000004" and weights(last_checkpoint("ppo")) != start


def test_it_is_evaluated(old_runs):
    (row,) = evaluate.run(parse(EvaluateArgs, ["--experiment_dir", "ppo", "--max_new_tokens", "4"]))
    assert row["gold"] == pytest.approx(0.25) and row["mean_length"] == 4
    assert len(read_jsonl("ppo/eval/test.jsonl")) == 4


def test_another_run_starts_from_it(old_runs):
    flags = ["--sft_experiment_dir", "ppo", "--max_steps", "1", "--log_dir", "logs", "--max_new_tokens", "4"]
    flags += ["--data_dir", "data/cafe/mini", "--reward_function", "own_rewards:length", "--rollout_size", "4"]
    flags += ["--mini_batch_size", "4", "--micro_batch_size", "4", "--accelerator", "cpu", "--log_interval", "1"]
    row = metrics(ppo.train(parse(PPOArgs, flags)))[0]
    assert row["objective/kl"] == pytest.approx(0, abs=1e-5)


# --------------------------------------------------------------------------------------------------- stored arguments
@pytest.mark.parametrize("run", RUNS)
def test_stored_arguments_keep_their_values(run, old_runs, capsys):
    """Under new names where they were renamed; a removed flag with a value that is gone is refused by name."""
    owner = args_class(f"lightrlhf.{RUNS[run]}")
    renamed, removed = getattr(owner, "RENAMED", {}), getattr(owner, "REMOVED", {})
    stored = change(f"{run}/args.json")
    for name in [name for name in removed if name in stored and removed[name][0] not in (stored[name], ...)]:
        with pytest.raises(SystemExit) as stopped:
            parse(owner, ["--resume_from", run])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and f"{name} {stored[name]}" in error
        stored = change(f"{run}/args.json", **{name: removed[name][0]})
    args = parse(owner, ["--resume_from", run])
    values = {renamed.get(name, name): value for name, value in stored.items() if name not in {*NOT_FLAGS, *removed}}
    if values["lr_warmup_ratio"] is not None:
        values["lr_warmup_steps"] = None  # the ratio won over steps
    if isinstance(values.get("reward_function"), str):
        values["reward_function"] = [values["reward_function"]]  # one, in older releases
    assert {name: getattr(args, name) for name in values} == values


def test_a_stored_flag_that_is_unknown_is_refused_by_name(old_runs, capsys):
    change("ppo/args.json", no_such_flag=1)
    with pytest.raises(SystemExit) as stopped:
        ppo.main(["--resume_from", "ppo"])
    assert stopped.value.code == 2 and "no_such_flag" in capsys.readouterr().err


def test_a_file_of_responses_is_still_of_its_settings(old_runs, capsys):
    file = Path("generate/responses.jsonl")
    before = file.stat().st_mtime_ns, file.read_bytes()
    flags = ["--model_name", "ppo", "--data_dir", "data/cafe/mini", "--split", "validation", "--accelerator", "cpu"]
    flags += ["--max_new_tokens", "4", "--output_file", str(file)]
    generate.main([*flags, "--num_generations", "2"])
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before
    with pytest.raises(SystemExit):
        generate.main([*flags, "--num_generations", "3"])
    assert "num_generations was 2, now 3" in capsys.readouterr().err
