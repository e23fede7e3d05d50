"""The experiment with estimators at fixed weights: its exact gradients, and what it measures of all groups."""

from itertools import product

import pytest
import torch

from examples.experiments import estimators
from examples.experiments.agent_tasks import PLACES, SEEDS, exact
from examples.experiments.estimators import ANSWERS, CHANCE, Played
from lightrlhf.storage.jsonl import read_jsonl

FACTS = {"setting", "arm", "seed", "seconds", "versions", "commit", "processor"}


def all_episodes(place: str) -> tuple[Played, torch.Tensor]:
    """Each course of an episode, and its probability."""
    found, chances = [], []
    for first in product([True, False], repeat=3):
        for bonus in product([True, False], repeat=2 if place == "in the middle" else 0):
            reached, rewards, chance = [True, first[0], first[0] and first[1]], [], 0.5 ** len(bonus)
            for turn, (taken, is_played) in enumerate(zip(first, reached)):
                chance *= float(CHANCE[turn] if taken else 1 - CHANCE[turn])
                pays = (1.0 if turn == 2 else float(any(bonus[turn : turn + 1]))) if taken else (0.2, 0.2, 0.0)[turn]
                rewards.append(pays if is_played else 0.0)
            found.append((first, reached, rewards))
            chances.append(chance)
    first, reached, rewards = zip(*found)
    played = Played(torch.tensor(first), torch.tensor(reached), torch.tensor(rewards, dtype=torch.float64))
    return played, torch.tensor(chances, dtype=torch.float64)


@pytest.mark.parametrize("place", PLACES)
def test_the_exact_gradient_is_the_enumerated_one(place):
    played, chances = all_episodes(place)
    assert float(chances.sum()) == pytest.approx(1)
    score = torch.where(played.reached, played.first.double() - CHANCE, 0.0)
    expected = (chances * played.rewards.sum(1)) @ score
    assert exact(place) == pytest.approx(expected.tolist())


@pytest.mark.parametrize("place", PLACES)
def test_sampled_episodes_are_as_frequent_as_their_probability(place):
    played, chances = all_episodes(place)
    sampled = estimators.play(place, 1, 2500)
    for turn in range(3):
        mean, mean_reward = (float((chances * of).sum()) for of in (played.reached[:, turn], played.rewards[:, turn]))
        assert float(sampled.reached[:, turn].double().mean()) == pytest.approx(mean, abs=0.015)
        assert float(sampled.rewards[:, turn].mean()) == pytest.approx(mean_reward, abs=0.015)


def test_rewards_by_index_are_centred_among_the_others_that_reached_the_turn():
    reached = torch.tensor([[True, True], [True, False], [True, True]] + [[True, False]] * 5)
    rewards = torch.zeros(8, 2, dtype=torch.float64)
    rewards[0], rewards[1] = torch.tensor([0.0, 1.0]), torch.tensor([0.7, 0.0])
    found = estimators.by_index(Played(reached, reached, rewards))
    assert found[0].tolist() == pytest.approx([1 - 0.1, 1]) and found[2].tolist() == pytest.approx([-1 - 0.1, -1])
    assert found[1].tolist() == pytest.approx([0.7, 0])


def test_rows_are_kept_and_their_figures_near_the_exact_ones(tmp_path, capsys):
    words = ["--output_dir", str(tmp_path), "--seeds", "1", "2", "--num_groups", "100"]
    estimators.main(words)
    rows = read_jsonl(tmp_path / "results.jsonl")
    assert len(rows) == 2 * (2 * 3 + 2 * 2) and all(row.keys() >= FACTS for row in rows)
    for row in rows:
        if row["setting"] in ANSWERS:
            variance = {SEEDS[0]: 0.09, SEEDS[1]: 0.25}[row["arm"]] * 8 / 7
            assert row["advantages"] == pytest.approx(variance, rel=0.25)
    printed = capsys.readouterr().out
    assert "at the end: exact | 0.064 | 0.064 | 0.134" in printed
    estimators.main(words)
    assert read_jsonl(tmp_path / "results.jsonl") == rows
