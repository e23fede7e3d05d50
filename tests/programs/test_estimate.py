"""lightrlhf.estimate: exact where it claims to be, proportional elsewhere."""

import dataclasses
import json

import pytest
import torch
from helpers import RunOfOneStep, save_model, tiny_scalar
from helpers.errors import refused
from helpers.rollouts import rollout_of
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from lightrlhf import estimate
from lightrlhf.cli.groups import FrozenArgs, ModelArgs
from lightrlhf.distill import DistillArgs, update_minibatch
from lightrlhf.estimate import EstimateArgs, build, llama_of, main, update
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.models.probes import enable_packing
from lightrlhf.models.roles import Policy, count_parameters
from lightrlhf.teachers.lesson import Lesson, TaughtBatch
from lightrlhf.teachers.teacher import Seen
from lightrlhf.training.memory import Meter

QWEN_7B = {  # Qwen2.5-7B as published: 7.6B parameters
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def parts(name, *flags: str) -> dict[str, float]:
    return main(["--model_name", str(name), "--sequence_length", "64", "--max_new_tokens", "32", *flags])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "falcon"])
@pytest.mark.parametrize("mode", ["all", "lora"])
def test_weights_gradients_and_optimiser_are_those_of_the_model(mode, architecture, tmp_path, tokenizer):
    folder = save_model(architecture, tmp_path, tokenizer)
    total, learning = count_parameters(load_policy(str(folder), ModelArgs(finetune_mode=mode), tokenizer))
    found = parts(folder, "--finetune_mode", mode)
    assert found["weights"] == 4 * total and found["gradients"] == 4 * learning
    assert found["optimizer"] == 8 * learning and found["rollout"] == 0
    assert parts(folder, "--finetune_mode", mode, "--optimizer", "AdamW8bit")["optimizer"] == 2 * learning


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_weights_held_in_bfloat16_are_those_that_the_library_holds(architecture, tmp_path, tokenizer):
    folder = save_model(architecture, tmp_path, tokenizer)
    args = ModelArgs(finetune_mode="lora", base_dtype="bfloat16")
    held = sum(p.nbytes for p in load_policy(str(folder), args, tokenizer).parameters())
    flags = ["--finetune_mode", "lora", "--base_dtype", "bfloat16"]
    assert parts(folder, *flags)["weights"] == held
    scalar = load_scalar(str(folder), args, tokenizer, seed=0)
    assert parts(folder, *flags, "--algorithm", "rm")["weights"] == sum(p.nbytes for p in scalar.parameters())


@pytest.mark.slow
def test_ppo_counts_four_models_or_one_backbone(tmp_path, tokenizer):
    folder = save_model("llama", tmp_path, tokenizer)
    reward_model = parts(folder, "--algorithm", "rm")
    one, ppo = (parts(folder, "--algorithm", name) for name in ("sft", "ppo"))
    assert ppo["weights"] == 2 * one["weights"] + 2 * reward_model["weights"]
    assert ppo["gradients"] == one["gradients"] + reward_model["gradients"] and ppo["rollout"] > 0
    lora = ["--finetune_mode", "lora"]
    policy, scalar, shared = (parts(folder, *lora, "--algorithm", name) for name in ("sft", "rm", "ppo"))
    apart = parts(folder, *lora, "--algorithm", "ppo", "--share_backbone", "False")
    assert shared["weights"] == policy["weights"] + 2 * scalar["gradients"]  # adapters and heads
    adapter = policy["gradients"]  # a reference shares what is frozen
    assert apart["weights"] == policy["weights"] + adapter + scalar["weights"] + reward_model["weights"]
    assert shared["gradients"] == apart["gradients"] == policy["gradients"] + scalar["gradients"]


