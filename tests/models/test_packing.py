"""Packing: values and gradients as of separate rows, from fewer tokens."""

import copy

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
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import Batch, preference_batch, response_batch
from lightrlhf.models import forward, roles
from lightrlhf.models.forward import packed_inputs
from lightrlhf.models.loading import load_policy, load_scalar
from lightrlhf.models.packing import pack_texts
from lightrlhf.models.probes import enable_packing
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
    pairs = pack_texts(batch.input_ids, batch.attention_mask, batch.group, 64)
    assert pairs.input_ids.tolist() == [[5, 9, 3, 8, 7, 2, 6, 11, 12, 1, 4, 13, 1]]
    assert pairs.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 9, 10]]
    assert pairs.columns.tolist() == [[*range(10), 0], [*range(8), 10, 11, 12]] and pairs.rows.tolist() == [0, 0]
    sees = {row: pairs.visible[0, row].nonzero()[:, 0].tolist() for row in (9, 10, 12)}
    assert sees == {9: [*range(10)], 10: [*range(8), 10], 12: [*range(8), 10, 11, 12]}


def test_pairs_that_share_little_stay_separate():
    batch = preference_batch([pair([5], [6] * 9, [7] * 9)], 0)
    assert pack_texts(batch.input_ids, batch.attention_mask, batch.group, 64) is None


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
    enable_packing(policy)
    batch = grouped([12, 20, 33], MIXED)
    assert pack_texts(batch.input_ids, batch.attention_mask, batch.group, 32).input_ids.numel() < 200
    found = []
    for rows in (torch.arange(9).split(9), torch.arange(9).split(1)):  # together, and each without padding
        logprobs = [policy(**policy_inputs(batch.select(i)), temperature=0.7).logprobs.sum(1) for i in rows]
        torch.cat(logprobs).pow(2).sum().backward()
        found.append((torch.cat(logprobs).detach(), gradients(policy)))
    (together, slopes), (single, others) = found
    assert policy.packs and torch.allclose(together, single, rtol=1e-9)
    in_float64 = architecture in ("gpt2", "gpt_neox", "opt")  # RMSNorm computes in float32
    assert_same_gradients(slopes, others, 1e-12 if in_float64 else 1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_roles_on_one_backbone_pack_the_texts_of_a_group(checkpointing, tmp_path, tokenizer):
    args = ModelArgs(finetune_mode="lora", activation_checkpointing=checkpointing)
    policy = load_policy(str(save_model("llama", tmp_path, tokenizer)), args, tokenizer, shares=True)
    train_a_little(policy)
    critic = load_scalar(str(tmp_path), args, tokenizer, 3, backbone=policy)
    enable_packing(policy)
    enable_packing(critic)
    policy.train()
    critic.train()
    reference, batch = policy.reference(), grouped([12, 20, 33], MIXED)
    assert policy.packs and critic.packs and reference.packs
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
    packed = pack_texts(batch.input_ids, batch.attention_mask, batch.group, hidden_size)
    assert (packed and tuple(packed.input_ids.shape)) == shape


@pytest.mark.parametrize(
    "lengths, hidden_size, most_columns, shape",
    [
        ([100, 70, 30, 50, 40], 2048, None, (1, 290)),  # attention costs little
        ([100, 70, 30, 50, 40], 64, None, (3, 100)),
        ([100, 70, 30, 50, 40], 2048, 150, (3, 100)),
        ([100, 70, 30, 50, 40], 2048, 99, None),  # there would be no room for the longest
        ([100, 90, 90], 64, None, None),  # little padding
        ([100], 64, None, None),
    ],
)
def test_texts_without_groups_are_packed_into_the_rows_that_cost_least(lengths, hidden_size, most_columns, shape):
    batch = response_batch(rows_of(*lengths), [[] for _ in lengths], 0)
    packed = pack_texts(batch.input_ids, batch.attention_mask, None, hidden_size, most_columns)
    assert (packed and tuple(packed.input_ids.shape)) == shape


@given(
    st.integers(0, 2**31), st.integers(1, 9), st.integers(0, 4), st.integers(1, 6), st.sampled_from([1, 8, 4096]),
    st.booleans(), st.sampled_from([None, 16]),
)  # fmt: skip
def test_a_packed_row_shows_each_text_itself_alone(seed, common, more, count, hidden_size, is_grouped, most_columns):
    """Each token of each text stands in the packed row, at its own position, and sees its own text up to itself."""
    g = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, 4, (common + i,), generator=g).tolist() for i in range(2)]
    ends = [torch.randint(1, 4, (1 + more * (i % 3),), generator=g).tolist() for i in range(count + 2)]
    group = torch.randint(0, 2, (count + 2,), generator=g)
    batch = response_batch([prompts[i] for i in group], ends, 0)
    packed = pack_texts(batch.input_ids, batch.attention_mask, group if is_grouped else None, hidden_size, most_columns)
    if packed is None:
        return
    assert packed.input_ids.shape[1] <= (most_columns or 10**9)
    for i, (ids, kept) in enumerate(zip(batch.input_ids, batch.attention_mask)):
        own, row = packed.columns[i][kept], packed.rows[i]
        assert torch.equal(packed.input_ids[row, own], ids[kept])
        assert packed.positions[row, own].tolist() == list(range(len(own)))
        for t, column in enumerate(own.tolist()):
            assert packed.visible[row, column].nonzero()[:, 0].tolist() == own[: t + 1].tolist()


