"""Rows of metrics: means over the steps since the row before."""

import math
from pathlib import Path

import pytest
from helpers import CPU, metrics

from lightrlhf import sft
from lightrlhf.programs import TRAINING
from lightrlhf.training.means import StepMeans


def test_a_metric_is_averaged_over_the_steps_that_have_it():
    means = StepMeans()
    for loss, lr in ((1.0, 0.1), (2.0, 0.2), (6.0, 0.3)):
        means.add({"train/loss": loss, "train/lr": lr})
    means.add({"train/lr": 0.4, "policy/kl": 5.0, "nothing": math.nan})
    row = means.end()
    assert math.isnan(row.pop("nothing")) and row == {"train/loss": 3.0, "train/lr": 0.4, "policy/kl": 5.0}
    assert means.end() == {}


def test_speeds_are_averaged_over_time():
    means = StepMeans()
    means.add({"time/rollout": 2.0, "time/update": 1.0, "time/tokens_per_second": 100.0})
    means.add({"time/rollout": 0.5, "time/update": 0.5, "time/tokens_per_second": 300.0})
    assert means.end() == {"time/rollout": 1.25, "time/update": 0.75, "time/tokens_per_second": (300 + 300) / 4}


def test_a_resumed_row_goes_on():
    means = StepMeans()
    means.add({"train/loss": 0.1})
    again = StepMeans(means.state())
    for one in (means, again):
        one.add({"train/loss": 0.7})
    assert means.end() == again.end() == {"train/loss": (0.1 + 0.7) / 2}


def test_rows_of_a_run_are_means_of_what_each_step_logs(cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--max_steps", "5", "--eval_interval", "0"]
    flags += ["--mini_batch_size", "2", "--micro_batch_size", "2", "--learning_rate", "1e-2", *CPU]
    each, rows = (
        metrics(Path(sft.main([*flags, "--log_interval", interval, "--log_dir", str(tmp_path / interval)])))
        for interval in ("1", "3")
    )
    assert [row["step"] for row in rows] == [3, 5]
    for row, steps in zip(rows, (each[:3], each[3:])):
        for name in ("train/loss", "train/grad_norm"):
            assert row[name] == pytest.approx(sum(step[name] for step in steps) / len(steps), rel=1e-12)
        assert row["train/lr"] == steps[-1]["train/lr"]


def test_programs_that_sample_log_each_step():
    for one in TRAINING.values():
        assert (one.args_class().log_interval == 1) == one.samples, one.name
