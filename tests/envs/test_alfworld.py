"""ALFWorld: the engine plays generated and published games, the planner wins, no global state is changed."""

import json
import random
import subprocess
import sys

import pytest
from helpers import ROOT, environment
from helpers.errors import error_naming
from helpers.processes import PATIENCE

try:
    from lightrlhf.envs import alfworld, household
except ModuleNotFoundError as missing:
    pytest.skip(f"needs pip install -e '.[alfworld]' (there is no {missing.name})", allow_module_level=True)

import fast_downward
import gymnasium
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs.pddl import PddlEnv, textgen
from textworld.envs.pddl import logic as pddl_logic

from lightrlhf.cli.errors import UsageError
from lightrlhf.envs import make_env

SPLITS = ("train", "validation", "test")
GAME = {"kind": household.KINDS[3], "object": "Potato", "target": "DiningTable", "room": 5, "level": 3}


@pytest.fixture(scope="module")
def env():
    made = make_env("alfworld")
    yield made
    made.close()


def play(env, start) -> dict:
    """The oracle's game; returns the last info."""
    _, info = env.reset(options=start)
    assert not info["success"] and info["level"] == start["level"]
    while (command := env.expert()) is not None:
        assert command in info["admissible"] and env.reflection(command) == "" and command in env.reflection()
        text, reward, *_, info = env.step(command)
        assert env.observation_space.contains(text) and reward == info["success"]
    return info


# ------------------------------------------------------------------------------------------------------ household games
def test_the_games_are_fixed_and_no_pair_of_thing_and_target_crosses_splits():
    games = {split: household.starts(split) for split in SPLITS}
    assert json.loads(json.dumps(games)) == games
    assert {split: len(part) for split, part in games.items()} == {"train": 6000, "validation": 120, "test": 240}
    pairs = [{(g["kind"], g["object"], g["target"]) for g in games[split]} for split in SPLITS]
    assert not pairs[0] & pairs[1] | pairs[0] & pairs[2] | pairs[1] & pairs[2]
    assert len({json.dumps(game) for split in SPLITS for game in games[split]}) == 6 * (1000 + 20 + 40)


def test_each_game_has_the_tasks_things_away_from_the_target():
    for game in (game for split in SPLITS for game in household.starts(split)):
        problem = household.problem_of(game)
        things = problem.count(f"(objectType {game['object'].lower()}_bar_")
        assert things == (2 if game["kind"].startswith("pick_two") else 1), game
        assert problem.count("(") == problem.count(")")
        at = [line for line in problem.splitlines() if line.startswith(f"(objectType {game['object'].lower()}_bar_")]
        assert not any(
            f"(inReceptacle {game['object'].lower()}_bar_1 {game['target'].lower()}_bar" in line for line in at
        )


def test_a_small_room_has_the_things_and_places_of_its_task():
    for places, things in ((3, 0), (4, 2), (13, 20)):
        for game in (game for split in SPLITS for game in household.starts(split, places=places, things=things)):
            assert (game["places"], game["things"]) == (places, things)
            problem = household.problem_of(game)
            assert problem.count(" - receptacle ") == places
            name = game["object"].lower()
            assert problem.count(f"(inReceptacle {name}_bar_") == (2 if game["kind"].startswith("pick_two") else 1)
            target = "sink_bar_1_bar_sinkbasin" if game["target"] == "SinkBasin" else f"{game['target'].lower()}_bar_"
            assert not any(f"(inReceptacle {name}_bar_{n} {target}" in problem for n in (0, 1))
    with error_naming(ValueError, "household game"):
        household.problem_of(game | {"target": "Sofa"})


@pytest.mark.parametrize("level", range(6))
def test_the_planner_wins_small_games_of_each_kind(level):
    small = make_env("alfworld", places=3, things=0)
    for start in small.starts("test", level)[:3]:
        assert play(small, start)["success"]
    small.close()


@pytest.mark.parametrize("level", range(6))
def test_the_planner_wins_a_game_of_each_kind(level, env):
    info = play(env, env.starts("test", level)[7])
    assert info["success"] and info["cost"] == -1 and 3 <= len(info["history"]) <= 12
    assert info["task"].startswith("Your task is to: ") and info["admissible"] == [] and env.reflection() == ""


