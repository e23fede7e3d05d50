"""LoRA: a checkpoint equals the trained model when loaded by lightrlhf, transformers or peft; roles on one backbone."""

import copy
import json
import shutil

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

from lightrlhf import ppo, rm
from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import response_batch
from lightrlhf.models.loading import load_policy, load_scalar, separate_pad_token
from lightrlhf.models.names import holds_reward_model
from lightrlhf.models.roles import last_token, policy_inputs
from lightrlhf.models.saving import export, self_contained
from lightrlhf.models.tokenizer import load_tokenizer
from lightrlhf.rewards.loading import load_scorer
from lightrlhf.rewards.scorers import PairScorer

LORA = ModelArgs(finetune_mode="lora")
IDS = torch.tensor(rows_of(9))


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


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon"])
def test_a_chain_of_lora_stages_is_one_adapter_on_the_first_base(architecture, stage, tokenizer, tmp_path):
    """base -> SFT -> PPO -> once more, the second on fewer layers and of another rank."""
    from peft import AutoPeftModelForCausalLM

    base = save_model(architecture, tmp_path / "base_model", tokenizer)
    target = {"llama": "q_proj,down_proj", "gpt2": "c_attn", "falcon": "dense"}[architecture]
    source, rank = base, 0
    for name, args in (
        ("sft", ModelArgs(finetune_mode="lora", lora_rank=4, lora_alpha=4)),
        ("ppo", ModelArgs(finetune_mode="lora", lora_rank=2, lora_alpha=7, lora_targets=target)),
        ("more", LORA),
    ):
        policy = load_policy(str(source), args, tokenizer)
        before = logits_of(policy.model, IDS)
        if rank:
            assert torch.allclose(before, after, atol=1e-5)  # noqa: F821 (of the stage before)
        train_a_little(policy)
        after = logits_of(policy.model, IDS)
        assert not torch.allclose(before, after, atol=1e-2)
        source, rank = stage(policy, name), rank + args.lora_rank
        assert config_of(source)["base_model_name_or_path"] == str(base.resolve())
        assert config_of(source)["r"] == rank and not (source / "config.json").exists()
        assert not (source.parent / "base").exists()
        for theirs in (plain(source), AutoPeftModelForCausalLM.from_pretrained(source)):
            assert torch.allclose(logits_of(theirs, IDS), after, atol=1e-5)
        assert torch.allclose(logits_of(load_policy(str(source), ModelArgs(), tokenizer).model, IDS), after, atol=1e-5)


def test_a_reward_model_on_an_adapter_is_an_adapter_with_a_head(stage, base_model, tokenizer):
    sft = load_policy(str(base_model), LORA, tokenizer)
    train_a_little(sft)
    reward = load_scalar(str(stage(sft, "sft")), LORA, tokenizer, seed=0)
    train_a_little(reward)
    folder = stage(reward, "rm")
    assert holds_reward_model(str(folder)) and not holds_reward_model(str(stage(sft, "again")))
    assert config_of(folder)["task_type"] == "SEQ_CLS" and config_of(folder)["modules_to_save"] == ["score"]
    batch = response_batch(rows_of(3, 9, 1), [[*row, 1] for row in rows_of(6, 2, 4)], 0)
    mine = last_token(reward.eval()(batch.input_ids, batch.attention_mask), batch.attention_mask)
    theirs = plain(folder, scalar=True)(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long())
    again = load_scalar(str(folder), ModelArgs(), tokenizer, seed=9, needs_head=True).eval()
    scores = last_token(again(batch.input_ids, batch.attention_mask), batch.attention_mask)
    assert torch.allclose(scores, mine, atol=1e-5)
    assert torch.allclose(theirs.logits[:, 0], mine, atol=1e-5)
    with error_naming(UsageError, "reward model"):
        load_policy(str(folder), LORA, tokenizer)


@pytest.mark.parametrize("mode", ["all", "last_layer"])
def test_other_modes_merge_the_adapter_they_start_from(mode, stage, base_model, tokenizer):
    sft = load_policy(str(base_model), LORA, tokenizer)
    train_a_little(sft)
    policy = load_policy(str(stage(sft, "sft")), ModelArgs(finetune_mode=mode), tokenizer)
    assert torch.allclose(logits_of(policy.model, IDS), logits_of(sft.model, IDS), atol=1e-5)
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert names and not any("lora" in name for name, _ in policy.named_parameters())
    assert (len(names) == len(list(policy.parameters()))) == (mode == "all")
    train_a_little(policy)
    folder = stage(policy, "next")
    assert (folder / "config.json").is_file() and not (folder / "adapter_config.json").exists()
    assert torch.allclose(logits_of(plain(folder), IDS), logits_of(policy.model, IDS), atol=1e-5)


