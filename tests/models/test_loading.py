"""Trainable parameters of each fine-tuning mode, and exported models equal the trained ones."""

import copy
import shutil
from functools import partial

import pytest
import torch
from helpers import assert_same_gradients, gradients, mixed_batch, rows_of, save_model, tiny_policy
from helpers.errors import error_naming
from helpers.trained import logits_of, train_a_little
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import response_batch
from lightrlhf.models.loading import choose_attention, load_policy, load_scalar, separate_pad_token
from lightrlhf.models.probes import enable_packing, note_flash
from lightrlhf.models.roles import count_parameters, last_token, policy_inputs, vocabulary_size
from lightrlhf.models.saving import export as write_checkpoint
from lightrlhf.models.saving import hash_weights, merged_model
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.sft import SFTArgs

TRAINABLE = ["llama", "gpt2", "opt", "gpt_neox", "falcon", "qwen2", "qwen3", "gemma", "gemma2", "phi"]


# ---------------------------------------------------------------------------------------------- fine-tuning modes
DROPOUT = {
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5},
    "gpt_neo": {"attention_dropout": 0.5, "resid_dropout": 0.5, "embed_dropout": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "qwen2": {"attention_dropout": 0.5},
    "qwen3": {"attention_dropout": 0.5},
    "gemma": {"attention_dropout": 0.5},
    "gemma2": {"attention_dropout": 0.5},
    "phi": {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "falcon": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "bloom": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
}


@pytest.mark.parametrize("architecture", DROPOUT)
def test_disable_dropout_makes_training_passes_repeatable(architecture, tmp_path, tokenizer):
    folder = save_model(architecture, tmp_path / "model", tokenizer, **DROPOUT[architecture])
    batch = mixed_batch()
    for disabled in (True, False):
        policy = load_policy(str(folder), ModelArgs(disable_dropout=disabled), tokenizer).train()
        one, other = (policy(**policy_inputs(batch)).logprobs for _ in range(2))
        assert torch.equal(one, other) == disabled


@pytest.mark.parametrize("architecture", TRAINABLE)
def test_last_layer_trains_the_last_layer_and_no_earlier_one(architecture, tmp_path, tokenizer):
    folder = save_model(architecture, tmp_path / "model", tokenizer)
    args = ModelArgs(finetune_mode="last_layer")
    for module in (load_policy(str(folder), args, tokenizer), load_scalar(str(folder), args, tokenizer, 0)):
        learning = {name for name, p in module.named_parameters() if p.requires_grad}
        layers = {name for name in learning if ".0." in name or ".1." in name}
        assert layers and all(".1." in name for name in layers)
        heads = {f"model.{name}" for name in ("score.weight", "lm_head.weight", "lm_head.bias", "embed_out.weight")}
        assert learning - layers <= heads
        assert any("score" in name for name in learning) == hasattr(module.model, "score")


def test_lora_trains_adapters_and_the_scalar_head_only(base_model, tokenizer):
    args = ModelArgs(finetune_mode="lora")
    policy = load_policy(str(base_model), args, tokenizer)
    assert all("lora_" in name for name, p in policy.named_parameters() if p.requires_grad)
    assert 0 < count_parameters(policy)[1] < count_parameters(policy)[0]
    reward = load_scalar(str(base_model), args, tokenizer, 0)
    others = {name for name, p in reward.named_parameters() if p.requires_grad and "lora_" not in name}
    assert others == {"model.score.weight"}


def test_lora_targets_can_be_named_and_a_wrong_name_is_refused(base_model, tokenizer):
    args = ModelArgs(finetune_mode="lora", lora_targets="q_proj,v_proj")
    policy = load_policy(str(base_model), args, tokenizer)
    learning = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert learning and all("q_proj" in name or "v_proj" in name for name in learning)
    with pytest.raises(UsageError, match="--lora_targets nowhere"):
        load_policy(str(base_model), ModelArgs(finetune_mode="lora", lora_targets="nowhere"), tokenizer)


def test_a_new_scalar_head_depends_on_the_seed_only(base_model, tokenizer):
    heads = []
    for seed in (3, 3, 4):
        torch.rand(5)  # whatever else was drawn before
        heads.append(load_scalar(str(base_model), ModelArgs(), tokenizer, seed).model.score.weight)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


# -------------------------------------------------------------------------------------------------- export, reload


def export(module, folder, tokenizer):
    merged_model(module).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", TRAINABLE)
@pytest.mark.parametrize("mode", ["all", "last_layer", "lora"])
def test_an_export_loaded_by_transformers_gives_the_trained_logits(architecture, mode, tmp_path, tokenizer):
    base = save_model(architecture, tmp_path / "base", tokenizer)
    policy = load_policy(str(base), ModelArgs(finetune_mode=mode), tokenizer)
    ids = torch.tensor(rows_of(9))
    before = logits_of(policy.model, ids)
    train_a_little(policy)
    trained = logits_of(policy.model, ids)
    assert not torch.allclose(before, trained, atol=1e-2)
    reloaded = AutoModelForCausalLM.from_pretrained(export(policy, tmp_path / "out", tokenizer))
    assert torch.allclose(logits_of(reloaded, ids), trained, atol=1e-5)
    assert "lora" not in " ".join(name for name, _ in reloaded.named_parameters())


def test_exporting_adapters_leaves_the_training_model_untouched(base_model, tokenizer):
    policy = load_policy(str(base_model), ModelArgs(finetune_mode="lora"), tokenizer)
    train_a_little(policy)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    merged_model(policy)
    after = policy.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[name]) for name, value in before.items())
    assert any(p.requires_grad for p in policy.parameters())


