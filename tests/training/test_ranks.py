"""Ranks: shares of a batch, and random numbers (collectives: test_devices.py)."""

import pytest
import torch


@pytest.mark.parametrize("world_size, num_rows", [(2, 9), (3, 10), (4, 5)])
def test_ranks_share_a_batch_without_overlap_and_none_goes_empty(run, world_size, num_rows):
    one = run()
    one.ranks.world_size = world_size
    seen = []
    for step in range(one.order.num_steps(range(num_rows), 2)):
        batch = one.order.global_batch([{"number": i} for i in range(num_rows)], step, 2)
        shares = []
        for rank in range(world_size):
            one.ranks.rank = rank
            shares.append([row["number"] for row in one.ranks.shard(batch)])
        assert all(shares) and max(map(len, shares)) - min(map(len, shares)) <= 1
        assert sum(shares, []) == [row["number"] for row in batch]
        seen += sum(shares, [])
    one.ranks.world_size = 1
    assert set(seen) == set(range(num_rows)) and len(seen) < num_rows + world_size


def test_noise_follows_from_seed_and_step_alone(run):
    one = run(seed=1)
    torch.rand(7)
    draws = [torch.rand(3, generator=one.ranks.generator(*key)) for key in ((5,), (5,), (6,), (5, 0), (-1,))]
    assert torch.equal(draws[0], draws[1])
    assert len({tuple(draw.tolist()) for draw in draws}) == 4
