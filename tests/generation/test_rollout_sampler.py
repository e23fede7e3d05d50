"""The sampler of a run: whose rows and noise, which groups and numbers, and the check of the first rollout."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers import rows_of
from helpers.errors import error_naming
from helpers.rollouts import EOS, rollout_of
from torch import nn

from lightrlhf.cli.errors import NotFinite, RunFailure
from lightrlhf.data.batch import joined, row_numbers
from lightrlhf.generation import rollout_sampler
from lightrlhf.generation.rollout_sampler import RolloutSampler
from lightrlhf.training.ranks import LocalRanks

PROMPTS = [{"input_ids": torch.tensor(row)} for row in rows_of(3, 4, 5, 6, 2, 7, 3)]
K = 3


class Sampled:
    """A run at one of its ranks that notes what is sampled in place of a model."""

    def __init__(self, monkeypatch, rank: int = 0, world_size: int = 1, **flags) -> None:
        sizes = {"rollout_size": 2, "rollout_mini_batch_size": 4, "max_new_tokens": 5, "max_staleness": 0}
        self.args = SimpleNamespace(**(sizes | {"rollout_server": [], "sampling_correction": "none"} | flags))
        self.ranks, self.device = LocalRanks(7), torch.device("cpu")
        self.order = SimpleNamespace(planned_steps=3, draw=self.draw)
        self.ranks.rank, self.ranks.world_size = rank, world_size
        self.autocast = nullcontext
        self.seen = []
        monkeypatch.setattr(rollout_sampler, "generate_rollout", self.generate)
        monkeypatch.setattr(rollout_sampler, "store_sampling", lambda *given: None)

    def draw(self, num_rows: int, step: int, size: int) -> list[int]:
        size *= self.ranks.world_size
        return [*range(step * size, (step + 1) * size)]

    def generate(self, model, reference, rows, args, tokenizer, noise, num_slots):
        """A rollout whose log-probabilities are those of its reference."""
        self.seen.append(([row["input_ids"].tolist() for row in rows], noise))
        rollout = rollout_of(self.seen[-1][0], [[8, EOS]] * len(rows))
        rollout.ref_logprobs, rollout.row = rollout.logprobs.clone(), row_numbers(rows)
        return rollout

    def sampler(self, **given) -> RolloutSampler:
        start = SimpleNamespace(tokenizer=None, policy=None, rows=PROMPTS)
        return RolloutSampler(self, None, SimpleNamespace(model=nn.Linear(1, 1)), start, **given)


def numbers(rows: list[list[int]]) -> list[int]:
    """Which of the prompts these are."""
    return [[one["input_ids"].tolist() for one in PROMPTS].index(row) for row in rows]


def test_the_responses_to_a_prompt_are_a_group_whose_rows_and_noise_follow_from_the_step(monkeypatch):
    run = Sampled(monkeypatch)
    rollout = run.sampler(responses=K).sample(1)
    prompts, noise = run.seen[0]
    assert numbers(prompts) == [2, 2, 2, 3, 3, 3] and rollout.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert rollout.num_groups == 2 and torch.equal(noise, LocalRanks(7).noise(6, 5, 1))


def test_two_ranks_sample_what_one_does(monkeypatch):
    """Four prompts of three responses: each rank has two groups; of three replaced groups each has one and a half."""
    parts, fresh = [], []
    for rank in range(2):
        run = Sampled(monkeypatch, rank, 2)
        sampler = run.sampler(responses=K)
        parts.append((sampler.sample(0), *run.seen[-1]))
        fresh.append((sampler.replace(0, 1, torch.tensor([0, 2, 3])), *run.seen[-1]))
    one = Sampled(monkeypatch, rollout_size=4)
    sampler = one.sampler(responses=K)
    for found, whole in ((parts, sampler.sample(0)), (fresh, sampler.replace(0, 1, torch.tensor([0, 2, 3])))):
        prompts, noise = one.seen.pop(0)
        assert [row for _, rows, _ in found for row in rows] == prompts
        assert torch.equal(torch.cat([own for *_, own in found]), noise)
        assert torch.equal(torch.cat([rollout.group for rollout, *_ in found]), whole.group)
    assert whole.num_groups == 4 and fresh[0][0].group.tolist() == [0, 0, 0, 2]


def test_rows_have_the_numbers_of_their_prompts_also_where_groups_are_replaced(monkeypatch):
    run = Sampled(monkeypatch, rollout_size=3)
    sampler = run.sampler(responses=2)
    rollout = sampler.sample(0)
    assert rollout.row.tolist() == [0, 0, 1, 1, 2, 2]
    for number, groups in ((1, [0, 2]), (2, [2])):
        fresh = sampler.replace(0, number, torch.tensor(groups))
        keep = ~torch.isin(rollout.group, torch.tensor(groups))
        rollout = joined([rollout.select(keep), fresh])
        assert rollout.row.tolist() == numbers(rollout.prompt_ids())
        assert rollout.group.tolist() == [*[1, 1], *([0, 0, 2, 2] if number == 1 else [0, 0, 2, 2])]


def test_prompts_whose_logits_are_not_finite_are_named_by_their_numbers(monkeypatch):
    def fail(*given):
        raise NotFinite("a model gives logits that are not finite", indices=[1, 4])

    sampler = Sampled(monkeypatch).sampler(responses=K)
    monkeypatch.setattr(rollout_sampler, "generate_rollout", fail)
    with pytest.raises(NotFinite) as stop:
        sampler.sample(1)
    assert stop.value.rows == [2, 3]


def test_what_is_asked_ahead_is_the_next_steps_request(monkeypatch):
    asked = []

    class Served:
        def __init__(self, *given) -> None: ...

    def answer(sampler, served, rows, noise, ahead):
        asked.append((rows, noise, ahead))
        return sampler.run.generate(None, None, rows, None, None, noise, 4)

    run = Sampled(monkeypatch, rollout_server=["http://x"], max_staleness=1)
    monkeypatch.setattr(rollout_sampler, "ServedPolicy", Served)
    monkeypatch.setattr(rollout_sampler, "refuse_gap", lambda *given: None)
    monkeypatch.setattr(RolloutSampler, "_ask", answer)
    sampler = run.sampler()
    for step in range(3):
        sampler.sample(step)
    for (_, _, ahead), (rows, noise, _) in zip(asked, asked[1:]):
        assert ahead.prompts == [row["input_ids"].tolist() for row in rows] and torch.equal(ahead.noise, noise)
    assert [numbers([row["input_ids"].tolist() for row in rows]) for rows, *_ in asked] == [[0, 1], [2, 3], [4, 5]]
    assert asked[-1][2] is None


@pytest.mark.parametrize("gap", [0.5, torch.nan])
def test_a_first_rollout_that_differs_from_its_reference_stops_the_run(monkeypatch, gap):
    run = Sampled(monkeypatch)
    sampler, generate = run.sampler(), run.generate
    assert len(sampler.sample(0)) == 2

    def other(*given):
        rollout = generate(*given)
        rollout.ref_logprobs[1, -1] += gap
        return rollout

    monkeypatch.setattr(rollout_sampler, "generate_rollout", other)
    with error_naming(RunFailure, "first update"):
        sampler.sample(0)
    assert len(sampler.sample(1)) == 2  # later ones do


def test_without_a_reference_the_first_rollout_is_compared_with_a_forward_pass(monkeypatch):
    run = Sampled(monkeypatch)
    sampler = run.sampler()
    sampler.reference = None
    scored = []
    monkeypatch.setattr(rollout_sampler, "gather_shards", lambda module: nullcontext())

    def score(model, batch, temperature, size):
        scored.append(batch)
        return torch.full(batch.action_mask.shape, -1.0) * batch.action_mask

    monkeypatch.setattr(rollout_sampler, "score_logprobs", score)
    run.args.temperature = 1.0
    with pytest.raises(RunFailure, match="forward"):
        sampler.sample(0)
    assert scored[0].group is None  # packed as where the rollout was scored