def test_a_base_that_is_not_stored_is_written_once_and_may_move_with_its_run(stage, tokenizer, tmp_path):
    policy = load_policy("tiny", LORA, tokenizer)
    train_a_little(policy)
    drawn = torch.get_rng_state()
    folder = stage(policy, "run")
    assert torch.equal(torch.get_rng_state(), drawn), "saving changed what is drawn next"
    assert config_of(folder)["base_model_name_or_path"] == str(tmp_path / "run" / "base")
    written = (tmp_path / "run" / "base" / "model.safetensors").stat().st_mtime_ns
    shutil.rmtree(folder)
    train_a_little(policy)
    folder.mkdir()
    export(policy, folder, tmp_path / "run" / "base")
    assert (tmp_path / "run" / "base" / "model.safetensors").stat().st_mtime_ns == written
    assert torch.allclose(logits_of(plain(folder), IDS), logits_of(policy.model, IDS), atol=1e-5)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    moved = load_policy(str(tmp_path / "moved" / "folder"), LORA, tokenizer)
    assert torch.allclose(logits_of(moved.model, IDS), logits_of(policy.model, IDS), atol=1e-5)
    shutil.rmtree(tmp_path / "moved" / "base")
    with error_naming(UsageError, "adapter", "/run/base"):
        load_policy(str(tmp_path / "moved" / "folder"), LORA, tokenizer)


def test_a_reward_model_whose_pad_token_needs_a_row_stores_its_own_base(stage, tokenizer, base_model, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    reward = load_scalar(str(base_model), LORA, tokenizer, seed=0)
    rows = reward.model.get_input_embeddings().weight.shape[0]
    separate_pad_token(reward, tokenizer)
    folder = stage(reward, "rm")
    grown = reward.model.get_input_embeddings().weight.shape[0] > rows
    assert (tmp_path / "rm" / "base").is_dir() == grown
    batch = mixed_batch()
    mine = last_token(reward.eval()(batch.input_ids, batch.attention_mask), batch.attention_mask)
    again = load_scalar(str(folder), ModelArgs(), tokenizer, seed=9, needs_head=True).eval()
    scores = last_token(again(batch.input_ids, batch.attention_mask), batch.attention_mask)
    assert torch.allclose(scores, mine, atol=1e-5)


@pytest.mark.parametrize("scalar", [False, True])
def test_an_uploaded_checkpoint_needs_no_local_folder(scalar, stage, base_model, tokenizer):
    if scalar:
        module = load_scalar(str(base_model), LORA, tokenizer, seed=0)
    else:
        module = load_policy(str(base_model), LORA, tokenizer)
    train_a_little(module)
    folder = stage(module, "run")
    (folder / "README.md").write_text("card")
    with self_contained(folder) as whole:
        assert sorted(path.name for path in whole.glob("*.json") if path.name.startswith("adapter")) == []
        assert {"README.md", "tokenizer.json", "config.json"} <= {path.name for path in whole.iterdir()}
        assert torch.allclose(logits_of(plain(whole, scalar), IDS), logits_of(plain(folder, scalar), IDS), atol=1e-5)
    assert not whole.exists() and [path.name for path in folder.parent.iterdir()] == ["folder"]
    with self_contained(base_model) as whole:
        assert whole == base_model


@pytest.mark.parametrize(
    "change", [{"bias": "all"}, {"alora_invocation_tokens": [1]}, {"modules_to_save": ["lm_head"]}]
)
def test_adapters_of_other_kinds_are_refused(change, stage, base_model, tokenizer):
    folder = stage(load_policy(str(base_model), LORA, tokenizer), "other")
    (folder / "adapter_config.json").write_text(json.dumps(config_of(folder) | change))
    with error_naming(UsageError, "LoRA", "DoRA"):
        load_policy(str(folder), LORA, tokenizer)


def test_an_adapter_of_another_architecture_is_refused(stage, base_model, tokenizer, tmp_path):
    folder = stage(load_policy(str(base_model), LORA, tokenizer), "other")
    other = save_model("gpt2", tmp_path / "gpt2", tokenizer)
    (folder / "adapter_config.json").write_text(json.dumps(config_of(folder) | {"base_model_name_or_path": str(other)}))
    with error_naming(UsageError, "adapter", "base"):
        load_policy(str(folder), LORA, tokenizer)


def test_the_tokenizer_of_an_adapter_folder_is_found(stage, base_model, tokenizer):
    folder = stage(load_policy(str(base_model), LORA, tokenizer), "sft")
    assert load_tokenizer(None, str(folder)).get_vocab() == tokenizer.get_vocab()


# ----------------------------------------------------------------------------------------------- roles on one backbone
@pytest.fixture
def trained(stage, base_model, tokenizer):
    """The folders of an SFT adapter and of a reward model's adapter on top of it."""
    sft = load_policy(str(base_model), LORA, tokenizer)
    train_a_little(sft)
    folder = stage(sft, "sft")
    reward = load_scalar(str(folder), LORA, tokenizer, seed=0)
    train_a_little(reward)
    return str(folder), str(stage(reward, "rm"))


def roles(trained, tokenizer, shares: bool, args: ModelArgs = LORA, critic_from: int = 1):
    """Policy, reference, reward model and critic, as PPO makes them."""
    torch.manual_seed(5)
    policy = load_policy(trained[0], args, tokenizer, shares=shares)
    reference = policy.reference().requires_grad_(False).eval()
    reward = load_scalar(trained[1], ModelArgs(), tokenizer, 0, needs_head=True, backbone=policy)
    critic = load_scalar(trained[critic_from], args, tokenizer, 3, backbone=policy)
    return policy.train(), reference, reward.requires_grad_(False).eval(), critic.train()


def outputs(policy, reference, reward, critic) -> list[torch.Tensor]:
    batch = mixed_batch()
    scores = [model(batch.input_ids, batch.attention_mask) for model in (reward, critic)]
    return [policy(**policy_inputs(batch)).logprobs, reference(**policy_inputs(batch)).logprobs, *scores]


def step(policy, critic) -> None:
    """Forward and backward of both, then a step, the critic's forward before the policy's backward."""
    batch = mixed_batch()
    loss = policy(**policy_inputs(batch)).logprobs.pow(2).sum()
    critic_loss = critic(batch.input_ids, batch.attention_mask).pow(2).sum()
    loss.backward()
    critic_loss.backward()
    for module in (policy, critic):
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1e-3)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("critic_from", [0, 1])
def test_four_roles_on_one_backbone_equal_four_models(critic_from, trained, tokenizer):
    one, four = (roles(trained, tokenizer, shares, critic_from=critic_from) for shares in (True, False))
    assert all(role.model is one[0].model for role in one) and len({id(role.model) for role in four}) == 4
    for _ in range(3):
        for mine, theirs in zip(outputs(*one), outputs(*four)):
            assert torch.allclose(mine, theirs, atol=1e-5)
        step(one[0], one[3])
        step(four[0], four[3])
    policy, reference, *_ = outputs(*one)
    assert not torch.allclose(policy, reference, atol=1e-3)


