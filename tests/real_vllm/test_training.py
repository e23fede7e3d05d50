"""GRPO and PPO whose responses a real vLLM samples: no gap to the trainer, and each fault is named."""

import pytest
from helpers.proxy import Faults, NoReload, OldHead, OtherVersion, StaleCache, forwarding
from helpers.real_vllm import assert_no_gap, serving_vllm

from lightrlhf import ppo

pytestmark = pytest.mark.slow

LORA = ["--finetune_mode", "lora", "--lora_rank", 4, "--learning_rate", "1e-2"]


@pytest.fixture(scope="module")
def server(cafe_sft):
    with serving_vllm(cafe_sft) as url:
        yield url


# -------------------------------------------------------------------------------------------------------------- no gap
@pytest.mark.parametrize("flags", [[], ["--temperature", 0.7], LORA], ids=["all", "temperature", "merged"])
def test_grpo_has_no_gap_to_vllm(trained, server, flags):
    assert_no_gap(trained(server, *flags))


def test_ppo_has_no_gap_to_vllm(trained, server):
    assert_no_gap(trained(server, program=ppo))


def test_cached_prefixes_make_no_gap(trained, server, long_prompts):
    assert_no_gap(trained(server, data=long_prompts))


def test_a_forwarder_without_faults_makes_no_gap(trained, server):
    with forwarding(server, Faults()) as url:
        assert_no_gap(trained(url))


# -------------------------------------------------------------------------------------------------------------- faults
def test_a_stale_cache_of_prefixes_is_named(failure, server, long_prompts):
    line = failure(server, StaleCache(), data=long_prompts)
    assert "at step 2" in line and "keys and values of earlier weights were reused" in line


@pytest.mark.parametrize("good", [0, 3])
def test_another_version_is_named(failure, server, good):
    assert "says that it has another-7" in failure(server, OtherVersion(good))


@pytest.mark.parametrize("faults", [NoReload, OldHead])
def test_other_weights_than_were_given_are_named(failure, server, faults):
    line = failure(server, faults())
    assert "at step 2" in line and "other weights than it was given" in line
