"""Bad flags and bad files: one line that names them, exit status 2 (1 for a failure while running), nothing written.

Messages are pinned by the flags, files and values they name, not by their sentences.
"""

import errno
import json
import math
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import CPU, errors, last_checkpoint, metrics, save_model, weights
from helpers.flat import stored_rows
from helpers.programs import main_of

import datasets_prep.cafe.prepare_data
import datasets_prep.helpful_harmless.prepare_data
import lightrlhf.sft
from datasets_prep.cafe.tokenizer import train_tokenizer

PREPARE = {"cafe": datasets_prep.cafe.prepare_data.main, "hh": datasets_prep.helpful_harmless.prepare_data.main}
PARSING = ["--termination_condition", "parsing"]
REWARD = ["--reward_function", "helpers.rewards:constant"]


def refused(program: str, flags: list, capsys, status: int = 2) -> str:
    """Run a program that must refuse; returns its one line on stderr."""
    line = errors.refused(capsys, PREPARE.get(program) or main_of(program), *flags, status=status)
    without_folders = re.sub(r"/\S+/", "", line)  # which are as long as they are
    assert re.match(r"(python -m [\w.]+: )?error: ", line) and len(without_folders) < 500, line
    return line


def missing(line: str, *pins: str) -> list[str]:
    """The pins that a line does not contain."""
    return [f"{pin!r} is not in: {line}" for pin in pins if pin not in line]


@pytest.fixture
def world(tmp_path, cafe_data, base_model, sft_dir, rm_dir):
    """Folders and flags for the tests below, and a copy of the data that a test may damage."""
    shutil.copytree(cafe_data, tmp_path / "data")
    return {
        "tmp": tmp_path,
        "data": tmp_path / "data",
        "model": base_model,
        "sft": sft_dir,
        "rm": rm_dir,
        "log": ["--log_dir", tmp_path / "logs", *CPU],
    }


def experiments(world) -> list[Path]:
    return list((world["tmp"] / "logs").rglob("args.json"))


