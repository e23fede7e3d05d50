"""A resumed run must have the rows per step and the sources with which it began."""

import copy
import importlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from helpers import CPU, listing, metrics, reseal, save_model
from helpers.errors import error_naming
from helpers.flat import stored_rows
from helpers.programs import args_classes
from safetensors.torch import load_file, save_file

from lightrlhf import grpo, ppo, rm, sft
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.online_dpo import OnlineDPOArgs
from lightrlhf.storage.locks import LOCK
from lightrlhf.training.beginning import SAME, Beginning, hash_rows
from lightrlhf.training.iterated_dir import open_directory
from lightrlhf.training.provenance import describe_given
from lightrlhf.training.sources import FUNCTIONS, MODELS, fingerprint, sources_of

FLAGS = ["--save_interval", "1", "--log_interval", "1", "--max_steps", "1", "--eval_interval", "0", *CPU]
ROLLOUT = ["--rollout_size", "4", "--mini_batch_size", "4", "--micro_batch_size", "4", "--max_new_tokens", "3"]
REWARD = ["--reward_function", "helpers.rewards:length"]


def refused(main, run, more, capsys) -> str:
    """The line with which a run is not resumed with these flags; it stays as it is."""
    before = files_of(run)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["--resume_from", str(run), "--max_steps", "2", *map(str, more)])
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if line.startswith("error:")]
    assert stop.value.code == 2 and "last bits" not in said.out and files_of(run) == before
    assert line.startswith(f"error: --resume_from {run}: ")
    assert line.rpartition("or begin a new run from its weights by --")[2].split()[1] == str(run)
    return line


def files_of(run) -> dict[str, int]:
    """Times of change of a run's files; a lock that is not collected yet is none."""
    return {name: (Path(run) / name).stat().st_mtime_ns for name in listing(run) if name != LOCK}


@pytest.fixture(scope="module")
def sft_run(cafe_data, base_model, tmp_path_factory):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--mini_batch_size", "8", *FLAGS]
    return sft.main([*flags, "--log_dir", str(tmp_path_factory.mktemp("sft"))])


@pytest.fixture(scope="module")
def grpo_run(cafe_data, base_model, tmp_path_factory):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), *REWARD, *FLAGS, *ROLLOUT]
    return grpo.main([*flags, "--num_generations", "2", "--log_dir", str(tmp_path_factory.mktemp("grpo"))])


@pytest.fixture(scope="module")
def episodes_run(cafe_data, base_model, tmp_path_factory):
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), *FLAGS, *ROLLOUT]
    episodes = ["--env", "guess_number", "--max_turns", "2", "--env_workers", "1"]
    return grpo.main([*flags, *episodes, "--log_dir", str(tmp_path_factory.mktemp("episodes"))])


def resumes(main, run, more, tmp_path) -> Path:
    """A copy of a run that goes on with these flags."""
    copy = shutil.copytree(run, tmp_path / "copy", symlinks=True)
    main(["--resume_from", str(copy), "--max_steps", "2", *map(str, more)])
    assert [row["step"] for row in metrics(copy)] == [1, 2]
    return copy


# ---------------------------------------------------------------------------------------------------- rows of its steps
@pytest.mark.parametrize(
    "flags, told",
    [
        (["--mini_batch_size", 4, "--micro_batch_size", 4], "--mini_batch_size 4 on 1 rank is 4, and was 8"),
        (["--mini_batch_size", 16], "--mini_batch_size 16 on 1 rank is 16, and was 8"),
        (["--seed", 7], "--seed is 7, and was 42"),
    ],
)
def test_other_rows_in_a_step_are_refused_by_name(flags, told, sft_run, capsys):
    assert told in refused(sft.main, sft_run, flags, capsys)


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--rollout_size", 8], "--rollout_size 8 on 1 rank is 8, and was 4"),
        (["--num_generations", 4], "--num_generations is 4, and was 2"),
        (["--mini_batch_size", 8], "--mini_batch_size 8 on 1 rank is 8, and was 4"),
        (["--ppo_epochs", 2], "changed: --ppo_epochs 2 (was 1)"),
    ],
)
def test_so_they_are_where_a_step_is_a_rollout(flags, told, grpo_run, capsys):
    line = refused(grpo.main, grpo_run, flags, capsys)
    assert told in line and f"by --sft_experiment_dir {grpo_run}" in line


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--max_turns", 4], "--max_turns is 4, and was 2"),
        (["--max_observation_tokens", 99], "--max_observation_tokens is 99, and was 1024"),
    ],
)
def test_other_episodes_are_refused_by_name(flags, told, episodes_run, capsys):
    assert told in refused(grpo.main, episodes_run, flags, capsys)