def test_frozen_models_beside_a_whole_policy_are_held_or_wait_on_the_host(tmp_path, tokenizer, capsys):
    folder = save_model("llama", tmp_path, tokenizer)
    held = load_policy(str(folder), FrozenArgs(base_dtype="bfloat16"), tokenizer).model
    reference = sum(p.nbytes for p in held.parameters())
    reward_model = sum(p.nbytes for p in held.base_model.parameters()) + 4 * held.config.hidden_size
    policy, critic = (parts(folder, "--algorithm", name)["weights"] for name in ("sft", "rm"))
    flags = ["--algorithm", "ppo", "--base_dtype", "bfloat16"]
    there, away = parts(folder, *flags), parts(folder, *flags, "--offload", "True")
    assert there["weights"] == policy + critic + reference + reward_model and away["weights"] == policy + critic
    assert away["rollout"] <= there["rollout"] + reference and away["peak"] < there["peak"]
    assert away["gradients"] == there["gradients"] == parts(folder, "--algorithm", "ppo")["gradients"]
    for more in (["--algorithm", "sft"], ["--algorithm", "ppo", "--accelerator", "cpu"]):
        assert "--offload True" in refused(capsys, lambda words: parts(*words), folder, *more, "--offload", "True")


def test_grpo_counts_policy_and_reward_model(tmp_path, tokenizer):
    folder = save_model("llama", tmp_path, tokenizer)
    one, two, reward_model = (parts(folder, "--algorithm", name) for name in ("sft", "grpo", "rm"))
    assert two["weights"] == one["weights"] + reward_model["weights"] and two["gradients"] == one["gradients"]
    assert two["rollout"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"precision": "bf16-mixed"}, {"activation_checkpointing": True}])
def test_tensors_without_data_take_what_real_ones_do(flags):
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 500}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)
    args = EstimateArgs(
        model_name="1M", finetune_mode="lora", base_dtype="bfloat16", micro_batch_size=1, sequence_length=50, **flags
    )
    model, _ = build(args, config)
    estimate.give_storage(model)
    with Meter() as meter:
        for value in (*model.parameters(), *model.buffers()):
            meter.note(value)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        real = meter.peak(update, args, model, None)
    assert estimate.estimate(args, config)["activations"] == real > 0


def test_a_teacher_of_its_own_is_counted_and_one_that_shares_is_not(tmp_path, tokenizer, capsys):
    folder = save_model("llama", tmp_path, tokenizer)
    held = load_policy(str(folder), FrozenArgs(base_dtype="bfloat16"), tokenizer).model
    size = sum(p.nbytes for p in held.parameters())
    flags = ["--base_dtype", "bfloat16", "--teacher", str(folder)]
    for program, other in (("distill", "sft"), ("grpo", "grpo")):
        alone = parts(folder, "--algorithm", other, *(flags[:2] if other == "grpo" else []))
        taught, away = (parts(folder, "--algorithm", program, *flags, "--offload", way) for way in ("False", "True"))
        assert taught["weights"] == alone["weights"] + size and taught["gradients"] == alone["gradients"]
        assert away["activations"] == taught["activations"] + size  # it is there in the update
    assert parts(folder, "--algorithm", "distill")["weights"] == 2 * parts(folder)["weights"]
    own = ["--finetune_mode", "lora"]
    assert parts(folder, *own, "--algorithm", "distill")["weights"] == parts(folder, *own)["weights"]
    for more in (["--teacher", str(folder)], ["--algorithm", "distill", *own, "--offload", "True"]):
        assert more[-2] in refused(capsys, lambda words: parts(*words), folder, *more)