def test_a_role_registers_only_its_trainable_parameters(trained, tokenizer):
    policy, reference, reward, critic = roles(trained, tokenizer, shares=True)
    names = {name for name, _ in policy.named_parameters()}
    assert names and all(name.startswith("own.") and name.endswith("/policy.weight") for name in names)
    names = {name for name, _ in critic.named_parameters()}
    assert "score.weight" in names and all("/scalar." in name for name in names - {"score.weight"})
    assert not list(reference.parameters()) and {n for n, _ in reward.named_parameters()} == {"score.weight"}
    assert all(p.requires_grad for role in (policy, critic) for p in role.parameters())
    learning = {id(p) for p in policy.model.parameters() if p.requires_grad}
    assert learning == {id(p) for role in (policy, critic) for n, p in role.named_parameters() if n != "score.weight"}


def test_outside_a_forward_pass_the_adapters_of_the_policy_are_active(trained, tokenizer):
    policy, *others = roles(trained, tokenizer, shares=True)
    step(policy, others[-1])
    with policy.active():
        expected = policy.model(IDS).logits
    outputs(policy, *others)
    with pytest.raises(IndexError), others[0].active():
        policy.model(IDS + 10_000)
    assert torch.equal(policy.model(IDS).logits, expected)


def test_recomputed_activations_use_the_adapters_of_the_forward_pass(trained, tokenizer):
    """Also where another role spoke between forward and backward, or speaks during it, and with dropout on."""
    found = []
    for checkpointing in (False, True):
        args = ModelArgs(finetune_mode="lora", lora_dropout=0.3, activation_checkpointing=checkpointing)
        policy, reference, reward, critic = roles(trained, tokenizer, shares=True, args=args)
        step(policy, critic)  # now both adapters matter
        batch = mixed_batch()
        torch.manual_seed(3)
        loss = policy(**policy_inputs(batch)).logprobs.pow(2).sum()
        reward(batch.input_ids, batch.attention_mask)
        with reference.active():
            loss.backward()
        critic(batch.input_ids, batch.attention_mask).pow(2).sum().backward()
        found.append(gradients(policy) | gradients(critic))
    assert_same_gradients(*found)


def test_a_reward_model_on_another_base_does_not_share_the_backbone(trained, tokenizer, stage, tmp_path):
    base = save_model("llama", tmp_path / "other_base", tokenizer)
    other = stage(load_scalar(str(base), LORA, tokenizer, seed=0), "other_rm")
    policy, _, reward, critic = roles((trained[0], str(other)), tokenizer, shares=True)
    assert reward.model is not policy.model and critic.model is not policy.model
    assert not reward.shares and not critic.shares


