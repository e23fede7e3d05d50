"""Values that are not finite are found in every precision, and large finite ones are not taken for them."""

import math

import pytest
import torch

from lightrlhf.maths.finite import leaves, not_finite

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_value_is_found_wherever_it_is_and_the_largest_are_finite(dtype):
    largest = torch.full((999,), torch.finfo(dtype).max, dtype=torch.float64)
    assert not_finite([("a", largest.to(dtype)), ("b", (-largest).to(dtype))]) == []
    for value in (math.nan, math.inf, -math.inf):
        for place in (0, 1, 500, 997, 998):
            values = largest.clone()
            values[place] = value
            assert not_finite([("a", largest.to(dtype)), ("b", values.to(dtype))]) == ["b"]


def test_what_holds_no_floats_is_finite():
    named = [("ids", torch.arange(3)), ("mask", torch.tensor([True])), ("none", torch.zeros(0))]
    assert not_finite(named) == [] and not_finite([]) == []
    assert not_finite([("waves", torch.tensor([1 + 1j * math.inf]))]) == ["waves"]


def test_a_tree_is_searched_to_its_leaves():
    tree = {"policy": [{"step": torch.tensor(1.0)}, (2, math.nan, "text", None)], "kl": math.inf}
    assert not_finite(leaves(tree)) == ["policy.1.1", "kl"]
