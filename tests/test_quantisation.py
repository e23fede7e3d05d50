"""Quantised bases under adapters, and optimisers of bitsandbytes: they run, they save, they resume."""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers import CPU, last_checkpoint, metrics, mixed_batch, rows_of, save_model, weights
from test_adapters import config_of, plain
from test_loading import logits_of, train_a_little

from lightrlhf.common.args import ModelArgs, UsageError
from lightrlhf.common.loading import export, load_policy, load_scalar, merged_model, separate_pad_token
from lightrlhf.common.model import policy_inputs

IDS = torch.tensor(rows_of(9))
BITS = ["load_in_8bit", "load_in_4bit"]


def lora(**changes) -> ModelArgs:
    return ModelArgs(finetune_mode="lora", **changes)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "gpt_neox"])
@pytest.mark.parametrize("bits", BITS)
def test_linear_layers_are_quantised_and_adapters_learn_above(bits, architecture, tmp_path, tokenizer):
    base = save_model(architecture, tmp_path / "base", tokenizer)
    policy = load_policy(str(base), lora(**{bits: True}), tokenizer)
    kinds = {type(m).__name__ for m in policy.model.modules()}
    assert {"load_in_8bit": "Linear8bitLt", "load_in_4bit": "Linear4bit"}[bits] in kinds
    assert policy.model.get_output_embeddings().weight.dtype == torch.float32
    policy(**policy_inputs(mixed_batch())).logprobs.sum().backward()
    learning = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    assert learning and all("lora_" in name for name in learning)
    assert any(float(p.grad.abs().max()) > 0 for p in learning.values())
    whole = load_policy(str(base), lora(), tokenizer)
    gap = float((logits_of(policy.model, IDS) - logits_of(whole.model, IDS)).abs().max())
    assert 0 < gap < float(logits_of(whole.model, IDS).abs().max())


def test_an_architecture_whose_layers_stay_as_they_are_is_refused(tmp_path, tokenizer):
    base = save_model("falcon", tmp_path, tokenizer)
    with pytest.raises(UsageError, match=r"\(falcon\) has no layer that bitsandbytes can quantise"):
        load_policy(str(base), lora(load_in_4bit=True), tokenizer)


@pytest.mark.parametrize("bits", BITS)
def test_an_adapter_trained_on_quantised_weights_goes_on_the_whole_ones(bits, base_model, tmp_path, tokenizer):
    policy = load_policy(str(base_model), lora(**{bits: True}), tokenizer)
    train_a_little(policy)
    (tmp_path / "out").mkdir()
    export(policy, tmp_path / "out", tmp_path / "base")
    assert config_of(tmp_path / "out")["base_model_name_or_path"] == str(base_model.resolve())
    whole = load_policy(str(base_model), lora(), tokenizer)
    whole.load_state_dict({n: p for n, p in policy.named_parameters() if "lora_" in n}, strict=False)
    expected = logits_of(whole.model, IDS)
    assert torch.allclose(logits_of(plain(tmp_path / "out"), IDS), expected, atol=1e-5)
    merged = merged_model(policy)
    assert all(p.dtype == torch.float32 for p in merged.parameters())
    assert torch.allclose(logits_of(merged, IDS), expected, atol=1e-5)
    again = load_policy(str(tmp_path / "out"), lora(**{bits: True}), tokenizer)
    assert torch.allclose(logits_of(again.model, IDS), logits_of(policy.model, IDS), atol=1e-4)


def test_a_reward_model_on_quantised_weights_keeps_its_head_and_needs_a_pad_token(tmp_path, tokenizer):
    import copy

    base = save_model("llama", tmp_path / "base", tokenizer)
    reward = load_scalar(str(base), lora(load_in_4bit=True), tokenizer, seed=0)
    assert reward.model.score.weight.dtype == torch.float32 and reward.model.score.weight.requires_grad
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.add_tokens([f"<{i}>" for i in range(reward.model.get_input_embeddings().weight.shape[0])])
    with pytest.raises(UsageError, match="a quantised one cannot grow"):
        separate_pad_token(reward, tokenizer)


@pytest.mark.parametrize("bits", BITS)
def test_every_algorithm_runs_on_quantised_weights(bits, cafe_data, base_model, tmp_path):
    from lightrlhf import dpo, ppo, rm, sft

    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--finetune_mode=lora", f"--{bits}=True"]
    flags += ["--max_steps=2", "--lr_warmup_steps=0", "--log_interval=1", "--eval_iters=1"]
    start = sft.main([*flags, "--model_name", str(base_model)])
    reward = rm.main([*flags, "--sft_experiment_dir", start])
    small = ["--rollout_size=8", "--mini_batch_size=8", "--micro_batch_size=4", "--max_new_tokens=6"]
    models = ["--sft_experiment_dir", start, "--rm_experiment_dir", reward]
    trained = [
        ppo.main([*flags, *models, *small, "--critic_learning_rate=1e-2", "--actor_learning_rate=1e-2"]),
        ppo.main([*flags, *models, *small, "--share_backbone=False", "--merge=True"]),
        dpo.main([*flags, "--sft_experiment_dir", start, "--learning_rate=1e-3"]),
    ]
    for folder in trained:
        assert logits_of(plain(last_checkpoint(folder)), IDS).isfinite().all()
    assert metrics(trained[0])[0]["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert metrics(trained[0])[0]["policy/ratio"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW8bit", "PagedAdamW32bit"])
def test_a_run_of_any_optimiser_is_resumed_to_the_bit(optimizer, cafe_data, base_model, tmp_path):
    from lightrlhf import sft

    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--model_name", str(base_model)]
    flags += ["--lr_warmup_steps=0", "--log_interval=1", "--eval_interval=0", "--save_interval=2", "--max_steps=4"]
    whole = sft.main([*flags, "--optimizer", optimizer, "--learning_rate=1e-2"])
    expected, rows = weights(last_checkpoint(whole)), metrics(whole)
    assert expected != weights(base_model)
    shutil.rmtree(f"{whole}/checkpoint-000004")
    sft.main(["--resume_from", whole])
    assert weights(last_checkpoint(whole)) == expected and metrics(whole) == rows
