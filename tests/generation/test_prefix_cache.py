"""The prefix cache: logits as if everything had been read, and less of it read."""

from __future__ import annotations

import pytest
import torch
from helpers import ARCHITECTURES, tiny_policy

from lightrlhf.cli.args import GenerationArgs
from lightrlhf.data.batch import response_batch
from lightrlhf.generation.engine import generate
from lightrlhf.generation.prefix_cache import CachedPrefix, can_keep, load_prefixes, shared_length, store_prefixes

GROWING = [  # three episodes, each prompt the next one of its episode; the second begins late, the third forks early
    [[5, 9, 3], [4, 8, 2, 7, 6], [3, 3, 3, 3]],
    [[5, 9, 3, 11, 12, 6], [4, 8, 2, 9], [7]],
    [[5, 9, 3, 11, 12, 6, 2, 2, 8], [4, 8, 2, 9, 10, 10], [7, 7, 5]],
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_growing_prompts_give_the_logits_of_whole_ones(architecture):
    policy = tiny_policy(architecture)
    assert can_keep(policy.model) == (architecture != "mamba")  # whose state is no list of keys and values
    if architecture == "mamba":
        return
    read: list[CachedPrefix | None] = [None] * 3
    counts = []
    for prompts in GROWING:
        past = load_prefixes(policy.model, prompts, read)
        batch = response_batch(past.rest, [[0]] * 3, 0)
        mask = torch.cat([past.mask, batch.attention_mask], 1)
        found = policy.choice_logits(batch.input_ids, mask, batch.action_mask, cache=past.cache)
        read = store_prefixes(past, prompts)
        counts.append([len(rest) for rest in past.rest])
        whole = response_batch(prompts, [[0]] * 3, 0)
        expected = policy.choice_logits(whole.input_ids, whole.attention_mask, whole.action_mask)
        assert torch.allclose(found, expected, atol=1e-4)
        assert all(keys.shape[1] == len(one.ids) for one in read for keys, _ in one.layers)
    assert counts == [[3, 5, 4], [3, 3, 1], [3, 3, 3]]  # as many of all as of the one with the most to read


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "mamba"])
def test_the_engine_goes_on_where_it_stopped_reading(architecture):
    policy = tiny_policy(architecture)
    args, uniforms = GenerationArgs(max_new_tokens=6), torch.rand(4, 6, generator=torch.Generator().manual_seed(1))
    widths: list[int] = []
    policy.model.register_forward_pre_hook(
        lambda _, __, options: widths.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    reads: list[CachedPrefix | None] = [None] * 4
    for prompts in GROWING:
        prompts = [*prompts, prompts[0]]  # the last two episodes of the four are alike so far
        whole = generate(policy, prompts, args, [0], uniforms, num_slots=2)
        widths.clear()
        said = generate(policy, prompts, args, [0], uniforms, num_slots=2, reads=reads)
        assert said.responses == whole.responses
        for one, other in zip(said.logprobs, whole.logprobs):
            assert one == pytest.approx(other, abs=1e-4)
        assert [list(read.ids) for read in reads] == prompts
        assert all(keys.shape[1] == len(read.ids) for read in reads for keys, _ in read.layers)
        assert max(widths) == (5 if prompts[0] == GROWING[0][0] else 3)


def test_the_last_id_is_always_read():
    read = CachedPrefix([1, 2, 3, 4], [])
    for prompt, length in (([1, 2, 3, 4], 3), ([1, 2, 3, 4, 5, 6], 4), ([1, 2, 9, 4], 2), ([8], 0), ([1], 0)):
        assert shared_length(prompt, read) == length
    assert shared_length([1, 2], None) == 0