def test_a_lora_stage_on_top_of_a_lora_stage_keeps_both(base_model, tokenizer, tmp_path):
    ids, args = torch.tensor(rows_of(9)), ModelArgs(finetune_mode="lora")
    first = load_policy(str(base_model), args, tokenizer)
    train_a_little(first)
    after_first = logits_of(first.model, ids)
    second = load_policy(str(export(first, tmp_path / "first", tokenizer)), args, tokenizer)
    assert torch.allclose(logits_of(second.model, ids), after_first, atol=1e-5)
    train_a_little(second)
    after_second = logits_of(second.model, ids)
    assert not torch.allclose(after_second, after_first, atol=1e-2)
    reloaded = AutoModelForCausalLM.from_pretrained(export(second, tmp_path / "second", tokenizer))
    assert torch.allclose(logits_of(reloaded, ids), after_second, atol=1e-5)


@pytest.mark.parametrize("mode", ["all", "last_layer", "lora"])
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_transformers_scores_padded_batches_as_our_last_token_does(mode, pad_is_eos, base_model, tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    model = load_scalar(str(base_model), ModelArgs(finetune_mode=mode), tokenizer, seed=0)
    separate_pad_token(model, tokenizer)
    train_a_little(model)
    export(model, tmp_path, tokenizer)
    tokenizer = load_tokenizer(None, str(tmp_path))
    eos = tokenizer.eos_token_id
    assert model.model.config.pad_token_id == tokenizer.pad_token_id != eos
    batch = response_batch(rows_of(3, 9, 1), [[*row, eos] for row in rows_of(6, 2, 4)], tokenizer.pad_token_id)
    mine = last_token(model.eval()(batch.input_ids, batch.attention_mask), batch.attention_mask)
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert reloaded.config.num_labels == 1 and reloaded.config.pad_token_id != eos
    theirs = reloaded(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits[:, 0]
    assert torch.allclose(mine, theirs, atol=1e-5)
    again = load_scalar(str(tmp_path), ModelArgs(), tokenizer, seed=9, needs_head=True).eval()
    assert torch.allclose(
        last_token(again(batch.input_ids, batch.attention_mask), batch.attention_mask), mine, atol=1e-5
    )


def test_a_separate_pad_token_gets_a_row_in_the_embedding(base_model, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    model = load_scalar(str(base_model), ModelArgs(), tokenizer, seed=0)
    separate_pad_token(model, tokenizer)
    assert tokenizer.pad_token_id < vocabulary_size(model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["all", "lora"])
def test_tokens_added_to_a_tokenizer_get_rows_in_embedding_and_head(mode, tied, tmp_path, tokenizer, capsys):
    base = save_model("llama", tmp_path / "base", tokenizer, tie_word_embeddings=tied)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<one>", "<two>"])
    policy = load_policy(str(base), ModelArgs(finetune_mode=mode), tokenizer)
    assert "the vocabulary grows from" in capsys.readouterr().out and vocabulary_size(policy) == len(tokenizer)
    old, new = AutoModelForCausalLM.from_pretrained(base), policy.model
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        before, after = getattr(old, layer)().weight, getattr(new, layer)().weight
        assert torch.equal(after[:-2], before) and torch.allclose(after[-1], before.mean(0), atol=1e-6)
    assert (new.get_input_embeddings().weight is new.get_output_embeddings().weight) == tied
    train_a_little(policy)
    (tmp_path / "out").mkdir()
    write_checkpoint(policy, tmp_path / "out", tmp_path / "written")
    assert (tmp_path / "written").is_dir() == (mode == "lora")
    ids = torch.tensor([[3, len(tokenizer) - 1, 5]])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits_of(theirs, ids), logits_of(new, ids), atol=1e-5)


def test_a_tokenizer_with_fewer_or_far_more_tokens_changes_nothing(tmp_path, tokenizer, capsys):
    for size in (len(tokenizer) + 9, 61):
        base = save_model("llama", tmp_path / str(size), tokenizer, vocab_size=size)
        assert vocabulary_size(load_policy(str(base), ModelArgs(), tokenizer)) == size
    assert "vocabulary" not in capsys.readouterr().out


def test_the_hash_of_weights_is_of_every_name_and_byte():
    policies = [tiny_policy("llama") for _ in range(3)]
    with torch.no_grad():
        policies[2].model.get_input_embeddings().weight[3, 4].add_(1e-6)
    one, same, other = (hash_weights(policy).hexdigest() for policy in policies)
    assert one == same != other


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("mode", ["all", "last_layer", "lora"])
def test_checkpointed_activations_change_no_gradient(mode, architecture, tmp_path, tokenizer):
    base, found = save_model(architecture, tmp_path, tokenizer), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        args = ModelArgs(finetune_mode=mode, activation_checkpointing=checkpointing)
        policy = load_policy(str(base), args, tokenizer).train()
        assert policy.model.is_gradient_checkpointing == checkpointing
        policy(**policy_inputs(mixed_batch())).logprobs.sum().backward()
        found.append(gradients(policy))
    assert_same_gradients(*found)


def test_the_tiny_model_has_under_a_million_parameters_and_the_vocabulary_of_the_tokenizer(tokenizer):
    policy = load_policy("tiny", ModelArgs(), tokenizer)
    assert count_parameters(policy)[0] < 1_000_000
    assert vocabulary_size(policy) == len(tokenizer)
    assert policy.model.generation_config.eos_token_id == tokenizer.eos_token_id


# ------------------------------------------------------------------------------------------------ weights not finite
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "part", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_a_model_with_weights_that_are_not_finite_is_refused(part, bad, base_model, tokenizer, tmp_path):
    stored = load_file(base_model / "model.safetensors")
    stored[part].view(-1)[3] = bad
    folder = shutil.copytree(base_model, tmp_path / "model")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    for load in (load_policy, lambda *given: load_scalar(*given[:3], 0, given[3])):
        with error_naming(UsageError, f"--ref_model {folder}", part):
            load(str(folder), ModelArgs(), tokenizer, "--ref_model")


# --------------------------------------------------------------------------------------------------------- attention
def test_eager_attention_computes_what_sdpa_does(tmp_path, tokenizer):
    folder, batch = save_model("llama", tmp_path / "model", tokenizer), mixed_batch()
    for load in (load_policy, partial(load_scalar, seed=0)):
        found = {}
        for name in ("sdpa", "eager"):
            module = load(str(folder), ModelArgs(attn_implementation=name), tokenizer)
            assert module.model.config._attn_implementation == name
            found[name] = module(**policy_inputs(batch)).logprobs if load is load_policy else module(*batch_of(batch))
        torch.testing.assert_close(found["eager"], found["sdpa"], atol=1e-5, rtol=1e-5)
        assert not torch.equal(found["eager"], found["sdpa"])


def batch_of(batch) -> tuple:
    return batch.input_ids, batch.attention_mask


@pytest.mark.parametrize(
    "flags, error", [({"accelerator": "cpu"}, "--accelerator cpu"), ({"precision": "32-true"}, "--precision 32-true")]
)
def test_flash_attention_is_refused_where_it_cannot_run(flags, error):
    with error_naming(ValueError, "--attn_implementation flash_attention_2", error):
        SFTArgs(model_name="tiny", attn_implementation="flash_attention_2", **flags)


def test_flash_attention_is_refused_without_a_gpu_and_for_an_architecture_that_has_none(
    tmp_path, tokenizer, monkeypatch
):
    folder = str(save_model("llama", tmp_path / "model", tokenizer))
    args = ModelArgs()
    object.__setattr__(args, "attn_implementation", "flash_attention_2")  # as where the package is installed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with error_naming(UsageError, "CUDA"):
        load_policy(folder, args, tokenizer)
    model = load_policy(folder, ModelArgs(), tokenizer).model
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model, "_can_set_attn_implementation", lambda: False)
    with error_naming(UsageError, "flash_attention_2", "llama"):
        choose_attention(model, args, "m")


def test_flash_attention_packs_no_texts_and_says_so_once(capsys):
    policy = tiny_policy("llama")
    policy.model.config._attn_implementation = "flash_attention_2"
    note_flash.cache_clear()
    enable_packing(policy)
    enable_packing(policy)
    assert not policy.packs
    assert capsys.readouterr().out.count("flash_attention_2: texts are not packed") == 1
