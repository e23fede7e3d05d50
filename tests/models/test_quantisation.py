"""Quantised bases with adapters, and optimisers of bitsandbytes: training, saving, resuming."""

import copy

import pytest
import torch
from helpers import (
    CPU,
    assert_same_gradients,
    gradients,
    last_checkpoint,
    metrics,
    mixed_batch,
    rows_of,
    save_model,
    weights,
)
from helpers.errors import error_naming
from helpers.programs import assert_resumes
from helpers.trained import config_of, logits_of, plain, train_a_little
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

from lightrlhf import dpo, ppo, rm, sft
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.models.loading import load_policy, load_scalar, separate_pad_token
from lightrlhf.models.quantisation import check_stored_quantisation
from lightrlhf.models.roles import policy_inputs
from lightrlhf.models.saving import export, merged_model
from lightrlhf.sft import SFTArgs

IDS = torch.tensor(rows_of(9))
BITS = ["load_in_8bit", "load_in_4bit"]


def lora(**changes) -> ModelArgs:
    return ModelArgs(finetune_mode="lora", **changes)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "gpt_neox"])
@pytest.mark.parametrize("bits", BITS)
def test_linear_layers_are_quantised_and_adapters_are_trainable(bits, architecture, tmp_path, tokenizer):
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


def test_an_architecture_without_quantisable_layers_is_refused(tmp_path, tokenizer):
    base = save_model("falcon", tmp_path, tokenizer)
    with error_naming(UsageError, "falcon", "bitsandbytes"):
        load_policy(str(base), lora(load_in_4bit=True), tokenizer)


@pytest.fixture(params=[True, False], ids=["avx512_bf16", "without"])
def processor(request, monkeypatch):
    """bitsandbytes reports a processor with or without AVX512-bf16, for which it repacks 4-bit weights."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: request.param)


def quantised_matrix(policy) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    weight = next(m for m in policy.modules() if type(m).__name__ == "Linear4bit").weight
    return dequantize_4bit(weight.data, weight.quant_state)


@pytest.mark.parametrize("widths", [(32, 48), (64, 96), (48, 80), (128, 256)], ids=str)
def test_passes_and_saving_leave_four_bit_weights_as_they_were_quantised(widths, processor, tmp_path, tokenizer):
    """Also where widths are no multiples of bitsandbytes' blocks: (32, 48) of 64 and 32."""
    sizes = dict(zip(("hidden_size", "intermediate_size"), widths))
    base = save_model("llama", tmp_path / "base", tokenizer, **sizes)
    fresh, used = (load_policy(str(base), lora(load_in_4bit=True), tokenizer) for _ in range(2))
    used.load_state_dict({n: p for n, p in fresh.named_parameters() if "lora_" in n}, strict=False)
    matrix = quantised_matrix(fresh)
    with torch.no_grad():
        logits = used.eval().model(IDS).logits
    used.state_dict()
    assert torch.equal(quantised_matrix(used), matrix)
    assert torch.equal(logits_of(used.model, IDS), logits)
    found = []
    for policy in (fresh, used.train()):
        policy(**policy_inputs(mixed_batch())).logprobs.sum().backward()
        found.append(gradients(policy))
    assert_same_gradients(*found, atol=0)


@pytest.mark.parametrize("widths", [(32, 48), (64, 128)], ids=str)
def test_a_release_that_repacks_nevertheless_is_refused(widths, monkeypatch, tmp_path, tokenizer):
    from bitsandbytes.nn import Linear4bit

    always = property(lambda layer: True, lambda layer, value: None)
    monkeypatch.setattr(Linear4bit, "support_avx512bf16_for_cpu", always, raising=False)
    sizes = dict(zip(("hidden_size", "intermediate_size"), widths))
    base = save_model("llama", tmp_path / "base", tokenizer, **sizes)
    with error_naming(UsageError, "4-bit", "model.layers.0.self_attn.q_proj"):
        load_policy(str(base), lora(load_in_4bit=True), tokenizer)


@pytest.fixture(scope="module")
def saved_in_four_bits(tmp_path_factory, tokenizer):
    """A folder whose weights bitsandbytes had quantised before they were saved."""
    folder = tmp_path_factory.mktemp("models")
    base = save_model("llama", folder / "base", tokenizer)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)
    model.save_pretrained(folder / "saved")
    return str(folder / "saved")


CANNOT = [
    (["--finetune_mode=all"], "saved in 4 bits and cannot be trained; use --finetune_mode lora"),
    (["--finetune_mode=last_layer"], "saved in 4 bits and cannot be trained; use --finetune_mode lora"),
    (["--finetune_mode=lora", "--push_to_hub=me/it"], "saved in 4 bits, so --push_to_hub"),
    (["--finetune_mode=lora", "--load_in_8bit=True"], "saved in 4 bits; remove --load_in_8bit"),
]


