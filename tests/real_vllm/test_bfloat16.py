"""A real vLLM that computes in bfloat16, for a run in float32."""

import pytest
from helpers.proxy import Faults
from helpers.real_vllm import serving_vllm

pytestmark = pytest.mark.slow


def test_a_server_in_bfloat16_is_named(cafe_sft, failure):
    with serving_vllm(cafe_sft, dtype="bfloat16") as url:
        line = failure(url, Faults())
    assert "at step 1" in line and "computes in bfloat16, this run in float32" in line
