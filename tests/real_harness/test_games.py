"""Environments of TextArena and SkyRL-gym play episodes by the classes of `examples/text_games.py`."""

import pytest
from helpers import metrics
from helpers.agent_runs import KEEPS, trained
from helpers.real_harness import environment_of

from lightrlhf.storage.jsonl import read_jsonl

pytestmark = pytest.mark.slow
GROUPS = {"num_generations": 3, "rollout_size": 2, "max_steps": 1, "log_rollouts": 6, "env_workers": 2}


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    (folder,) = environment_of("games").parent.glob("lib/python*/site-packages")
    monkeypatch.setenv("PACKAGES_OF_GAMES", str(folder))


def test_a_game_of_textarena_is_one_for_a_group(tmp_path):
    game = {"env": "helpers.packaged_games:TextArena", "env_options": ["game=Mastermind-v0", "max_turns=3"]}
    folder = trained(KEEPS, tmp_path, max_turns=4, **game, **GROUPS)
    (row,) = metrics(folder)
    assert row["episodes/stop_done_ratio"] == row["objective/valid_ratio"] == 1, row
    prompts = [one["prompt"] for one in read_jsonl(folder / "rollouts.jsonl")]
    assert "Mastermind" in prompts[0] and len({*prompts}) == 2


def test_a_game_begins_alike_with_a_seed_and_says_what_is_new(packages):
    from helpers.packaged_games import TextArena

    game = TextArena("GuessTheNumber-v0", max_turns=10)

    def play(seed: int) -> list:
        said = [game.reset(seed=seed)[0]]
        for number in range(1, 21):
            text, reward, done, *_ = game.step(f"I say [{number}].")
            said.append((text, reward))
            if done:
                return said
        raise AssertionError("it never ends")

    played = play(5)
    assert played == play(5) and played != play(6)
    assert "between 1 and 20" in played[0] and "I say" not in str(played[1:])
    assert played[1] in [("The target number is higher.", 0.0), (played[-1][0], 1)]


def test_an_environment_of_skyrl_reads_a_rows_columns(tmp_path):
    asked = [{"role": "user", "content": "What is 6 times 7?"}]
    columns = {"reward_spec": {"ground_truth": "42"}, "extra_info": {"max_turns": 2}}
    game = {"env": "helpers.packaged_games:SkyRLGym", "env_options": ["name=gsm8k_multi_turn"]}
    folder = trained(KEEPS, tmp_path, prompts=[{"prompt": asked, **columns}] * 2, **game, **GROUPS)
    (row,) = metrics(folder)
    assert row["episodes/turns"] == 2 and row["episodes/stop_done_ratio"] == 1, row
    assert "final numeric answer" in read_jsonl(folder / "rollouts.jsonl")[0]["response"]