# ------------------------------------------------------------------------------------------------------------- flags
ONE_FLAG = [  # program, flags added to good ones, what the line names: flag, value, remedy
    ("sft", ["--learning_rat", "1"], "--learning_rate"),
    ("sft", ["--zzzzqqqq", "1"], "--zzzzqqqq", "--help"),
    ("rm", ["--los_type", "average"], "--los_type", "--loss_type"),
    ("ppo", ["--rollot_size", "8"], "--rollot_size", "--rollout_size"),
    ("sft", ["--epochs", "many"], "--epochs many"),
    ("sft", ["--use_targets", "maybe"], "--use_targets maybe", "True"),
    ("sft", ["--mini_batch_size", "6", "--micro_batch_size", "4"], "--mini_batch_size 6", "--micro_batch_size 3"),
    ("sft", ["--mini_batch_size", "4", "--micro_batch_size", "8"], "--mini_batch_size 4", "--micro_batch_size 4"),
    ("sft", ["--optimizer", "SGDD"], "--optimizer SGDD", "AdamW"),
    ("sft", ["--precision", "8-maybe"], "--precision 8-maybe", "32-true", "bf16-mixed"),
    ("sft", ["--accelerator", "abacus"], "--accelerator abacus"),
    ("sft", ["--data_dir", "/nowhere/at/all"], "--data_dir /nowhere/at/all"),
    ("sft", ["--load_in_4bit=True"], "--load_in_4bit True", "--finetune_mode lora"),
    ("sft", ["--base_dtype=float16", "--finetune_mode=lora"], "--base_dtype", "bfloat16"),
    (
        "sft",
        ["--load_in_4bit=True", "--finetune_mode=lora", "--strategy=fsdp"],
        "--load_in_4bit True",
        "--strategy fsdp",
    ),
    ("sft", ["--finetune_mode", "lora", "--lora_targets", "nowhere"], "--lora_targets nowhere"),
    ("sft", ["--finetune_mode", "lora", "--lora_targets", "q_proj,nowhere"], "--lora_targets nowhere"),
    ("sft", ["--config", "/nowhere.yaml"], "/nowhere.yaml"),
    ("sft", ["--model_name", "./nowhere"], "--model_name ./nowhere"),
    ("sft", ["--model_name", "no-such-organisation/no-such-model"], "no-such-organisation/no-such-model"),
    ("rm", ["--loss_type", "best"], "--loss_type best", "per_sample", "last_token", "average"),
    ("rm", ["--sft_experiment_dir", "nowhere"], "--sft_experiment_dir nowhere"),
    ("ppo", ["--repetition_penalty", "1.2"], "--repetition_penalty"),
    ("ppo", ["--eos_ids", "5", "-7"], "--eos_ids -7"),
    ("ppo", ["--eos_ids", "5", "many"], "--eos_ids", "many"),
    ("ppo", ["--stop_strings", ""], "--stop_strings ''"),
    ("ppo", ["--do_sample", "False"], "--do_sample"),
    ("ppo", ["--rollout_size", "4"], "--mini_batch_size 8", "--rollout_size 4"),
    ("ppo", [*PARSING, "--parser", "bert"], "--parser bert", "textblob", "benepar", "stanza", "python"),
    ("ppo", [*PARSING, "--parser", "benepar"], "--parser benepar", "pip install -e '.[benepar]'"),
    ("ppo", [*PARSING, "--parser", "nowhere:f"], "--parser nowhere:f"),
    ("ppo", ["--parsing_cutoff", "4"], "--parsing_cutoff 4", "--termination_condition parsing"),
    ("ppo", ["--repeat_times", "4"], "--repeat_times 4", "--termination_condition randomized"),
    ("sft", ["--strategy", "deepspeed"], "--strategy deepspeed", "pip install deepspeed"),
    ("ppo", ["--reward_function", "nowhere:f"], "--reward_function nowhere:f"),
    ("ppo", ["--reward_function", "nowhere"], "--reward_function nowhere"),
    ("ppo", ["--reward_function", "helpers.rewards:nothing"], "--reward_function helpers.rewards:nothing"),
    ("ppo", ["--reward_function", "helpers.rewards:number"], "--reward_function helpers.rewards:number"),
    ("ppo", ["--reward_function", "helpers.rewards:takes_no_columns"], "--reward_function", "**columns"),
    ("ppo", ["--rm_experiment_dir", "nowhere"], "--rm_experiment_dir nowhere"),
    ("iterative_refuel", ["--etta", "1"], "--etta", "--eta"),
    ("iterative_refuel", ["--base_url", "http://localhost:1/v1"], "--base_url", "--user_model"),
    ("iterative_refuel", ["--rm_experiment_dir", "nowhere"], "--rm_experiment_dir nowhere"),
    ("iterative_refuel", ["--do_sample", "False"], "--do_sample"),
    ("iterative_refuel", [], "dialogue_train.pt"),
]


def good_flags(program: str, world) -> list:
    flags = ["--data_dir", world["data"], "--model_name", world["model"], "--max_steps", "1", *world["log"]]
    if program == "iterative_refuel":
        flags += REWARD
    if program == "ppo":
        flags += [*REWARD, "--rollout_size", "8", "--mini_batch_size", "8", "--max_new_tokens", "4"]
    return flags


@pytest.mark.parametrize("call", ONE_FLAG, ids=[" ".join([call[0], *call[1]]) for call in ONE_FLAG])
def test_a_bad_flag_is_refused_before_anything_is_written(call, world, capsys):
    program, flags, *pins = call
    assert not missing(refused(program, [*good_flags(program, world), *flags], capsys), *pins)
    assert not experiments(world)


def test_a_model_is_needed(world, capsys):
    flags = ["--data_dir", world["data"], *world["log"]]
    assert "--model_name" in refused("sft", flags, capsys)
    assert not missing(refused("rm", flags, capsys), "--sft_experiment_dir", "--model_name")
    assert not missing(refused("ppo", [*flags, *REWARD], capsys), "--sft_experiment_dir", "--model_name")
    line = refused("ppo", [*flags, "--model_name", world["model"]], capsys)
    assert not missing(line, "--rm_experiment_dir", "--reward_function")
    assert not experiments(world)


