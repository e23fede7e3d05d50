"""Texts that follow one another in a row: values and gradients as of padded rows, by attention to each text alone."""

import pytest
import torch
from helpers import assert_same_gradients, gradients, rows_of, save_model, tiny_policy, tiny_scalar
from helpers.trained import train_a_little
from helpers.varlen import attend_alone
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from lightrlhf.cli.groups import ModelArgs
from lightrlhf.data.batch import Batch, response_batch
from lightrlhf.models import varlen
from lightrlhf.models.loading import load_policy, load_scalar, switch_off_dropout
from lightrlhf.models.probes import enable_packing
from lightrlhf.models.roles import policy_inputs, scalar_inputs

LENGTHS = (3, 17, 1, 9, 4)


@pytest.fixture
def in_float64(monkeypatch):
    """The layout of CUDA on a CPU in any precision, with attention to each text alone."""
    monkeypatch.setattr(varlen, "DEVICES", {"cpu"})
    monkeypatch.setattr(varlen, "half_precision", lambda device: torch.float64)
    monkeypatch.setattr(varlen, "kernel", lambda: attend_alone)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", {**AttentionInterface._global_mapping})
    varlen.is_right.cache_clear()
    yield
    varlen.is_right.cache_clear()


def batch_of(*lengths: int) -> Batch:
    return response_batch(rows_of(*(n + 1 for n in lengths)), rows_of(*reversed(lengths)), 0)


def test_a_row_holds_the_texts_without_padding():
    ids = torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0], [1, 2, 3, 4]])
    row = varlen.text_row(ids, ids > 0)
    assert row.input_ids.tolist() == [[5, 6, 7, 1, 2, 3, 4]] and row.positions.tolist() == [[0, 1, 0, 0, 1, 2, 3]]
    assert row.ends.tolist() == [0, 2, 3, 7] and row.ends.dtype is torch.int32 and row.longest == 4
    assert row.columns.tolist() == [[0, 1, 0, 0], [2, 0, 0, 0], [3, 4, 5, 6]] and row.rows.tolist() == [0, 0, 0]
    assert row.as_mask().shape == (1, 1, 4, 4) and row.as_mask().untyped_storage().nbytes() == 16


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2", "mistral", "gpt_neox", "opt"])
@pytest.mark.parametrize("make", [tiny_policy, tiny_scalar])
def test_values_and_gradients_are_those_of_padded_rows(make, architecture, in_float64):
    wide = {"sliding_window": 64} if architecture == "mistral" else {}
    role, batch, found = make(architecture, **wide).double(), batch_of(*LENGTHS), []
    switch_off_dropout(role.model)
    enable_packing(role)
    rows = count_rows(role)
    for packs in (True, False):
        role.packs = packs
        if make is tiny_policy:
            values = role(**policy_inputs(batch), temperature=0.7).logprobs
        else:
            values = role(**scalar_inputs(batch)) * batch.attention_mask
        role.zero_grad()
        values.pow(2).sum().backward()
        found.append((values.detach(), gradients(role)))
    assert role.attends_by_text and rows[-2:] == [1, len(LENGTHS)]
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-6)
    assert_same_gradients(found[0][1], found[1][1], 1e-6)


def count_rows(role) -> list[int]:
    """Rows of the passes from now on."""
    rows: list[int] = []
    role.model.get_input_embeddings().register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    return rows


@pytest.mark.parametrize("checkpointing", [False, True])
def test_recomputed_passes_and_roles_on_one_backbone_attend_by_text(checkpointing, in_float64, tmp_path, tokenizer):
    args = ModelArgs(finetune_mode="lora", activation_checkpointing=checkpointing)
    policy = load_policy(str(save_model("llama", tmp_path, tokenizer)), args, tokenizer, shares=True)
    train_a_little(policy)
    critic = load_scalar(str(tmp_path), args, tokenizer, 3, backbone=policy)
    roles = policy.double().train(), critic.double().train()
    for role in roles:
        enable_packing(role)
    reference, batch, found = policy.reference(), batch_of(*LENGTHS), []
    for packs in (True, False):
        policy.packs = critic.packs = reference.packs = packs
        logprobs, values = policy(**policy_inputs(batch)).logprobs, critic(**scalar_inputs(batch))
        before = reference(**policy_inputs(batch)).logprobs
        ((logprobs - before.detach()).pow(2).sum() + values[batch.attention_mask].pow(2).sum()).backward()
        found.append((before.detach(), gradients(policy) | gradients(critic)))
    assert policy.attends_by_text and critic.attends_by_text and reference.attends_by_text
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-6) and not torch.equal(before, logprobs)
    assert_same_gradients(found[0][1], found[1][1], 1e-6)


