"""rsLoRA, DoRA and initialisations: each begins as its base, and a checkpoint equals the trained model."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, last_checkpoint, metrics, mixed_batch, rows_of, save_model
from helpers.errors import error_naming, refused
from helpers.programs import assert_resumes
from helpers.trained import config_of, logits_of, plain, train_a_little

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.models import lora
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.models.roles import last_token, policy_inputs
from lightrlhf.models.saving import export, merged_model
from lightrlhf.ppo import PPOArgs
from lightrlhf.training.resume import read_checkpoint

VARIANTS = {
    "dora": {"use_dora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
}
MADE_BY_PEFT = {"rslora": {"use_rslora": True}, "both": {"use_dora": True, "use_rslora": True}}  # only read here
PARTS = ["pissa", "olora"]
IDS = torch.tensor(rows_of(9))


def args_of(variant: str = "", **changes) -> ModelArgs:
    return ModelArgs(finetune_mode="lora", lora_rank=4, **(VARIANTS[variant] if variant else {}), **changes)


@pytest.fixture
def stage(tokenizer, tmp_path):
    """Save a role as a run does: `stage(module, "name")` is its checkpoint."""

    def save(module, name: str):
        folder = tmp_path / name / "folder"
        folder.mkdir(parents=True)
        export(module, folder, tmp_path / name / "base")
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_begins_as_its_base_and_comes_back_from_disk(variant, architecture, stage, tokenizer, tmp_path):
    from peft import AutoPeftModelForCausalLM

    base = save_model(architecture, tmp_path / "base_model", tokenizer)
    before = logits_of(plain(base), IDS)
    policy = load_policy(str(base), args_of(variant), tokenizer)
    for first in (policy, policy.reference()):
        assert torch.allclose(logits_of(first.model, IDS), before, atol=1e-5)
        if variant not in ("orthogonal", *PARTS):
            assert torch.equal(logits_of(first.model, IDS), before)
    train_a_little(policy)
    assert all(not torch.equal(p, q) for p, q in zip(trained(policy), trained(load_again(base, variant, tokenizer))))
    after = logits_of(policy.model, IDS)
    assert not torch.allclose(before, after, atol=1e-2)
    folder = stage(policy, "run")
    assert config_of(folder)["base_model_name_or_path"] == str(base.resolve())
    assert config_of(folder)["r"] == (8 if variant in PARTS else 4)
    assert config_of(folder)["lora_alpha"] == (8 if variant in PARTS else 16)
    assert config_of(folder)["use_dora"] == (variant == "dora")
    assert config_of(folder)["init_lora_weights"] is True and not (folder.parent / "base").exists()
    for theirs in (plain(folder), AutoPeftModelForCausalLM.from_pretrained(folder)):
        assert torch.allclose(logits_of(theirs, IDS), after, atol=1e-5)
    mine = load_policy(str(folder), ModelArgs(), tokenizer)
    for merged in (mine.model, merged_model(policy)):
        assert not lora.lora_layers(merged) and torch.allclose(logits_of(merged, IDS), after, atol=1e-5)


def trained(module) -> list[torch.Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def load_again(base, variant: str, tokenizer):
    return load_policy(str(base), args_of(variant), tokenizer)


@pytest.mark.parametrize(("first", "second"), [("", "pissa"), ("pissa", "olora"), ("olora", ""), ("orthogonal", "")])
def test_a_stage_on_a_stage_is_one_adapter_on_the_first_base(first, second, stage, base_model, tokenizer):
    sft = load_policy(str(base_model), args_of(first), tokenizer)
    train_a_little(sft)
    after = logits_of(sft.model, IDS)
    policy = load_policy(str(stage(sft, "sft")), args_of(second, lora_alpha=7), tokenizer)
    assert torch.allclose(logits_of(policy.model, IDS), after, atol=1e-5)
    train_a_little(policy)
    folder = stage(policy, "next")
    config = config_of(folder)
    assert config["r"] == config["lora_alpha"] == 4 * (2 + (first in PARTS) + (second in PARTS))
    assert config["base_model_name_or_path"] == str(base_model.resolve())
    assert not config["use_rslora"] and not config["use_dora"]
    assert torch.allclose(logits_of(plain(folder), IDS), logits_of(policy.model, IDS), atol=1e-5)


@pytest.mark.parametrize(("first", "second"), [("dora", ""), ("", "dora"), ("dora", "dora"), ("dora", "pissa")])
def test_an_adapter_below_or_above_dora_is_merged_first(first, second, stage, base_model, tokenizer, capsys):
    sft = load_policy(str(base_model), args_of(first), tokenizer)
    train_a_little(sft)
    folder, after = stage(sft, "sft"), logits_of(sft.model, IDS)
    capsys.readouterr()
    policy = load_policy(str(folder), args_of(second), tokenizer)
    assert capsys.readouterr().out == (
        f"--model_name {folder}: its adapter is merged into its base, since a DoRA adapter stands alone; "
        "this run saves the sum\n"
    )
    assert torch.allclose(logits_of(policy.model, IDS), after, atol=1e-5)
    train_a_little(policy)
    later = stage(policy, "next")
    assert config_of(later)["base_model_name_or_path"] == str(later.parent / "base")
    assert torch.allclose(logits_of(plain(later.parent / "base"), IDS), after, atol=1e-5)
    assert torch.allclose(logits_of(plain(later), IDS), logits_of(policy.model, IDS), atol=1e-5)
    again = load_policy(str(later), ModelArgs(finetune_mode="last_layer"), tokenizer)
    assert torch.allclose(logits_of(again.model, IDS), logits_of(policy.model, IDS), atol=1e-5)


def test_a_reward_model_of_dora_stands_beside_a_shared_backbone(stage, base_model, tokenizer, tmp_path):
    reward = load_scalar(str(base_model), args_of("dora"), tokenizer, seed=0)
    train_a_little(reward)
    folder, batch = str(stage(reward, "rm")), mixed_batch()
    mine = last_token(reward.eval()(batch.input_ids, batch.attention_mask), batch.attention_mask)
    policy = load_policy(str(base_model), args_of(), tokenizer, shares=True)
    for again in (
        load_scalar(folder, ModelArgs(), tokenizer, 9, needs_head=True, backbone=policy),
        load_scalar(folder, args_of(), tokenizer, 9, backbone=policy),  # a critic
    ):
        assert again.model is not policy.model and not again.shares
        scores = last_token(again.eval()(batch.input_ids, batch.attention_mask), batch.attention_mask)
        assert torch.allclose(scores, mine, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("variant", [*MADE_BY_PEFT, "dora", "orthogonal"])
def test_adapters_made_by_peft_are_read(variant, architecture, tokenizer, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = save_model(architecture, tmp_path / "base", tokenizer)
    targets = {"llama": ["q_proj", "up_proj"], "gpt2": ["c_attn"]}[architecture]
    made = MADE_BY_PEFT.get(variant) or VARIANTS[variant]
    config = LoraConfig(
        r=4, target_modules=targets, fan_in_fan_out=architecture == "gpt2", task_type="CAUSAL_LM", **made
    )
    theirs = get_peft_model(plain(base), config)
    train_a_little(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    for args in (ModelArgs(), args_of()):
        policy = load_policy(str(tmp_path / "theirs"), args, tokenizer)
        assert torch.allclose(logits_of(policy.model, IDS), logits_of(theirs, IDS), atol=1e-5)


def test_an_adapter_on_a_base_that_peft_changed_is_refused(stage, base_model, tokenizer):
    folder = stage(load_policy(str(base_model), args_of(), tokenizer), "pissa")
    stored = config_of(folder) | {"init_lora_weights": "pissa"}
    (folder / "adapter_config.json").write_text(json.dumps(stored))
    with error_naming(UsageError, "pissa"):
        load_policy(str(folder), args_of(), tokenizer)


def test_parts_are_those_of_the_papers(base_model, tokenizer):
    """As peft takes them, of the weights with the adapter below; its base loses them, here the second adapter."""
    from peft import LoraConfig, get_peft_model

    for variant in PARTS:
        args = args_of(variant, lora_targets="q_proj,up_proj")
        policy = load_policy(str(base_model), args, tokenizer)
        names = args.lora_target_names()
        theirs = get_peft_model(
            plain(base_model), LoraConfig(r=4, lora_alpha=16, target_modules=names, **VARIANTS[variant])
        )
        layers = lora.lora_layers(theirs)
        for name, layer in lora.lora_layers(policy.model).items():
            mine, other = layer.get_delta_weight("policy"), layers[f"base_model.model.{name}"]
            assert torch.allclose(mine, other.get_delta_weight("default"), atol=1e-5)
            left = layer.base_layer.weight + layer.get_delta_weight("policy-initial")
            assert torch.allclose(left, other.base_layer.weight, atol=1e-5)


def test_a_part_is_one_of_the_weights_with_the_adapters_below(stage, base_model, tokenizer):
    sft = load_policy(str(base_model), args_of(), tokenizer)
    train_a_little(sft)
    policy = load_policy(str(stage(sft, "sft")), args_of("pissa"), tokenizer)
    for layer in lora.lora_layers(policy.model).values():
        start = layer.base_layer.weight + layer.get_delta_weight("start_0")
        left = torch.linalg.svdvals(start + layer.get_delta_weight("policy-initial"))
        assert torch.allclose(left[:-4], torch.linalg.svdvals(start)[4:], atol=1e-4)


def test_the_default_is_what_peft_draws(base_model, tokenizer):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    policy = load_policy(str(base_model), args_of(lora_targets="q_proj,up_proj"), tokenizer)
    torch.manual_seed(3)
    theirs = get_peft_model(plain(base_model), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    other = {name.replace("default", "policy"): p for name, p in theirs.named_parameters() if "lora_" in name}
    mine = {f"base_model.model.{name}": p for name, p in policy.model.named_parameters() if "lora_" in name}
    assert mine.keys() == other.keys() and all(torch.equal(p, other[name]) for name, p in mine.items())


@pytest.mark.parametrize("variant", PARTS)
def test_a_shared_backbone_keeps_its_base(variant, stage, base_model, tokenizer):
    """Policy, reference and critic on it equal models of their own."""
    sft = load_policy(str(base_model), args_of(), tokenizer)
    train_a_little(sft)
    start, batch, found = str(stage(sft, "sft")), mixed_batch(), []
    for shares in (True, False):
        torch.manual_seed(5)
        policy = load_policy(start, args_of(variant), tokenizer, shares=shares)
        critic = load_scalar(start, args_of(variant), tokenizer, 3, backbone=policy)
        assert (critic.model is policy.model) == shares
        reference = policy.reference()
        if shares:
            own = {name for role in (policy, critic) for name, _ in role.named_parameters()}
            assert any("policy-initial" in name for name in own) and any("scalar-initial" in name for name in own)
        before = reference(**policy_inputs(batch)).logprobs
        assert torch.allclose(policy(**policy_inputs(batch)).logprobs, before, atol=1e-5)
        for p in [*trained(policy), *trained(critic)]:
            p.data.mul_(1.1)
        assert torch.equal(reference(**policy_inputs(batch)).logprobs, before)
        after = policy(**policy_inputs(batch)).logprobs
        assert not torch.allclose(after, before, atol=1e-3)
        found.append([before, after, critic(batch.input_ids, batch.attention_mask)])
    for mine, theirs in zip(*found):
        assert torch.allclose(mine, theirs, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ refusals
def test_an_orthogonal_adapter_of_an_odd_rank_is_refused():
    with error_naming(ValueError, "--init_lora_weights orthogonal", "--lora_rank 3"):
        ModelArgs(finetune_mode="lora", model_name="some", init_lora_weights="orthogonal", lora_rank=3)


def test_dora_for_servers_is_refused(tmp_path):
    server = {"rollout_server": ["http://localhost:1"], "exchange_adapter": True}
    start = {"model_name": "some", "reward_function": ["helpers.rewards:length"], "share_backbone": False}
    with error_naming(ValueError, "--exchange_adapter True", "--use_dora True"):
        PPOArgs(finetune_mode="lora", use_dora=True, **server, **start)


@pytest.mark.parametrize("bits", ["load_in_8bit", "load_in_4bit"])
def test_dora_on_a_quantised_base_is_refused(bits, stage, base_model, tokenizer):
    policy = load_policy(str(base_model), args_of("dora"), tokenizer)
    with error_naming(UsageError, "DoRA", "quantised"):
        load_policy(str(stage(policy, "sft")), args_of(**{bits: True}), tokenizer)


def test_a_rank_above_the_size_of_a_layer_is_refused(base_model, tokenizer):
    args = ModelArgs(finetune_mode="lora", lora_rank=1000, init_lora_weights="pissa")
    with error_naming(UsageError, "--lora_rank 1000", "--init_lora_weights pissa", "model.layers.0.self_attn"):
        load_policy(str(base_model), args, tokenizer)


LENGTH = ["--reward_function", "helpers.rewards:length", "--rollout_size", "8", "--max_new_tokens", "6"]
SMALL = ["--mini_batch_size", "8", "--micro_batch_size", "4", "--log_interval", "1", "--eval_interval", "0"]
SMALL += ["--keep_last", "0", "--save_interval", "1", "--max_steps", "3", "--lora_rank", "4", "--epochs", "9"]


@pytest.mark.parametrize("program", ["ppo", "grpo"])
def test_dora_is_refused_on_a_shared_backbone(program, cafe_data, base_model, tmp_path, capsys):
    from importlib import import_module

    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--model_name", str(base_model)]
    flags += ["--finetune_mode", "lora", "--use_dora", "True", *LENGTH, *SMALL]
    error = refused(capsys, import_module(f"lightrlhf.{program}").main, *flags)
    assert "--use_dora True: a DoRA adapter must stand alone" in error
    assert ("--share_backbone False" in error) == (program == "ppo") and len(error.strip().splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------ programs
@pytest.fixture
def flags(cafe_data, base_model, tmp_path):
    some = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--model_name", str(base_model)]
    return [*some, "--finetune_mode", "lora", *SMALL]


def rounds_differently(monkeypatch) -> None:
    """Change the decompositions by as little as another machine might."""
    svd, qr = torch.svd_lowrank, torch.linalg.qr

    def other_svd(*given, **options):
        left, values, right = svd(*given, **options)
        return left, values * 1.0001, right

    def other_qr(matrix):
        return SimpleNamespace(Q=-qr(matrix).Q)

    monkeypatch.setattr(torch, "svd_lowrank", other_svd)
    monkeypatch.setattr(torch.linalg, "qr", other_qr)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [["--use_dora", "True"], ["--init_lora_weights", "pissa"]])
def test_a_run_is_resumed_to_the_bit(variant, flags, monkeypatch):
    from lightrlhf import sft

    run = sft.main([*flags, *variant, "--learning_rate", "1e-2", "--lr_warmup_steps", "0"])
    state, _ = read_checkpoint(Path(run) / "checkpoint-000003")
    assert any("lora_magnitude_vector" in name for name in state["learned"]["policy"]) == ("--use_dora" in variant)
    rounds_differently(monkeypatch)
    assert_resumes(sft.main, run)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [["--use_dora", "True"], ["--init_lora_weights", "pissa"]])
def test_a_stage_on_a_stage_is_resumed_to_the_bit(variant, flags, monkeypatch, capsys):
    from lightrlhf import dpo, sft

    start = sft.main([*flags, *variant, "--learning_rate", "1e-2", "--max_steps", "1"])
    more = [*variant, "--learning_rate", "1e-2", "--sft_experiment_dir", start]
    at = flags.index("--model_name")
    run = dpo.main([*flags[:at], *flags[at + 2 :], *more])
    if "--use_dora" in variant:
        assert config_of(last_checkpoint(run))["base_model_name_or_path"] == f"{run}/base"
    assert metrics(run)[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-4)  # the policy is its reference
    rounds_differently(monkeypatch)
    assert_resumes(dpo.main, run)
    assert "computing log-probabilities again" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("program", ["ppo", "grpo"])
@pytest.mark.parametrize("variant", PARTS)
def test_a_run_against_a_reference_begins_at_it_and_is_resumed_to_the_bit(variant, program, flags, monkeypatch):
    from importlib import import_module

    given = {
        "ppo": ["--actor_learning_rate", "1e-2", "--critic_learning_rate", "1e-2"],
        "grpo": ["--learning_rate", "1e-2"],
    }
    more = {"ppo": [], "grpo": ["--num_generations", "2", "--init_kl_coeff", "0.1"]}
    module = import_module(f"lightrlhf.{program}")
    run = module.main([*flags, *LENGTH, *given[program], *more[program], "--init_lora_weights", variant])
    first = metrics(run)[0]
    assert abs(first["objective/kl"]) < 1e-5
    rounds_differently(monkeypatch)
    assert_resumes(module.main, run)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [["--use_dora", "True"], ["--init_lora_weights", "pissa"]])
def test_a_variant_on_models_of_its_own_is_resumed_to_the_bit(variant, flags, monkeypatch):
    from lightrlhf import ppo

    rates = ["--actor_learning_rate", "1e-2", "--critic_learning_rate", "1e-2", "--share_backbone", "False"]
    run = ppo.main([*flags, *LENGTH, *rates, *variant])
    assert abs(metrics(run)[0]["objective/kl"]) < 1e-5 < abs(metrics(run)[2]["objective/kl"])
    rounds_differently(monkeypatch)
    assert_resumes(ppo.main, run)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_the_frozen_twin_has_no_dropout(init, tmp_path, tokenizer):
    """It takes away what the base has in every pass; with dropout of its own the two would not cancel."""
    base = save_model("llama", tmp_path / "base", tokenizer)
    policy = load_policy(
        str(base), ModelArgs(finetune_mode="lora", init_lora_weights=init, lora_dropout=0.5), tokenizer
    )
    for layer in lora.lora_layers(policy.model).values():
        kinds = {name: type(module).__name__ for name, module in layer.lora_dropout.items()}
        assert kinds == {"policy": "Dropout", f"policy{lora.INITIAL}": "Identity"}
