"""The text environments' protocol, their prompts, and DangerousTaxi."""

import json
import random
import subprocess
import sys
from collections import deque

import numpy as np
import pytest
from helpers import ROOT, environment
from helpers.errors import error_naming
from helpers.processes import PATIENCE

gymnasium = pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from lightrlhf.cli.errors import RunFailure, UsageError  # noqa: E402
from lightrlhf.envs import MEMBERS, TextEnv, information, make_env, prompts, read_options  # noqa: E402
from lightrlhf.envs.dangerous_taxi import ABOARD, DROPOFF, FULL, PICKUP  # noqa: E402

SPLITS = ("train", "validation", "test")


@pytest.fixture
def taxi():
    return make_env("dangerous_taxi")


def play(env, start, choose, seed=None):
    """All outputs of an episode."""
    text, info = env.reset(seed=seed, options=start)
    steps = [(text, 0.0, False, False, plain(info))]
    while not (steps[-1][2] or steps[-1][3]):
        text, reward, terminated, truncated, info = env.step(choose(env))
        steps.append((text, reward, terminated, truncated, plain(info)))
    return steps


def plain(info):
    return info | {"action_mask": info["action_mask"].tolist()}


# ----------------------------------------------------------------------------------------------------------- protocol
def test_gymnasiums_own_checker_accepts_the_taxi(taxi):
    from gymnasium.utils.env_checker import check_env

    check_env(taxi, skip_render_check=True)


@pytest.mark.slow
def test_equal_seeds_and_actions_give_equal_episodes_in_any_process():
    code = """
import random
from lightrlhf.envs import make_env
taxi, rng = make_env("dangerous_taxi"), random.Random(1)
for seed in range(3):
    print(taxi.reset(seed=seed))
    over = False
    while not over:
        text, reward, terminated, truncated, info = taxi.step(rng.choice(taxi.actions))
        over = terminated or truncated
        print(text, reward, info, taxi.reflection(), taxi.reflection("west"))
"""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env=environment() | {"PYTHONHASHSEED": hashed}, cwd=ROOT,
            capture_output=True, text=True, check=True, timeout=PATIENCE,
        ).stdout
        for hashed in ("1", "2")
    ]  # fmt: skip
    assert outputs[0] == outputs[1] and len(outputs[0]) > 1000


def test_two_environments_share_no_state(taxi):
    other = make_env("dangerous_taxi")
    start, another = taxi.starts("train", FULL)[:2]
    alone = play(taxi, start, lambda env: env.expert())
    text, _ = other.reset(options=another)
    seen = []

    def interfering(env):
        if other.expert():
            other.step(other.expert())
        seen.append(text)
        return env.expert()

    assert play(taxi, start, interfering) == alone and seen


def test_starts_are_fixed_plain_and_in_one_split_only(taxi):
    starts = {split: taxi.starts(split) for split in SPLITS}
    assert starts == {split: make_env("dangerous_taxi").starts(split) for split in SPLITS}
    assert json.loads(json.dumps(starts)) == starts
    for level in (DROPOFF, FULL):
        states = [{s["state"] for s in taxi.starts(split, level)} for split in SPLITS]
        assert not states[0] & states[1] and not states[0] & states[2] and not states[1] & states[2]
    assert [len(taxi.starts(split, FULL)) for split in SPLITS] == [210, 30, 60]
    assert [taxi.starts(split, PICKUP) == [s | {"level": 0} for s in taxi.starts(split, FULL)] for split in SPLITS]


def test_a_reset_without_a_start_draws_from_the_split():
    env = make_env("dangerous_taxi", split="validation", level=DROPOFF)
    allowed = {env.reset(options=start)[0] for start in env.starts("validation", DROPOFF)}
    drawn = {env.reset(seed=seed)[0] for seed in range(100)}
    assert drawn == allowed