@pytest.mark.parametrize("flags, error", CANNOT, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_flags_that_stored_quantised_weights_do_not_support_are_refused_before_training(
    flags, error, saved_in_four_bits, cafe_data, tmp_path, monkeypatch, capsys
):
    from lightrlhf import sft

    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with pytest.raises(SystemExit) as stopped:
        sft.main(
            ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--model_name", saved_in_four_bits, *flags]
        )
    assert stopped.value.code == 2 and error in capsys.readouterr().err
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_weights_that_were_saved_quantised_are_not_sharded(saved_in_four_bits, cafe_data):
    args = SFTArgs(data_dir=str(cafe_data), model_name=saved_in_four_bits, finetune_mode="lora", strategy="fsdp")
    with error_naming(UsageError, "4 bits", "--strategy fsdp"):
        check_stored_quantisation(saved_in_four_bits, "--model_name", args)


@pytest.mark.slow
def test_adapters_on_stored_quantised_weights_are_trained_and_used_unmerged(
    saved_in_four_bits, cafe_data, tmp_path, tokenizer
):
    flags = ["--model_name", saved_in_four_bits, "--finetune_mode=lora", "--max_steps=2", "--learning_rate=1e-2"]
    folder = sft.main(["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, *flags])
    trained = load_policy(folder, ModelArgs(), tokenizer)
    going_on = load_policy(folder, lora(), tokenizer)  # a new adapter, which changes nothing yet, on top
    assert torch.equal(logits_of(trained.model, IDS), logits_of(going_on.model, IDS))
    started = load_policy(saved_in_four_bits, ModelArgs(), tokenizer)
    assert not torch.allclose(logits_of(trained.model, IDS), logits_of(started.model, IDS), atol=1e-4)
    with error_naming(UsageError, "4 bits", "scalar head"):
        load_scalar(saved_in_four_bits, ModelArgs(), tokenizer, seed=0)


def test_a_reward_model_that_was_saved_quantised_scores(tmp_path, tokenizer):
    """As it was saved: with a head in full precision."""
    base = save_model("llama", tmp_path / "base", tokenizer)
    whole = load_scalar(str(base), ModelArgs(), tokenizer, seed=0)
    whole.model.save_pretrained(tmp_path / "whole")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["score"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    loaded = load_scalar(str(tmp_path / "saved"), ModelArgs(), tokenizer, seed=0, needs_head=True).eval()
    mask = torch.ones_like(IDS, dtype=torch.bool)
    expected, found = whole.eval()(IDS, mask), loaded(IDS, mask)
    assert found.isfinite().all() and 0 < float((found - expected).abs().max()) < float(expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_ppo_on_quantised_weights_is_resumed_to_the_bit(bits, processor, cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--model_name", str(base_model)]
    flags += ["--finetune_mode=lora", f"--{bits}=True", "--reward_function=helpers.rewards:length"]
    flags += ["--rollout_size=8", "--mini_batch_size=8", "--micro_batch_size=4", "--max_new_tokens=6"]
    flags += ["--actor_learning_rate=1e-2", "--log_interval=1", "--eval_interval=1", "--eval_iters=1"]
    assert_resumes(ppo.main, ppo.main([*flags, "--save_interval=2", "--max_steps=4"]))


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_an_adapter_trained_on_quantised_weights_fits_the_full_ones(bits, processor, base_model, tmp_path, tokenizer):
    policy = load_policy(str(base_model), lora(**{bits: True}), tokenizer)
    with torch.no_grad():
        policy.eval().model(IDS)  # the pass at which weights would be repacked
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
    base = save_model("llama", tmp_path / "base", tokenizer)
    reward = load_scalar(str(base), lora(load_in_4bit=True), tokenizer, seed=0)
    assert reward.model.score.weight.dtype == torch.float32 and reward.model.score.weight.requires_grad
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.add_tokens([f"<{i}>" for i in range(reward.model.get_input_embeddings().weight.shape[0])])
    with error_naming(UsageError, "quantised"):
        separate_pad_token(reward, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_every_algorithm_runs_on_quantised_weights(bits, processor, cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--finetune_mode=lora", f"--{bits}=True"]
    flags += ["--max_steps=2", "--lr_warmup_steps=0", "--log_interval=1", "--eval_iters=1"]
    start = sft.main([*flags, "--model_name", str(base_model)])
    reward = rm.main([*flags, "--sft_experiment_dir", start])
    small = ["--rollout_size=8", "--mini_batch_size=8", "--micro_batch_size=4", "--max_new_tokens=6"]
    models = ["--sft_experiment_dir", start, "--rm_experiment_dir", reward]
    trained = [
        ppo.main([*flags, *models, *small, "--critic_learning_rate=1e-2", "--actor_learning_rate=1e-2"]),
        ppo.main([*flags, *models, *small, "--share_backbone=False"]),
        dpo.main([*flags, "--sft_experiment_dir", start, "--learning_rate=1e-3"]),
    ]
    for folder in trained:
        assert logits_of(plain(last_checkpoint(folder)), IDS).isfinite().all()
    assert metrics(trained[0])[0]["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert metrics(trained[0])[0]["policy/ratio"] == pytest.approx(1, abs=2e-3)  # rounded weights, after one update


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["Adam", "AdamW8bit", "PagedAdamW32bit"])
def test_a_run_of_any_optimiser_is_resumed_to_the_bit(optimizer, cafe_data, base_model, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--model_name", str(base_model)]
    flags += ["--lr_warmup_steps=0", "--log_interval=1", "--eval_interval=0", "--save_interval=2", "--max_steps=4"]
    whole = sft.main([*flags, "--optimizer", optimizer, "--learning_rate=1e-2"])
    assert weights(last_checkpoint(whole)) != weights(base_model)
    assert_resumes(sft.main, whole)
