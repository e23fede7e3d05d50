"""Episodes: how they are played and counted, their batch of decisions, and the buffer of successes."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
from helpers.errors import error_naming

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from helpers.corridor import STARTS, Corridor

from lightrlhf import reflect_rl
from lightrlhf.cli.errors import RunFailure
from lightrlhf.envs import episodes as module
from lightrlhf.envs.curriculum import curriculum
from lightrlhf.envs.episodes import (
    Decision,
    Episode,
    Replay,
    count,
    decision_batch,
    oracle_agent,
    play,
    random_agent,
    rates,
    rates_by_level,
)


def test_rates_of_the_oracle_and_of_random_commands():
    episodes = play([Corridor(), Corridor()], STARTS, oracle_agent, "0")
    means = rates(count(episodes))
    assert means["success"] == 1 and means["invalid_ratio"] == 0
    assert means["reward"] == pytest.approx(-means["cost"]) and means["reward"] > 0.6
    assert means["length"] == sum(len(one.decisions) for one in episodes) / len(episodes)
    lost = rates(count(play([Corridor()], STARTS, random_agent, "0")))
    assert lost["success"] < 0.9 and lost["invalid_ratio"] > 0.1
    story = episodes[0].story()
    assert story.startswith("Task: go west\n--- 1 ---\nat -1 of 3\nAction: west  (reward -0.05)")
    assert story.endswith("=== success after 2 actions, cost -0.9\n")


def test_a_bandits_episode_is_one_decision_and_an_endless_one_is_refused(monkeypatch):
    assert {len(one.decisions) for one in play([Corridor()], STARTS, random_agent, "0", max_decisions=1)} == {1}
    monkeypatch.setattr(module, "MAX_STEPS", 4)
    with error_naming(RunFailure, "4 actions"):
        play([Corridor()], [{"level": 1, "goal": "east", "at": -4}], oracle_agent, "0", max_decisions=99)


def test_rates_by_level_are_summed_over_ranks_for_levels_that_were_played():
    episodes = play([Corridor()], [start for start in STARTS if start["level"] == 1], oracle_agent, "0")
    overall, by_level = rates_by_level(episodes, Corridor.levels, lambda counts: 2 * counts)
    assert overall == by_level["long_way"] == pytest.approx(rates(count(episodes))) and list(by_level) == ["long_way"]


def test_a_batch_of_decisions_keeps_their_order_and_episodes():
    rows = [
        Decision("a", prompt_ids=[5] * n, response_ids=[7], logprobs=[-0.5 * n], allowed=[n], reward=n)
        for n in (1, 2, 3)
    ]
    batch = decision_batch([Episode({}, decisions=rows[:1]), Episode({}, decisions=rows[1:])], 0, 4)
    assert batch.episode.tolist() == [0, 1, 1] and batch.rewards.tolist() == [1, 2, 3]
    assert batch.logprobs.tolist() == [[-0.5, 0, 0], [0, -1, 0], [0, 0, -1.5]]
    assert batch.action_mask.sum(1).tolist() == [1, 1, 1] and batch.input_ids[1].tolist() == [5, 5, 7, 0]
    assert batch.allowed[:, 0].nonzero().tolist() == [[0, 1], [1, 2], [2, 3]]


def test_single_decisions_are_not_replayed_in_the_stage_of_whole_episodes(monkeypatch):
    """The curriculum "a/1; a" has two stages of the same levels."""
    entered = []
    monkeypatch.setattr(Replay, "enter", lambda self, key: entered.append(tuple(key)))
    for stage in curriculum(["full"], stages="full/1; full"):
        with suppress(AttributeError):  # what follows needs a run
            reflect_rl.replay_step(SimpleNamespace(args=None), None, Replay(3), [], None, stage)
    assert len(set(entered)) == 2


def test_the_replay_keeps_the_last_successes_of_one_stage():
    replay = Replay(3)
    won, lost = Episode({}, decisions=[Decision("a")], success=True), Episode({}, success=False)
    replay.enter((0,))
    replay.add([won, lost, won, won, won])
    assert replay.episodes == [won] * 3
    copy = Replay(3)
    copy.load(replay.state())
    assert copy == replay
    replay.enter((1,))
    assert not replay.episodes