@pytest.mark.parametrize("kind", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_many_at_once_by_gymnasiums_vector(kind):
    make = [lambda: make_env("dangerous_taxi", split="train")] * 3
    options = {"context": "forkserver", "shared_memory": False} if kind == "AsyncVectorEnv" else {}
    alone = make_env("dangerous_taxi", split="train")
    many = getattr(gymnasium.vector, kind)(make, **options)
    try:
        texts, infos = many.reset(seed=7)
        assert list(texts) == [alone.reset(seed=seed)[0] for seed in (7, 8, 9)]
        assert infos["action_mask"].shape == (3, 6) and infos["admissible"][2] == alone.actions
        texts, rewards, terminated, *_, infos = many.step(["dropoff", "no such action", "dropoff"])
        assert rewards.tolist() == [-0.5] * 3 and terminated.all() and infos["invalid"].all()
        texts, *_ = many.step(["south"] * 3)  # an ended episode begins anew by itself
        assert all(text in {alone.reset(options=start)[0] for start in alone.starts("train", FULL)} for text in texts)
    finally:
        many.close()


def test_an_environment_of_your_own_by_import_path(monkeypatch, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lightrlhf.envs.dangerous_taxi import DangerousTaxi\n\n\n"
        "class Slow(DangerousTaxi):\n"
        "    def __init__(self, horizon: int = 40):\n"
        "        super().__init__(horizon)\n\n\n"
        "class Untyped(DangerousTaxi):\n"
        "    def __init__(self, horizon):\n"
        "        super().__init__(horizon)\n\n\n"
        "class Mute:\n    actions = levels = instructions = reset = step = starts = expert = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_env("mine:Slow").horizon == 40 and make_env("mine:Slow", horizon=5).horizon == 5
    for name, options, line in (
        ("mine:Mute", {}, "has no reflection"),
        ("mine:Fast", {}, "cannot be imported"),
        ("yours:Slow", {}, "cannot be imported"),
        ("taxi", {}, "package.module:Class"),
        ("mine:Slow", {"speed": 3}, "its options are: horizon"),
        ("dangerous_taxi", {"horizon": 0}, "horizon 0 must be at least 1"),
        ("dangerous_taxi", {"split": "dev"}, "split dev must be one of train"),
        ("dangerous_taxi", {"horizon": "text"}, "--env_options horizon 'text' is not a whole number"),
        ("dangerous_taxi", {"first_step": 1}, "--env_options first_step 1 is not True or False"),
        ("dangerous_taxi", {"split": [1]}, "--env_options split [1] is not a text"),
        ("mine:Untyped", {"horizon": "text"}, "cannot be made with these --env_options"),
    ):
        with pytest.raises(UsageError) as problem:
            make_env(name, **options)
        assert line in str(problem.value) and name in str(problem.value)


def test_options_from_the_command_line():
    words = ["horizon=30", "bonus=0.5", "split=train", "easy=True", "repo_dir=/a b=c", "level=None"]
    assert read_options(words) == {
        "horizon": 30,
        "bonus": 0.5,
        "split": "train",
        "easy": True,
        "repo_dir": "/a b=c",
        "level": None,
    }
    assert read_options(["a={[]: 1}", "b=" + "[" * 9999]) == {"a": "{[]: 1}", "b": "[" * 9999}  # texts
    for word in ("horizon", "=3", "a-b=3"):
        with error_naming(ValueError, "name=value"):
            read_options([word])


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gymnasium", None)
        patch.delitem(sys.modules, "lightrlhf.envs.dangerous_taxi")
        with error_naming(UsageError, "gymnasium", "'.[envs]'"):
            make_env("dangerous_taxi")
    monkeypatch.delitem(sys.modules, "lightrlhf.envs.alfworld", raising=False)
    monkeypatch.setitem(sys.modules, "fast_downward", None)
    with error_naming(UsageError, "package", "'.[alfworld]'"):
        make_env("alfworld")


# --------------------------------------------------------------------------------------------------------------- taxi
def test_the_oracle_is_optimal_on_every_start(taxi):
    """Compared with a search through gymnasium's transitions, one per start."""
    table = gymnasium.make("Taxi-v4").unwrapped.P
    lengths = []
    for start in [start for split in SPLITS for start in taxi.starts(split)]:
        episode = play(taxi, start, lambda env: env.expert())
        assert episode[-1][4]["success"] and not episode[-1][4]["invalid"]
        lengths.append((start["level"], len(episode) - 1))
        assert lengths[-1][1] == shortest(table, start)
    full = [length for level, length in lengths if level == FULL]
    assert len(full) == 300 and round(np.mean(full), 1) == 13.1 and max(full) == 18
    assert round(np.mean([length <= 15 for length in full]), 3) == 0.807


def shortest(table, start) -> int:
    seen, waiting = {start["state"]}, deque([(start["state"], 0)])
    while waiting:
        state, steps = waiting.popleft()
        for action in range(6):
            _, after, _, delivered = table[state][action][0]
            aboard = after // 4 % 5 == ABOARD and state // 4 % 5 != ABOARD
            if delivered or (start["level"] == PICKUP and aboard):
                return steps + 1
            if after not in seen:
                seen.add(after)
                waiting.append((after, steps + 1))
    raise AssertionError("no path")


def test_the_oracle_recovers_from_harmless_random_steps(taxi):
    """Within the number of steps in its own table."""
    rng = random.Random(0)
    for start in rng.choices(taxi.starts("train"), k=100):
        taxi.reset(options=start | {"horizon": 100})
        for _ in range(rng.randrange(12)):
            harmless = [a for a in taxi.actions if not taxi._is_fatal(a) and taxi._steps_after(a) > 0]
            taxi.step(rng.choice(harmless))
        expected, steps, over = taxi._steps_left(), 0, False
        while not over:
            *_, over, _, info = taxi.step(taxi.expert())
            steps += 1
        assert info["success"] and steps == expected


def test_an_action_that_changes_nothing_ends_the_episode_also_on_the_first_step(taxi):
    fatal = {}
    for start in taxi.starts("train", FULL):
        for action in [*taxi.actions, "fly", ""]:
            before, _ = taxi.reset(options=start)
            text, reward, terminated, truncated, info = taxi.step(action)
            assert terminated == (text == before) == info["invalid"] and not truncated
            assert reward == (-0.5 if terminated else -0.05 if action != "pickup" else pytest.approx(-0.05))
            assert info["cost"] == -reward and len(info["history"]) == 1
            fatal[action] = fatal.get(action, 0) + terminated
    assert fatal["fly"] == fatal[""] == fatal["dropoff"] == 210 and 0 < fatal["west"] < fatal["pickup"] < 210


def test_an_ended_episode_takes_no_more_steps(taxi):
    taxi.reset(seed=0)
    taxi.step("fly")
    assert taxi.expert() is None and taxi.reflection() == ""
    with pytest.raises(RuntimeError):
        taxi.step("north")


def test_levels_rewards_and_the_pickup_bonus(taxi):
    start = taxi.starts("train", FULL)[0]
    full = play(taxi, start, lambda env: env.expert())
    assert [step[1] for step in full[1:]] == [-0.05] * (len(full) - 2) + [1.0]
    assert full[-1][4]["cost"] == pytest.approx(0.05 * (len(full) - 2) - 1)
    pickup = play(taxi, start | {"level": PICKUP}, lambda env: env.expert())
    assert pickup[-1][4]["success"] and pickup[-1][1] == 1.0 and pickup[-1][4]["history"][-1][0] == "pickup"
    assert [step[0] for step in pickup] == [step[0] for step in full[: len(pickup)]] or len(pickup) < len(full)
    bonus = play(taxi, start | {"pickup_bonus": 1.0}, lambda env: env.expert())
    assert sum(step[1] for step in bonus) == pytest.approx(sum(step[1] for step in full) + 1)
    assert play(make_env("dangerous_taxi", pickup_bonus=1.0), start, lambda env: env.expert()) == bonus
    ride = play(taxi, taxi.starts("train", DROPOFF)[0], lambda env: env.expert())
    assert "X" in ride[0][0] and "pickup" not in [action for action, _ in ride[-1][4]["history"]]
    for level, state in ((FULL, 16), (DROPOFF, 0), (7, 0), (FULL, 500), (FULL, 0)):
        with pytest.raises(ValueError):
            taxi.reset(options={"state": state, "level": level})


def test_a_second_pickup_earns_no_second_bonus(taxi):
    riding = next(s for s in taxi.starts("train", FULL) if taxi._tables.places[s["state"]][:2] == (0, 0))
    taxi.reset(options=riding | {"pickup_bonus": 1.0, "horizon": 100})
    while taxi.expert() != "pickup":
        taxi.step(taxi.expert())
    rewards = [taxi.step(action)[1] for action in ("pickup", "dropoff", "pickup")]
    assert rewards == pytest.approx([0.95, -0.05, -0.05])


def test_the_horizon_truncates_and_does_not_terminate(taxi):
    start = next(s for s in taxi.starts("train", FULL) if taxi.reset(options=s) and taxi._steps_left() > 4)
    episode = play(taxi, start | {"horizon": 3}, lambda env: env.expert())
    assert len(episode) == 4 and [step[2:4] for step in episode] == [(False, False)] * 3 + [(False, True)]


def test_with_first_step_one_step_is_the_episode_and_a_right_one_a_success(taxi):
    seen = set()
    for start in taxi.starts("validation"):
        for action in [*taxi.actions, "fly"]:
            taxi.reset(options=start)
            is_right = action in taxi.actions and taxi.reflection(action) == ""
            fatal = action == "fly" or taxi._is_fatal(action)
            taxi.reset(options=start | {"first_step": True})
            _, reward, terminated, _, info = taxi.step(action)
            assert terminated and info["success"] == is_right and info["invalid"] == fatal
            assert reward == (1.0 if is_right else -0.5 if fatal else -0.05)
            seen.add(reward)
    assert len(seen) == 3 and make_env("dangerous_taxi", first_step=True).first_step


def test_the_grid_is_different_for_every_state(taxi):
    """Reachable states: 300 with the passenger waiting, 100 with them aboard."""
    table = taxi._tables
    states = [s for s, (*_, passenger, destination) in enumerate(table.places) if passenger != destination]
    assert len(states) == len({table.texts[s] for s in states}) == 400
    for state in states:
        row, column, passenger, _ = table.places[state]
        at_the_passenger = passenger != ABOARD and (row, column) == table.stands[passenger]
        mark = "X" if passenger == ABOARD else "O" if at_the_passenger else "T"
        assert table.texts[state].split("\n")[1 + row][1 + 2 * column] == mark
        assert ("P" in table.texts[state]) == (mark == "T")


def test_reflections_are_correct(taxi):
    for start in taxi.starts("validation"):
        taxi.reset(options=start)
        best = taxi.expert()
        assert taxi.reflection().endswith(f"Next: {best}.") and taxi.reflection(best) == ""
        for action in [*taxi.actions, "fly"]:
            comment = taxi.reflection(action)
            copy = make_env("dangerous_taxi")
            copy.reset(options=start)
            left = copy._steps_left()
            over, info = copy.step(action)[2:5:2]
            fatal = over and info["invalid"]
            assert (
                f"{action}" in taxi.reflection().partition("Fatal:")[2].partition(".")[0].split(", ")
            ) is False or fatal
            assert bool(comment) == (fatal or (not info["success"] and copy._steps_left() >= left))
            assert not comment or (f"Not {action}:" in comment and comment.endswith(f"Instead: {best}."))


# ------------------------------------------------------------------------------------------------------------ prompts
def a_state(mask=(True, True, True), actions=("left", "right", "wait")):
    admissible = [action for action, on in zip(actions, mask) if on]
    return information(actions, admissible, task="Find the door.", history=[("wait", "Nothing.")])


def test_prompts_of_one_state():
    info = a_state((True, False, True))
    labels = prompts.labels_for(info)
    assert labels == ["0", "2"]  # a command keeps its label when another one is not admissible
    assert prompts.reflection_prompt("A hall.", info) == "Find the door.\nA hall.\n# Analyze:\n"
    assert prompts.policy_prompt("A hall.", info, "Go left.", labels, with_history=True) == (
        "Find the door.\n> wait\nNothing.\nA hall.\n# Analyze:\nGo left.\n# Choose:\n0. left\n2. wait\n# Action:\n"
    )
    assert "Analyze" not in prompts.policy_prompt("A hall.", info, None, labels)
    assert "left" not in prompts.reflection_prompt("A hall.", info, with_history=True)
    assert prompts.tidy(" Go left. \n# Action:\n1 # Analyze:") == "Go left."


def test_labels_and_actions_are_inverse_to_each_other_also_shuffled():
    info = information(None, [f"cat {n}" for n in range(30)])
    for shuffle in (None, random.Random(3)):
        labels = prompts.labels_for(info, shuffle, pool=40)
        assert len(set(labels)) == 30 and set(labels) <= set(prompts.choices(40))
        for action in info["admissible"]:
            assert prompts.action_of(f"{prompts.label_of(action, info, labels)}\n", info, labels) == action
    assert prompts.action_of("?", info, labels) is None
    with pytest.raises(RunFailure, match="253 commands"):
        prompts.labels_for(information(None, map(str, range(253))))


def test_labels_are_single_tokens_or_refused(tokenizer):
    ids = prompts.label_ids(tokenizer, prompts.choices(62))
    assert tokenizer.convert_ids_to_tokens(ids) == prompts.choices(62)
    with error_naming(UsageError, "'10'"):
        prompts.label_ids(tokenizer, prompts.choices(63))


def test_the_protocol_contains_all_checked_members():
    described = set(TextEnv.__annotations__) | {name for name in vars(TextEnv) if not name.startswith("_")}
    assert set(MEMBERS) <= described
