"""Mistakes of a first hour: each is answered in one line whose remedy works."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import last_checkpoint, tiny_model
from helpers.errors import error_naming, refused
from helpers.programs import main_of
from helpers.tiny_runs import TRAINED, experiment_of

from lightrlhf import sft
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.gguf.files import check_model_exists
from lightrlhf.models.names import resolve
from lightrlhf.models.probes import check_room
from lightrlhf.storage.run_dir import read_metrics

EVALUATED = {  # flags of an evaluation, which needs a validation split
    "iterative_refuel": ("--iterations", 1, "--eval_dialogues", 2),
    "online_refuel": ("--eval_interval", 1, "--eval_dialogues", 2),
}
IN_PLACE = ("refuel", "reflect_rl")  # refuel evaluates where there is such a split, reflect_rl has no data


@pytest.mark.slow
@pytest.mark.parametrize("program", [one for one in (*TRAINED, "iterative_refuel") if one not in IN_PLACE])
def test_a_run_without_a_validation_split_goes_on_as_the_error_says(program, runs, tmp_path, capsys):
    flags = runs.flags(program, tmp_path / "logs", *EVALUATED.get(program, ("--eval_interval", 1)), steps=1)
    place = flags.index("--data_dir") + 1
    data = Path(shutil.copytree(flags[place], tmp_path / "data"))
    for split in data.glob("*_validation.pt"):
        split.unlink()
    flags[place] = str(data)
    line = refused(capsys, main_of(program), *flags)
    remedy = re.search(r"give (--\w+ 0)", line)
    assert "validation.pt" in line and remedy
    main_of(program)([*flags, *remedy[1].split()])
    assert last_checkpoint(experiment_of(tmp_path / "logs"))


def test_a_folder_that_is_no_model_says_what_it_is(cafe_data, sft_dir, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    runs = Path(sft_dir).parent  # other tests may have run there since, and the newest run is named
    for folder, fact in [(cafe_data, "--data_dir"), (runs, f"such as {runs}"), (empty, "config.json")]:
        with error_naming(UsageError, "--flag", folder, fact):
            check_model_exists(str(folder), "--flag")
        with error_naming(UsageError, "--flag", folder, fact):
            resolve(str(folder), "--flag")
        with error_naming(UsageError, folder, fact):
            read_metrics(str(folder))
    check_model_exists(sft_dir, "--flag")


def test_a_prompt_that_fills_the_context_is_told_apart_from_a_long_response():
    model = tiny_model("llama")
    limit = model.config.max_position_embeddings
    args = SamplingArgs(max_new_tokens=8)
    with error_naming(UsageError, f"{limit} positions", "--max_prompt_length"):
        check_room(model, torch.tensor([limit]), args)
    with error_naming(UsageError, "--max_new_tokens 8", "at most 3"):
        check_room(model, torch.tensor([limit - 3]), args)


def test_a_wrong_folder_leads_to_the_right_one(cafe_data, sft_dir, base_model, tmp_path, capsys):
    given = ("--model_name", base_model)
    assert str(cafe_data) in refused(capsys, sft.main, "--data_dir", Path(cafe_data).parent, *given)
    assert "no .pt split" in refused(capsys, sft.main, "--data_dir", sft_dir, *given)
    checkpoint = last_checkpoint(sft_dir)
    assert f"mean {sft_dir}?" in refused(capsys, sft.main, "--resume_from", checkpoint)
    line = refused(capsys, sft.main, "--data_dir", cafe_data, "--model_name", f"{sft_dir}/checkpoint-999999")
    assert "does not exist" in line
    prompts = Path(shutil.copytree(cafe_data, tmp_path / "prompts"))
    for file in {*prompts.glob("finetune_*"), *prompts.glob("preference_*"), *prompts.glob("*_test.pt")}:
        file.unlink()
    line = refused(capsys, main_of("generate"), "--data_dir", prompts, *given, "--split", "test")
    assert "prompts_test.pt does not exist" in line and line.endswith("holds prompts_train.pt, prompts_validation.pt")
    assert "no.npz does not exist" in refused(capsys, main_of("check_run"), "no.npz")
    pairs = Path(shutil.copytree(cafe_data, tmp_path / "data"))
    for file in pairs.glob("preference_*.pt"):
        file.unlink()
    assert "prompt, chosen, rejected" in refused(capsys, main_of("dpo"), "--data_dir", pairs, *given)


@pytest.mark.slow
def test_ctrl_c_says_from_where_to_go_on(runs, tmp_path, capsys, monkeypatch):
    train_step, calls = sft.train_step, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return train_step(*args)

    monkeypatch.setattr(sft, "train_step", interrupted)
    with pytest.raises(SystemExit) as stopped:
        sft.main(runs.flags("sft", tmp_path, "--save_interval", 2))
    told = capsys.readouterr().out
    assert stopped.value.code == 130
    assert "checkpoint-000002" in told and f"--resume_from {experiment_of(tmp_path)}" in told
