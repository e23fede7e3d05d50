"""AutoExplore: costs, the oracle, reflections, what is visible, and the gymnasium interface."""

import copy
import subprocess
import sys

import pytest
from helpers import ROOT, environment
from helpers.explore import TEXTS, grow, started, tasks_of
from helpers.processes import PATIENCE

gymnasium = pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from lightrlhf.cli.errors import UsageError  # noqa: E402
from lightrlhf.envs import make_env  # noqa: E402


def test_costs_add_up(explore_env):
    started(explore_env, "garden/roses.py", horizon=10)
    rewards = [
        explore_env.step(command)[1]
        for command in ("cd ..", "cd garden", "cat soil.txt", "cat soil.txt", "cat roses.py")
    ]
    assert rewards == [-2, -1, -1, -2, -1]  # warnings: leaving the root, reading again
    text, reward, terminated, truncated, info = explore_env.step("id roses.py")
    assert (reward, terminated, truncated, info["success"], info["cost"]) == (9, True, False, True, -2)
    assert (
        "Right." in text
        and info["admissible"] == []
        and explore_env.expert() is None
        and explore_env.reflection() == ""
    )
    with pytest.raises(RuntimeError, match="reset"):
        explore_env.step("cd ..")
    started(explore_env, "garden/roses.py", horizon=10)
    text, reward, terminated, truncated, info = explore_env.step("id ovens.py")
    assert (reward, terminated, info["success"], info["cost"]) == (-11, True, False, 11) and "Wrong." in text


def test_the_horizon_cuts_and_costs_as_much_as_a_wrong_file(explore_env):
    started(explore_env, "ovens.py", horizon=3)
    assert [explore_env.step("cat rolls.md")[3] for _ in range(2)] == [False, False]
    assert explore_env.expert() == "id ovens.py"  # too few steps are left to read it
    _, reward, terminated, truncated, info = explore_env.step("cat prices.csv")
    assert (reward, terminated, truncated, info["success"]) == (-4, False, True, False)


def test_admissible_commands_are_in_a_fixed_order(explore_env):
    _, info = started(explore_env, "garden/roses.py")
    assert info["admissible"] == ["cd garden", *(f"cat {n}" for n in FILES), *(f"id {n}" for n in FILES)]
    assert (
        info["action_mask"].tolist() == [True] * 7 + [False] * 36 and info["level"] == 1 and info["task"].endswith("?")
    )
    text, *_, info = explore_env.step("cat ovens.py")
    assert "cat ovens.py" not in info["admissible"] and "ovens.py (read)" in text
    assert text.endswith("Last: cat ovens.py\n" + TEXTS["ovens.py"])
    assert info["history"] == [("cat ovens.py", "Read.")] and not info["invalid"]
    *_, info = explore_env.step("cd garden")
    assert info["admissible"][:2] == ["cd ..", "cd pond"]


FILES = ["ovens.py", "prices.csv", "rolls.md"]


def test_language_models_also_have_ls_head_tail_and_exit(explored):
    env = make_env("auto_explore", task_dir=explored[1], discretize_actions=False)
    assert "`tail NAME`" in env.instructions
    text, info = started(env, "garden/roses.py")
    assert {"ls", "exit", "head ovens.py", "tail ovens.py"} <= set(info["admissible"])
    text, reward, *_ = env.step("ls")
    assert text.endswith("Last: ls\ngarden/\novens.py\nprices.csv\nrolls.md") and reward == -1
    long = "".join(f"line {number}\n" for number in range(200_000))
    original = (explored[0] / "tree" / "rolls.md").read_text()
    try:
        (explored[0] / "tree" / "rolls.md").write_text(long)
        head, tail = env.step("head rolls.md")[0], env.step("tail rolls.md")[0]
    finally:
        (explored[0] / "tree" / "rolls.md").write_text(original)
    assert head.endswith("line 8\nline 9") and "line 10" not in head
    assert tail.endswith("line 199998\nline 199999") and "line 199989" not in tail
    _, reward, terminated, _, info = env.step("exit")
    assert terminated and reward == -16 and not info["success"]


def test_the_oracle_names_every_file_by_a_shortest_path(explore_env):
    paths = {}
    for split in ("train", "validation", "test"):
        for row in explore_env.starts(split):
            explore_env.reset(options=row)
            while command := explore_env.expert():
                assert explore_env.reflection(command) == "" and command in explore_env.reflection()
                *_, info = explore_env.step(command)
            assert info["success"] and info["cost"] == len(info["history"]) - 15
            paths[row["targets"][0]] = [command for command, _ in info["history"]]
    assert paths["garden/pond/fish.py"] == ["cd garden", "cd pond", "cat fish.py", "id fish.py"]
    assert {len(path) - row.count("/") for row, path in paths.items()} == {2}


def test_reflections_say_what_is_wrong_and_what_to_do(explore_env):
    started(explore_env, "garden/roses.py")
    assert explore_env.reflection("cat ovens.py") == (
        "Not cat ovens.py: ovens.py does not answer the question. The answer is below garden. Instead: cd garden."
    )
    assert "the search would end" in explore_env.reflection("id rolls.md")
    assert "this is the root" in explore_env.reflection("cd ..") and "cannot be done" in explore_env.reflection(
        "rm -rf"
    )
    explore_env.step("cd garden")
    assert "not below pond" in explore_env.reflection("cd pond") and "leads away" in explore_env.reflection("cd ..")
    assert explore_env.reflection("id roses.py") == ""  # bold, but right
    explore_env.step("cd pond")
    assert explore_env.reflection() == "The answer is not below /garden/pond. Next: cd ..."
    explore_env.step("cat fish.py")
    assert explore_env.reflection().startswith("fish.py does not answer the question. ")
    explore_env.step("cd ..")
    explore_env.step("cat roses.py")
    assert explore_env.reflection() == "roses.py answers the question. Next: id roses.py."
    assert "it was read already" in explore_env.reflection("cat roses.py")