# --------------------------------------------------------------------------------------------------------- programs
PPO = ["--max_steps", "3", "--rollout_size", "8", "--mini_batch_size", "8", "--micro_batch_size", "4", "--epochs", "9"]
PPO += ["--max_new_tokens", "6", "--log_interval", "1", "--eval_interval", "3", "--ppo_epochs", "2", "--keep_last", "0"]
PPO += ["--actor_learning_rate", "1e-2", "--critic_learning_rate", "1e-2", "--save_interval", "1"]


@pytest.fixture(scope="module")
def lora_flags(cafe_data, base_model, tmp_path_factory):
    """Flags of PPO on an SFT run and a reward-model run, all with adapters."""
    from lightrlhf import rm, sft

    logs = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path_factory.mktemp("lora_runs")), *CPU]
    some = ["--finetune_mode", "lora", "--max_steps", "2", "--learning_rate", "1e-2", "--lr_warmup_steps", "0"]
    start = sft.main([*logs, *some, "--model_name", str(base_model)])
    reward = rm.main([*logs, *some, "--sft_experiment_dir", start])
    return [*logs, "--finetune_mode", "lora", "--sft_experiment_dir", start, "--rm_experiment_dir", reward, *PPO]


@pytest.mark.slow
def test_ppo_on_one_backbone_is_ppo_of_four_models(lora_flags, base_model, tmp_path):
    """To the bit but for the reward model, whose adapter is merged when it is a model of its own."""
    one = ppo.main([*lora_flags, "--log_dir", str(tmp_path / "one")])
    four = ppo.main([*lora_flags, "--log_dir", str(tmp_path / "four"), "--share_backbone", "False"])
    folder = last_checkpoint(one)
    assert config_of(folder)["base_model_name_or_path"] == str(base_model.resolve()) and config_of(folder)["r"] == 16
    for mine, theirs in zip(metrics(one), metrics(four), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert metrics(one)[-2]["objective/kl"] > 1e-3
    tokenizer = load_tokenizer(None, str(folder))
    assert torch.allclose(
        logits_of(plain(folder), IDS), logits_of(load_policy(one, ModelArgs(), tokenizer).model, IDS), atol=1e-5
    )
    by_rule = [*lora_flags, "--reward_function", "helpers.rewards:length"]
    at = by_rule.index("--rm_experiment_dir")
    by_rule = by_rule[:at] + by_rule[at + 2 :]
    runs = [
        ppo.main([*by_rule, "--log_dir", str(tmp_path / shares), "--share_backbone", shares])
        for shares in ("True", "False")
    ]
    assert metrics(runs[0]) == metrics(runs[1])
    assert weights(last_checkpoint(runs[0])) == weights(last_checkpoint(runs[1]))


@pytest.mark.slow
@pytest.mark.parametrize("shares", ["True", "False"])
def test_ppo_with_adapters_is_resumed_to_the_bit(shares, lora_flags, tmp_path):
    flags = [*lora_flags, "--disable_dropout", "False", "--lora_dropout", "0.2", "--activation_checkpointing", "True"]
    whole = ppo.main([*flags, "--log_dir", str(tmp_path), "--share_backbone", shares])
    assert_resumes(ppo.main, whole)


@pytest.mark.slow
def test_a_run_of_adapters_on_a_built_model_keeps_its_base(cafe_data, tmp_path):
    from lightrlhf import ppo, sft

    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--finetune_mode", "lora"]
    start = sft.main([*flags, "--model_name", "tiny", "--max_steps", "1"])
    assert config_of(last_checkpoint(start))["base_model_name_or_path"] == f"{start}/base"
    more = ["--sft_experiment_dir", start, "--reward_function", "helpers.rewards:length", *PPO, "--max_steps", "1"]
    folder = last_checkpoint(ppo.main([*flags, *more]))
    assert config_of(folder)["base_model_name_or_path"] == f"{start}/base"
    assert logits_of(plain(folder), IDS).isfinite().all()


def test_an_adapter_of_a_pair_comparing_model_stays_one(cafe_data, base_model, tokenizer, tmp_path):
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), *CPU, "--finetune_mode", "lora"]
    folder = rm.main([*flags, "--model_name", str(base_model), "--loss_type", "pair", "--max_steps", "1"])
    assert isinstance(load_scorer(folder, torch.device("cpu"), 4, "--rm_experiment_dir"), PairScorer)
    assert plain(last_checkpoint(folder), scalar=True).score.weight.isfinite().all()
    policy = load_policy(str(base_model), LORA, tokenizer, shares=True)
    with error_naming(UsageError, "two responses"):
        load_scalar(folder, ModelArgs(), tokenizer, 0, needs_head=True, backbone=policy)