def test_the_planner_wins_after_random_steps(env):
    rng = random.Random(3)
    _, info = env.reset(options=GAME | {"horizon": 60})
    for _ in range(12):
        assert env.expert() in info["admissible"]
        *_, info = env.step(rng.choice([c for c in info["admissible"] if not c.startswith("move")]))
    while command := env.expert():
        *_, info = env.step(command)
    assert info["success"]


def test_commands_and_texts_are_those_of_the_unmodified_engine(env):
    infos = textworld.EnvInfos(admissible_commands=True, won=True, policy_commands=True)
    plain = AlfredDemangler(PddlEnv(infos))
    arguments = list(sys.argv)
    plain.load(alfworld.game_of(GAME, None))
    state = plain.reset()
    sys.argv = arguments
    _, info = env.reset(options=GAME)
    rng = random.Random(1)
    for step in range(10):
        commands = [command for command in state.admissible_commands if command != "help"]
        assert info["admissible"] == commands and (step or env.expert() == state.policy_commands[0])
        command = rng.choice(commands)
        state, *_ = plain.step(command)
        *_, info = env.step(command)
        assert info["history"][-1] == (command, " ".join(state.feedback.split()))


def test_observations_contain_the_things_seen_and_held(env):
    text, info = env.reset(options=GAME)
    assert text == "At: -. Holding: -.\nSeen: -."
    assert info["task"].startswith(
        "Your task is to: heat some potato and put it in diningtable.\nYou are in the middle"
    )
    env.step("go to fridge 1")
    text, *_ = env.step("open fridge 1")
    assert text.startswith("Last: open fridge 1\nYou open the fridge 1. The fridge 1 is open. In it, you see ")
    text, *_ = env.step("go to microwave 1")
    assert "At: microwave 1. Holding: -.\nSeen: fridge 1: " in text and "; microwave 1: closed." in text
    while command := env.expert():
        text, *_ = env.step(command)
        if command.startswith("take"):
            assert "Holding: potato 1." in text
    bare = make_env("alfworld", remember=False)
    assert bare.reset(options=GAME)[0] == "Nothing was done yet."
    assert bare.step("go to fridge 1")[0] == "Last: go to fridge 1\nYou arrive at fridge 1. The fridge 1 is closed."
    bare.close()


@pytest.mark.parametrize("command", ["fly", "", "go to moon 1", "help me", "go to fridge 1; rm -rf", "é\0🌍" * 300])
def test_a_command_that_is_not_admissible_changes_nothing(command, env):
    _, before = env.reset(options=GAME | {"horizon": 2})
    text, reward, terminated, truncated, info = env.step(command)
    assert info["invalid"] and reward == 0 and not terminated and not truncated
    assert info["admissible"] == before["admissible"] and "Nothing happens." in text
    assert env.observation_space.contains(text)
    assert env.step("look")[3]  # the horizon
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")


def test_reflections_say_what_is_wrong_and_what_to_do(env):
    env.reset(options=GAME)
    plan = list(env._current_plan())
    take = next(command for command in plan if command.startswith("take"))
    assert env.reflection() == f"To do: {take}. Next: {plan[0]}."
    for command, reason in (
        ("look", "it changes nothing"),
        ("heat potato 1 with microwave 1", "that cannot be done here"),
        ("go to microwave 1", "another place comes first"),
        ("go to sinkbasin 1", "nothing is to be done there"),
    ):
        assert env.reflection(command) == f"Not {command}: {reason}. To do: {take}. Instead: {plan[0]}."


EPISODES = """
import random
from lightrlhf.envs import make_env
env, rng = make_env("alfworld"), random.Random(1)
for seed in range(2):
    text, info = env.reset(seed=seed)
    for _ in range(8):
        print(text, info, env.expert(), env.reflection())
        text, *_, info = env.step(rng.choice(info["admissible"]))
env.close()
"""


@pytest.mark.slow
def test_equal_seeds_and_actions_give_equal_episodes_in_any_process(capsys):
    other = subprocess.run(
        [sys.executable, "-c", EPISODES], env=environment() | {"PYTHONHASHSEED": "1"}, cwd=ROOT,
        capture_output=True, text=True, check=True, timeout=PATIENCE,
    ).stdout  # fmt: skip
    capsys.readouterr()
    exec(EPISODES, {})
    assert capsys.readouterr().out == other and len(other) > 1000


