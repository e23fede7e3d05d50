"""The best checkpoint is kept, also when a run is killed, and a run that gets no better stops."""

import importlib
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, metrics, weights
from helpers.errors import refused
from helpers.programs import main_of, trained

from lightrlhf import evaluate, sft
from lightrlhf.cli.groups.evaluation import best_metric
from lightrlhf.evaluate import EvaluateArgs
from lightrlhf.models.names import resolve
from lightrlhf.sft import SFTArgs
from lightrlhf.storage.checkpoint import checkpoints, final_checkpoint, save_checkpoint
from lightrlhf.storage.run_dir import choices, data_dir_of
from lightrlhf.training.best import Best

# The rate is so high that the loss rises first and then falls: where it is highest, a run is "best" in the middle.
HIGHEST = "max:val/loss"
UNSTEADY = ["--learning_rate", "1e-1", "--lr_scheduler_type", "constant", "--mini_batch_size", "4"]
UNSTEADY += ["--micro_batch_size", "4", "--log_interval", "1", "--eval_interval", "2", "--eval_iters", "1", *CPU]


def flags_of(data, model, logs, *more: str) -> list[str]:
    return ["--data_dir", str(data), "--model_name", str(model), "--log_dir", str(logs), *UNSTEADY, *more]


def values(folder, metric: str) -> dict[int, float]:
    return {row["step"]: row[metric] for row in metrics(folder) if metric in row}


def steps(folder) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in checkpoints(Path(folder))]


@pytest.fixture(scope="module")
def whole(cafe_data, base_model, tmp_path_factory):
    """An SFT run whose best checkpoint is neither the first evaluated nor among the last two."""
    flags = ["--epochs", "1", "--keep_best", HIGHEST, "--save_interval", "5"]
    return Path(sft.main(flags_of(cafe_data, base_model, tmp_path_factory.mktemp("best"), *flags)))


def test_the_best_checkpoint_survives_beside_the_newest(whole):
    losses = values(whole, "val/loss")
    best = max(losses, key=losses.get)
    assert best not in (min(losses), max(losses)) and best % 5, "a run that shows nothing"
    assert os.readlink(whole / "best") == f"checkpoint-{best:06d}"
    assert best in steps(whole) and len(steps(whole)) == 3 and steps(whole)[-1] == max(losses)
    assert torch.load(whole / "best" / "resume.pt", weights_only=True)["step"] == best
    assert final_checkpoint(whole).name == f"checkpoint-{best:06d}" != last_checkpoint(whole).name


@pytest.mark.slow
def test_the_next_stage_and_the_tools_take_it(whole, cafe_data, tmp_path):
    name = str(whole / "best")
    assert resolve(name, "--sft_experiment_dir") == str(final_checkpoint(whole))
    assert data_dir_of(name) == str(cafe_data)
    assert {model for model, _ in choices([name]).values()} >= {str(final_checkpoint(whole))}
    flags = ["--data_dir", str(cafe_data), "--sft_experiment_dir", name, "--log_dir", str(tmp_path), *CPU]
    sft_flags = [*flags[:2], "--model_name", name, *flags[4:], "--max_steps", "1", "--learning_rate", "1e-30"]
    assert sft.main([*sft_flags, "--lr_warmup_steps", "0"])
    assert importlib.import_module("lightrlhf.rm").main([*flags, "--max_steps", "1"])
    (row,) = evaluate.run(EvaluateArgs(model_name=[name], max_new_tokens=2, accelerator="cpu", num_samples=2))
    (last,) = evaluate.run(EvaluateArgs(model_name=[str(whole)], max_new_tokens=2, accelerator="cpu", num_samples=2))
    assert row["perplexity"] > last["perplexity"]


def test_a_damaged_best_is_refused_by_its_name(whole, tmp_path, capsys):
    folder = shutil.copytree(whole, tmp_path / "copy", symlinks=True)
    (final_checkpoint(folder) / "config.json").write_text("{}")
    flags = ["--data_dir", data_dir_of(str(folder)), "--model_name", folder / "best", "--max_steps", "1"]
    assert f"{final_checkpoint(folder)} is damaged" in refused(capsys, sft.main, *flags)


