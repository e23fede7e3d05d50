"""Model cards: a header that the hub reads, where a model comes from, how to use it, and no path of this machine."""

import json
import re
from pathlib import Path

import pytest
from helpers import CPU, last_checkpoint
from huggingface_hub import ModelCard

from lightrlhf import __version__, export, rm, sft
from lightrlhf.training.model_card import lineage, model_card

FEW = ["--max_steps", "1", "--mini_batch_size", "4", "--micro_batch_size", "4"]


@pytest.fixture(scope="module")
def adapted(cafe_data, sft_dir, tmp_path_factory):
    """Runs of SFT and of a reward model with adapters, from a run of SFT."""
    logs = str(tmp_path_factory.mktemp("logs"))
    flags = ["--data_dir", str(cafe_data), "--log_dir", logs, "--finetune_mode", "lora", *CPU, *FEW]
    more = [["--model_name", sft_dir], ["--sft_experiment_dir", sft_dir]]
    return [program.main([*start, *flags]) for program, start in zip((sft, rm), more, strict=True)]


def use(folder: Path, monkeypatch):
    """What the code of a card makes, run in the card's folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(code, names)
    return names


def test_the_code_of_a_card_loads_model_and_tokenizer(sft_dir, rm_dir, adapted, monkeypatch):
    for experiment in (sft_dir, rm_dir, *adapted):
        names = use(last_checkpoint(experiment), monkeypatch)
        ids = names["tokenizer"]("Guest: A muffin, please.", return_tensors="pt")
        assert names["model"](**ids).logits.isfinite().all()


def test_the_header_says_what_the_hub_asks_for(sft_dir, rm_dir, adapted):
    for experiment, kind, library in (
        (sft_dir, "text-generation", "transformers"),
        (rm_dir, "text-classification", "transformers"),
        (adapted[0], "text-generation", "peft"),
        (adapted[1], "text-classification", "peft"),
    ):
        data = ModelCard.load(last_checkpoint(experiment) / "README.md").data
        assert (data.pipeline_tag, data.library_name, data.base_model) == (kind, library, None)
        assert "lightrlhf" in data.tags


def test_no_card_has_a_path_of_this_machine(sft_dir, rm_dir, adapted, tmp_path):
    exported = export.main([adapted[0], "--to", "merged", "--destination_dir", str(tmp_path / "merged")])
    for folder in (sft_dir, rm_dir, *adapted, exported):
        text = Path(folder, "README.md").read_text()
        assert not re.search(r"[`| ]/\w", text), folder


def test_flags_without_a_value_are_left_out_and_the_version_is_the_code_s(monkeypatch):
    monkeypatch.setattr("lightrlhf.training.provenance.version", lambda package: "0.0.1")  # installed before a pull
    text = model_card("run", "grpo", "Trained.", {"tools": [], "env": None, "max_turns": 0, "lockstep": False})
    assert "| tools |" not in text and "| env |" not in text
    assert "| max_turns | 0 |" in text and "| lockstep | False |" in text
    assert f"lightrlhf {__version__}," in text and "torch 0.0.1," in text


def test_a_command_keeps_its_words_without_folders_of_this_machine(tmp_path):
    (tmp_path / "my data").mkdir()
    flags = {
        "mcp": "/opt/bin/python /home/ada/tools/server.py --root /srv/x --ask /think",
        "base_url": "http://a/b/c/d",
    }
    text = model_card("run", "grpo", "Trained.", {**flags, "data_dir": str(tmp_path / "my data")})
    assert "| mcp | bin/python tools/server.py --root srv/x --ask /think |" in text
    assert "| base_url | http://a/b/c/d |" in text and f"| data_dir | {tmp_path.name}/my data |" in text


def test_lineage_names_the_pretrained_model_and_each_run(base_model, sft_dir, adapted):
    args = json.loads(Path(adapted[1], "args.json").read_text())
    assert [name for name, _ in lineage(args)] == [str(base_model), sft_dir]
    text = Path(adapted[1], "README.md").read_text()
    assert f"1. `{base_model.parent.name}/llama`\n2. `" in text and "by `lightrlhf.sft` on `cafe/tiny`\n3. this" in text
    assert lineage({"model_name": None}) == [] and lineage({"sft_experiment_dir": "/gone/run"})[0][1] == "`gone/run`"


def test_teachers_are_named_beside_the_model_without_folders_of_this_machine():
    args = {"model_name": "somebody/base", "teacher": "sums=/home/ada/logs/a/b,code=/home/ada/logs/c/d"}
    text = model_card("run", "distill", "Trained.", args)
    assert "2. this model, by `lightrlhf.distill`, taught by `sums=a/b,code=c/d`" in text and "/home" not in text


def test_a_base_and_data_of_the_hub_are_in_the_header_with_a_known_licence(tmp_path, monkeypatch):
    (tmp_path / "args.json").write_text(json.dumps({"destination_dir": "x", "dataset_name": "somebody/pairs"}))
    card = tmp_path / "base" / "README.md"
    card.parent.mkdir()
    card.write_text("---\nlicense: mit\n---\n# Base\n")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(card))
    args = {"model_name": "somebody/base", "data_dir": str(tmp_path)}
    data = ModelCard(model_card("run", "dpo", "Trained.", args)).data
    assert (data.base_model, data.datasets, data.license) == ("somebody/base", ["somebody/pairs"], "mit")
    local = ModelCard(model_card("run", "dpo", "Trained.", {"model_name": str(card.parent)})).data
    assert (local.base_model, local.license) == (None, "mit")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    assert ModelCard(model_card("run", "dpo", "Trained.", args)).data.license is None
