"""lightrlhf.plot: input, curves, errors."""

import itertools
import json
import math
from functools import partial
from pathlib import Path

import pytest
from helpers.errors import refused

from lightrlhf import plot
from lightrlhf.plot import best_of_n, best_of_n_kl, read_sweep
from lightrlhf.storage.jsonl import write_jsonl, write_settings

PNG = b"\x89PNG\r\n\x1a\n"
ROWS = [{"step": step, "train/loss": 3.0 / step, "objective/kl": 0.1 * step} for step in range(1, 6)]


def experiment(folder: Path, rows: list[dict] = ROWS, name: str | None = "rlhf-ppo", tail: str = "") -> str:
    """An experiment dir with these metrics."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    if name:
        (folder / "args.json").write_text(json.dumps({"experiment_name": name}))
    return str(folder)


@pytest.fixture
def drawn(monkeypatch) -> dict[str, dict[str, list]]:
    """Filled by the next call: for each panel its curves by label, as lists of points."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list]] = {}
    save = Figure.savefig

    def keep(figure, *args, **kwargs):
        for axis in figure.axes:
            if axis.get_visible():
                lines = [line for line in axis.lines if not line.get_label().startswith("_")]
                panels[axis.get_title()] = {str(line.get_label()): line.get_xydata().tolist() for line in lines}
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return panels


def test_one_run_with_the_points_as_logged(tmp_path, drawn):
    folder = experiment(tmp_path / "run")
    written = plot.main(["--experiment_dir", folder])
    assert written == f"{folder}/curves.png"
    assert Path(written).read_bytes().startswith(PNG)
    assert list(drawn) == ["objective/kl", "train/loss"]  # in the order of USUAL_METRICS, unlogged ones left out
    assert drawn["train/loss"]["rlhf-ppo"] == [[row["step"], row["train/loss"]] for row in ROWS]


def test_two_runs_share_panels_and_keep_their_names(tmp_path, drawn):
    one, two = experiment(tmp_path / "a" / "1"), experiment(tmp_path / "b" / "2", ROWS[:3])
    output = tmp_path / "both.png"
    plot.main(["--experiment_dir", one, two, "--output_file", str(output), "--metrics", "objective/kl"])
    assert output.read_bytes().startswith(PNG)
    assert {label: len(points) for label, points in drawn["objective/kl"].items()} == {"rlhf-ppo": 5, "rlhf-ppo 2": 3}


def test_a_run_without_a_metric_leaves_its_panel_to_the_others(tmp_path, drawn):
    one = experiment(tmp_path / "1")
    two = experiment(tmp_path / "2", [{"step": 1, "objective/kl": 0.5}], name="other")
    plot.main(["--experiment_dir", one, two])
    assert list(drawn["train/loss"]) == ["rlhf-ppo"]
    assert list(drawn["objective/kl"]) == ["rlhf-ppo", "other"]


def test_no_run_is_lost_when_names_and_times_repeat(tmp_path):
    folders = [experiment(tmp_path / letter / "2026-01-01_00-00-00") for letter in "abcd"]
    assert list(plot.labels(folders).values()) == folders
    assert list(plot.labels([folders[0], folders[0]]).values())[-1] == folders[0]


def test_a_folder_without_args_is_called_by_its_own_name(tmp_path):
    assert list(plot.labels([experiment(tmp_path / "mine", name=None)])) == ["mine"]


def test_a_line_that_is_being_written_is_left_out(tmp_path, drawn):
    folder = experiment(tmp_path / "run", tail='{"step": 6, "train/lo')
    plot.main(["--experiment_dir", folder])
    assert len(drawn["train/loss"]["rlhf-ppo"]) == 5


def test_long_runs_are_smoothed_and_short_ones_are_not(tmp_path, drawn):
    rows = [{"step": step, "train/loss": float(step % 2)} for step in range(40)]
    folder = experiment(tmp_path / "run", rows)
    plot.main(["--experiment_dir", folder])
    middle = [value for step, value in drawn["train/loss"]["rlhf-ppo"] if 10 <= step <= 30]
    assert all(0.4 < value < 0.6 for value in middle)
    plot.main(["--experiment_dir", folder, "--smoothing", "1"])
    assert {value for _, value in drawn["train/loss"]["rlhf-ppo"]} == {0.0, 1.0}


