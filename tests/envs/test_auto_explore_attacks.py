"""AutoExplore under attack: a tree that changes, commands that try to escape, and tampered task folders."""

import json
import os
from pathlib import Path

import pytest
from helpers.errors import error_naming
from helpers.explore import SECRET, TEXTS, grow, read_only, started, tasks_of

pytest.importorskip("gymnasium", reason="needs pip install -e '.[envs]'")

from lightrlhf.cli.errors import UsageError
from lightrlhf.envs import make_env

CHANGES = {  # what happens to garden/roses.py during the episode, and what `cat` then shows
    "it vanishes": (lambda garden: (garden / "roses.py").unlink(), "it is not there"),
    "its folder vanishes": (lambda garden: garden.rename(garden.parent.parent / "away"), "it is not there"),
    "it becomes a link outside": (lambda garden: swap(garden / "roses.py", "../../secret.txt"), "it is no plain file"),
    "its folder becomes a link": (lambda garden: swap_folder(garden), "its folder is a link or no folder"),
    "it becomes a folder": (
        lambda garden: [(garden / "roses.py").unlink(), (garden / "roses.py").mkdir()],
        "it is no plain file",
    ),
    "it becomes a pipe": (
        lambda garden: [(garden / "roses.py").unlink(), os.mkfifo(garden / "roses.py")],
        "it is no plain file",
    ),
    "it becomes empty": (lambda garden: (garden / "roses.py").write_text(""), "It is empty."),
    "it becomes binary": (lambda garden: (garden / "roses.py").write_bytes(b"\0\x1b\xff" * 99), "�"),
    "it grows": (lambda garden: (garden / "roses.py").write_text("thorns " * 10**6), "thorns"),
}


def swap(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def swap_folder(garden: Path) -> None:
    outside = garden.parent.parent / "outside"
    grow(outside, {"roses.py": SECRET})
    garden.rename(garden.parent.parent / "away")
    garden.symlink_to(outside)


@pytest.mark.parametrize("change", CHANGES)
def test_a_tree_that_changes_during_the_episode(change, tmp_path):
    grow(tmp_path / "tree", TEXTS)
    grow(tmp_path, {"secret.txt": SECRET})
    env = make_env("auto_explore", task_dir=tasks_of(tmp_path))
    started(env, "garden/roses.py")
    env.step("cd garden")
    alter, shown = CHANGES[change]
    alter(tmp_path / "tree" / "garden")
    grow(tmp_path / "tree", {"new.txt": SECRET})
    with read_only():
        text, reward, *_, info = env.step("cat roses.py")
        assert shown in text and SECRET not in text and len(text) < 1000
        assert (
            info["invalid"] == text.count("Error.") == (shown.startswith("it")) and reward == -1 - 2 * info["invalid"]
        )
        text, *_ = env.step("cd ..")
        assert "new.txt" not in text  # a file that is not listed does not exist for the agent
        env.step("cd garden")
        *_, info = env.step("id roses.py")
    assert info["success"]


COMMANDS = ["cat ../secret.txt", "cat /etc/passwd", "cat garden/roses.py", "cat ./ovens.py", "cat ovens.py;ls", "cat"]
COMMANDS += ["cat ovens.py secret.txt", "cat *", "cat $(ls)", "cat 'ovens.py'", "cat ovens.py\0", "cat ~", "cat garden"]
COMMANDS += [
    "cd /", "cd ../..", "cd garden/..", "cd .", "cd", "cd garden/pond", "cd ~", "cd ovens.py", "cd -", "cd  ..",
]  # fmt: skip
COMMANDS += [
    "id", "id garden", "id ../secret.txt", "ls", "exit", "head ovens.py", "rm ovens.py", "python -c 1", "", " ",
]  # fmt: skip
COMMANDS += [
    "CAT ovens.py", "x" * 100_000, "cat " + "x" * 100_000, "\n\n", "cat ovens.py\ncat rolls.md", "\ud800", "é🌍",
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_that_fails_costs_more_and_does_nothing(command, explore_env):
    before, _ = started(explore_env, "garden/roses.py")
    with read_only():
        text, reward, terminated, truncated, info = explore_env.step(command)
    assert (reward, info["cost"], info["invalid"]) == (-3.0, 3.0, True) and not terminated and not truncated
    assert text.startswith(before) and SECRET not in text and len(text) < len(before) + 300
    assert explore_env.observation_space.contains(text) and len(info["history"]) == 1
    text.encode()


def test_the_lists_of_a_tampered_task_folder_are_refused(explored, tmp_path):
    stored = json.loads(Path(explored[1], "tree.json").read_text())
    cases = ["../secret.txt", "/etc/passwd", "a//b", "", ".", "garden/../ovens.py", "x\ny.txt", "x\0.txt", 3, None]
    for file in cases:
        grow(tmp_path, {"tree.json": json.dumps(stored | {"files": [file]})})
        with error_naming(UsageError, "tree.json"):
            make_env("auto_explore", task_dir=str(tmp_path))
    for content in ("", "{", "[]", "{}", '{"repo_dir": "."}', b"\xff"):
        grow(tmp_path, {"tree.json": content})
        with error_naming(UsageError, "tree.json"):
            make_env("auto_explore", task_dir=str(tmp_path))


def test_a_task_whose_answer_is_not_in_the_tree_is_refused(explore_env):
    with error_naming(ValueError, "tree"):
        explore_env.reset(options={"task": "Where?", "targets": ["../secret.txt"], "level": 0})
