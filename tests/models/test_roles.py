"""Roles: padding and packing change no output, for each architecture."""

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    VOCABULARY,
    alone,
    assert_same_gradients,
    gradients,
    left_padded,
    mixed_batch,
    tiny_model,
    tiny_policy,
    tiny_scalar,
)
from helpers.errors import error_naming
from helpers.zoo import capped, enlarged, zoo_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import ModelArgs
from lightrlhf.maths import head as heads
from lightrlhf.models.forward import embedding_rows, inference
from lightrlhf.models.loading import load_policy
from lightrlhf.models.roles import Policy, ScalarModel, last_token, policy_inputs

ATTENTION = [name for name in ARCHITECTURES if name != "mamba"]
SCALAR = ["llama", "gpt2", "opt", "gpt_neox", "qwen2", "gemma2", "phi", "falcon", "mistral"]
PACKS = ["llama", "gpt2", "gpt_neo", "gpt_neox", "qwen2", "mistral", "gemma2", "phi", "opt", "falcon"]
WIDE = {"mistral": {"sliding_window": 12}, "gemma2": {"sliding_window": 12}}  # as long as the longest row


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("mode", ["all", "lora"])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_logits_of_all_tokens_are_never_in_memory_together(mode, with_entropy, base_model, tokenizer, monkeypatch):
    """The largest tensor, forwards and backwards, is as large as `logit_rows` allows; gradients are the same."""
    policy = load_policy(str(base_model), ModelArgs(finetune_mode=mode), tokenizer)
    vocabulary, most = embedding_rows(policy.model), policy.model.get_output_embeddings().weight.numel()
    ids = torch.randint(2, vocabulary, (4, 65))
    actions = torch.ones(4, 64, dtype=torch.bool)
    found = []
    for rows in (256, 8):
        monkeypatch.setitem(heads.MOST_LOGITS, "cpu", rows * vocabulary)
        policy.zero_grad()
        with LargestTensor() as largest:
            policy(ids, torch.ones_like(ids), actions, with_entropy=with_entropy).logprobs.sum().backward()
        found.append((largest.numel, [p.grad for p in policy.parameters() if p.grad is not None]))
    assert found[0][0] == 4 * 64 * vocabulary
    assert found[1][0] <= max((32 if with_entropy else 8) * vocabulary, most)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-3)


# --------------------------------------------------------------------------------------------------------- padding
@pytest.mark.parametrize("architecture", ATTENTION)
def test_logprobs_are_those_of_the_whole_model_run_on_each_row_alone(architecture):
    policy, batch = tiny_policy(architecture), mixed_batch()
    for layout in (batch, left_padded(batch)):
        stats = policy(**policy_inputs(layout), temperature=0.7, with_entropy=True, with_mean=True)
        for row in range(len(batch)):
            ids = alone(batch, row).input_ids
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, :-1].double() / 0.7
            expected = logits.log_softmax(-1)
            actions = alone(batch, row).action_mask[0]
            mine = layout.action_mask[row]
            target = expected.gather(-1, ids[0, 1:, None])[:, 0][actions]
            assert torch.allclose(stats.logprobs[row][mine].double(), target, atol=2e-5)
            entropy = -(expected.exp() * expected).sum(-1)[actions]
            assert torch.allclose(stats.entropy[row][mine].double(), entropy, atol=2e-5)
            assert torch.allclose(stats.mean_logprobs[row][mine].double(), expected.mean(-1)[actions], atol=2e-5)
        for values in stats:
            assert (values[~layout.action_mask] == 0).all()


@pytest.mark.parametrize("architecture", ATTENTION)
def test_policy_gradients_are_the_same_padded_left_right_and_row_by_row(architecture):
    policy, batch = tiny_policy(architecture), mixed_batch()
    found = []
    for parts in ([batch], [left_padded(batch)], [alone(batch, row) for row in range(len(batch))]):
        for part in parts:
            policy(**policy_inputs(part)).logprobs.sum().backward()
        found.append(gradients(policy))
    assert_same_gradients(found[0], found[1])
    assert_same_gradients(found[0], found[2])