def test_the_first_step_alone(explore_env):
    for command, reward, success in (("cd garden", 14, True), ("cat ovens.py", -16, False), ("nonsense", -18, False)):
        started(explore_env, "garden/roses.py", first_step=True)
        _, got, terminated, _, info = explore_env.step(command)
        assert (got, terminated, info["success"]) == (reward, True, success)


def test_leaveout_hides_names_off_the_path_and_nothing_else(explored):
    env = make_env("auto_explore", task_dir=explored[1], leaveout_prob=1.0)
    _, info = started(env, "garden/pond/fish.py")
    assert info["admissible"] == ["cd garden"]
    assert started(env, "garden/pond/fish.py", leaveout_prob=0.0)[1]["admissible"] != ["cd garden"]
    half = make_env("auto_explore", task_dir=explored[1], leaveout_prob=0.5)
    row = half.starts("train", 2)[0]
    seen = {half.reset(seed=seed, options=row)[0] for seed in range(30)}
    assert len(seen) == 8  # three files of the root come and go
    assert "There is no file 'ovens.py'" in [started(env, "garden/pond/fish.py"), env.step("cat ovens.py")][1][0]


def test_a_large_folder_shows_a_fixed_sample_that_contains_the_answer(tmp_path):
    grow(tmp_path / "tree", TEXTS | {f"other_{n}.txt": f"nothing of use is here, number {n}" for n in range(500)})
    env = make_env("auto_explore", task_dir=tasks_of(tmp_path), max_entries=10)
    _, info = started(env, "ovens.py")
    names = [command[3:] for command in info["admissible"] if command.startswith("id ")]
    assert len(info["admissible"]) <= 20 and len(names) >= 9 and "ovens.py" in names and names == sorted(names)
    env.reset(seed=99)
    assert started(env, "ovens.py")[1]["admissible"] == info["admissible"]
    assert started(env, "rolls.md")[1]["admissible"] != info["admissible"]


def test_gymnasiums_own_checker_accepts_it(explore_env):
    from gymnasium.utils.env_checker import check_env

    check_env(explore_env, skip_render_check=True)


EPISODES = """
import random
from lightrlhf.envs import make_env
env, rng = make_env("auto_explore", task_dir={!r}, leaveout_prob=0.5), random.Random(1)
for seed in range(5):
    text, info = env.reset(seed=seed)
    while info["admissible"]:
        print(text, info, env.reflection(), env.reflection("cat ovens.py"))
        text, *_, info = env.step(rng.choice(info["admissible"]))
"""


@pytest.mark.slow
def test_equal_seeds_and_actions_give_equal_episodes_in_any_process(explored, capsys):
    code = EPISODES.format(explored[1])
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment() | {"PYTHONHASHSEED": "1"}, cwd=ROOT,
        capture_output=True, text=True, check=True, timeout=PATIENCE,
    ).stdout  # fmt: skip
    capsys.readouterr()
    exec(code, {})
    assert capsys.readouterr().out == other and len(other) > 1000


def test_a_deep_copy_continues_like_the_original(explore_env):
    explore_env.reset(seed=3)
    other = copy.deepcopy(explore_env)
    assert explore_env.step("cd ..")[:2] == other.step("cd ..")[:2] and explore_env.reset()[0] == other.reset()[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_many_at_once_by_gymnasiums_vector(kind, explored):
    options = {"context": "forkserver", "shared_memory": False} if kind == "AsyncVectorEnv" else {}
    task_dir = explored[1]
    many = getattr(gymnasium.vector, kind)([lambda: make_env("auto_explore", task_dir=task_dir)] * 2, **options)
    try:
        texts, infos = many.reset(seed=7)
        alone = make_env("auto_explore", task_dir=task_dir)
        assert list(texts) == [alone.reset(seed=seed)[0] for seed in (7, 8)]
        texts, rewards, *_ = many.step(["cat ovens.py", "cd .."])
        assert rewards.tolist() == [-1, -2] and "ovens.py (read)" in texts[0]
    finally:
        many.close()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"task_dir": "nowhere"}, "task_dir nowhere"),
        ({"repo_dir": "nowhere"}, "repo_dir nowhere"),
        ({"horizon": 0}, "horizon 0 must be at least 1"),
        ({"leaveout_prob": 2}, "leaveout_prob 2 must lie in"),
        ({"max_entries": 0}, "max_entries 0 must be from 1 to 100"),
        ({"output_limit": -1}, "output_limit -1 must be from 0"),
        ({"error_cost": -1}, "error_cost -1 and warning_cost 1.0 must be at least 0"),
        ({"split": "dev"}, "split dev must be one of train, validation, test"),
        ({"level": 7}, "has no task of level 7 in its split train"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, line, explored):
    with pytest.raises(UsageError) as problem:
        make_env("auto_explore", **({"task_dir": explored[1]} | options))
    assert line in str(problem.value) and "\n" not in str(problem.value)
