"""Frozen models in the host's memory, and such that are held in bfloat16 beside a policy that is trained whole."""

import pytest
import torch
from helpers import CPU, PAIRS, metrics, tiny_policy
from helpers.errors import refused
from torch import nn

from lightrlhf import distill, grpo, ppo, rm, sft
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import preference_batch
from lightrlhf.models import frozen
from lightrlhf.models.loading import load_policy
from lightrlhf.models.offload import HostWeights, offload, on_device
from lightrlhf.models.roles import policy_inputs

META = torch.device("meta")
SIZES = ["--max_steps=2", "--rollout_size=4", "--mini_batch_size=4", "--micro_batch_size=2", "--max_new_tokens=4"]
FLAGS = [*CPU, *SIZES, "--log_interval=1", "--eval_interval=0", "--logger=csv", "--lr_warmup_steps=0"]
LENGTH = "--reward_function=helpers.rewards:length"


def test_parameters_are_on_the_device_within_the_context_alone():
    policy = tiny_policy("llama", tie_word_embeddings=True).requires_grad_(False)
    names = policy.state_dict().keys()
    offload(policy, META)
    head, embedding = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
    for _ in range(2):
        with on_device(nn.ModuleList([policy])):
            with on_device(policy):
                fetched = policy.model.get_output_embeddings().weight
            assert head.weight is fetched  # the inner context neither fetches nor releases
            assert {p.device for p in policy.parameters()} == {META} and head.weight is embedding.weight
            assert not any(p.requires_grad for p in policy.parameters())
        assert {p.device.type for p in policy.parameters()} == {"cpu"} and head.weight is embedding.weight
    assert policy.state_dict().keys() == names
    assert {buffer.device for buffer in policy.buffers()} == {META}


def test_values_are_those_of_before_and_come_back_after_an_error():
    policy, batch = tiny_policy("llama"), preference_batch(PAIRS, 0)
    before = policy(**policy_inputs(batch)).logprobs
    offload(policy, torch.device("cpu"))
    with on_device(policy):
        assert torch.equal(policy(**policy_inputs(batch)).logprobs, before)
    with pytest.raises(ZeroDivisionError), on_device(policy):
        raise ZeroDivisionError
    weights: HostWeights = policy.offloaded
    assert not weights.is_there and all(p is weights.host[key] for p, key in zip(policy.parameters(), weights.host))


def test_other_modules_are_left_alone():
    layer = nn.Linear(2, 2)
    with on_device(layer):
        assert layer.weight.device.type == "cpu" and layer.weight.requires_grad


def test_a_cpu_has_nothing_to_offload_to(base_model, cafe_data, tmp_path, capsys):
    flags = ["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), "--model_name", str(base_model), *FLAGS]
    for program, own in ((ppo, LENGTH), (distill, f"--teacher={base_model}")):
        given = refused(capsys, program.main, *flags, own, "--offload=True")
        assert "the memory of this device is the host's own" in given


# --------------------------------------------------------------------------------------- all weights are trained
def run(program, base, data, logs, *more: str) -> list[dict[str, float]]:
    flags = ["--data_dir", str(data), "--log_dir", str(logs), "--model_name", str(base), *FLAGS, *more]
    return metrics(program.main(flags))


@pytest.fixture(scope="module")
def bases(base_model, tmp_path_factory, tokenizer):
    """A model with weights that bfloat16 has, and one with others."""
    folder = tmp_path_factory.mktemp("published")
    model = load_policy(str(base_model), ModelArgs(), tokenizer).model
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"published": folder, "trained": base_model}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["published", "trained"])
def test_kl_is_0_at_the_start_where_bfloat16_has_the_weights(kind, precision, bases, cafe_data, tmp_path):
    """The run also equals the float32 run bit by bit."""
    given = f"--precision={precision}", LENGTH
    plain = run(ppo, bases[kind], cafe_data, tmp_path / "a", *given)
    held = run(ppo, bases[kind], cafe_data, tmp_path / "b", *given, "--base_dtype=bfloat16")
    kl = [row["objective/kl"] for row in held]
    print(kind, precision, kl)
    if kind == "published":
        names = [name for name in plain[0] if not name.startswith(("time/", "memory/"))]
        assert kl[0] == pytest.approx(0, abs=1e-6)  # sampling and scoring round in their own ways on some processors
        assert [[row[n] for n in names] for row in plain] == [[row[n] for n in names] for row in held]
    else:
        assert 0 < abs(kl[0]) < 0.01


@pytest.mark.parametrize("kind", ["published", "trained"])
def test_a_teacher_is_held_as_a_reference_is(kind, bases, cafe_data, tmp_path):
    """The student is its own: the KL begins at 0 where bfloat16 has the weights, and the run is the same."""
    given = f"--teacher={bases[kind]}", "--learning_rate=1e-3"
    plain = run(distill, bases[kind], cafe_data, tmp_path / "a", *given)
    held = run(distill, bases[kind], cafe_data, tmp_path / "b", *given, "--base_dtype=bfloat16")
    kl, other = ([row["objective/kl"] for row in rows] for rows in (held, plain))
    print(kind, kl, other)
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl == other if kind == "published" else 1e-6 < kl[0] < 0.01


def test_flags_without_a_frozen_model_are_refused(base_model, cafe_data, tmp_path, capsys):
    where = ["--data_dir", cafe_data, "--log_dir", tmp_path, "--model_name", base_model, *FLAGS]
    for more in (["--init_kl_coeff=0"], ["--finetune_mode=last_layer", "--init_kl_coeff=0.1"]):
        words = [*where, LENGTH, "--num_generations=2", "--mini_batch_size=8", *more, "--base_dtype=bfloat16"]
        assert "--base_dtype bfloat16" in refused(capsys, grpo.main, *words)
    words = [*where, "--own_teacher=average", "--privileged_column=x", "--base_dtype=bfloat16"]  # its weights move
    assert "--base_dtype bfloat16" in refused(capsys, distill.main, *words)
    assert "--finetune_mode lora" in refused(capsys, sft.main, *where[:6], "--base_dtype=bfloat16")
    sharded = ["--finetune_mode=lora", "--strategy=fsdp", "--devices=2"]
    assert "--strategy fsdp" in refused(capsys, ppo.main, *where, LENGTH, *sharded, "--base_dtype=bfloat16")


def test_a_reward_model_is_held_and_the_policy_s_frozen_layers_are_not(bases, cafe_data, tmp_path, monkeypatch):
    """With `last_layer` the reference shares the frozen layers, which stay float32."""
    scored = rm.main(["--data_dir", str(cafe_data), "--log_dir", str(tmp_path), "--model_name", str(bases["trained"]),
                      *CPU, "--max_steps=1", "--eval_interval=0", "--logger=csv"])  # fmt: skip
    seen, hold = [], frozen.hold
    monkeypatch.setattr(frozen, "hold", lambda model: seen.append(type(model).__name__) or hold(model))
    held = ["--base_dtype=bfloat16", f"--rm_experiment_dir={scored}", "--max_steps=1"]
    run(ppo, bases["trained"], cafe_data, tmp_path / "a", *held, "--finetune_mode=last_layer")
    assert seen == ["LlamaForSequenceClassification"]
    run(ppo, bases["trained"], cafe_data, tmp_path / "b", *held)
    assert seen[1:] == ["LlamaForCausalLM", "LlamaForSequenceClassification"]