@pytest.mark.parametrize("change", ["other rows", "fewer rows", "another order", "two sets"])
def test_other_data_is_refused_by_name(change, sft_run, cafe_data, tmp_path, capsys):
    other = shutil.copytree(cafe_data, tmp_path / "other")
    rows = stored_rows(other / "finetune_train.pt")
    if change == "other rows":
        rows[3] = rows[4]
    rows = {"fewer rows": rows[:-1], "another order": rows[::-1]}.get(change, rows)
    torch.save(rows, other / "finetune_train.pt")
    reseal(other)
    folders = [cafe_data, other] if change == "two sets" else [other]
    line = refused(sft.main, sft_run, ["--data_dir", *folders], capsys)
    told = f"--data_dir was {cafe_data} when the run began, and {cafe_data} {other} is not the same"
    assert "changed: --data_dir" in line or change == "two sets"
    assert (told if change == "two sets" else f"the content of {other} is {len(rows)} rows") in line


def test_weights_of_sets_are_refused_too(cafe_data, base_model, tmp_path, capsys):
    other = shutil.copytree(cafe_data, tmp_path / "other")
    flags = ["--data_dir", str(cafe_data), str(other), "--model_name", str(base_model), "--data_weights", "1", "1"]
    run = sft.main([*flags, *FLAGS, "--log_dir", str(tmp_path)])
    line = refused(sft.main, run, ["--data_weights", 2, 1], capsys)
    assert "--data_weights is [2.0, 1.0], and was [1.0, 1.0]" in line


@pytest.mark.slow
def test_what_changes_no_row_may_change(sft_run, cafe_data, base_model, tmp_path):
    moved = [shutil.copytree(folder, tmp_path / folder.name) for folder in (cafe_data, base_model)]
    flags = ["--data_dir", moved[0], "--model_name", moved[1], "--micro_batch_size", 2, "--learning_rate", 1e-3]
    resumes(sft.main, sft_run, flags, tmp_path)


def arguments(**changes) -> TrainArgs:
    return TrainArgs(resume_from="run", **changes)


def test_the_product_with_the_number_of_ranks_counts():
    began = {"began": Beginning(arguments(), 4, {}).as_stored()}
    assert Beginning(arguments(mini_batch_size=16), 2, {}, began).values["mini_batch_size"] == 32
    with error_naming(UsageError, "2 ranks", "16", "32", "--mini_batch_size 16"):
        Beginning(arguments(), 2, {}, began)
    with error_naming(UsageError, "as it began"):
        Beginning(arguments(), 3, {}, began)


def test_a_program_s_own_number_of_rows_counts_whatever_its_flag():
    first = Beginning(arguments(), 2, {})
    first.fix_rows(range(9), 3, "data")
    again = Beginning(arguments(), 2, {}, {"began": first.as_stored()})
    with error_naming(UsageError, "rows of a step", "8", "6"):
        again.fix_rows(range(9), 4, "data")


def test_rows_are_equal_by_all_that_they_hold():
    rows = [{"input_ids": torch.tensor([1, 2]), "prompt_len": 1, "columns": {"answer": "a"}}]
    assert hash_rows(rows) == hash_rows([{**rows[0], "input_ids": torch.tensor([0, 1, 2])[1:]}])
    others = [{**rows[0], "prompt_len": 0}, {**rows[0], "columns": {"answer": "b"}}]
    others += [{**rows[0], "input_ids": torch.tensor([2, 1])}]
    assert len({hash_rows(one) for one in (rows, rows * 2, *([other] for other in others))}) == 5


