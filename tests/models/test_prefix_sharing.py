"""Prefix sharing: values and gradients as of separate rows, from fewer tokens."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    PAIRS,
    assert_same_gradients,
    gradients,
    pair,
    rows_of,
    save_model,
    tiny_policy,
    tiny_scalar,
)
from helpers.trained import train_a_little
from helpers.zoo import zoo_model

from lightrlhf.cli.args import ModelArgs
from lightrlhf.data.batch import Batch, preference_batch, response_batch
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.models.prefix_sharing import pack_groups
from lightrlhf.models.probes import share_prefixes
from lightrlhf.models.roles import Policy, policy_inputs

SEPARATE = {"bloom", "mamba"}  # positions are derived from the mask, or there is no attention
WIDE = {"mistral": {"sliding_window": 64}, "gemma2": {"sliding_window": 64}, "gpt_neo": {"window_size": 64}}
KINDS = [
    (make, name)
    for make in (tiny_policy, tiny_scalar)
    for name in ARCHITECTURES
    if (make, name) != (tiny_scalar, "mamba")
]


def test_a_row_holds_the_common_prefix_once_and_hides_the_chosen_text_from_the_rejected_one():
    batch = preference_batch(PAIRS[:1], 0)
    pairs = pack_groups(batch.input_ids, batch.attention_mask, batch.group, 64)
    assert pairs.input_ids.tolist() == [[5, 9, 3, 8, 7, 2, 6, 11, 12, 1, 4, 13, 1]]
    assert pairs.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 9, 10]]
    assert pairs.columns.tolist() == [[*range(10), 0], [*range(8), 10, 11, 12]] and pairs.rows.tolist() == [0, 0]
    sees = {row: pairs.visible[0, row].nonzero()[:, 0].tolist() for row in (9, 10, 12)}
    assert sees == {9: [*range(10)], 10: [*range(8), 10], 12: [*range(8), 10, 11, 12]}


def test_pairs_that_share_little_stay_separate():
    batch = preference_batch([pair([5], [6] * 9, [7] * 9)], 0)
    assert pack_groups(batch.input_ids, batch.attention_mask, batch.group, 64) is None


def grouped(prompts: list[int], lengths: list[list[int]]) -> Batch:
    """Responses of these lengths to prompts of these lengths, rows shuffled, every fourth action left out."""
    rows = rows_of(*prompts, *(n for group in lengths for n in group))
    group = torch.tensor([i for i, part in enumerate(lengths) for _ in part])
    batch = response_batch([rows[i] for i in group], rows[len(prompts) :], 0)
    batch.action_mask[:, 3::4] = False
    batch.group = group + 40
    return batch.select(torch.randperm(len(group), generator=torch.Generator().manual_seed(0)))


MIXED = [[4], [1, 6, 3], [2, 5, 0, 1, 7]]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "gemma", "gemma2", "gpt_neox", "opt"])
def test_groups_of_any_size_match_each_text_alone_in_float64(architecture):
    policy = tiny_policy(architecture, **WIDE.get(architecture, {})).double()
    share_prefixes(policy, longest=40, group_size=5)
    batch = grouped([12, 20, 33], MIXED)
    assert pack_groups(batch.input_ids, batch.attention_mask, batch.group, 32).input_ids.numel() < 200
    found = []
    for rows in (torch.arange(9).split(9), torch.arange(9).split(1)):  # together, and each without padding
        logprobs = [policy(**policy_inputs(batch.select(i)), temperature=0.7).logprobs.sum(1) for i in rows]
        torch.cat(logprobs).pow(2).sum().backward()
        found.append((torch.cat(logprobs).detach(), gradients(policy)))
    (together, slopes), (single, others) = found
    assert policy.shares_prefixes and torch.allclose(together, single, rtol=1e-9)
    in_float64 = architecture in ("gpt2", "gpt_neox", "opt")  # RMSNorm computes in float32
    assert_same_gradients(slopes, others, 1e-12 if in_float64 else 1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_roles_on_one_backbone_share_the_prefix_of_a_group(checkpointing, tmp_path, tokenizer):
    args = ModelArgs(finetune_mode="lora", activation_checkpointing=checkpointing)
    policy = load_policy(str(save_model("llama", tmp_path, tokenizer)), args, tokenizer, shares=True)
    train_a_little(policy)
    critic = load_scalar(str(tmp_path), args, tokenizer, 3, backbone=policy)
    share_prefixes(policy, longest=40, group_size=5)
    share_prefixes(critic, longest=40, group_size=5)
    policy.train()
    critic.train()
    reference, batch = policy.reference(), grouped([12, 20, 33], MIXED)
    assert policy.shares_prefixes and critic.shares_prefixes and reference.shares_prefixes
    found = []
    for group in (None, batch.group):
        batch.group = group
        logprobs, values = policy(**policy_inputs(batch)).logprobs, critic(batch.input_ids, batch.attention_mask, group)
        before = reference(**policy_inputs(batch)).logprobs
        ((logprobs - before.detach()).pow(2).sum() + values[batch.attention_mask].pow(2).sum()).backward()
        found.append((before.detach(), gradients(policy) | gradients(critic)))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5) and not torch.equal(before, logprobs)
    assert_same_gradients(found[0][1], found[1][1], 1e-5)


@pytest.mark.parametrize(
    "prompt, hidden_size, shape", [(64, 2048, (1, 576)), (64, 64, (4, 192)), (24, 2048, (1, 536)), (24, 8, None)]
)
def test_long_texts_of_a_group_are_packed_into_several_rows_or_none(prompt, hidden_size, shape):
    batch = grouped([prompt], [[64] * 6 + [32, 96] if prompt == 64 else [64] * 8])
    packed = pack_groups(batch.input_ids, batch.attention_mask, batch.group, hidden_size)
    assert (packed and tuple(packed.input_ids.shape)) == shape


@pytest.mark.parametrize("make, architecture", KINDS)
def test_values_and_gradients_are_those_of_separate_rows(make, architecture):
    role = make(architecture, **WIDE.get(architecture, {}))
    share_prefixes(role, longest=12)
    assert role.shares_prefixes == (architecture not in SEPARATE) and not role.training
    batch = preference_batch(PAIRS, 0)
    weights = torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(0)) * batch.attention_mask
    found = []
    for shares in (False, role.shares_prefixes):
        role.shares_prefixes = shares
        role.zero_grad()
        if make is tiny_policy:
            values = role(**policy_inputs(batch), with_entropy=True)
            (values.logprobs * weights[:, 1:] + values.entropy).sum().backward()
            values = values.logprobs
        else:
            values = role(batch.input_ids, batch.attention_mask, batch.group) * batch.attention_mask
            (values * weights).sum().backward()
        found.append((values.detach(), [p.grad.clone() for p in role.parameters() if p.grad is not None]))
    (separate, gradients), (packed, others) = found
    assert torch.allclose(separate, packed, atol=1e-4)
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(gradients, others, strict=True))


def test_fewer_tokens_are_computed(monkeypatch):
    policy = tiny_policy("llama")
    share_prefixes(policy, longest=12)
    shapes = []
    forward = policy.model.base_model.forward
    monkeypatch.setattr(
        policy.model.base_model, "forward", lambda **given: shapes.append(given["input_ids"].shape) or forward(**given)
    )
    batch = preference_batch(PAIRS, 0)
    policy(**policy_inputs(batch))
    assert batch.input_ids.shape == (8, 12) and shapes == [(4, 13)]
    policy(**policy_inputs(batch.select(torch.tensor([0, 4]))))  # selected rows keep their groups
    policy(**policy_inputs(batch.select(torch.tensor([0, 5]))))
    assert shapes[1:] == [(1, 13), (2, 10)]


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe", "jamba", "inkling_text"])
def test_layers_that_leak_keep_pairs_separate_though_small_weights_hide_it(kind):
    policy = Policy(zoo_model(kind))
    share_prefixes(policy, longest=12)
    assert not policy.shares_prefixes


@pytest.mark.parametrize(
    "architecture, changes", [("mistral", {"sliding_window": 11}), ("gpt_neo", {"window_size": 23})]
)
def test_a_window_that_is_too_short_keeps_pairs_separate(architecture, changes):
    policy = tiny_policy(architecture, **changes)
    share_prefixes(policy, longest=12)
    assert not policy.shares_prefixes


@pytest.mark.parametrize("group_size", [2, 3])
def test_gpt_neos_window_counts_the_columns_of_the_whole_group(group_size):
    policy = tiny_policy("gpt_neo", window_size=24)
    share_prefixes(policy, longest=12, group_size=group_size)
    assert policy.shares_prefixes == (group_size == 2)
