"""Frozen weights held in bfloat16: only their storage differs from a base that had been rounded to it."""

import copy
from pathlib import Path

import pytest
import torch
from helpers import CPU, metrics, mixed_batch, save_model, tiny_model
from helpers.errors import error_naming
from helpers.programs import assert_resumes
from helpers.trained import logits_of, train_a_little
from torch import nn
from transformers import AutoModelForCausalLM

from lightrlhf import dpo, grpo, ppo, rm, sft
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.models import frozen
from lightrlhf.models.given import as_policy
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.models.roles import policy_inputs
from lightrlhf.models.saving import export, merged_model

ARCHITECTURES = ["llama", "qwen3", "opt", "gpt_neox", "gpt2", "gemma2", "falcon"]


def args(**changes) -> ModelArgs:
    return ModelArgs(finetune_mode="lora", **changes)


def rounded(folder: Path, into: Path, tokenizer) -> Path:
    """A copy of a model whose weights were rounded to bfloat16 and are stored in float32."""
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().save_pretrained(into)
    tokenizer.save_pretrained(into)
    return into


@pytest.fixture
def bases(request, tmp_path, tokenizer):
    """The same weights twice: to be held in bfloat16, and rounded beforehand."""
    base = save_model(getattr(request, "param", "llama"), tmp_path / "base", tokenizer)
    return base, rounded(base, tmp_path / "rounded", tokenizer)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("bases", ARCHITECTURES, indirect=True)