@pytest.mark.slow
def test_a_deleted_best_is_one_clear_line_and_a_resumed_run_drops_the_link(whole, cafe_data, tmp_path, capsys):
    folder = shutil.copytree(whole, tmp_path / "copy", symlinks=True)
    gone, name = final_checkpoint(folder), str(folder / "best")
    shutil.rmtree(gone)
    for program, flags in {
        "evaluate": ["--experiment_dir", name],
        "generate": ["--model_name", name, "--output_file", str(tmp_path / "out.jsonl")],
        "serve": ["--model_name", name],
        "rm": ["--sft_experiment_dir", name],
        "ppo": ["--sft_experiment_dir", str(folder), "--rm_experiment_dir", name],
    }.items():
        data = [] if program == "serve" else ["--data_dir", str(cafe_data)]
        assert f"{name} links to {gone.name}, which does not exist; give {folder}" in refused(
            capsys, main_of(program), *flags, *data
        )
    assert final_checkpoint(folder) == last_checkpoint(folder)
    sft.main(["--resume_from", str(folder)])
    assert not os.path.lexists(name) and f"{gone.name}, was deleted" in capsys.readouterr().out
    os.symlink(gone.name, name)
    save_checkpoint(folder, 999, lambda path: None, best=int(gone.name.partition("-")[2]))
    assert not os.path.lexists(name)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_a_resumed_run_keeps_the_same_best(whole, copied, cafe_data, base_model, tmp_path):
    """As a kill leaves it: between a checkpoint and its link, or copied with links followed."""
    flags = ["--epochs", "1", "--keep_best", HIGHEST, "--save_interval", "5", "--keep_last", "0"]
    run = Path(sft.main(flags_of(cafe_data, base_model, tmp_path, *flags)))
    expected, rows, last = os.readlink(run / "best"), metrics(run), last_checkpoint(run).name
    end = weights(run / last)
    best = int(expected.partition("-")[2])
    for path in checkpoints(run):
        if int(path.name.partition("-")[2]) > best:
            shutil.rmtree(path)
    (run / "best").unlink()
    if copied:
        shutil.copytree(checkpoints(run)[0], run / "best")
    else:
        (run / "best").symlink_to(checkpoints(run)[0].name)
    sft.main(["--resume_from", str(run)])
    assert os.readlink(run / "best") == expected and weights(run / last) == end and metrics(run) == rows
    assert rows == metrics(whole)
    (run / "best").unlink()
    sft.main(["--resume_from", str(run)])  # killed after its last checkpoint, before the link
    assert os.readlink(run / "best") == expected


@pytest.mark.slow
@pytest.mark.parametrize("program", ["rm", "dpo", "ppo"])
def test_every_program_keeps_its_best_by_evaluations_or_by_training_metrics(program, cafe_data, base_model, tmp_path):
    more = ["--max_steps", "5", "--save_interval", "100", "--keep_last", "1"]
    metric = "val/rewards/accuracies" if program == "dpo" else "rewards/accuracies"
    if program == "ppo":
        metric = "objective/score"
        more += ["--reward_function", "helpers.rewards:length", "--rollout_size", "4", "--max_new_tokens", "4"]
    flags = flags_of(cafe_data, base_model, tmp_path, *more, "--keep_best", metric)
    if program == "ppo":
        flags.remove("--learning_rate")
        flags.remove("1e-1")
    run = trained(program, *flags)
    found = values(run, metric)
    best = max(found, key=found.get)  # the first of equal ones
    assert os.readlink(run / "best") == f"checkpoint-{best:06d}" and steps(run) == sorted({best, 5})


