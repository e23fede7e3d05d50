"""Attention by batched products is that of float64, forwards and backwards, and goes away again."""

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_policy

from lightrlhf.cpu import attention

pytestmark = pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch cannot hand out its kernels")
MASKS = {  # shapes before (T, C)
    "none": None,
    "causal": None,
    "one": (),
    "of rows": (3, 1),
    "of heads": (3, -1),
    "of heads, alike in all rows": (1, -1),
    "a row without columns": (3, 1),
}


@pytest.fixture
def restored():
    """torch's own kernels; those before them afterwards."""
    before = bool(attention._replaced)
    attention.restore_attention()
    yield
    attention.restore_attention()
    if before:
        attention.replace_attention()


@pytest.fixture
def replaced(restored):
    """Batched products, whatever the processor."""
    attention.replace_attention()


def inputs(heads: int, groups: int, tokens: int = 7, columns: int = 7, size: int = 8) -> list[torch.Tensor]:
    """Queries, keys and values of bfloat16, by tokens in memory, as layers have them."""
    generator = torch.Generator().manual_seed(heads + groups + tokens)
    shapes = (tokens, heads), (columns, groups), (columns, groups)
    made = [torch.randn(3, rows, count, size, generator=generator).bfloat16() for rows, count in shapes]
    return [states.transpose(1, 2).requires_grad_() for states in made]


def options(kind: str, heads: int, tokens: int = 7, columns: int = 7) -> dict:
    """Arguments of attention with a kind of mask, in which each query sees a column."""
    if kind in ("none", "causal"):
        return {"is_causal": kind == "causal"}
    shape = [heads if size < 0 else size for size in MASKS[kind]]
    mask = torch.rand(*shape, tokens, columns, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = True
    if kind == "a row without columns":
        mask[1] = False
    return {"attn_mask": mask}


def attend(states: list[torch.Tensor], **kwargs) -> list[torch.Tensor]:
    """The outputs of attention, and its gradients of queries, keys and values."""
    own = [one.detach().clone(memory_format=torch.preserve_format).requires_grad_() for one in states]
    outputs = F.scaled_dot_product_attention(*own, enable_gqa=own[0].shape[1] != own[1].shape[1], **kwargs)
    weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs).to(outputs.dtype)
    outputs.backward(weights)
    return [outputs.detach(), *(one.grad for one in own)]


def assert_near_float64(found: list[torch.Tensor], states: list[torch.Tensor], **kwargs) -> None:
    expected = attend([one.detach().double() for one in states], **kwargs)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is torch.bfloat16
        size = torch.maximum(other.norm(), expected[-1].norm())  # where one column is seen, two gradients are 0
        assert float((one.double() - other).norm() / size) < 0.01


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("heads, groups", [(4, 4), (6, 2)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_outputs_and_gradients_are_those_of_float64(heads, groups, kind, scale, replaced):
    states, chosen = inputs(heads, groups), options(kind, heads) | {"scale": scale}
    found = attend(states, **chosen)
    assert_near_float64(found, states, **chosen)
    if kind == "a row without columns":
        assert not found[0][1].any() and not found[1][1].any()


@pytest.mark.parametrize("tokens, columns", [(1, 5), (4, 9), (9, 4)])
def test_rows_may_have_other_numbers_of_queries_than_of_columns(tokens, columns, replaced):
    states = inputs(4, 2, tokens, columns)
    for kind in ("causal", "of rows"):
        chosen = options(kind, 4, tokens, columns)
        assert_near_float64(attend(states, **chosen), states, **chosen)


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (3, 1, 1, 7), (1, 6, 1, 7), (3, 6, 7, 1), (1, 1, 1, 1)])
def test_masks_may_be_the_same_for_all_queries_or_columns(shape, replaced):
    states = inputs(6, 2)
    mask = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = attend([one.detach().double() for one in states], attn_mask=mask.double())
    for one, other in zip(attend(states, attn_mask=mask), expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 0.01


@pytest.mark.parametrize("kind", MASKS)
def test_a_few_rows_at_a_time_are_as_all_at_once(kind, replaced, monkeypatch):
    states, chosen = inputs(4, 2), options(kind, 4)
    whole = attend(states, **chosen)
    for rows in (1, 2):
        monkeypatch.setattr(attention, "MOST_SCORES", rows * 4 * 7 * 7)
        for one, other in zip(attend(states, **chosen), whole, strict=True):
            assert float((one - other).detach().norm() / other.detach().norm()) < 0.01


def test_other_types_long_rows_and_dropout_are_left_to_torch(replaced, monkeypatch):
    states, chosen = inputs(4, 4), options("of rows", 4)
    plain = [one.detach().float() for one in states]
    with pytest.raises(RuntimeError, match="dropout"):  # which torch's kernel has not
        getattr(torch.ops.aten, attention.FORWARD)(*states, 0.5)
    found = attend(plain, **chosen)
    monkeypatch.setattr(attention, "MOST_SCORES", 4 * 7 * 7 - 1)
    found += attend(states, **chosen)
    attention.restore_attention()
    for one, other in zip(found, attend(plain, **chosen) + attend(states, **chosen), strict=True):
        assert torch.equal(one, other)


def test_what_is_not_a_number_stays_so(replaced):
    states = inputs(4, 4)
    with torch.no_grad():
        states[0][1, 2, 3] = torch.nan
    outputs, *_ = attend(states, **options("of rows", 4))
    assert outputs[1, 2, 3].isnan().all() and int(outputs.isnan().sum()) == outputs.shape[-1]


@pytest.mark.parametrize("faster", [True, False])
def test_a_model_is_the_same_up_to_rounding(faster, restored, monkeypatch):
    monkeypatch.setattr(attention, "is_faster", lambda: faster)
    policy = tiny_policy("llama", num_key_value_heads=2)
    ids = torch.randint(2, 40, (3, 12), generator=torch.Generator().manual_seed(1))
    words = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "action_mask": torch.ones(3, 11) > 0}
    expected = policy(**words).logprobs
    for _ in range(2):
        attention.use_batched_attention()
    assert len(attention._replaced) == int(faster)
    with torch.autocast("cpu", torch.bfloat16):
        found = policy(**words).logprobs
    assert float((found - expected).detach().abs().max()) < 0.05 * float(expected.detach().abs().max())


def test_processors_with_amx_or_narrower_vectors_keep_torchs_kernel(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for width, has_bf16, has_amx, expected in (
        ("AVX512", True, False, True),
        ("AVX512", True, True, False),
        ("AVX512", False, False, False),
        ("AVX2", True, False, False),  # by ATEN_CPU_CAPABILITY
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda value=width: value)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda value=has_bf16: value, raising=False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda value=has_amx: value, raising=False)
        assert attention.is_faster() is expected
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert not attention.is_faster()
