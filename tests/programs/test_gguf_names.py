"""Programs take a GGUF file, or the package that has one, wherever they take a model."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import CPU
from helpers.data import gpt2_like
from helpers.errors import error_naming
from helpers.gguf import converted
from helpers.programs import main_of, trained

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.parser import parse
from lightrlhf.demo.args import DemoArgs
from lightrlhf.demo.models import ModelCache
from lightrlhf.gguf.files import from_gguf
from lightrlhf.models.tokenizer import load_tokenizer, store_tokenizer
from lightrlhf.online_dpo import OnlineDPOArgs
from lightrlhf.storage.run_dir import choices
from lightrlhf.training.iterated_dir import as_given

pytestmark = pytest.mark.slow

NAME = "package:toy_weights"
LORA = ["--finetune_mode", "lora", "--max_steps", "1", "--mini_batch_size", "4", "--micro_batch_size", "4"]
LORA += ["--eval_iters", "1", *CPU]


@pytest.fixture(scope="module")
def world(tmp_path_factory, tokenizer):
    """A package with a GGUF file, which is converted in the cache, and a run of SFT that starts from it."""
    root = tmp_path_factory.mktemp("gguf")
    folder = converted(root / "site" / "toy_weights" / "toy-1M.gguf", root / "cache", tokenizer)
    (root / "site" / "toy_weights" / "__init__.py").write_text("raise ImportError('not to be imported')\n")
    return root, folder


@pytest.fixture
def here(world, monkeypatch):
    root, folder = world
    monkeypatch.setenv("LIGHTRLHF_CACHE", str(root / "cache"))
    monkeypatch.syspath_prepend(str(root / "site"))
    return root, folder


@pytest.fixture
def tuned(here, cafe_data):
    """The experiment dir of a step of SFT with adapters."""
    log_dir = here[0] / "logs"
    if not log_dir.is_dir():
        sft = importlib.import_module("lightrlhf.sft")
        sft.main(["--data_dir", str(cafe_data), "--model_name", NAME, "--log_dir", str(log_dir), *LORA])
    (experiment,) = log_dir.glob("*/*/*/latest")
    return experiment.resolve()


def test_a_card_names_the_file_and_its_licence_and_no_folder_of_the_cache(here, tuned, cafe_data):
    again = ["--data_dir", str(cafe_data), "--sft_experiment_dir", str(tuned), "--log_dir", str(here[0] / "more")]
    later = Path(importlib.import_module("lightrlhf.dpo").main([*again, *LORA]))
    for experiment in (tuned, later):
        for card in experiment.rglob("README.md"):
            text = card.read_text()
            assert "`toy-1M.gguf`" in text and "Licence: apache-2.0" in text
            assert str(here[1]) not in text
    assert json.loads((tuned / "args.json").read_text())["model_name"] == NAME


@pytest.mark.parametrize("program, data", [("online_dpo", "cafe_data"), ("iterative_refuel", "talk_data")])
def test_iterations_hand_its_name_on(program, data, here, request, tmp_path):
    """Cards and arguments of the runs inside name the file; `initial` alone is pinned to what it was converted into."""
    few = ["--iterations", "1", "--max_steps", "1", "--mini_batch_size", "4", "--micro_batch_size", "4", *CPU]
    few += ["--reward_function", "helpers.rewards:vowels", "--max_new_tokens", "4", "--finetune_mode", "lora"]
    if program == "online_dpo":
        few += ["--prompts_per_iteration", "4", "--num_generations", "2", "--eval_prompts", "2"]
    else:
        few += [
            "--user_function", "helpers.rewards:echo", "--num_data", "4", "--num_turns", "2", "--eval_dialogues", "2",
        ]  # fmt: skip
    data_dir = str(request.getfixturevalue(data))
    started = ["--data_dir", data_dir, "--model_name", NAME, "--log_dir", str(tmp_path), *few]
    experiment = trained(program, *started)
    cards = [path.read_text() for path in experiment.rglob("README.md")]
    assert len(cards) >= 2
    for card in cards:
        assert "Licence: apache-2.0" in card and str(here[1]) not in card
    policy = json.loads((experiment / "iteration-01" / "policy" / "args.json").read_text())
    assert policy["sft_experiment_dir"] == NAME and policy.get("ref_model") in (None, NAME)
    assert json.loads((experiment / "args.json").read_text())["initial"] == str(here[1])


def test_iterations_go_on_with_the_same_weights_when_the_file_is_another_by_now(here, monkeypatch, tmp_path):
    args = parse(OnlineDPOArgs, ["--model_name", NAME, "--reward_function", "helpers.rewards:vowels"])
    assert as_given(args, str(here[1])) == NAME
    assert as_given(args, str(tmp_path)) == str(tmp_path)
    monkeypatch.setattr("sys.path", sys.path[1:])
    from_gguf.cache_clear()
    assert as_given(args, str(here[1])) == str(here[1])


def test_the_card_of_an_export_names_the_file_and_its_licence_once_at_its_start(here, tuned, tmp_path):
    export = importlib.import_module("lightrlhf.export")
    for number, model in enumerate((NAME, str(tuned))):
        folder = Path(export.main([model, "--to", "merged", "--destination_dir", str(tmp_path / str(number))]))
        start = (folder / "README.md").read_text().split("\n## The model")[0]
        assert start.count("Licence: apache-2.0") == 1 and str(here[1]) not in start
        assert ("## The model it was made of" in (folder / "README.md").read_text()) == (model != NAME)


def test_files_are_called_after_a_package_without_a_colon(here, cafe_data, tmp_path):
    few = ["--num_prompts", "1", "--max_new_tokens", "2", "--accelerator", "cpu", "--output_dir", str(tmp_path)]
    (file,) = importlib.import_module("lightrlhf.generate").main(
        ["--model_name", NAME, "--data_dir", str(cafe_data), *few]
    )
    assert Path(file).name == "toy_weights.jsonl" and Path(file).is_file()


@pytest.mark.parametrize(
    "program", ["annotate", "generate", "evaluate", "evaluate_dialogues", "judge", "ppo", "online_dpo"]
)
@pytest.mark.parametrize("name", [NAME, "toy.gguf"])
def test_it_is_no_reward_model(program, name, here, tuned, cafe_data, capsys, tmp_path):
    (tmp_path / "rows.jsonl").touch()
    rows = str(tmp_path / "rows.jsonl")
    flags = {
        "annotate": ["--responses_file", rows],
        "generate": ["--data_dir", str(cafe_data), "--model_name", NAME],
        "judge": ["--judge", "reward", "--responses_file", rows, rows],
        "ppo": ["--data_dir", str(cafe_data), "--model_name", NAME],
        "online_dpo": ["--data_dir", str(cafe_data), "--model_name", NAME],
    }
    given = flags.get(program, ["--experiment_dir", str(tuned)])
    with pytest.raises(SystemExit) as stop:
        main_of(program)([*given, "--rm_experiment_dir", name])
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and f"--rm_experiment_dir {name}: a GGUF file holds a language model" in line


def test_evaluation_reads_it_and_finds_where_a_run_started(here, tuned, cafe_data):
    evaluate = importlib.import_module("lightrlhf.evaluate")
    few = ["--num_samples", "2", "--max_new_tokens", "4", "--accelerator", "cpu"]
    alone = evaluate.main(["--experiment_dir", NAME, "--data_dir", str(cafe_data), *few])
    both = evaluate.main(["--experiment_dir", str(tuned), "--use_pretrained", "True", "--reference_dir", NAME, *few])
    assert [row["model"] for row in both] == [NAME, "rlhf-supervised-finetuning"]
    assert both[0]["perplexity"] == alone[0]["perplexity"]
    assert both[0]["kl"] == pytest.approx(0, abs=1e-5)  # decoded token by token, and scored at once


def test_the_demo_offers_it_and_what_a_run_started_from(here, tuned):
    args = parse(DemoArgs, ["--experiment_dir", NAME, str(tuned), "--reference_dir", NAME])
    cache = ModelCache(args.model_name, torch.device("cpu"), reference_dir=args.reference_dir)
    assert set(choices([NAME, str(tuned)])) == set(cache.labels()) >= {NAME, f"pretrained {NAME}"}
    assert cache.model(NAME).policy is cache.model(f"pretrained {NAME}").policy


def test_data_of_another_tokenizer_are_refused_by_the_name_that_was_given(here, tmp_path):
    other = gpt2_like()
    store_tokenizer(other, tmp_path)
    with error_naming(UsageError, f"--tokenizer_name {NAME}"):
        load_tokenizer(tmp_path, NAME)


def test_adapters_find_their_base_in_another_cache(here, tuned, cafe_data, monkeypatch, tmp_path):
    evaluate = importlib.import_module("lightrlhf.evaluate")
    flags = ["--experiment_dir", str(tuned), "--num_samples", "2", "--max_new_tokens", "4", "--accelerator", "cpu"]
    before = evaluate.main(flags)
    moved = shutil.move(here[0] / "cache", tmp_path / "elsewhere")
    try:
        with pytest.raises(SystemExit) as stop:
            evaluate.main(flags)
        assert stop.value.code == 2
        monkeypatch.setenv("LIGHTRLHF_CACHE", str(moved))
        assert evaluate.main(flags) == before
    finally:
        shutil.move(moved, here[0] / "cache")


@pytest.mark.parametrize(
    "program, flags",
    [
        ("evaluate", ["--experiment_dir"]),
        ("evaluate", ["--experiment_dir", NAME, "--reference_dir"]),
        ("evaluate_dialogues", ["--experiment_dir"]),
        ("evaluate_env", ["--env", "dangerous_taxi", "--experiment_dir"]),
        ("reflect_rl", ["--env", "dangerous_taxi", "--sft_experiment_dir"]),
        ("online_dpo", ["--model_name", NAME, "--reward_function", "helpers.rewards:vowels", "--responder"]),
        ("demo", ["--experiment_dir"]),
        ("sft", ["--model_name"]),
        ("generate", ["--model_name"]),
        ("estimate", ["--model_name"]),
        ("serve", []),
    ],
)
@pytest.mark.parametrize("name", ["package:no_such", "package:json", "no_such.gguf"])
def test_a_name_that_means_no_file_is_one_line(program, flags, name, here, cafe_data, capsys, monkeypatch):
    monkeypatch.chdir(here[0])
    data = ["--data_dir", str(cafe_data)] if program in ("sft", "generate", "online_dpo", "evaluate") else []
    with pytest.raises(SystemExit) as stop:
        main_of(program)([*flags, name, *data])
    assert stop.value.code == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert name in line and ("does not exist" in line or "package" in line)
