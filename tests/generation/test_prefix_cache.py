"""The prefix cache: the logits of uncached prompts, from fewer computed tokens."""

import pytest
import torch
from helpers import ARCHITECTURES, tiny_policy

from lightrlhf.cli.groups import DecodingArgs
from lightrlhf.data.batch import response_batch
from lightrlhf.generation.engine import generate
from lightrlhf.generation.prefix_cache import CachedPrefix, has_kv_cache, load_prefixes, shared_length, store_prefixes

GROWING = [  # prompts of three episodes over time; the second drops its end, the third shares nothing
    [[5, 9, 3], [4, 8, 2, 7, 6], [3, 3, 3, 3]],
    [[5, 9, 3, 11, 12, 6], [4, 8, 2, 9], [7]],
    [[5, 9, 3, 11, 12, 6, 2, 2, 8], [4, 8, 2, 9, 10, 10], [7, 7, 5]],
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_cached_prompts_give_the_logits_of_uncached_ones(architecture):
    policy = tiny_policy(architecture)
    assert has_kv_cache(policy.model) == (architecture != "mamba")
    if architecture == "mamba":
        return
    prefixes: list[CachedPrefix | None] = [None] * 3
    counts = []
    for prompts in GROWING:
        cached = load_prefixes(policy.model, prompts, prefixes)
        batch = response_batch(cached.rest, [[0]] * 3, 0)
        mask = torch.cat([cached.mask, batch.attention_mask], 1)
        found = policy.choice_logits(batch.input_ids, mask, batch.action_mask, cache=cached.cache)
        prefixes = store_prefixes(cached, prompts)
        counts.append([len(rest) for rest in cached.rest])
        whole = response_batch(prompts, [[0]] * 3, 0)
        expected = policy.choice_logits(whole.input_ids, whole.attention_mask, whole.action_mask)
        assert torch.allclose(found, expected, atol=1e-4)
        assert all(keys.shape[1] == len(one.ids) for one in prefixes for keys, _ in one.layers)
    assert counts == [[3, 5, 4], [3, 3, 1], [3, 3, 3]]  # as many of each as of the one with most uncached tokens


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "mamba"])
@pytest.mark.parametrize("steps", [6, 20])  # with the decoder of packed weights, too
def test_the_engine_computes_uncached_tokens_only(architecture, steps):
    policy = tiny_policy(architecture)
    args = DecodingArgs(max_new_tokens=steps)
    uniforms = torch.rand(4, steps, generator=torch.Generator().manual_seed(1))
    widths: list[int] = []
    policy.model.register_forward_pre_hook(
        lambda _, __, options: widths.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    prefixes: list[CachedPrefix | None] = [None] * 4
    for prompts in GROWING:
        prompts = [*prompts, prompts[0]]  # the last two episodes of the four are alike so far
        whole = generate(policy, prompts, args, [0], uniforms, num_slots=2)
        widths.clear()
        sampled = generate(policy, prompts, args, [0], uniforms, num_slots=2, prefixes=prefixes)
        assert sampled.responses == whole.responses
        for one, other in zip(sampled.logprobs, whole.logprobs):
            assert one == pytest.approx(other, abs=1e-4)
        assert [list(prefix.ids) for prefix in prefixes] == prompts
        assert all(keys.shape[1] == len(prefix.ids) for prefix in prefixes for keys, _ in prefix.layers)
        assert max(widths) == (5 if prompts[0] == GROWING[0][0] else 3)


def test_the_last_id_is_never_taken_from_the_cache():
    prefix = CachedPrefix([1, 2, 3, 4], [])
    for prompt, length in (([1, 2, 3, 4], 3), ([1, 2, 3, 4, 5, 6], 4), ([1, 2, 9, 4], 2), ([8], 0), ([1], 0)):
        assert shared_length(prompt, prefix) == length
    assert shared_length([1, 2], None) == 0
