"""Adapters on an output layer that is tied to the embedding: their logits are kept wherever they are merged."""

import copy

import pytest
import torch
from helpers import CPU, rows_of, save_model, tiny_model
from helpers.errors import error_naming, refused
from helpers.trained import logits_of, plain, tied_adapter, train_a_little

from lightrlhf import grpo
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.models.given import as_policy
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.models.saving import export, merged_model

IDS = torch.tensor(rows_of(9))
LORA = ModelArgs(finetune_mode="lora")
STAGES = {
    "all": ModelArgs(),
    "last_layer": ModelArgs(finetune_mode="last_layer"),
    "lora": LORA,
    "dora": ModelArgs(finetune_mode="lora", use_dora=True),
    "bfloat16": ModelArgs(finetune_mode="lora", base_dtype="bfloat16"),
}


def written(policy, folder, merge: bool = False):
    """What transformers loads from the checkpoint of a policy, or from its merged weights."""
    saved = folder / f"merge_{merge}"
    saved.mkdir()
    if merge:
        merged_model(policy).save_pretrained(saved)
    else:
        export(policy, saved, folder / "base")
    return plain(saved)


@pytest.mark.parametrize("stage", STAGES)
def test_each_next_stage_starts_from_the_logits_of_the_trained_model(stage, tokenizer, tmp_path):
    policy, folder = tied_adapter("llama", tmp_path, tokenizer)
    later = load_policy(str(folder), STAGES[stage], tokenizer)
    atol = 0.1 if stage == "bfloat16" else 1e-4
    assert torch.allclose(logits_of(later.model, IDS), logits_of(policy.model, IDS), atol=atol)
    train_a_little(later)
    for merge in (True,) if stage == "bfloat16" else (True, False):  # unmerged it names the base before rounding
        assert torch.allclose(logits_of(written(later, tmp_path, merge), IDS), logits_of(later.model, IDS), atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_a_merged_copy_is_untied_and_the_model_is_not(architecture, use_dora, tokenizer, tmp_path):
    policy, _ = tied_adapter(architecture, tmp_path, tokenizer, use_dora=use_dora)
    expected = logits_of(policy.model, IDS)
    merged = written(policy, tmp_path, merge=True)
    assert torch.allclose(logits_of(merged, IDS), expected, atol=1e-4)
    assert not merged.config.tie_word_embeddings and policy.model.config.tie_word_embeddings
    assert torch.equal(logits_of(policy.model, IDS), expected)


def test_a_model_without_adapters_on_its_output_layer_stays_tied(tokenizer, tmp_path):
    base = save_model("llama", tmp_path / "tied", tokenizer, tie_word_embeddings=True)
    assert written(load_policy(str(base), LORA, tokenizer), tmp_path, merge=True).config.tie_word_embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_on_the_embedding_is_refused(tied, tokenizer, tmp_path):
    base = save_model("llama", tmp_path / "model", tokenizer, tie_word_embeddings=tied)
    targets = ModelArgs(finetune_mode="lora", lora_targets="embed_tokens,lm_head")
    with error_naming(UsageError, "--lora_targets embed_tokens,lm_head", "model.embed_tokens"):
        load_policy(str(base), targets, tokenizer)


def test_an_adapter_of_others_on_the_embedding_is_refused(tokenizer, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = save_model("llama", tmp_path / "model", tokenizer)
    get_peft_model(plain(base), LoraConfig(target_modules=["embed_tokens", "q_proj"])).save_pretrained(
        tmp_path / "other"
    )
    with error_naming(UsageError, "model.embed_tokens", "merge_and_unload"):
        load_policy(str(tmp_path / "other"), ModelArgs(), tokenizer)


def test_an_adapter_on_a_matrix_of_two_layers_is_refused(tokenizer):
    model = tiny_model("llama", vocab_size=len(tokenizer))
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    with error_naming(UsageError, "layers.0.self_attn.q_proj"):
        as_policy(model, LORA, tokenizer)


def test_scalar_roles_start_from_all_but_the_output_layer(tokenizer, tmp_path):
    policy, folder = tied_adapter("llama", tmp_path, tokenizer)
    alone = load_scalar(str(folder), ModelArgs(), tokenizer, seed=0)
    states = policy.model.model(IDS).last_hidden_state
    assert torch.allclose(alone(IDS, IDS > 0), alone.model.score(states)[..., 0], atol=1e-4)
    more = ModelArgs(finetune_mode="lora", lora_targets="lm_head,q_proj")
    shared = load_policy(str(folder), more, tokenizer, shares=True)
    critic = load_scalar(str(folder), more, tokenizer, 0, backbone=shared)
    names = [name for name, _ in critic.named_parameters()]
    assert critic.shares and any("q_proj" in name for name in names) and not any("lm_head" in name for name in names)


def test_the_vocabulary_does_not_grow_below_an_adapter_on_the_output_layer(tokenizer, tmp_path):
    _, folder = tied_adapter("llama", tmp_path, tokenizer)
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(["<|new|>"])
    with error_naming(UsageError, "adapter", "output layer"):
        load_policy(str(folder), LORA, grown)


def test_rollout_servers_get_no_untied_weights(cafe_data, tokenizer, tmp_path, capsys):
    base = save_model("llama", tmp_path / "tied", tokenizer, tie_word_embeddings=True)
    flags = ["--data_dir", cafe_data, "--model_name", base, "--log_dir", tmp_path, *CPU, "--rollout_server"]
    flags += ["http://127.0.0.1:9", "--reward_function", "helpers.rewards:length", "--finetune_mode", "lora"]
    assert "leave it out of --lora_targets" in refused(capsys, grpo.main, *flags, "--lora_targets", "lm_head,q_proj")
