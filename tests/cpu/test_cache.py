"""Attention over the columns of each slot is that of float64, and rows may come, move and leave."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_policy

from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.cpu import cache, decoder
from lightrlhf.cpu.cache import BLOCKS, Attention, RaggedLayer, has_fast_sums
from lightrlhf.generation.engine import generate
from lightrlhf.generation.slots import SlabLayer, Slots

BLOCK = BLOCKS[torch.float32]
SLOTS, GROUPS, SIZE, COLUMNS = 5, 2, 12, 4 * RaggedLayer.multiple
pytestmark = pytest.mark.skipif(not has_fast_sums(), reason="torch has no FBGEMM here")


class Unwritten:
    """torch, whose new memory is NaN."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(size, torch.nan, dtype=dtype)


def prefilled(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    keys, values = torch.randn(2, rows, GROUPS, columns, SIZE)
    return SimpleNamespace(keys=keys.to(dtype), values=values.to(dtype), get_seq_length=lambda: columns)


def both(columns: int, dtype: torch.dtype = torch.float32) -> tuple[RaggedLayer, SlabLayer]:
    """The two kinds of cache with the same rows."""
    first = prefilled(SLOTS, columns, dtype)
    layers = RaggedLayer(first, SLOTS, COLUMNS), SlabLayer(first, SLOTS, COLUMNS)
    for layer in layers:
        layer.insert(torch.arange(SLOTS), first, torch.arange(SLOTS))
    return layers


def keys_and_values(layer: RaggedLayer) -> list[torch.Tensor]:
    """(slots, groups, columns, D) each"""
    return [cache.permute(1, 2, 0, 3, 4).flatten(2, 3) for cache in (layer.keys.transpose(3, 4), layer.values)]


def assert_same(ragged: RaggedLayer, slab: SlabLayer, late: tuple[int, ...] = ()) -> None:
    """late: slots of which only the last seven columns count."""
    assert (ragged.start, ragged.end) == (slab.start, slab.end)
    for slot in range(len(slab.slabs[0])):
        part = slice(slab.end - 7 if slot in late else slab.start, slab.end)
        for found, expected in zip(keys_and_values(ragged), slab.slabs, strict=True):
            assert torch.equal(found[slot, :, part], expected[slot, :, part])


@pytest.mark.parametrize("dtype", BLOCKS)
def test_rows_come_move_and_leave_as_in_a_slab(dtype):
    ragged, slab = both(BLOCKS[dtype] + 3, dtype)
    for _ in range(ragged.multiple):
        keys, values = torch.randn(2, SLOTS, GROUPS, SIZE)
        ragged.update(keys, values)
        slab.update(keys[:, :, None], values[:, :, None])
    assert_same(ragged, slab)
    late = prefilled(3, 7, dtype)
    for layer in (ragged, slab):
        layer.insert(torch.tensor([3, 1]), late, torch.tensor([2, 0]))
    assert_same(ragged, slab, (3, 1))
    for layer in (ragged, slab):
        layer.compact(torch.tensor([0]), torch.tensor([4]), 4)
    assert_same(ragged, slab, (3, 1))
    for layer in (ragged, slab):
        layer.start = ragged.multiple + 1
        layer.drop_columns(ragged.multiple)
    assert_same(ragged, slab, (3, 1))


def test_all_of_the_last_block_is_finite_after_columns_were_dropped(monkeypatch):
    monkeypatch.setattr(cache, "torch", Unwritten())
    layer = RaggedLayer(prefilled(SLOTS, 2 * BLOCK + 5), SLOTS, COLUMNS)
    layer.start = layer.end
    layer.insert(torch.arange(SLOTS), prefilled(SLOTS, 7), torch.arange(SLOTS))
    layer.drop_columns(BLOCK)
    assert layer.end == BLOCK + 5
    assert layer.keys[1].isfinite().all() and layer.values[1].isfinite().all()


def test_what_precedes_a_short_prompt_in_its_first_block_is_finite(monkeypatch):
    """In a slot that had no longer one before."""
    monkeypatch.setattr(cache, "torch", Unwritten())
    long, short = prefilled(SLOTS, 2 * BLOCK + 5), prefilled(1, BLOCK - 7)
    layer = RaggedLayer(long, SLOTS, COLUMNS)
    layer.insert(torch.arange(SLOTS - 1), long, torch.arange(SLOTS - 1))
    layer.insert(torch.tensor([SLOTS - 1]), short, torch.tensor([0]))
    mask = torch.zeros(SLOTS, COLUMNS, dtype=torch.bool)
    mask[: SLOTS - 1, : layer.end + 1] = True
    mask[SLOTS - 1, layer.end - (BLOCK - 7) : layer.end + 1] = True
    attention = Attention(mask, layer, GROUPS)
    attention.begin_step()
    layer.update(*torch.randn(2, SLOTS, GROUPS, SIZE))
    assert attention(torch.randn(SLOTS, 2 * GROUPS, SIZE), layer).isfinite().all()


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("blocks, more", [(1, -1), (1, 0), (2, 5)])
@pytest.mark.parametrize("dtype", BLOCKS)
def test_attention_is_that_of_float64_over_the_columns_of_each_slot(heads, blocks, more, dtype):
    """In float16 queries and weights are rounded to it, and so are the scores and the outputs."""
    columns = blocks * BLOCKS[dtype] + more
    layer, _ = both(columns, dtype)
    assert layer.keys.dtype is layer.values.dtype is dtype
    mask = torch.zeros(SLOTS, COLUMNS, dtype=torch.bool)
    for slot in range(SLOTS):  # the last one has the new column alone
        mask[slot, columns * slot // (SLOTS - 1) : columns] = True
    attention = None
    for _ in range(layer.block + 2):
        mask[:, layer.end] = True
        if attention is None or not attention.holds(layer):
            attention = Attention(mask, layer, heads)
        attention.begin_step()
        keys, values = torch.randn(2, SLOTS, GROUPS, SIZE)
        layer.update(keys, values)
        turned = 0.3 * torch.randn(SLOTS, heads + GROUPS, SIZE)
        found = attention(turned, layer)
        states = (part[:, :, : layer.end] for part in keys_and_values(layer))
        keys, values = (part.double().repeat_interleave(heads // GROUPS, 1) for part in states)
        queries, seen = turned[:, :heads].double(), mask[:, None, : layer.end]
        weights = torch.einsum("shd,shcd->shc", queries, keys).masked_fill(~seen, -torch.inf).softmax(-1)
        expected = torch.einsum("shc,shcd->shd", weights, values).flatten(1)
        largest = torch.einsum("shc,shcd->shd", weights, values.abs()).flatten(1)
        unit = 1e-6 if dtype is torch.float32 else 2**-11
        score = (torch.einsum("shd,shcd->shc", queries.abs(), keys.abs()) * seen).amax(-1)  # before numbers cancel
        rounding = 2 * (2 * unit * score) + 2 * unit  # of queries and scores, in numerator and denominator; of the rest
        assert ((found.double() - expected).abs() <= 1.1 * rounding.repeat_interleave(SIZE, 1) * largest).all()


def test_what_is_left_of_a_prompt_is_not_read():
    layer, _ = both(3 * BLOCK)
    mask = torch.zeros(SLOTS, COLUMNS, dtype=torch.bool)
    mask[:, 3 * BLOCK - 4 :] = True
    mask[0, :BLOCK] = True
    attention = Attention(mask, layer, GROUPS)
    assert len(attention.blocks) == GROUPS * (2 * SLOTS + 1) and attention.first == 0
    assert len(attention.columns) == GROUPS * ((BLOCK + 4) * SLOTS + BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 2, 64])
def test_long_calls_that_refill_slots_and_drop_columns_equal_the_model(num_slots, monkeypatch):
    """Memory that was not written is NaN here, which would stay NaN with a weight of 0."""
    monkeypatch.setattr(cache, "torch", Unwritten())
    policy = tiny_policy("llama", num_key_value_heads=2, max_position_embeddings=512)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, 40, (3 + 5 * (row % 8),), generator=generator).tolist() for row in range(16)]
    noise, args = torch.rand(16, 60, generator=generator), SamplingArgs(max_new_tokens=60)
    dropped, drop = [], Slots._drop_columns
    monkeypatch.setattr(Slots, "_drop_columns", lambda self, count: (dropped.append(count), drop(self, count)))
    found = generate(policy, prompts, args, [7, 9], noise, num_slots)
    assert bool(dropped) is (num_slots < 16) and all(count % BLOCK == 0 < count for count in dropped)
    monkeypatch.setattr(decoder, "LEAST_STEPS", 61)
    expected = generate(policy, prompts, args, [7, 9], noise, num_slots)
    assert found.responses == expected.responses and 60 in map(len, found.responses)
    assert min(map(len, found.responses)) < 60
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
