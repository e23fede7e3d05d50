"""Several sets in --data_dir: an epoch, weights, resuming, and what must be equal between them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import CPU, last_checkpoint, metrics, reseal, weights
from helpers.errors import refused
from helpers.flat import stored_rows
from helpers.programs import args_class, assert_resumes, main_of, trained

from lightrlhf import sft
from lightrlhf.cli.groups import DataSetsArgs
from lightrlhf.cli.parser import parse
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.sft import SFTArgs
from lightrlhf.storage.run_dir import locate

FLAGS = ["--mini_batch_size", "6", "--micro_batch_size", "3", "--log_interval", "1", "--learning_rate", "1e-2", *CPU]
PPO_FLAGS = ["--rollout_size", "6", "--mini_batch_size", "6", "--micro_batch_size", "3", "--max_new_tokens", "4"]
PPO_FLAGS += ["--reward_function", "helpers.rewards:length", "--log_interval", "1", *CPU]


@pytest.fixture(scope="module")
def sets(cafe_data, tmp_path_factory):
    """Two sets of 20 and 7 training rows of each kind, and `both`, their rows one after the other."""
    root = tmp_path_factory.mktemp("sets") / "cafe"
    for name, parts in {"one": [(0, 20)], "two": [(30, 37)], "both": [(0, 20), (30, 37)]}.items():
        folder = Path(shutil.copytree(cafe_data, root / name))
        for path in folder.glob("*_train.pt"):
            rows = stored_rows(path)
            torch.save([row for first, last in parts for row in rows[first:last]], path)
            reseal(path.parent)
        for path in folder.glob("*_validation.pt"):
            rows = stored_rows(path)
            part = {"one": rows[::2], "two": rows[1::2], "both": rows}[name]
            torch.save(part, path)
            reseal(path.parent)
    return root


def train(program: str, folders, model, logs, *more: str) -> Path:
    flags = ["--data_dir", *map(str, folders), "--model_name", str(model), "--log_dir", str(logs)]
    return trained(program, *flags, *(PPO_FLAGS if program == "ppo" else FLAGS), *more)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", "rm", "dpo", "ppo"])
def test_without_weights_an_epoch_is_that_of_all_rows_in_one_set(program, sets, base_model, tmp_path, capsys):
    two = train(program, [sets / "one", sets / "two"], base_model, tmp_path, "--max_steps", "4")
    told = capsys.readouterr().out
    assert f"{sets / 'one'} (20 rows, 20 of 27 in an epoch)" in told and "(7 rows, 7 of 27 in an epoch)" in told
    one = train(program, [sets / "both"], base_model, tmp_path, "--max_steps", "4")
    assert weights(last_checkpoint(two)) == weights(last_checkpoint(one))
    for row, other in zip(metrics(two), metrics(one), strict=True):  # validation rows come in the same order, too
        assert row == pytest.approx(other, rel=1e-5)
    assert (two.parent.parent.name, two.parent.name) == ("cafe", "one+two") and one.parent.name == "both"
    assert f"{sets.name}/two (7 rows, 7 of 27 in an epoch)" in (two / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", "rm", "dpo", "ppo"])
def test_a_weighted_run_that_is_resumed_is_bitwise_the_same(program, sets, base_model, tmp_path, capsys):
    metric = {"sft": "max:train/loss", "ppo": "objective/score"}.get(program, "rewards/accuracies")
    more = ["--data_weights", "1", "3", "--max_steps", "8", "--save_interval", "3", "--keep_last", "0"]
    more += ["--keep_best", metric, "--eval_interval", "4", "--eval_iters", "1"]
    run = train(program, [sets / "one", sets / "two"], base_model, tmp_path, *more)
    assert "(20 rows, 7 of 27 in an epoch)" in capsys.readouterr().out
    stored = json.loads((run / "args.json").read_text())
    assert stored["data_dir"] == [str(sets / "one"), str(sets / "two")] and stored["data_weights"] == [1, 3]
    best = os.readlink(run / "best")
    assert_resumes(main_of(program), run)
    assert os.readlink(run / "best") == best


def test_weights_are_the_shares_of_the_rows_that_a_run_trains_on(sets, base_model, tmp_path, monkeypatch):
    seen = []
    step = sft.train_step
    monkeypatch.setattr(
        sft, "train_step", lambda run, model, rows, pad: seen.extend(rows) or step(run, model, rows, pad)
    )
    train("sft", [sets / "one", sets / "two"], base_model, tmp_path, "--data_weights=[1,3]", "--epochs", "2")
    few = [row["input_ids"].tolist() for row in stored_rows(sets / "two" / "finetune_train.pt")]
    times = [sum(row["input_ids"].tolist() == ids for row in seen) for ids in few]
    assert len(seen) == 54 and sum(times) == 40 and set(times) == {5, 6}


def test_evaluation_of_a_few_batches_has_rows_of_all_sets(sets, base_model, tmp_path, monkeypatch):
    found = []
    evaluate = sft.evaluate
    monkeypatch.setattr(
        sft, "evaluate", lambda run, model, rows, pad: found.append(rows) or evaluate(run, model, rows, pad)
    )
    train("sft", [sets / "one", sets / "two"], base_model, tmp_path, "--max_steps", "1", "--eval_iters", "1")
    whole = {
        name: [row["input_ids"].tolist() for row in stored_rows(sets / name / "finetune_validation.pt")]
        for name in ("one", "two")
    }
    first = [row["input_ids"].tolist() for row in found[0][:4]]
    assert sum(ids in whole["one"] for ids in first) == sum(ids in whole["two"] for ids in first) == 2


# ------------------------------------------------------------------------------------------------------------ the flag
def test_one_folder_stays_a_text_and_several_are_a_list(tmp_path):
    for words in (["a"], ["[a]"], ['["a"]']):
        assert parse(SFTArgs, ["--model_name", "tiny", "--data_dir", *words]).data_dir == "a"
    for words in (["a", "b"], ["a,b"], ["[a, b]"]):
        assert parse(SFTArgs, ["--model_name", "tiny", "--data_dir", *words]).data_dir == ["a", "b"]
    assert SFTArgs(data_dir=[Path("a")]).data_dir == "a" and SFTArgs(data_dir=Path("a")).data_dir == "a"
    assert SFTArgs(data_dir=("a", "b"), data_weights=[1, 2]).data_dir == ["a", "b"]
    for stored in ("a", ["a", "b"]):
        (tmp_path / "args.json").write_text(json.dumps({"program": "sft", "data_dir": stored}))
        reseal(tmp_path)
        assert parse(SFTArgs, ["--resume_from", str(tmp_path)]).data_dir == stored
        assert locate(str(tmp_path), "data_dir") == "a"
    assert not issubclass(args_class("lightrlhf.online_dpo"), DataSetsArgs)


@pytest.mark.parametrize(
    "words, told",
    [
        (
            ["--data_dir", "a", "b", "--data_weights", "1"],
            "--data_weights 1.0: give 2, one for each folder of --data_dir",
        ),
        (["--data_dir", "a", "--data_weights", "1", "2"], "--data_weights 1.0 2.0: give 1, one for each folder"),
        (["--data_dir", "a", "b", "a"], "--data_dir a is given twice"),
        (["--data_dir", "a", "b"], "--data_dir a does not exist"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert told in refused(capsys, sft.main, "--model_name", "tiny", *words)


def test_a_weight_that_gives_a_set_no_row_is_refused(sets, base_model, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train("sft", [sets / "one", sets / "two"], base_model, tmp_path, "--data_weights", "1000", "1")
    assert f"--data_weights give {sets / 'two'} none of the 27 rows of an epoch" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["tokenizers", "chat templates"])
def test_sets_of_other_tokenizers_or_templates_are_refused(other, sets, base_model, tmp_path, capsys):
    folder = Path(shutil.copytree(sets / "two", tmp_path / "two"))
    tokenizer = load_tokenizer(folder)
    if other == "tokenizers":
        tokenizer.add_tokens(["wholly_new"])
    else:
        tokenizer.chat_template += " "
    tokenizer.save_pretrained(folder / "tokenizer")
    reseal(folder)
    with pytest.raises(SystemExit) as stopped:
        train("sft", [sets / "one", folder], base_model, tmp_path)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert stopped.value.code == 2
    assert f"--data_dir {sets / 'one'} and {folder} were prepared with different {other}" in line


def test_a_tool_asks_which_set_of_a_run_it_should_take(sets, base_model, tmp_path, capsys):
    from lightrlhf import evaluate

    run = train("sft", [sets / "one", sets / "two"], base_model, tmp_path, "--max_steps", "1", "--eval_interval", "0")
    assert f"--data_dir is required: {run} was trained on several, {sets / 'one'}, {sets / 'two'}; give one" in refused(
        capsys, evaluate.main, "--experiment_dir", run, "--accelerator", "cpu"
    )
    flags = ["--data_dir", str(sets / "two"), "--num_samples", "2", "--max_new_tokens", "2", "--accelerator", "cpu"]
    evaluate.main(["--experiment_dir", str(run), *flags])