def test_in_bfloat16_the_queries_and_keys_are_cast(monkeypatch):
    """Rotation makes them float32 under autocast."""
    seen = []
    monkeypatch.setattr(varlen, "DEVICES", {"cpu"})
    monkeypatch.setattr(varlen, "kernel", lambda: lambda *given: seen.append(given) or attend_alone(*given))
    monkeypatch.setattr(AttentionInterface, "_global_mapping", {**AttentionInterface._global_mapping})
    varlen.is_right.cache_clear()
    policy, batch, found = tiny_policy("llama"), batch_of(*LENGTHS), []
    enable_packing(policy)
    for packs in (True, False):
        policy.packs = packs
        with torch.autocast("cpu", torch.bfloat16):
            found.append(policy(**policy_inputs(batch)).logprobs.detach())
    assert policy.attends_by_text and {part.dtype for given in seen for part in given[:3]} == {torch.bfloat16}
    assert seen[-1][3].tolist()[-1] == int(batch.attention_mask.sum()) and seen[-1][4] == batch.input_ids.shape[1]
    assert torch.allclose(*found, atol=0.02)


def test_in_float32_texts_are_computed_as_before(monkeypatch):
    monkeypatch.setattr(varlen, "DEVICES", {"cpu"})
    monkeypatch.setattr(varlen, "kernel", lambda: pytest.fail("no kernel for float32"))
    policy = tiny_policy("llama")
    enable_packing(policy)
    policy(**policy_inputs(batch_of(*LENGTHS)))
    assert policy.attends_by_text is None


@pytest.mark.parametrize("architecture, changes", [("gpt2", {"attn_pdrop": 0.1}), ("gemma2", {}), ("gpt_neo", {})])
def test_models_with_other_attention_are_computed_as_before(architecture, changes, in_float64, monkeypatch):
    """Dropout of attention; soft caps, for which sdpa is not chosen; layers without such a function."""
    policy = tiny_policy(architecture, **changes).double()
    enable_packing(policy)
    state = torch.get_rng_state()
    policy.eval()(**policy_inputs(batch_of(*LENGTHS)))
    assert policy.attends_by_text is False and not policy.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_kernel_that_fails_or_is_wrong_is_not_used(in_float64, monkeypatch):
    def refused(*given):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    def leaks(query, key, value, ends, longest, scale):
        return attend_alone(query, key, value, ends[[0, -1]], longest, scale)

    def no_gradient(*given):
        return attend_alone(*given) * 2 - attend_alone(*given).detach()

    for kernel in (refused, leaks, no_gradient, attend_alone):
        varlen.is_right.cache_clear()
        monkeypatch.setattr(varlen, "kernel", lambda kernel=kernel: kernel)
        policy = tiny_policy("llama").double()
        enable_packing(policy)
        policy(**policy_inputs(batch_of(*LENGTHS)))
        assert policy.attends_by_text is (kernel is attend_alone), kernel


def test_groups_texts_of_a_length_and_texts_beyond_a_window_keep_their_layout(in_float64):
    policy = tiny_policy("mistral", sliding_window=32).double()
    enable_packing(policy)
    policy(**policy_inputs(batch_of(*LENGTHS)))
    rows, batch = count_rows(policy), batch_of(*LENGTHS)
    batch.group = torch.tensor([0, 1, 2, 3, 3])
    policy(**policy_inputs(batch))
    batch.group = torch.arange(5)
    policy(**policy_inputs(batch))
    policy(**policy_inputs(batch_of(8, 8, 8)))
    policy(**policy_inputs(batch_of(3, 20, 1, 20, 4)))
    assert rows[0] > 1 and rows[1:3] == [1, 3] and rows[3] == 5


@pytest.mark.parametrize("option", [{"softcap": 5.0}, {"position_bias": torch.zeros(1)}, {"is_causal": False}])
def test_attention_of_another_kind_is_refused(option, in_float64):
    ends, states = torch.tensor([0, 2, 3], dtype=torch.int32), [torch.randn(1, 2, 3, 8) for _ in range(3)]
    varlen.attend(torch.nn.Module(), *states, ends.expand(1, 1, 2, -1))
    with pytest.raises(NotImplementedError):
        varlen.attend(torch.nn.Module(), *states, ends.expand(1, 1, 2, -1), **option)


def test_a_model_of_which_some_layers_have_other_attention_is_computed_as_before(in_float64):
    policy = tiny_policy("llama").double()
    policy.model.config.num_hidden_layers += 1
    enable_packing(policy)
    policy(**policy_inputs(batch_of(*LENGTHS)))
    assert policy.attends_by_text is False


def test_torch_s_kernel_takes_these_arguments():
    """Its operator has no kernel of CPUs: it is reached, and refuses."""
    states = [torch.randn(4, number, 8) for number in (2, 1, 1)]
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen.kernel()(*states, torch.tensor([0, 3, 4], dtype=torch.int32), 3, 0.5)


def test_other_masks_are_sdpa_s(in_float64):
    module, states = torch.nn.Module(), [torch.randn(2, 2, 3, 4) for _ in range(3)]
    out = varlen.attend(module, *states, None)[0]
    assert torch.equal(out, scaled_dot_product_attention(*states, is_causal=True).transpose(1, 2))
