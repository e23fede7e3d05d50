"""What a run prints: a banner first, a table last, once whatever the number of ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import CPU, ROOT, environment
from helpers.processes import PATIENCE, started
from transformers import AutoModelForCausalLM

from lightrlhf import sft
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.storage.curves import columns
from lightrlhf.storage.results import USUAL_METRICS, usual_metrics
from lightrlhf.training.memory import peak_memory
from lightrlhf.training.metric_log import IN_PROGRESS_BAR
from lightrlhf.training.run import Run
from lightrlhf.training.summary import (
    describe_audit,
    describe_device,
    describe_groups,
    describe_steps,
    mean_speed,
    metric_cells,
)

FIELDS = ("model", "data", "device", "steps", "results")


def fields_of(text: str, names: tuple[str, ...] = FIELDS) -> dict[str, str]:
    """The fields of a banner; each is printed once."""
    found = re.findall(rf"^({'|'.join(names)}) +(.+)$", text, re.MULTILINE)
    assert [name for name, _ in found] == list(names), text
    return dict(found)


def test_a_run_begins_with_its_banner_and_ends_with_its_table(cafe_data, base_model, tmp_path, capsys):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), *CPU, "--log_interval", "1"]
    flags += ["--max_steps", "3", "--eval_interval", "2", "--output_dir", str(tmp_path / "run")]
    run = sft.main(flags)
    text = capsys.readouterr().out
    shown = fields_of(text)
    assert re.fullmatch(rf"{base_model}; policy: ([\d,]+) parameters, \1 trainable", shown["model"])
    assert shown["data"] == f"{cafe_data}, 60 rows" and shown["results"] == run
    assert shown["device"] == "cpu, 1 rank, precision 32-true" and shown["steps"] == "3 of 8 rows"
    table = text[text.index("lightrlhf.sft") :]
    assert [line.split("│")[1].strip() for line in table.splitlines() if line[:1] == "│"] == ["train/loss", "val/loss"]
    assert re.search(r"^speed +[\d,]+ tokens per second of training\nmemory +\d+\.\d\d GiB at most\n", table, re.M)
    assert f"\ncheckpoint {run}/checkpoint-000003\nfinished in " in table and table.endswith(f"s: {run}\n")

    sft.main(["--resume_from", run, "--max_steps", "4"])
    text = capsys.readouterr().out
    assert fields_of(text)["steps"] == "4 of 8 rows; resumes at step 3"
    losses = [row for row in (Path(run) / "metrics.jsonl").read_text().splitlines() if "train/loss" in row]
    first = float(re.search(r'"train/loss": ([\d.]+)', losses[0])[1])
    assert f"│ train/loss │ {first:.4g} │" in re.sub(" +", " ", text)  # of before it was resumed


@pytest.mark.thorough
def test_of_two_ranks_the_first_alone_prints_and_links(cafe_data, base_model, tmp_path):
    """Started as a user does, by new interpreters."""
    flags = ["--data_dir", cafe_data, "--model_name", base_model, "--accelerator", "cpu", "--devices", "2"]
    command = [sys.executable, "-m", "lightrlhf.sft", *flags, "--max_steps", "1", "--log_dir", tmp_path]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started([str(word) for word in command], cwd=ROOT, env=environment(), **pipes) as process:
        printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert printed.count("checkpoint ") == printed.count("lightrlhf.sft") == 1
    shown = fields_of(printed)
    assert shown["device"] == "cpu, 2 ranks, precision 32-true"
    assert shown["steps"] == "1 of 16 rows (8 on each rank)"
    assert Path(shown["results"]).with_name("latest").resolve() == Path(shown["results"])


def test_a_model_given_from_python_is_called_that(cafe_data, base_model, tokenizer, tmp_path, capsys):
    args = sft.SFTArgs(data_dir=str(cafe_data), log_dir=str(tmp_path), accelerator="cpu", max_steps=1, eval_interval=0)
    sft.train(args, policy=AutoModelForCausalLM.from_pretrained(base_model), tokenizer=tokenizer)
    assert fields_of(capsys.readouterr().out)["model"].startswith("given from Python; policy: ")


def test_the_training_of_an_iteration_says_what_is_its_own(tmp_path, capsys):
    (tmp_path / "args.json").write_text("{}")
    run = Run(TrainArgs(log_dir=str(tmp_path / "iteration-01"), accelerator="cpu"), "test")
    run.setup("policy", torch.nn.Linear(2, 3), 1e-3, 1)
    for _ in run.steps(run.order.num_steps(range(20), 8)):
        run.progress.step += 1
    run.finish()
    text = capsys.readouterr().out
    shown = fields_of(text, ("model", "steps"))
    assert shown == {"model": "policy: 9 parameters, 9 trainable", "steps": "3 of 8 rows"}
    assert "finished in" in text and "memory" not in text and "data" not in text.split("finished")[0]


def test_the_best_is_the_lowest_or_highest_where_the_name_says_which():
    rows = [
        {"step": 1, "train/loss": 3.0, "objective/score": -1.0},
        {"step": 2, "train/loss": 1.0, "objective/score": 2.0, "objective/entropy": 0.5},
        {"step": 3, "train/loss": 2.0, "val/score": 4.0},
    ]
    assert metric_cells(columns(rows), ["train/loss", "objective/score", "objective/entropy", "val/score"]) == [
        ["train/loss", "3", "2", "1", "2"],
        ["objective/score", "-1", "2", "2", "2"],
        ["objective/entropy", "0.5", "0.5", "", ""],
        ["val/score", "4", "4", "4", "3"],
    ]
    assert metric_cells({}, []) == []


def test_the_audit_that_was_asked_for_is_told_also_where_it_scored_nothing():
    assert describe_audit(columns([{"step": 1, "train/loss": 1.0}])) == ""
    rows = [{"step": step, "audit/valid_ratio": 0.5, "audit/warning": float(step > 8)} for step in range(1, 11)]
    assert all(fact in describe_audit(columns(rows)) for fact in ("50%", "9, 10"))
    assert "0%" in describe_audit(columns([{"step": 1, "audit/valid_ratio": 0.0, "audit/warning": 0.0}]))


def test_groups_that_taught_nothing_are_told():
    assert describe_groups(columns([{"step": 1, "train/loss": 1.0}])) == ""
    for last, told in ((1.0, True), (0.9, False)):
        rows = [{"step": step, "objective/zero_std_ratio": ratio} for step, ratio in ((1, 1.0), (2, last))]
        assert ("all 2 steps" in describe_groups(columns(rows))) is told


def test_the_usual_metrics_are_one_list():
    assert usual_metrics({"val/loss", "train/loss", "mine"}) == ["train/loss", "val/loss"]
    assert usual_metrics({"mine", "also"}) == ["also", "mine"]
    assert IN_PROGRESS_BAR == USUAL_METRICS[:4]


def test_the_words_of_a_line():
    device = torch.device("cpu")
    assert describe_device(device, TrainArgs(strategy="ddp"), 4) == "cpu, 4 ranks, ddp, precision 32-true"
    assert describe_steps(1000, 16, 2, 8, 0) == (
        "1,000 of 32 rows (16 on each rank), 8 samples of each; resumes at step 0"
    )
    speeds = columns({"step": step, "time/tokens_per_second": speed} for step, speed in ((1, 10.0), (2, 30.0)))
    assert mean_speed(speeds) == "20 tokens per second of training"
    assert mean_speed({}) == "" and 0.01 < peak_memory(device) < 1000