def test_rows_without_tokens_stay_separate():
    empty = torch.zeros(3, 2, dtype=torch.int64)
    assert pack_texts(empty, empty.bool(), None, 64) is None
    assert pack_texts(empty[:0], empty[:0].bool(), None, 64) is None


def test_rows_that_are_not_right_padded_stay_separate():
    batch = response_batch(rows_of(20, 4, 4, 4), [[] for _ in range(4)], 0)
    right = batch.input_ids, batch.attention_mask
    left = [torch.stack([row.roll(20 - n) for row, n in zip(part, (20, 4, 4, 4))]) for part in right]
    assert pack_texts(*right, None, 64) is not None and pack_texts(*left, None, 64) is None


def test_a_row_holds_several_pairs_and_hides_them_from_each_other():
    pairs = [pair([5, 9, 3], [8], [7, 6]), pair([5, 9], [4, 8], [7])]  # begin alike, but are not one group
    batch = preference_batch(pairs, 0)
    packed = pack_texts(batch.input_ids, batch.attention_mask, batch.group, 64)
    assert packed.input_ids.shape[0] == 1 and packed.rows.tolist() == [0] * 4
    for row in range(4):
        kept = batch.attention_mask[row]
        columns = packed.columns[row][kept]
        assert torch.equal(packed.input_ids[0, columns], batch.input_ids[row][kept])
        assert packed.positions[0, columns].tolist() == [*range(len(columns))]
        sees = [packed.visible[0, column].nonzero()[:, 0].tolist() for column in columns]
        assert sees == [columns[: end + 1].tolist() for end in range(len(columns))]


@pytest.mark.parametrize("make, architecture", KINDS)
def test_values_and_gradients_are_those_of_separate_rows(make, architecture):
    role = make(architecture, **WIDE.get(architecture, {}))
    enable_packing(role)
    assert role.packs == (architecture not in SEPARATE) and not role.training
    batch = preference_batch(PAIRS, 0)
    weights = torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(0)) * batch.attention_mask
    found = []
    for packs in (False, role.packs):
        role.packs = packs
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


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "gemma2", "gpt_neox", "opt"])
@pytest.mark.parametrize("make", [tiny_policy, tiny_scalar])
def test_texts_without_groups_match_each_text_alone_in_float64(make, architecture):
    role = make(architecture, **WIDE.get(architecture, {})).double()
    enable_packing(role)
    batch, found = grouped([12, 20, 33], MIXED), []
    batch.group = None
    assert pack_texts(batch.input_ids, batch.attention_mask, None, 32).input_ids.numel() < batch.input_ids.numel()
    for rows in (torch.arange(9).split(9), torch.arange(9).split(1)):  # together, and each without padding
        parts = [batch.select(i) for i in rows]
        if make is tiny_policy:
            sums = [role(**policy_inputs(part)).logprobs.sum(1) for part in parts]
        else:
            sums = [(role(*ids_and_mask(part)) * part.attention_mask).sum(1) for part in parts]
        torch.cat(sums).pow(2).sum().backward()
        found.append((torch.cat(sums).detach(), gradients(role)))
    (together, slopes), (single, others) = found
    assert role.packs and torch.allclose(together, single, rtol=1e-6)
    assert_same_gradients(slopes, others, 1e-5)