@pytest.mark.slow
def test_an_update_of_distillation_takes_what_is_estimated(monkeypatch):
    shape = {"num_hidden_layers": 3, "vocab_size": 500, "num_attention_heads": 4, "num_key_value_heads": 2}
    configs = [LlamaConfig(hidden_size=size, intermediate_size=2 * size, **shape) for size in (64, 128)]
    sizes = {"num_generations": 4, "micro_batch_size": 4, "max_new_tokens": 16}
    student, teacher = (Policy(AutoModelForCausalLM.from_config(config)) for config in configs)
    enable_packing(student)
    run = RunOfOneStep(
        DistillArgs(data_dir="x", model_name="x", teacher="x", rollout_size=1, mini_batch_size=4, **sizes),
        policy=student,
    )
    responses = torch.randint(2, 500, (4, 16)).tolist()
    group = {"group": torch.zeros(4, dtype=torch.int64), "num_groups": 1}
    batch = dataclasses.replace(rollout_of([[5] * 16] * 4, responses), **group)
    learned = batch.extend(TaughtBatch, place=torch.arange(4))
    lesson = Lesson(run, teacher.requires_grad_(False).eval(), batch.extend(Seen))
    for parameter in student.parameters():
        parameter.grad = torch.zeros_like(parameter)
    monkeypatch.setattr(run, "optimize", lambda name: 0.0)
    with Meter() as meter:
        for role in (student, teacher):
            for value in (*role.parameters(), *role.buffers()):
                meter.note(value)
        real = meter.peak(update_minibatch, run, student, lesson, learned)
    monkeypatch.setattr(estimate, "config_of", lambda *_: configs[1])
    args = EstimateArgs(
        algorithm="distill", model_name="x", teacher="x", sequence_length=32, accelerator="cpu", **sizes
    )
    assert estimate.estimate(args, configs[0])["activations"] == pytest.approx(real, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "length"),
    [
        ("ppo", 1024),
        pytest.param("grpo", 1024, marks=pytest.mark.thorough),
        pytest.param("dpo", 1024, marks=pytest.mark.thorough),
        pytest.param("sft", 2048, marks=pytest.mark.thorough),
    ],
)
def test_7b_on_a_base_in_bfloat16_fits_24_gib(program, length):
    args = EstimateArgs(
        algorithm=program,
        model_name="7B",
        finetune_mode="lora",
        lora_rank=16,
        base_dtype="bfloat16",
        precision="bf16-mixed",
        activation_checkpointing=True,
        micro_batch_size=1,
        sequence_length=length,
        max_new_tokens=512,
        rollout_mini_batch_size=8,
    )
    assert estimate.estimate(args, Qwen2Config(**QWEN_7B))["peak"] < (24 - estimate.RESERVE) * 2**30


@pytest.mark.slow
def test_the_largest_micro_batch_that_fits_is_named(capsys):
    flags = ["--finetune_mode", "lora", "--micro_batch_size", "64"]
    parts("1M", *flags, "--memory_gb", "2.2")
    line = " ".join(capsys.readouterr().out.split())
    assert "it does not fit into 2.2 GiB with 2 kept free; up to --micro_batch_size" in line
    parts("1M", *flags, "--memory_gb", "1")
    assert "not even --micro_batch_size 1 does" in " ".join(capsys.readouterr().out.split())


def test_weights_saved_in_4_bits_count_as_such(tmp_path, tokenizer, capsys):
    folder = save_model("llama", tmp_path, tokenizer)
    flags = ["--finetune_mode", "lora"]
    quantised = parts(folder, *flags, "--load_in_4bit", "True")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert parts(folder, *flags) == quantised
    assert "--finetune_mode lora" in refused(capsys, lambda words: parts(*words), folder)


@pytest.mark.slow
def test_options_that_save_memory_lower_the_estimate():
    flags = ["--finetune_mode", "lora"]
    whole, less = (parts("50M", *flags, *more) for more in ([], ["--load_in_4bit", "True"]))
    held = [*flags, "--base_dtype", "bfloat16"]
    assert 0.15 < less["weights"] / whole["weights"] < 0.6
    assert parts("50M", *held)["weights"] == pytest.approx(whole["weights"] / 2, rel=0.1)
    assert parts("50M", "--activation_checkpointing", "True")["activations"] < parts("50M")["activations"]
    assert parts("50M", *held, "--precision", "bf16-mixed")["activations"] < parts("50M", *held)["activations"]
    assert parts("50M", "--micro_batch_size", "16")["activations"] > parts("50M")["activations"]


@pytest.mark.parametrize("size", [30e6, 1.5e9, 7e9])
def test_a_size_is_that_of_the_llama_that_stands_for_it(size):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_of(size))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.15)


def test_a_model_that_cannot_be_estimated_is_refused(capsys, tmp_path, tokenizer):
    tiny_scalar("llama").model.save_pretrained(tmp_path)
    for flags, line in (
        ([], "--model_name is required"),
        (["--model_name", "50M", "--load_in_4bit", "True"], "--load_in_4bit True"),
        (["--model_name", str(tmp_path)], "is a reward model"),
        (["--model_name", "1.5"], "1.5B"),
        (["--model_name", "no-such/model"], "no-such/model"),
    ):
        assert line in refused(capsys, main, *flags)