def test_a_held_base_gives_bitwise_the_numbers_of_a_rounded_one(bases, precision, tokenizer):
    """Log-probabilities and the gradients of all adapters, of each architecture."""
    seen = []
    for source, changes in zip(bases, ({"base_dtype": "bfloat16"}, {})):
        torch.manual_seed(0)
        policy = load_policy(str(source), args(**changes), tokenizer)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            logprobs = policy(**policy_inputs(mixed_batch())).logprobs
        logprobs.sum().backward()
        seen.append((logprobs, {n: p.grad for n, p in policy.named_parameters() if p.requires_grad}))
    (held, held_grads), (plain, plain_grads) = seen
    assert torch.equal(held, plain) and held.abs().sum() > 0
    assert held_grads.keys() == plain_grads.keys() and held_grads
    assert all(torch.equal(held_grads[name], plain_grads[name]) for name in plain_grads)


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_held_once_and_all_else_is_float32(tied, tmp_path, tokenizer):
    base = save_model("llama", tmp_path / "base", tokenizer, tie_word_embeddings=tied)
    policy = load_policy(str(base), args(base_dtype="bfloat16"), tokenizer, shares=True)
    kinds = {name: parameter.dtype for name, parameter in policy.model.named_parameters()}
    for name, dtype in kinds.items():
        is_matrix = "norm" not in name and ".lora_" not in name
        assert dtype == (torch.bfloat16 if is_matrix else torch.float32), name
    assert ("lm_head.weight" in kinds) is not tied  # a tied head is the embedding itself
    assert (policy.model.lm_head.weight is policy.model.get_input_embeddings().weight) is tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_copy_of_a_matrix_outlives_its_layer(dtype):
    """What a pass keeps for the backward pass holds bfloat16 matrices only, under autocast too."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).requires_grad_(False).bfloat16().float()
    plain = copy.deepcopy(model)
    frozen.hold(model)
    inputs = torch.randn(2, 64)
    seen, kept = [], []
    for one in (plain, model):
        kept.clear()
        given = inputs.clone().requires_grad_()
        with (
            torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
            torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        ):
            out = one(given)
        out.float().sum().backward()
        seen.append((out, given.grad))
    matrices = [t for t in kept if sorted(t.shape) == [64, 64]]
    assert len(matrices) == 3 and {t.dtype for t in matrices} == {torch.bfloat16}
    assert all(torch.equal(*pair) for pair in zip(*seen))


def test_a_held_weight_that_is_to_be_trained_is_refused():
    layer = nn.Sequential(nn.Linear(4, 4))
    frozen.hold(layer)
    with error_naming(RuntimeError, "gradient"):
        layer(torch.randn(1, 4))


def test_adapters_are_float32_and_merge_without_rounding(tmp_path, tokenizer):
    """An adapter of a held base merges as in float32, is loaded on one exactly, and the base stays as it was."""
    base = save_model("llama", tmp_path / "base", tokenizer)
    policy = load_policy(str(base), args(base_dtype="bfloat16"), tokenizer, shares=True)
    train_a_little(policy)
    before = copy.deepcopy(policy.model.state_dict())
    merged = merged_model(policy)
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    ids = torch.tensor([[5, 6, 7, 8]])
    with policy.active():
        torch.testing.assert_close(logits_of(merged, ids), logits_of(policy.model, ids))
    export(policy, tmp_path / "adapter", tmp_path / "unused")
    again = load_policy(str(tmp_path / "adapter"), args(base_dtype="bfloat16"), tokenizer, shares=True)
    with policy.active(), again.active():
        assert torch.equal(logits_of(again.model, ids), logits_of(policy.model, ids))
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())


def test_a_held_reward_model_has_a_float32_head(tmp_path, tokenizer):
    base = save_model("llama", tmp_path / "base", tokenizer)
    model = load_scalar(str(base), args(base_dtype="bfloat16"), tokenizer, seed=1)
    head = model.model.score
    assert head.weight.dtype == torch.float32 and head.weight.requires_grad
    plain = load_scalar(str(base), args(), tokenizer, seed=1)
    assert torch.equal(head.weight, plain.model.score.weight)


def test_a_grown_vocabulary_is_held_too(tmp_path, tokenizer):
    base = save_model("llama", tmp_path / "base", tokenizer)
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["<new>"])
    policy = load_policy(str(base), args(base_dtype="bfloat16"), more, shares=True)
    embedding = policy.model.get_input_embeddings()
    assert len(embedding.weight) == len(more) and type(embedding) is frozen.HeldEmbedding
    assert embedding(torch.tensor([len(more) - 1])).dtype == torch.float32


LORA = [*CPU, "--finetune_mode=lora", "--max_steps=2", "--lr_warmup_steps=0", "--log_interval=1", "--eval_iters=1"]
ROLLOUT = ["--rollout_size=8", "--mini_batch_size=8", "--micro_batch_size=4", "--max_new_tokens=6"]


def chain(base: Path, data: Path, folder: Path, *flags: str) -> list[list[dict]]:
    """Metrics of SFT, a reward model, PPO, GRPO and DPO, each on what the one before has trained."""
    flags = ("--data_dir", str(data), "--log_dir", str(folder), *LORA, *flags)
    start = sft.main([*flags, "--model_name", str(base), "--learning_rate=1e-2"])
    reward = rm.main([*flags, "--sft_experiment_dir", start, "--learning_rate=1e-2"])
    models = ["--sft_experiment_dir", start, "--rm_experiment_dir", reward]
    runs = [
        start,
        reward,
        ppo.main([*flags, *models, *ROLLOUT, "--actor_learning_rate=1e-2", "--critic_learning_rate=1e-2"]),
        grpo.main([*flags, *models, *ROLLOUT, "--learning_rate=1e-2", "--init_kl_coeff=0.1"]),
        dpo.main([*flags, "--sft_experiment_dir", start, "--learning_rate=1e-2"]),
    ]
    return [[{k: v for k, v in row.items() if not k.startswith("time/")} for row in metrics(run)] for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_each_algorithm_on_a_held_base_is_the_one_on_a_rounded_base(
    precision, cafe_data, base_model, tmp_path, tokenizer
):
    """Every metric of every step; KL to the reference is 0 before the first update."""
    plain = rounded(base_model, tmp_path / "rounded", tokenizer)
    held = chain(base_model, cafe_data, tmp_path / "a", f"--precision={precision}", "--base_dtype=bfloat16")
    assert held == chain(plain, cafe_data, tmp_path / "b", f"--precision={precision}")
    for rows in held[2:4]:
        assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
def test_a_run_on_a_held_base_is_resumed_to_the_bit_and_keeps_a_small_base(cafe_data, tmp_path):
    """Of `tiny`, whose base is stored with the run: in bfloat16, so that it is read back as it was held."""
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *LORA, "--model_name=tiny"]
    whole = sft.main([*flags, "--base_dtype=bfloat16", "--learning_rate=1e-2", "--save_interval=1"])
    assert_resumes(sft.main, whole)
    stored = sft.main([*flags, "--learning_rate=1e-2", "--max_steps=1"])
    sizes = [(Path(run) / "base" / "model.safetensors").stat().st_size for run in (whole, stored)]
    assert sizes[0] < 0.6 * sizes[1]


def test_an_adapter_that_is_merged_below_is_refused_on_a_held_base(tmp_path, tokenizer):
    """A sum rounded to bfloat16 would not be what was trained."""
    base = save_model("llama", tmp_path / "base", tokenizer)
    policy = load_policy(str(base), args(use_dora=True), tokenizer)
    export(policy, tmp_path / "adapter", tmp_path / "unused")
    with error_naming(UsageError, "DoRA", "--base_dtype"):
        load_policy(str(tmp_path / "adapter"), args(base_dtype="bfloat16"), tokenizer)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_given_model_is_stored_as_it_was_held(architecture, tmp_path, tokenizer):
    """Norms, and layers that stay in float32, are rounded as those of a model from disk are."""
    policy = as_policy(
        tiny_model(architecture, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id),
        args(base_dtype="bfloat16"),
        tokenizer,
    )
    train_a_little(policy)
    export(policy, tmp_path / "adapter", tmp_path / "base")
    again = load_policy(str(tmp_path / "adapter"), args(base_dtype="bfloat16"), tokenizer)
    ids = torch.tensor([[5, 6, 7, 8]])
    with policy.active(), again.active():
        assert torch.equal(logits_of(again.model, ids), logits_of(policy.model, ids))


def test_the_matrices_of_a_given_bfloat16_model_stay_where_they_are(tokenizer):
    """A copy in float32 on the way, twice their size, may not fit on the device."""
    model = tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).to(torch.bfloat16)
    places = {name: p.data_ptr() for name, p in model.named_parameters() if name.endswith("_proj.weight")}
    as_policy(model, args(base_dtype="bfloat16"), tokenizer)
    now = {name.replace(".base_layer", ""): p.data_ptr() for name, p in model.named_parameters()}
    assert all(now[name] == place for name, place in places.items())


def test_a_base_that_is_rounded_is_noted(bases, tokenizer, capsys):
    load_policy(str(bases[0]), args(base_dtype="bfloat16"), tokenizer)
    assert "is stored in float32, and --base_dtype bfloat16 rounds it" in capsys.readouterr().out
    published = bases[0].parent / "published"
    AutoModelForCausalLM.from_pretrained(bases[0], dtype=torch.bfloat16).save_pretrained(published)
    load_policy(str(published), args(base_dtype="bfloat16"), tokenizer)
    assert "rounds" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_reference_is_held_like_the_policy(cafe_data, base_model, tmp_path):
    """DPO from a base, with that base as `--ref_model`: no margin at the first step, as without the flag."""
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *LORA, "--base_dtype=bfloat16"]
    flags += ["--model_name", str(base_model)]
    runs = [dpo.main([*flags, *more]) for more in ([], ["--ref_model", str(base_model)])]
    mine, theirs = ([row["rewards/margins"] for row in metrics(run)[:2]] for run in runs)
    assert [mine[0], theirs[0]] == pytest.approx([0, 0], abs=1e-6) and theirs == pytest.approx(mine, abs=5e-6)