# ------------------------------------------------------------------------------------------------------ bad splits
class Bomb:
    """Unpickling it without restrictions writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def data_case(world, name: str) -> None:
    """Damage the copy of the data in one way, without a seal that would tell at once."""
    data = world["data"]
    (data / "manifest.json").unlink()
    file = data / "finetune_train.pt"
    if name == "missing":
        file.unlink()
    elif name == "truncated":
        file.write_bytes(file.read_bytes()[:700])
    elif name == "empty file":
        file.write_bytes(b"")
    elif name == "text":
        file.write_text("not a split at all")
    elif name == "pickle with code":
        file.write_bytes(pickle.dumps(Bomb(world["tmp"] / "ran")))
    elif name == "torch file with code":
        torch.save([Bomb(world["tmp"] / "ran")], file)
    elif name == "no rows":
        torch.save([], file)
    elif name == "no list":
        torch.save({"input_ids": [1, 2]}, file)
    elif name == "rows that are no dicts":
        torch.save([[1, 2, 3]], file)
    elif name == "wrong stage":
        shutil.copy(data / "preference_train.pt", file)
    elif name == "ids beyond the vocabulary":
        rows = stored_rows(file)
        rows[3]["input_ids"][2] = 99_999
        torch.save(rows, file)
    elif name == "negative ids":
        rows = stored_rows(file)
        rows[3]["input_ids"][2] = -7
        torch.save(rows, file)
    elif name == "targets of another length":
        rows = stored_rows(file)
        rows[3]["targets"] = rows[3]["targets"][:-2]
        torch.save(rows, file)
    elif name == "a folder":
        file.unlink()
        file.mkdir()


DATA = {
    "missing": ["finetune_train.pt"],
    "truncated": ["finetune_train.pt", "damaged"],
    "empty file": ["finetune_train.pt", "damaged"],
    "text": ["finetune_train.pt"],
    "pickle with code": ["finetune_train.pt"],
    "torch file with code": ["finetune_train.pt"],
    "no rows": ["finetune_train.pt"],
    "no list": ["finetune_train.pt"],
    "rows that are no dicts": ["finetune_train.pt", "row 0", "list"],
    "wrong stage": ["finetune_train.pt", "preference rows"],
    "ids beyond the vocabulary": ["99999"],
    "negative ids": ["-7"],
    "targets of another length": ["finetune_train.pt", "row 3"],
    "a folder": ["finetune_train.pt"],
}


@pytest.mark.parametrize("name", DATA)
def test_a_bad_split_is_refused_and_its_code_never_runs(name, world, capsys):
    data_case(world, name)
    assert not missing(refused("sft", good_flags("sft", world), capsys), *DATA[name])
    assert not experiments(world) and not (world["tmp"] / "ran").exists()


@pytest.mark.parametrize("program, file", [("rm", "preference_train.pt"), ("ppo", "prompts_train.pt")])
def test_every_program_refuses_the_split_of_another_stage(program, file, world, capsys):
    shutil.copy(world["data"] / "finetune_train.pt", world["data"] / file)
    assert f"{file} is not what was written" in refused(program, good_flags(program, world), capsys)
    (world["data"] / "manifest.json").unlink()
    assert f"{file} holds finetune rows" in refused(program, good_flags(program, world), capsys)


def test_a_missing_validation_split_is_named(world, capsys):
    (world["data"] / "finetune_validation.pt").unlink()
    assert "finetune_validation.pt" in refused("sft", good_flags("sft", world), capsys)


def test_a_model_with_fewer_tokens_than_the_data_is_refused(world, tokenizer, capsys):
    small = save_model("llama", world["tmp"] / "small", tokenizer, vocab_size=100)
    for program in ("sft", "rm", "ppo"):
        flags = [*good_flags(program, world), "--model_name", small]
        assert "100 tokens" in refused(program, flags, capsys)
    assert not experiments(world)


def test_data_of_another_tokenizer_than_the_models_is_refused_though_its_ids_fit(world, tokenizer, capsys):
    folder = save_model("llama", world["tmp"] / "other", tokenizer)
    other = train_tokenizer(vocab_size=600, seed=5, num_texts=500)
    other.save_pretrained(folder)
    for program in ("sft", "rm", "ppo"):
        line = refused(program, [*good_flags(program, world), "--model_name", folder], capsys)
        assert not missing(line, "tokenizer", str(folder))
    assert not experiments(world)


def test_responses_that_do_not_fit_into_the_positions_are_refused(world, tokenizer, capsys):
    small = save_model("llama", world["tmp"] / "small", tokenizer, max_position_embeddings=32)
    flags = [*good_flags("ppo", world), "--model_name", small, "--max_new_tokens", "30"]
    assert not missing(refused("ppo", flags, capsys), "--max_new_tokens 30", "32")
    assert not experiments(world)


def test_rows_longer_than_the_positions_are_refused(world, tokenizer, capsys):
    small = save_model("gpt2", world["tmp"] / "small", tokenizer, n_positions=20)
    for program in ("sft", "rm"):
        line = refused(program, [*good_flags(program, world), "--model_name", small], capsys)
        assert not missing(line, "20 positions", "--max_length 20")
    assert not experiments(world)


# -------------------------------------------------------------------------------------------------- wrong directories
def damaged(world, sft_dir: str, keep_before: bool) -> Path:
    folder = world["tmp"] / "damaged"
    shutil.copytree(sft_dir, folder)
    if keep_before:
        shutil.copytree(folder / "checkpoint-000002", folder / "checkpoint-000001")
    file = folder / "checkpoint-000002" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(bytes(content))
    return folder


def test_directories_of_the_wrong_kind_are_told_apart(world, capsys):
    rm_flags = ["--data_dir", world["data"], "--max_steps", "1", *world["log"]]
    line = refused("ppo", [*good_flags("ppo", world), "--sft_experiment_dir", world["rm"]], capsys)
    assert not missing(line, f"--sft_experiment_dir {world['rm']}", "reward model")
    flags = [*rm_flags, "--sft_experiment_dir", world["sft"], "--rm_experiment_dir", world["sft"]]
    line = refused("ppo", [*flags, "--rollout_size", "8", "--mini_batch_size", "8"], capsys)
    assert not missing(line, f"--rm_experiment_dir {world['sft']}", "language model")
    line = refused("sft", [*rm_flags, "--model_name", world["rm"]], capsys)
    assert not missing(line, f"--model_name {world['rm']}", "reward model")
    line = refused("rm", [*rm_flags, "--sft_experiment_dir", world["data"]], capsys)
    assert "--sft_experiment_dir" in line
    line = refused("sft", [*rm_flags, "--model_name", world["tmp"]], capsys)
    assert not missing(line, f"--model_name {world['tmp']}", "config.json", "args.json")
    assert not experiments(world)


def test_an_experiment_without_a_checkpoint_is_refused(world, capsys):
    (world["tmp"] / "young").mkdir()
    (world["tmp"] / "young" / "args.json").write_text(json.dumps({"program": "sft"}))
    flags = ["--data_dir", world["data"], "--sft_experiment_dir", world["tmp"] / "young", *world["log"]]
    assert not missing(refused("rm", flags, capsys), f"--sft_experiment_dir {world['tmp'] / 'young'}", "checkpoint")


@pytest.mark.parametrize("keep_before", [True, False])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_offered(keep_before, world, capsys):
    folder = damaged(world, world["sft"], keep_before)
    flags = ["--data_dir", world["data"], "--sft_experiment_dir", folder, *world["log"]]
    line = refused("rm", flags, capsys)
    assert not missing(line, "checkpoint-000002", "model.safetensors")
    assert ("checkpoint-000001" in line) == keep_before
    if keep_before:
        before = ["--data_dir", world["data"], "--max_steps", "1", *world["log"]]
        main_of("rm")([str(f) for f in [*before, "--sft_experiment_dir", folder / "checkpoint-000001"]])


def test_an_incomplete_model_folder_is_refused(world, capsys):
    folder = world["tmp"] / "half"
    folder.mkdir()
    (folder / "config.json").write_text((world["model"] / "config.json").read_text())
    assert "--model_name" in refused("sft", [*good_flags("sft", world), "--model_name", folder], capsys)
    weights_file = (world["model"] / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights_file[: len(weights_file) // 2])
    assert "--model_name" in refused("sft", [*good_flags("sft", world), "--model_name", folder], capsys)
    (folder / "config.json").write_text("{")
    assert "--model_name" in refused("sft", [*good_flags("sft", world), "--model_name", folder], capsys)
    assert not experiments(world)


# ------------------------------------------------------------------------------------------------------- resuming
def test_resuming_from_nonsense_is_refused(world, capsys):
    tmp = world["tmp"]
    assert "--resume_from nowhere" in refused("sft", ["--resume_from", "nowhere"], capsys)
    (tmp / "empty").mkdir()
    assert not missing(refused("sft", ["--resume_from", tmp / "empty"], capsys), "--resume_from", "args.json")
    (tmp / "empty" / "args.json").write_text("{")
    assert "args.json" in refused("sft", ["--resume_from", tmp / "empty"], capsys)
    (tmp / "empty" / "args.json").write_text("[1, 2]")
    assert "--resume_from" in refused("sft", ["--resume_from", tmp / "empty"], capsys)


def test_resuming_the_run_of_another_program_is_refused(world, capsys):
    line = refused("rm", ["--resume_from", world["sft"]], capsys)
    assert line.endswith(f"--resume_from {world['sft']} is a run of sft, not of rm\n") or line.endswith("not of rm")


def test_resuming_a_run_without_a_checkpoint_is_refused(world, capsys):
    folder = world["tmp"] / "young"
    shutil.copytree(world["sft"], folder)
    shutil.rmtree(folder / "checkpoint-000002")
    assert not missing(refused("sft", ["--resume_from", folder], capsys), str(folder), "checkpoint")


def test_resuming_with_another_model_is_refused(world, tokenizer, capsys):
    other = save_model("gpt2", world["tmp"] / "gpt2", tokenizer)
    folder = world["tmp"] / "copy"
    shutil.copytree(world["sft"], folder)
    before = metrics(folder)
    line = refused("sft", ["--resume_from", folder, "--model_name", other, "--max_steps", "4"], capsys)
    assert not missing(line, f"--resume_from {folder}", "model")
    assert metrics(folder) == before


def test_resuming_with_a_wider_model_is_refused(world, tokenizer, capsys):
    wide = save_model("llama", world["tmp"] / "wide", tokenizer, hidden_size=64)
    flags = ["--resume_from", world["sft"], "--model_name", wide, "--max_steps", "4"]
    assert not missing(refused("sft", flags, capsys), f"--resume_from {world['sft']}", "model")


# ------------------------------------------------------------------------------------------------- the log directory
@pytest.mark.parametrize("program", ["sft", "rm", "ppo"])
def test_a_log_dir_below_a_file_is_refused(program, world, capsys):
    (world["tmp"] / "file").write_text("not a folder")
    flags = [*good_flags(program, world), "--log_dir", world["tmp"] / "file" / "logs"]
    assert f"--log_dir {world['tmp']}/file/logs" in refused(program, flags, capsys)


# ---------------------------------------------------------------------------------------------------------- the demo
DEMO = [
    (["--host", "0.0.0.0"], "--host 0.0.0.0", "--password_file"),
    (["--host", "0.0.0.0", "--password_file", "none"], "--password_file none"),
    (["--rm_experiment_dir", "none"], "--rm_experiment_dir none"),
    (["--load_in_8bit", "True", "--load_in_4bit", "True"], "--load_in_8bit True", "--load_in_4bit True"),
]


@pytest.mark.parametrize("call", DEMO, ids=[" ".join(call[0]) for call in DEMO])
def test_the_demo_refuses_a_bad_flag(call, sft_dir, capsys):
    flags, *pins = call
    assert not missing(refused("demo", ["--experiment_dir", sft_dir, *flags], capsys), *pins)


def test_the_demo_refuses_a_reward_model_and_a_missing_folder(rm_dir, capsys):
    line = refused("demo", ["--experiment_dir", rm_dir], capsys)
    assert not missing(line, f"--model_name {rm_dir}", "--rm_experiment_dir")
    assert "--model_name none" in refused("demo", ["--model_name", "none"], capsys)


# -------------------------------------------------------------------------------------------------- data preparation
def test_data_preparation_refuses_prompts_that_are_all_too_long_and_writes_nothing(tmp_path, capsys):
    raw = tmp_path / "raw.jsonl"
    side = "\n\nHuman: " + "please " * 60 + "\n\nAssistant: "
    raw.write_text("".join(json.dumps({"chosen": side + f"yes {i}", "rejected": side + "no"}) + "\n" for i in range(9)))
    train_tokenizer(vocab_size=300, num_texts=50).save_pretrained(tmp_path / "tokenizer")
    flags = ["--dataset_name", raw, "--destination_dir", tmp_path / "out", "--tokenizer_name", tmp_path / "tokenizer"]
    capsys.readouterr()
    line = refused("hh", [*flags, "--max_prompt_length", "20", "--num_proc", "1"], capsys, status=1)
    assert "prompt_too_long" in line
    assert not list(tmp_path.glob("out/*.pt"))


@pytest.mark.parametrize(
    "flags, pin", [(["--destination_dri", "x"], "--destination_dir"), (["--tokenizer_name", "./nowhere"], "./nowhere")]
)
def test_cafe_preparation_refuses(flags, pin, tmp_path, capsys):
    assert pin in refused("cafe", ["--destination_dir", tmp_path / "out", *flags], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "program, flag, others",
    [
        ("generate", "--output_file", ["--prompts_file", "ROWS", "--model_name", "tiny"]),
        ("generate", "--output_dir", ["--prompts_file", "ROWS", "--model_name", "tiny"]),
        ("annotate", "--output_file", ["--responses_file", "ROWS", *REWARD]),
        ("judge", "--output_file", ["--responses_file", "ROWS", "ROWS", "--judge", REWARD[1]]),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(program, flag, others, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "responses": ["b"]}\n')
    others = [rows if word == "ROWS" else word for word in others]
    for path in (rows / "a.jsonl", tmp_path / ("a" * 300), *([] if flag == "--output_dir" else [tmp_path])):
        assert not missing(refused(program, [*others, flag, path], capsys), flag)
    assert list(tmp_path.iterdir()) == [rows]


@pytest.mark.parametrize("content", ["[]", "7", "", '{"seed": 1'])
def test_an_args_json_that_holds_no_arguments_is_refused(content, world, capsys):
    shutil.copytree(world["model"], world["tmp"] / "run")
    (world["tmp"] / "run" / "args.json").write_text(content)
    assert "args.json" in refused("evaluate", ["--experiment_dir", world["tmp"] / "run"], capsys)


@pytest.mark.parametrize("content", ["[]", "7", "null", "", '{"seed": 1', "[" * 20000, '{"program": "online_dpo"}'])
def test_an_output_dir_whose_arguments_cannot_be_read_is_refused(content, world, capsys):
    folder = world["tmp"] / "run"
    folder.mkdir()
    (folder / "args.json").write_text(content)
    iterated = ["--data_dir", world["data"], "--sft_experiment_dir", world["sft"], *REWARD, "--iterations", "1"]
    iterated += ["--prompts_per_iteration", "8", "--mini_batch_size", "4", "--micro_batch_size", "4"]
    for program, flags in (("sft", good_flags("sft", world)), ("online_dpo", iterated)):
        assert str(folder) in refused(program, [*flags, "--output_dir", folder], capsys)
    assert [path.name for path in folder.iterdir()] == ["args.json"]


@pytest.mark.parametrize(
    "row", ['{"train/loss": 1.0}', '{"step": "1"}', '{"step": null}', '{"step": 1e999}', "[1]", "3"]
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_log_whose_rows_have_no_step_is_refused(name, row, world, capsys):
    folder = shutil.copytree(world["sft"], world["tmp"] / "run", symlinks=True)
    (folder / name).write_text(row + "\n")
    pins = (f"{folder / name}: row 1 has no step", "restore")
    assert not missing(refused("sft", ["--resume_from", folder, "--max_steps", 3], capsys), *pins)
    if name == "metrics.jsonl":
        assert not missing(refused("plot", ["--experiment_dir", folder], capsys), *pins)
    assert (folder / name).read_text() == row + "\n"


@pytest.mark.parametrize("program, flag", [("sft", "--data_dir"), ("sft", "--model_name"), ("plot", "--output_file")])
def test_a_path_longer_than_names_may_be_is_refused(program, flag, world, capsys):
    flags = good_flags("sft", world) if program == "sft" else ["--experiment_dir", world["sft"]]
    line = refused(program, [*flags, flag, world["tmp"] / f"{'名' * 90}.png"], capsys)  # 274 bytes
    assert "名.png" in line and "File name too long" in line


# --------------------------------------------------------------------------------------------- failures of a run
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(world, capsys, monkeypatch):
    losses = lightrlhf.sft.sft_loss
    calls = []

    def explodes(*args):
        calls.append(1)
        return losses(*args) * (math.nan if len(calls) == 4 else 1)

    monkeypatch.setattr(lightrlhf.sft, "sft_loss", explodes)
    flags = [*good_flags("sft", world), "--max_steps", "6", "--save_interval", "1", "--eval_interval", "0"]
    line = refused("sft", flags, capsys, status=1)
    assert not missing(line, "nan", "step 4") and line.endswith("checkpoint-000003")
    lightrlhf.storage.checkpoint.verify_checkpoint(Path(line.split()[-1]))


def save_fails_at(monkeypatch, step: int, problem: OSError) -> None:
    """From checkpoint `step` on, saving writes a part of the file and fails."""
    plain = torch.save

    def save(state, file, *args, **kwargs):
        if state.get("step", 0) >= step:
            file.write(b"half")
            raise problem
        plain(state, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", save)


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem", [OSError(errno.ENOSPC, "No space left on device"), PermissionError(13, "Permission denied")]
)
@pytest.mark.parametrize("program", ["sft", "rm", "ppo"])
def test_a_failed_save_is_reported_and_the_last_good_checkpoint_stays(program, problem, world, capsys, monkeypatch):
    save_fails_at(monkeypatch, 2, problem)
    flags = [*good_flags(program, world), "--max_steps", "3", "--save_interval", "1", "--eval_interval", "0"]
    line = refused(program, flags, capsys, status=1)
    assert problem.strerror in line and "the last good checkpoint is checkpoint-000001, go on by --resume_from" in line
    (experiment,) = (path.parent for path in experiments(world))
    assert [path.name for path in experiment.glob("*checkpoint*")] == ["checkpoint-000001"]
    lightrlhf.storage.checkpoint.verify_checkpoint(last_checkpoint(experiment))
    monkeypatch.undo()
    main_of(program)(["--resume_from", str(experiment)])
    assert last_checkpoint(experiment).name == "checkpoint-000003" and weights(last_checkpoint(experiment))


@pytest.mark.parametrize("name, pin", [("too_few", "1 scores for 8"), ("raises", "KeyError: 'answer'")])
def test_a_failing_reward_function_is_reported_in_one_line(name, pin, world, capsys):
    flags = [*good_flags("ppo", world), "--reward_function", f"helpers.rewards:{name}"]
    assert pin in refused("ppo", flags, capsys, status=1)