@pytest.mark.slow
def test_a_run_that_gets_no_better_stops_and_resumed_it_stays_so(cafe_data, base_model, tmp_path, capsys):
    flags = ["--epochs", "9", "--keep_best", HIGHEST, "--early_stop_patience", "2", "--save_interval", "3"]
    run = Path(sft.main(flags_of(cafe_data, base_model, tmp_path, *flags)))
    losses = list(values(run, "val/loss").values())
    best = losses.index(max(losses))
    assert len(losses) == best + 3 and all(value <= losses[best] for value in losses[best + 1 :])
    end = 2 * len(losses)
    assert last_checkpoint(run).name == f"checkpoint-{end:06d}" and end < 9 * 15
    assert "2 values without improvement" in capsys.readouterr().out
    before = metrics(run)
    sft.main(["--resume_from", str(run)])
    assert metrics(run) == before and "--early_stop_patience 2 ended this run" in capsys.readouterr().out
    sft.main(["--resume_from", str(run), "--early_stop_patience", "3", "--max_steps", str(end + 2)])
    assert metrics(run)[: len(before)] == before and last_checkpoint(run).name == f"checkpoint-{end + 2:06d}"


@pytest.mark.slow
def test_stopping_early_is_the_same_for_a_run_that_was_killed(cafe_data, base_model, tmp_path):
    flags = ["--epochs", "9", "--keep_best", HIGHEST, "--early_stop_patience", "2", "--save_interval", "3"]
    run = Path(sft.main(flags_of(cafe_data, base_model, tmp_path, *flags, "--keep_last", "0")))
    rows, end, kept = metrics(run), weights(last_checkpoint(run)), steps(run)
    for path in checkpoints(run)[-2:]:  # in between there was a value without improvement
        shutil.rmtree(path)
    sft.main(["--resume_from", str(run)])
    assert metrics(run) == rows and weights(last_checkpoint(run)) == end and steps(run) == kept


# --------------------------------------------------------------------------------------------------- which is better
@pytest.mark.parametrize(
    "flag, metric, lower",
    [
        ("val/loss", "val/loss", True),
        ("val/perplexity", "val/perplexity", True),
        ("objective/kl", "objective/kl", True),
        ("val/rewards/accuracies", "val/rewards/accuracies", False),
        ("objective/score", "objective/score", False),
        ("max:val/loss", "val/loss", False),
        ("min:completions/mean_length", "completions/mean_length", True),
    ],
)
def test_the_name_or_a_prefix_says_which_value_is_better(flag, metric, lower):
    assert best_metric(flag) == (metric, lower)


def test_equal_values_and_nan_are_no_improvement():
    best = Best(SFTArgs(keep_best="val/loss", early_stop_patience=3), None)
    nan = float("nan")
    found = [best.update(value, step) for step, value in enumerate([nan, 2.0, 2.0, nan, 1.5, 1.5, 3.0, nan])]
    assert found == [False, True, False, False, True, False, False, False]
    assert (best.value, best.step, best.since, best.out_of_patience) == (1.5, 4, 3, True)
    again = Best(SFTArgs(keep_best="val/loss"), best.state())
    assert again.state() == best.state() and not again.out_of_patience
    assert Best(SFTArgs(keep_best="val/perplexity"), best.state()).step is None


@pytest.mark.parametrize(
    "flags, told",
    [
        (
            ["--keep_best", "train/lr"],
            "--keep_best train/lr: say which value is better, --keep_best min:train/lr or max:",
        ),
        (["--keep_best", "val/loss", "--eval_interval", "0"], "--keep_best val/loss is measured in evaluations"),
    ],
)
def test_flags_that_say_nothing_are_refused(flags, told, cafe_data, base_model, tmp_path, capsys):
    assert told in refused(capsys, sft.main, *flags_of(cafe_data, base_model, tmp_path), *flags)


def test_a_metric_that_is_never_logged_ends_the_run_at_the_first_evaluation(cafe_data, base_model, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        sft.main(flags_of(cafe_data, base_model, tmp_path, "--keep_best", "val/rewards/accuracies"))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert stopped.value.code == 2 and "--keep_best val/rewards/accuracies is not a metric of this run; it logs" in line
    assert "train/loss" in line and "val/loss" in line and "time/" not in line
    (folder,) = [path.parent for path in tmp_path.rglob("metrics.jsonl")]
    assert max(row["step"] for row in metrics(folder)) == 2