def ids_and_mask(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.input_ids, batch.attention_mask


def shapes_of(role, monkeypatch) -> list[tuple[int, int]]:
    """The shapes of the ids in passes from now on."""
    shapes: list[tuple[int, int]] = []
    forward = role.model.base_model.forward
    monkeypatch.setattr(
        role.model.base_model,
        "forward",
        lambda **given: shapes.append(tuple(given["input_ids"].shape)) or forward(**given),
    )
    return shapes


def test_fewer_tokens_are_computed(monkeypatch):
    policy = tiny_policy("llama")
    enable_packing(policy)
    shapes, batch = shapes_of(policy, monkeypatch), preference_batch(PAIRS, 0)
    policy(**policy_inputs(batch))
    assert batch.input_ids.shape == (8, 12) and shapes[0][0] * shapes[0][1] <= 4 * 13
    policy(**policy_inputs(batch.select(torch.tensor([0, 4]))))  # selected rows keep their groups
    policy(**policy_inputs(batch.select(torch.tensor([0, 5]))))
    assert shapes[1:] == [(1, 13), (2, 10)]


def test_gradients_behind_the_zeros_of_padding_are_finite():
    """The pad token's embedding is 0: where padding saw itself alone, Gemma 3n's gradients of its norm were NaN."""
    policy = Policy(zoo_model("gemma3n_text", 0.0)).eval()
    enable_packing(policy)
    batch = preference_batch(PAIRS, 0)
    packed = pack_texts(batch.input_ids, batch.attention_mask, batch.group, 32)
    for row, padding in enumerate((packed.input_ids == 0).tolist()):
        for column in (column for column, pad in enumerate(padding) if pad):
            assert packed.visible[row, column].tolist() == [k <= column for k in range(len(padding))]
    policy(**policy_inputs(batch)).logprobs.sum().backward()
    assert policy.packs and all(slope.isfinite().all() for slope in gradients(policy).values())


LEAKS = ["jamba", "lfm2", "lfm2_moe", "falcon_h1", "zamba", "inkling_text"]


@pytest.mark.parametrize("kind", LEAKS)
def test_layers_that_leak_keep_texts_separate_though_small_weights_hide_it(kind):
    policy = Policy(zoo_model(kind))
    enable_packing(policy)
    assert not policy.packs


def test_an_architecture_that_ignores_the_mask_keeps_texts_separate(monkeypatch):
    def all_earlier(model, packed):
        return packed_inputs(model, packed) | {"attention_mask": torch.ones_like(packed.input_ids)}

    monkeypatch.setattr(roles, "packed_inputs", all_earlier)
    policy = tiny_policy("llama")
    enable_packing(policy)
    assert not policy.packs


def test_what_no_trial_has_shown_is_not_packed(monkeypatch):
    monkeypatch.setattr(forward, "pack_texts", lambda *given: None)
    policy = tiny_policy("llama")
    enable_packing(policy)
    assert not policy.packs


def test_trials_leave_the_model_as_it_was():
    policy = tiny_policy("llama").train()
    before = copy.deepcopy(policy.state_dict())
    enable_packing(policy)
    assert policy.training and all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize(
    "architecture, window",
    [("mistral", "sliding_window"), ("gemma2", "sliding_window"), ("llama", "attention_chunk_size"), ("llama", None)],
)
def test_texts_that_exceed_a_window_stay_separate(architecture, window, monkeypatch):
    policy = tiny_policy(architecture, **({window: 16} if window else {}))
    enable_packing(policy)
    if window is None:  # that of a text model within a larger one
        inner = copy.deepcopy(policy.model.config)
        inner.sliding_window = 16
        monkeypatch.setattr(type(inner), "get_text_config", lambda *given, **options: inner)
    shapes = shapes_of(policy, monkeypatch)
    for longest in (16, 17):
        policy(**policy_inputs(response_batch(rows_of(*[4] * 9, longest), [[]] * 10, 0)))
    assert policy.packs and shapes[0][0] < 10 and shapes[1] == (10, 17)


def test_gpt_neos_window_counts_the_columns_of_the_packed_row(monkeypatch):
    policy = tiny_policy("gpt_neo", window_size=24)
    enable_packing(policy)
    shapes = shapes_of(policy, monkeypatch)
    policy(**policy_inputs(response_batch(rows_of(*[4] * 9, 16), [[]] * 10, 0)))
    assert shapes[0][0] < 10 and shapes[0][1] <= 24


@pytest.mark.parametrize("packs", [False, True])
def test_texts_behind_a_cache_stay_separate(packs):
    """A cache holds the columns of each row, (8, 16) here; behind them are 1 to 4 tokens."""
    policy = tiny_policy("llama").eval()
    policy.packs = packs
    batch = response_batch(rows_of(*[16] * 8), rows_of(1, 1, 1, 1, 1, 1, 1, 4), 0)
    whole = policy.choice_logits(batch.input_ids, batch.attention_mask, batch.action_mask)  # (N, V)
    cache, first = DynamicCache(), torch.zeros(8, 15, dtype=torch.bool)
    ids, mask = batch.input_ids, batch.attention_mask
    policy.choice_logits(ids[:, :16], mask[:, :16], first, cache=cache)
    later = batch.action_mask[:, 16:]  # those after the first token behind the cache
    found = policy.choice_logits(ids[:, 16:], mask, later, cache=cache)
    places = batch.action_mask.nonzero()[:, 1] >= 16
    assert torch.allclose(found, whole[places], atol=1e-5)
