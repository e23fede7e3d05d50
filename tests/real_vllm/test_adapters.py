"""A policy with adapters, which a real vLLM puts on its own base."""

import pytest
from helpers.proxy import FirstAdapter
from helpers.real_vllm import assert_no_gap, serving_vllm

pytestmark = pytest.mark.slow

LORA = ["--finetune_mode", "lora", "--lora_rank", 4, "--learning_rate", "1e-2", "--exchange_adapter", "True"]


@pytest.fixture(scope="module")
def server(cafe_sft):
    with serving_vllm(cafe_sft, enable_lora=True, max_lora_rank=8) as url:
        yield url


def test_adapters_have_no_gap_to_vllm(trained, server):
    assert_no_gap(trained(server, *LORA))


def test_a_reused_name_of_an_adapter_is_named(failure, server):
    line = failure(server, FirstAdapter(tells_paths=False), *LORA)
    assert "at step 2" in line and "an adapter's name was used before" in line


def test_an_adapter_from_another_path_is_named(failure, server):
    line = failure(server, FirstAdapter(tells_paths=True), *LORA)
    assert "serves adapter" in line and "not from" in line and "restart the server" in line