def test_several_environments_are_independent_and_change_no_global_state(env):
    originals = list(sys.argv), fast_downward.pddl2sas, pddl_logic.GameLogic, textgen.Rule
    many = gymnasium.vector.SyncVectorEnv([lambda: make_env("alfworld")] * 2)
    texts, infos = many.reset(seed=5)
    tasks = [env.reset(seed=seed)[1]["task"] for seed in (5, 6)]
    assert list(infos["task"]) == tasks and infos["action_mask"].shape == (2, 50)
    env.reset(seed=5)
    for _ in range(4):
        command = env.expert()
        text, *_ = env.step(command)
        texts, *_ = many.step([command, "look"])
        assert texts[0] == text
    assert originals == (list(sys.argv), fast_downward.pddl2sas, pddl_logic.GameLogic, textgen.Rule)
    many.close()


# ------------------------------------------------------------------------------------------------------ published games
def publish(folder, game, name: str, kind: str | None = None, **changes) -> None:
    """Write a game in the layout of the benchmark's files."""
    folder = folder / name / "trial_T20190907_174127_043461"
    folder.mkdir(parents=True)
    content = alfworld.game_of(game, None) | {"solvable": True} | changes
    (folder / "game.tw-pddl").write_text(json.dumps(content))
    (folder / "traj_data.json").write_text(json.dumps({"task_type": kind or game["kind"]}))


@pytest.fixture
def benchmark(tmp_path):
    """A folder in the layout of `alfworld-download`, with generated games: the published ones need a download."""
    for folder in ("train", "valid_seen", "valid_unseen"):
        publish(tmp_path / folder, GAME, "pick_heat_then_place_in_recep-Potato-None-DiningTable-7")
    look = next(start for start in household.starts("train") if start["level"] == 1)
    publish(tmp_path / "train", look, "look_at_obj_in_light-Pen-None-DeskLamp-301")
    publish(tmp_path / "train", GAME, "pick_heat_then_place_in_recep-Egg-None-DiningTable-2", solvable=False)
    publish(tmp_path / "train", GAME, "pick_heat_then_place_in_recep-PotatoSliced-None-DiningTable-3")
    publish(tmp_path / "train", GAME, "a-Potato-Bowl-DiningTable-4", kind="pick_and_place_with_movable_recep")
    return tmp_path


def test_games_of_the_benchmark_are_found_and_played(benchmark):
    env = make_env("alfworld", data_dir=str(benchmark), horizon=50)
    assert [start["level"] for start in env.starts("train")] == [1, 3]  # by path, without sliced and unsolvable ones
    (start,) = env.starts("test")
    assert start["game"].startswith("valid_unseen/pick_heat") and env.starts("validation", 0) == []
    info = play(env, start)
    assert info["success"] and info["action_mask"].shape == (150,)
    env.close()


def test_bad_options_and_games_are_refused_in_one_line(benchmark, env, tmp_path):
    (tmp_path / "empty").mkdir()
    for options, fact in (
        ({"horizon": 0}, "horizon 0"),
        ({"places": 2}, "places 2"),
        ({"things": 21}, "things 21"),
        ({"things": 2, "data_dir": str(benchmark)}, "things"),
        ({"data_dir": "nowhere"}, "data_dir nowhere"),
    ):
        with error_naming(UsageError, fact):
            make_env("alfworld", **options)
    with error_naming(ValueError, "train"):
        make_env("alfworld", data_dir=str(tmp_path / "empty")).starts("train")
    with error_naming(ValueError, "split dev"):
        env.starts("dev")
    with error_naming(ValueError, "household game"):
        env.reset(options=GAME | {"object": "Bed"})
    with pytest.raises(ValueError, match="gone.tw-pddl"):
        env.reset(options={"game": "gone.tw-pddl", "level": 0})
    broken = make_env("alfworld", data_dir=str(benchmark))
    next((benchmark / "valid_seen").rglob("traj_data.json")).write_text("{}")
    with error_naming(ValueError, "benchmark"):
        broken.starts("validation")