def test_seeds_become_one_line_within_a_band_and_folders_of_one_seed_one_run(tmp_path, drawn):
    def seeded(number: int, seed: int, rows: list[dict]) -> str:
        folder = Path(experiment(tmp_path / f"{number}", rows))
        (folder / "args.json").write_text(json.dumps({"experiment_name": "arm", "seed": seed}))
        return str(folder)

    begun = seeded(0, 1, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 99.0, "older": 5.0}])
    went_on = seeded(1, 1, [{"step": 2, "loss": 2.0}, {"step": 2, "val": 7.0}, {"step": 3, "loss": 3.0}])
    other = seeded(2, 2, [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 6.0}, {"step": 2, "val": 9.0}])
    plot.main(["--experiment_dir", begun, went_on, other, "--group_seeds", "True", "--metrics", "loss", "val"])
    assert drawn["loss"] == {"arm": [[1, 2.0], [2, 4.0], [3, 3.0]]} and drawn["val"] == {"arm": [[2, 8.0]]}


def test_metrics_outside_the_usual_ones_are_drawn_when_there_are_no_others(tmp_path, drawn):
    plot.main(["--experiment_dir", experiment(tmp_path / "run", [{"step": 1, "my/metric": 2.0}])])
    assert list(drawn) == ["my/metric"]


def test_the_curves_of_a_real_run(sft_dir, tmp_path):
    output = tmp_path / "sft.png"
    plot.main(["--experiment_dir", sft_dir, "--output_file", str(output)])
    assert output.read_bytes().startswith(PNG)


def test_bad_calls_are_one_line(tmp_path, capsys):
    folder, told = experiment(tmp_path / "run"), partial(refused, capsys, plot.main)
    assert "experiment_dir" in told()
    assert "at least one" in told("--experiment_dir")
    assert "nowhere" in told("--experiment_dir", "nowhere")
    empty = experiment(tmp_path / "empty", [])
    assert "metrics.jsonl" in told("--experiment_dir", empty)
    error = told("--experiment_dir", folder, "--metrics", "train/los")
    assert "--metrics train/los " in error and "train/loss" in error
    assert "--smoothing 0" in told("--experiment_dir", folder, "--smoothing", "0")
    missing = str(tmp_path / "no" / "such" / "a.png")
    assert f"--output_file {missing}" in told("--experiment_dir", folder, "--output_file", missing)
    assert "--output_file" in told("--experiment_dir", folder, "--output", "a.png")
    assert "did you mean --output_file?" in told("--experiment_dir", folder, "--outptu_file", "a.png")


def test_damage_before_the_last_line_is_named(tmp_path, capsys):
    folder = experiment(tmp_path / "run", ROWS[:2], tail='{"step": 3, "train\n' + json.dumps(ROWS[3]) + "\n")
    assert "metrics.jsonl line 3 is not JSON" in refused(capsys, plot.main, "--experiment_dir", folder)


def test_the_best_of_n_is_the_mean_over_all_subsets():
    rewards = [0.3, 2.0, -1.0, 0.5, 2.0]
    for n in range(1, 6):
        subsets = list(itertools.combinations(rewards, n))
        assert best_of_n(rewards, n) == pytest.approx(sum(map(max, subsets)) / len(subsets))
    assert best_of_n_kl(1) == 0 and best_of_n_kl(4) == pytest.approx(math.log(4) - 0.75)


def test_sweeps_over_temperatures_are_drawn_and_a_file_without_rewards_is_refused(tmp_path, capsys):
    files = []
    for heat in (0.5, 1.0):
        path = tmp_path / f"temperature={heat}" / "model.jsonl"
        write_jsonl(path, [{"rewards": [heat, 2 * heat, 0.1]}, {"rewards": [0.2, None, 0.3]}])
        write_settings(path, {"temperature": heat, "do_sample": True})
        files.append(str(path))
    assert read_sweep(files[1]).best == pytest.approx([3.1 / 3, (1 + 2 + 2) / 3, 2.0])
    drawn = plot.main(["--responses_file", *files])
    assert Path(drawn) == Path(files[0]).parent / "curves.png" and Path(drawn).stat().st_size > 10_000
    write_jsonl(tmp_path / "bare.jsonl", [{"responses": ["a"]}])
    for wrong, message in (
        ([str(tmp_path / "bare.jsonl")], "row 1 has no 'rewards'"),
        ([files[0], "--experiment_dir", "x"], "and not both"),
    ):
        assert message in refused(capsys, plot.main, "--responses_file", *wrong)
