"""The prefix cache: logits as if everything had been read, and less of it read."""

from __future__ import annotations

import pytest
import torch
from helpers import ARCHITECTURES, tiny_policy

from lightrlhf.common.batch import response_batch
from lightrlhf.common.prefix_cache import Read, can_keep, past_of, read_of, shared_length

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
    read: list[Read | None] = [None] * 3
    counts = []
    for prompts in GROWING:
        past = past_of(policy.model, prompts, read)
        batch = response_batch(past.rest, [[0]] * 3, 0)
        mask = torch.cat([past.mask, batch.attention_mask], 1)
        found = policy.choice_logits(batch.input_ids, mask, batch.action_mask, cache=past.cache)
        read = read_of(past, prompts)
        counts.append([len(rest) for rest in past.rest])
        whole = response_batch(prompts, [[0]] * 3, 0)
        expected = policy.choice_logits(whole.input_ids, whole.attention_mask, whole.action_mask)
        assert torch.allclose(found, expected, atol=1e-4)
        assert all(keys.shape[1] == len(one.ids) for one in read for keys, _ in one.layers)
    assert counts == [[3, 5, 4], [3, 1, 1], [3, 2, 2]]


def test_the_last_id_is_always_read():
    read = Read([1, 2, 3, 4], [])
    for prompt, length in (([1, 2, 3, 4], 3), ([1, 2, 3, 4, 5, 6], 4), ([1, 2, 9, 4], 2), ([8], 0), ([1], 0)):
        assert shared_length(prompt, read) == length
    assert shared_length([1, 2], None) == 0
