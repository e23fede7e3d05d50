"""Destinations inside experiment dirs and checkpoints are refused by every program that writes to a given path."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
from helpers import CAFE_SIZES, last_checkpoint
from helpers.errors import error_naming, refused

from datasets_prep import train_tokenizer
from datasets_prep.generic import prepare_data
from lightrlhf import annotate
from lightrlhf.cli.errors import UsageError
from lightrlhf.storage.checkpoint import save_checkpoint
from lightrlhf.storage.destinations import check_destination, check_output, is_run, owner_of
from lightrlhf.storage.seals import damage, write_folder


@pytest.fixture
def run(tmp_path):
    """An experiment dir with a checkpoint, as far as files go."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"program": "sft"}))
    save_checkpoint(folder, 2, lambda partial: (partial / "resume.pt").write_bytes(b""))
    return folder


@pytest.mark.parametrize(
    "inside",
    ["", "args.json", "mine", "mine/deeper", "base/x", "checkpoint-000002", "checkpoint-000002/x", "eval/../x"],
)
def test_a_place_in_a_run_or_a_checkpoint_is_refused(inside, run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    for place in (run / inside, tmp_path / "link" / inside):
        owner = run / "checkpoint-000002" if inside.startswith("checkpoint") else run
        assert str(owner.name) in (owner_of(place) or "")
        with error_naming(UsageError, "outside"):
            check_destination(place, "--destination_dir")


def test_places_of_results_prepared_data_and_all_others_may_be_written(run, tmp_path, cafe_data):
    places = [run / name for name in ("eval/test.json", "export/mine", "iteration-01/pairs", "curves.png")]
    for place in [*places, tmp_path, tmp_path / "x" / "y", Path("x"), cafe_data, cafe_data / "rows.jsonl"]:
        check_destination(place, "--output_dir")
    check_output(run / "eval" / "mine.json", "--output_file")
    with error_naming(ValueError, "--output_file", "x.jsonl", "run"):
        check_output(run / "x.jsonl", "--output_file")


def test_a_run_whose_arguments_cannot_be_read_is_one(run):
    (run / "args.json").write_text("{")
    assert is_run(run) and owner_of(run / "mine")


def test_a_sealed_model_gets_no_file_but_may_be_replaced_by_its_program(tmp_path):
    write_folder(tmp_path / "model", lambda partial: (partial / "config.json").write_text("{}"))
    assert owner_of(tmp_path / "model" / "rows.jsonl") and owner_of(tmp_path / "model") is None


GENERIC = ["--tokenizer_name", "{data}/tokenizer", "--num_proc", "1", "--dataset_name", "{rows}"]
WRITERS = {
    "lightrlhf.generate": ("--output_file", ["--data_dir", "{data}", "--model_name", "{run}", "--num_prompts", "1"]),
    "lightrlhf.generate by folder": ("--output_dir", ["--data_dir", "{data}", "--model_name", "{run}"]),
    "lightrlhf.annotate": (
        "--output_file",
        ["--responses_file", "{rows}", "--reward_function", "helpers.rewards:length"],
    ),
    "lightrlhf.annotate by folder": (
        "--output_dir",
        ["--responses_file", "{rows}", "--choose_type", "max_min", "--data_dir", "{data}"],
    ),
    "lightrlhf.judge": ("--output_file", ["--responses_file", "{rows},{rows}", "--judge", "helpers.rewards:length"]),
    "lightrlhf.plot": ("--output_file", ["--experiment_dir", "{run}"]),
    "lightrlhf.check_reward": (
        "--output_file",
        ["--data_dir", "{data}", "--reward_function", "helpers.rewards:length"],
    ),
    "lightrlhf.check_run": ("--output_file", ["{run}"]),
    "lightrlhf.export": ("--destination_dir", ["{run}", "--to", "merged"]),
    "lightrlhf.evaluate": ("--harness_dir", ["--model_name", "{run}", "--harness", "lm_eval"]),
    "lightrlhf.sweep": ("--output_dir", ["{sweep}"]),
    "lightrlhf.quickstart": ("--output_dir", ["--smoke", "True"]),
    "lightrlhf.sft": ("--output_dir", ["--data_dir", "{data}", "--model_name", "tiny"]),
    "lightrlhf.sft by root": ("--log_dir", ["--data_dir", "{data}", "--model_name", "tiny"]),
    "lightrlhf.online_dpo": (
        "--output_dir",
        ["--data_dir", "{data}", "--sft_experiment_dir", "{run}", "--reward_function", "helpers.rewards:length"]
        + ["--iterations", "1", "--prompts_per_iteration", "8", "--mini_batch_size", "4", "--micro_batch_size", "4"],
    ),
    "lightrlhf.demo": ("--votes_file", ["--model_name", "{run}"]),
    "datasets_prep.cafe.prepare_data": ("--destination_dir", [*CAFE_SIZES]),
    "datasets_prep.generic.prepare_data": ("--destination_dir", GENERIC),
    "datasets_prep.train_tokenizer": ("--destination_dir", ["--dataset_name", "{rows}"]),
    "datasets_prep.cafe.pretrain_base": ("--destination_dir", []),
    "datasets_prep.text_envs.prepare_data": ("--destination_dir", []),
    "datasets_prep.text_envs.prepare_data by file": ("--reflections_file", ["--destination_dir", "{rows}.d"]),
    "datasets_prep.text_envs.make_tasks": ("--destination_dir", ["--repo_dir", "{data}"]),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def given(tmp_path_factory, sft_dir, cafe_data):
    """A copy of a run, prepared data, a file of responses, and a file of a sweep."""
    folder = tmp_path_factory.mktemp("given")
    run = Path(shutil.copytree(sft_dir, folder / "run", symlinks=True))
    rows, sweep = folder / "rows.jsonl", folder / "sweep.yaml"
    row = {"prompt": "a", "response": "b", "responses": ["b", "c"], "rewards": [0.0, 1.0], "completion": "b"}
    rows.write_text((json.dumps(row) + "\n") * 2)
    sweep.write_text(
        json.dumps({"program": "sft", "seeds": [1], "metric": "val/loss", "flags": {"model_name": "tiny"}})
    )
    return {"run": run, "data": cafe_data, "rows": rows, "sweep": sweep}


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_refuses_a_place_in_a_run_and_in_a_checkpoint(name, given, capsys):
    flag, words = WRITERS[name]
    program = name.partition(" ")[0]
    main = importlib.import_module("lightrlhf.demo.page" if program == "lightrlhf.demo" else program).main
    before = contents(given["run"])
    for folder in (given["run"], last_checkpoint(given["run"])):
        place = folder / ("mine.png" if "plot" in name else "mine")
        with pytest.raises(SystemExit) as stop:
            main([word.format(**given) for word in words] + [flag, str(place)])
        told = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 2 and told[-1].endswith("name a place outside") and flag in told[-1]
    assert contents(given["run"]) == before and damage(last_checkpoint(given["run"])) is None


def test_prepared_data_and_pairs_do_not_replace_each_other_or_data_of_others(given, cafe_data, tmp_path, capsys):
    data = Path(shutil.copytree(cafe_data, tmp_path / "data"))
    words = ["--responses_file", str(given["rows"]), "--choose_type", "max_min", "--data_dir", str(cafe_data)]
    pairs, mine = tmp_path / "pairs", tmp_path / "mine"
    annotate.main([*words, "--output_dir", str(pairs)])
    annotate.main([*words, "--output_dir", str(pairs)])  # its own may be written again
    mine.mkdir()
    (mine / "finetune_test.pt").write_bytes(b"mine")
    prepared = [word.format(**given) for word in GENERIC]
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(cafe_data / "tokenizer" / "tokenizer.json", model)
    texts = ["--dataset_name", str(given["rows"]), "--vocab_size", "300"]
    train_tokenizer.main([*texts, "--destination_dir", str(tmp_path / "bpe")])
    train_tokenizer.main([*texts, "--destination_dir", str(tmp_path / "bpe")])
    for folder, main, flags in (
        (model, train_tokenizer.main, [*texts, "--destination_dir", str(model)]),
        (data, annotate.main, [*words, "--output_dir", str(data)]),
        (pairs, prepare_data.main, [*prepared, "--destination_dir", str(pairs)]),
        (mine, prepare_data.main, [*prepared, "--destination_dir", str(mine)]),
    ):
        before = contents(folder)
        assert "of another program; name another folder" in refused(capsys, main, *flags)
        assert contents(folder) == before