# -------------------------------------------------------------------------------------------------------------- sources
def change_weights(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"] += 0.5
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def test_another_model_is_refused_by_name(sft_run, tokenizer, base_model, tmp_path, capsys):
    other = save_model("llama", tmp_path / "other", tokenizer)
    change_weights(other)
    line = refused(sft.main, sft_run, ["--model_name", other], capsys)
    assert f"--model_name was {base_model} when the run began, and {other} is not the same" in line


def test_another_kind_of_start_is_refused_by_name(grpo_run, sft_run, capsys):
    line = refused(grpo.main, grpo_run, ["--sft_experiment_dir", sft_run], capsys)
    assert "when the run began and is not given" in line or f"and is {sft_run}" in line


@pytest.mark.slow
@pytest.mark.parametrize("program, flag", [(grpo, "--sft_experiment_dir"), (ppo, "--rm_experiment_dir")])
def test_a_stage_that_was_trained_further_is_refused(program, flag, sft_dir, rm_dir, cafe_data, tmp_path, capsys):
    source = shutil.copytree(sft_dir if program is grpo else rm_dir, tmp_path / "source", symlinks=True)
    flags = ["--data_dir", str(cafe_data), flag, str(source), *FLAGS, *ROLLOUT, "--log_dir", str(tmp_path / "logs")]
    flags += [*REWARD, "--num_generations", "2"] if program is grpo else ["--sft_experiment_dir", sft_dir]
    run = program.main(flags)
    (sft if program is grpo else rm).main(["--resume_from", str(source), "--max_steps", "3"])
    line = refused(program.main, run, [], capsys)
    before, now = source / "checkpoint-000002", source / "checkpoint-000003"
    assert f"{flag} meant {before} when the run began and means {now}; give {flag} {before}" in line
    resumes(program.main, run, [flag, before], tmp_path)
    shutil.rmtree(before)
    assert "restore it" in refused(program.main, run, [], capsys)


def test_other_weights_at_the_path_of_an_adapter_s_base_are_refused(cafe_data, tokenizer, tmp_path, capsys):
    base = save_model("llama", tmp_path / "base", tokenizer)
    flags = ["--data_dir", str(cafe_data), "--finetune_mode", "lora", *FLAGS]
    first = sft.main([*flags, "--model_name", str(base), "--log_dir", str(tmp_path / "first")])
    second = sft.main([*flags, "--model_name", str(first), "--log_dir", str(tmp_path / "second")])
    change_weights(base)
    assert "(model.safetensors has changed)" in refused(sft.main, first, [], capsys)
    assert "(base/model.safetensors has changed)" in refused(sft.main, second, [], capsys)


def test_another_template_is_refused(cafe_data, base_model, tmp_path, capsys):
    data = shutil.copytree(cafe_data, tmp_path / "data")
    flags = ["--data_dir", str(data), "--model_name", str(base_model), *FLAGS, "--log_dir", str(tmp_path / "logs")]
    run = sft.main(flags)
    template = next(file for file in (data / "tokenizer").iterdir() if "template" in file.name)
    template.write_text(template.read_text() + " ")
    reseal(data)
    assert f"(0/{template.name} has changed)" in refused(sft.main, run, [], capsys)


def test_a_reward_function_whose_file_has_changed_is_refused(cafe_data, base_model, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "own_reward.py"
    file.write_text("def short(prompts, completions, **columns):\n    return [-float(len(one)) for one in prompts]\n")
    flags = ["--data_dir", str(cafe_data), "--model_name", str(base_model), "--reward_function", "own_reward:short"]
    run = grpo.main([*flags, *FLAGS, *ROLLOUT, "--num_generations", "2", "--log_dir", str(tmp_path / "logs")])
    file.write_text(file.read_text().replace("-float", "float"))
    line = refused(grpo.main, run, [], capsys)
    assert "--reward_function own_reward:short is not what it was" in line and "(own_reward has changed)" in line
    line = refused(grpo.main, run, ["--reward_function", "helpers.rewards:length"], capsys)
    assert "--reward_function was own_reward:short when the run began, and helpers.rewards:length is not" in line
    sys.modules.pop("own_reward")


def test_a_given_function_counts_by_its_file_and_a_script_s_does_not(monkeypatch):
    assert list(sources_of(TrainArgs(), {"reward": "helpers.rewards:length"})["reward"]["files"]) == ["helpers.rewards"]
    assert sources_of(TrainArgs(), {"reward": "__main__:length", "policy": "Llama sha256:0f"}) == {}
    assert sources_of(TrainArgs(), {"reward": "lightrlhf.rewards.verifiers:maths"}) == {}


@pytest.mark.slow
def test_programs_in_iterations_compare_rows_and_sources_too(sft_dir, rm_dir, base_model, tmp_path, capsys):
    start, scorer = (shutil.copytree(one, tmp_path / Path(one).parts[-4], symlinks=True) for one in (sft_dir, rm_dir))
    given = {"sft_experiment_dir": str(start), "rm_experiment_dir": str(scorer), "output_dir": str(tmp_path / "run")}
    args = OnlineDPOArgs(**given, accelerator="cpu")

    def opened(rows=(1, 2), **flags):
        return open_directory(replace(args, **flags), "online_dpo", "a/b", "2 prompts", rows=rows)

    began = opened()
    sft.main(["--resume_from", str(start), "--max_steps", "3"])  # the run keeps to the policy that it began with
    assert opened() == began == (tmp_path / "run", str(start / "checkpoint-000002"))
    with error_naming(UsageError, "is 2 rows", "was 2 rows"):
        opened(rows=(2, 1))
    with error_naming(UsageError, "iterations was 3 there"):  # each with a third of the prompts
        opened(iterations=4)
    rm.main(["--resume_from", str(scorer), "--max_steps", "3"])
    with error_naming(UsageError, "--rm_experiment_dir", "checkpoint-000002"):
        opened()


def test_of_a_large_file_pieces_are_read_from_its_first_to_its_last_byte(tmp_path, monkeypatch):
    sources = importlib.import_module("lightrlhf.training.sources")
    monkeypatch.setattr(sources, "WHOLE", 1000)
    monkeypatch.setattr(sources, "PIECE", 100)
    monkeypatch.setattr(sources, "PIECES", 20)
    file, content = tmp_path / "weights", bytearray(5000)
    seen = set()
    for place in (None, 0, 2600, 4999):
        changed = bytearray(content)
        if place is not None:
            changed[place] = 1
        file.write_bytes(changed)
        seen.add(fingerprint(file))
    file.write_bytes(content + b"\0")
    assert len(seen | {fingerprint(file)}) == 5
    file.write_bytes(content[:1000])
    whole = fingerprint(file)
    file.write_bytes(content[:999] + b"1")
    assert fingerprint(file) != whole


def test_every_text_flag_of_a_training_program_is_a_source_or_known_to_be_none():
    """So that a new flag that names a model or a function is not forgotten."""
    read = {*MODELS, *FUNCTIONS, "model_name", "sft_experiment_dir", "data_dir"}
    others = {"accelerator", "audit_function", "base_url", "experiment_name", "keep_best", "log_dir", "mcp"}
    others |= {"lora_targets", "output_dir", "parser", "push_to_hub", "rapo", "resume_from", "rollout_server"}
    others |= {"estimator", "teacher_column", "teacher_server"}
    others |= {"privileged_column", "stop_strings", "wandb_project", *SAME}
    for one in args_classes().values():
        if issubclass(one, TrainArgs):
            texts = {name for name, kind in get_type_hints(one).items() if "str" in str(kind) and "Cl" not in str(kind)}
            assert texts <= read | others


def test_a_column_that_another_split_alone_has_changes_no_hash():
    ids = torch.arange(3)
    one, other = ({"input_ids": ids, "columns": columns} for columns in ({"a": 1}, {"b": None, "a": 1}))
    assert hash_rows([one]) == hash_rows([other]) != hash_rows([{"input_ids": ids, "columns": {"a": 2}}])


def test_another_chat_template_makes_another_given_tokenizer(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages[0]['content'] }}"
    assert describe_given(tokenizer=other) != describe_given(tokenizer=tokenizer)