@pytest.mark.parametrize("architecture", SCALAR)
def test_scores_and_their_gradients_are_the_same_padded_left_right_and_row_by_row(architecture):
    model, batch = tiny_scalar(architecture), mixed_batch()
    scores, grads = [], []
    for parts in ([batch], [left_padded(batch)], [alone(batch, row) for row in range(len(batch))]):
        ends = torch.cat(
            [last_token(model(part.input_ids, part.attention_mask), part.attention_mask) for part in parts]
        )
        ends.pow(2).sum().backward()
        scores.append(ends.detach())
        grads.append(gradients(model))
    assert torch.allclose(scores[0], scores[1], atol=1e-5) and torch.allclose(scores[0], scores[2], atol=1e-5)
    assert_same_gradients(grads[0], grads[1], atol=2e-6)
    assert_same_gradients(grads[0], grads[2], atol=2e-6)


def test_the_last_token_is_found_by_the_mask_with_padding_on_either_side():
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    mask = torch.tensor([[True, True, False, False], [False, False, True, True]])
    assert last_token(values, mask).tolist() == [2.0, 4.0]


def test_soft_caps_after_the_head_are_detected():
    assert tiny_policy("llama").head_is_plain and not tiny_policy("gemma2").head_is_plain


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("gemma2", {"final_logit_softcapping": 30.0}),
        ("vaultgemma", {"final_logit_softcapping": 30.0}),
        ("nanochat", {}),
        ("granite", {"logits_scaling": 8.0}),
    ],
)
def test_caps_and_scales_show_at_small_weights(kind, changes):
    """Of these logits, all below 1, a cap of 30 changes less than rounding does."""
    policy = Policy(zoo_model(kind, **changes)).eval()
    assert not policy.head_is_plain
    assert_whole_model(enlarged(policy))


def test_a_cap_that_no_configuration_names_shows():
    policy = Policy(capped(lambda logits: 100 * torch.tanh(logits / 100)))
    assert not policy.head_is_plain
    assert_whole_model(enlarged(policy))


def assert_whole_model(policy: Policy) -> None:
    batch = mixed_batch()
    found = policy(**policy_inputs(batch)).logprobs
    logits = policy.model(batch.input_ids, attention_mask=batch.attention_mask.long(), use_cache=False).logits
    expected = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    assert torch.allclose(found[batch.action_mask], expected[batch.action_mask], atol=1e-4, rtol=1e-4)


def test_a_model_without_a_base_of_its_own_trains_on_its_whole_logits():
    assert_whole_model(Policy(zoo_model("llama4_text")).eval())


@pytest.mark.parametrize("kind", ["bert", "cpmant", "xmod"])
def test_what_is_no_causal_language_model_is_refused(kind):
    with error_naming(UsageError, kind):
        Policy(zoo_model(kind))


def test_a_reward_model_without_a_linear_head_is_refused():
    with error_naming(UsageError, "ctrl", "reward model"):
        ScalarModel(zoo_model("ctrl", scalar=True))


def test_a_policy_trains_what_its_head_shares_with_its_embedding():
    """Tied weights get one gradient, of both uses."""
    policy = Policy(tiny_model("llama", tie_word_embeddings=True))
    batch = mixed_batch()
    policy(**policy_inputs(batch)).logprobs.sum().backward()
    logits = policy.model(batch.input_ids, attention_mask=batch.attention_mask.long(), use_cache=False).logits
    found = gradients(policy)
    targets = batch.input_ids[:, 1:]
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    logprobs[batch.action_mask].sum().backward()
    assert_same_gradients(found, gradients(policy), atol=2e-6)
    assert policy.model.get_input_embeddings().weight.shape[0] == VOCABULARY


# ------------------------------------------------------------------------------------------------------- inference
@pytest.mark.parametrize("training", [True, False])
def test_inference_restores_the_mode_also_after_an_error(training):
    policy = tiny_policy("llama").train(training)
    with inference(policy):
        assert not policy.training and not policy.model.training and not torch.is_grad_enabled()
    with pytest.raises(KeyError), inference(policy):
        raise KeyError
    assert policy.training == policy.model.training == training and torch.is_grad_enabled()
