"""Curves over runs: columns, resumed runs, groups of seeds, means and errors, smoothing, thinning."""

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from lightrlhf.storage.curves import (
    Column,
    column,
    columns,
    curves_of,
    differences,
    join_columns,
    over_seeds,
    seed_groups,
    smooth,
    thin,
)
from lightrlhf.storage.run_dir import read_logged


def experiment(folder: Path, **args: object) -> str:
    """An experiment dir with these arguments."""
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"experiment_name": "ppo", **args}))
    return str(folder)


def points(of: Column) -> dict[int, float]:
    return dict(zip(of.steps.tolist(), of.values.tolist()))


def test_columns_are_finite_numbers_by_step_and_the_last_of_a_step_counts():
    rows = [{"step": 2, "loss": 1.0, "name": "x"}, {"step": 1, "loss": math.inf, "kl": 3}, {"step": 2, "loss": 5.0}]
    found = columns([*rows, {"step": 1, "loss": 4.0}, {"step": 3, "loss": math.inf}])
    assert {name: points(own) for name, own in found.items()} == {"loss": {1: 4.0, 2: 5.0}, "kl": {1: 3.0}}
    assert found["loss"].steps.tolist() == [1, 2] and columns([]) == {}


def test_a_value_of_a_long_log_takes_eight_bytes(tmp_path):
    path, metrics = tmp_path / "metrics.jsonl", 40

    def peak(rows: int) -> int:
        row = {f"train/metric_{number}": number / 7 for number in range(metrics)}
        path.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in range(rows)))
        tracemalloc.start()
        found = columns(read_logged(path))
        assert [len(found["train/metric_1"].steps), len(found)] == [rows, metrics]
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return memory

    few, many = 500, 5000
    assert (peak(many) - peak(few)) / (many - few) < 1.25 * 8 * (metrics + 2)  # arrays grow ahead


def test_of_a_resumed_run_the_last_folder_counts_where_they_share_a_step():
    begun = columns([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 99.0, "older": 5.0}])
    went_on = columns([{"step": 2, "loss": 2.0}, {"step": 2, "val": 7.0}, {"step": 3, "loss": 3.0}])
    whole = {name: points(own) for name, own in join_columns([begun, went_on]).items()}
    assert whole == {"loss": {1: 1.0, 2: 2.0, 3: 3.0}, "val": {2: 7.0}}
    assert points(join_columns([begun])["older"]) == {2: 5.0}


def test_means_and_standard_errors_over_the_seeds_that_have_a_value():
    curve = over_seeds([column({1: 1.0, 2: 2.0, 3: 3.0}), column({1: 3.0, 2: 6.0}), column({1: 8.0})])
    assert curve.steps.tolist() == [1, 2, 3] and curve.seeds.tolist() == [3, 2, 1]
    assert curve.means.tolist() == [4.0, 4.0, 3.0]
    expected = [np.std([1, 3, 8], ddof=1) / math.sqrt(3), np.std([2, 6], ddof=1) / math.sqrt(2), 0.0]
    assert curve.errors == pytest.approx(expected)
    assert list(curves_of("loss", {"a": [{"loss": column({1: 1.0})}], "b": [{"kl": column({1: 1.0})}]})) == ["a"]


def test_runs_that_differ_by_their_seed_alone_are_one_group(tmp_path):
    start = "logs/sft/2026-01-0{}_00-00-00"
    one, two, three, other, named = (
        experiment(tmp_path / "1", seed=1, lr=1e-3, save_interval=5, sft_experiment_dir=start.format(1)),
        experiment(tmp_path / "2", seed=2, lr=1e-3, save_interval=9, sft_experiment_dir=start.format(2)),
        experiment(tmp_path / "3", seed=1, lr=1e-3, sft_experiment_dir=start.format(1)),
        experiment(tmp_path / "4", seed=1, lr=1e-4, sft_experiment_dir=start.format(1)),
        experiment(tmp_path / "5", seed=1, experiment_name="dpo"),
    )
    groups = seed_groups([one, two, three, three, other, named])
    assert groups == {"ppo, lr 0.001": {1: [one, three], 2: [two]}, "ppo, lr 0.0001": {1: [other]}, "dpo": {1: [named]}}
    assert list(seed_groups([one, two])) == ["ppo"]


def test_groups_with_many_differences_keep_labels_that_differ(tmp_path):
    folders = [experiment(tmp_path / f"{n}", a="x" * 90, b=n, c=n, d=n) for n in range(3)]
    folders += [experiment(tmp_path / f"long {n}", a="x" * 90 + str(n)) for n in range(2)]
    groups = seed_groups(folders)
    assert [own for seeds in groups.values() for own in seeds.values()] == [[folder] for folder in folders]
    assert all(len(label) < 160 for label in groups)


def test_differences_are_the_keys_that_differ():
    runs = [{"lr": 1, "seed": 1, "same": [2]}, {"lr": 1, "seed": 2, "same": [2], "own": None, "new": 3}]
    assert differences(runs) == {"seed": [1, 2], "new": [None, 3]}
    assert differences(runs[:1]) == differences([]) == {}


def test_smooth_keeps_length_ends_and_straight_lines():
    line = [float(i) for i in range(20)]
    assert smooth(line, 9) == pytest.approx(line)
    assert smooth([0.1, 1.0, 3.3], 9)[[0, 2]].tolist() == [0.1, 3.3]
    assert smooth([5.0, 1.0, 3.0], 3) == pytest.approx([5.0, 3.0, 3.0])
    assert smooth([1.0, 2.0], 1).tolist() == [1.0, 2.0] and smooth([], 5).tolist() == []
    values = np.random.default_rng(0).normal(1e6, 1.0, 30)
    assert smooth(values, 7)[15] == pytest.approx(values[12:19].mean(), rel=1e-12)


@pytest.mark.parametrize("number", [4, 5, 1000, 1001, 50_000])
def test_a_thinned_line_is_short_and_keeps_ends_lowest_and_highest(number):
    values = np.random.default_rng(number).normal(size=number)
    kept = thin(values, 1000)
    assert len(kept) <= 1000 and (len(kept) == number or number > 1000)
    assert {0, number - 1, int(values.argmin()), int(values.argmax())} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert len(thin(values, 4)) <= 4
