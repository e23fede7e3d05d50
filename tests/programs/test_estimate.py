"""lightrlhf.estimate: exact where it claims to be, proportional elsewhere."""

from __future__ import annotations

import json

import pytest
from helpers import save_model, tiny_scalar

from lightrlhf.cli.args import ModelArgs
from lightrlhf.estimate import llama_of, main
from lightrlhf.models.loading import load_policy
from lightrlhf.models.roles import count_parameters


def parts(name, *flags: str) -> dict[str, float]:
    return main(["--model_name", str(name), "--sequence_length", "64", *flags])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "falcon"])
@pytest.mark.parametrize("mode", ["all", "lora"])
def test_weights_gradients_and_optimiser_are_those_of_the_model(mode, architecture, tmp_path, tokenizer):
    folder = save_model(architecture, tmp_path, tokenizer)
    total, learning = count_parameters(load_policy(str(folder), ModelArgs(finetune_mode=mode), tokenizer))
    found = parts(folder, "--finetune_mode", mode)
    assert found["weights"] == 4 * total and found["gradients"] == 4 * learning
    assert found["optimizer"] == 8 * learning and found["cache"] == 0
    assert parts(folder, "--finetune_mode", mode, "--optimizer", "AdamW8bit")["optimizer"] == 2 * learning


def test_ppo_counts_four_models_or_one_backbone(tmp_path, tokenizer):
    folder = save_model("llama", tmp_path, tokenizer)
    one = parts(folder, "--finetune_mode", "lora")
    ppo = parts(folder, "--finetune_mode", "lora", "--algorithm", "ppo")
    four = parts(folder, "--finetune_mode", "lora", "--algorithm", "ppo", "--share_backbone", "False")
    base = one["weights"] - one["gradients"]
    assert ppo["weights"] == base + 2 * one["gradients"] and four["weights"] == 4 * base + 2 * one["gradients"]
    assert ppo["gradients"] == 2 * one["gradients"] and ppo["cache"] > 0
    assert parts(folder, "--algorithm", "ppo")["weights"] == 4 * base


def test_grpo_counts_policy_and_reward_model(tmp_path, tokenizer):
    folder = save_model("llama", tmp_path, tokenizer)
    one, two = parts(folder), parts(folder, "--algorithm", "grpo")
    assert two["weights"] == 2 * one["weights"] and two["gradients"] == one["gradients"]
    assert two["cache"] == parts(folder, "--algorithm", "ppo")["cache"] > 0
    lora = [parts(folder, "--finetune_mode", "lora", "--algorithm", name)["weights"] for name in ("sft", "grpo")]
    assert lora[0] == lora[1]


def test_weights_saved_in_4_bits_count_as_such(tmp_path, tokenizer, capsys):
    folder = save_model("llama", tmp_path, tokenizer)
    flags = ["--finetune_mode", "lora"]
    quantised = parts(folder, *flags, "--load_in_4bit", "True")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert parts(folder, *flags) == quantised
    with pytest.raises(SystemExit) as stopped:
        parts(folder)
    assert stopped.value.code == 2 and "--finetune_mode lora" in capsys.readouterr().err


def test_options_that_save_memory_lower_the_estimate():
    flags = ["--finetune_mode", "lora"]
    whole, less = (parts("50M", *flags, *more) for more in ([], ["--load_in_4bit", "True"]))
    assert 0.15 < less["weights"] / whole["weights"] < 0.6
    assert parts("50M", "--activation_checkpointing", "True")["activations"] < parts("50M")["activations"]
    assert parts("50M", "--precision", "bf16-mixed")["activations"] < parts("50M")["activations"]
    assert parts("50M", "--micro_batch_size", "16")["activations"] > parts("50M")["activations"]


@pytest.mark.parametrize("size", [30e6, 1.5e9, 7e9])
def test_a_size_is_that_of_the_llama_that_stands_for_it(size):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_of(size))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.15)


def test_a_model_that_cannot_be_estimated_is_refused(capsys, tmp_path, tokenizer):
    tiny_scalar("llama").model.save_pretrained(tmp_path)
    for flags, line in (
        ([], "--model_name is required"),
        (["--model_name", "50M", "--load_in_4bit", "True"], "--load_in_4bit True"),
        (["--model_name", str(tmp_path)], "is a reward model"),
        (["--model_name", "no-such/model"], "no-such/model"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(flags)
        assert stopped.value.code == 2 and line in capsys.readouterr().err
