"""AutoExplore, after Reflect-RL (Zhou, Du and Li 2024, https://arxiv.org/abs/2402.12621): find the file that answers.

An agent gets a question about a source tree and navigates its folders: `cd d` and `cd ..`, `cat f` to read the
beginning of a file, `id f` to name the file that answers, which ends the episode. A step costs 1; naming a right file
pays `horizon`, naming a wrong one, `exit` and running out of steps cost `horizon`. A command that fails costs
`error_cost` more, one without effect (reading a file again, leaving the root) `warning_cost` more.

The tree is any folder, read through `lightrlhf.envs.tree`: no shell, no copy, no change of the working directory. The
questions and the list of files that are visible to the agent come from `datasets_prep.text_envs.make_tasks`; files that
are not on the list do not exist for the agent. Levels are the depth of the file that answers: in the root, one folder
down, two folders down.

Left out: the authors' price per token, which was 0, and their sandbox, a copy of the tree with a shell.
"""

from __future__ import annotations

import json
import random
import string
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium

from lightrlhf.data.splits import SPLITS
from lightrlhf.envs import Info, Start, information, text_space
from lightrlhf.envs.tree import UNKNOWN, Refused, Tree, as_text, is_plain_name, parts_of
from lightrlhf.storage.jsonl import read_jsonl

LEVELS = ["depth 0", "depth 1", "depth 2"]
MAX_ENTRIES = 100  # a state then has at most 201 commands, for which 252 labels exist
SHOWN_LINES = 10  # by `head` and `tail`
READ_LIMIT = 2**20  # bytes that `cat`, `head` and `tail` read of a file
ECHO_LIMIT = 80  # characters of a command that an error message repeats
TEXT_LIMIT = 2**16
INSTRUCTIONS = """\
You look for the one file of a source tree that answers a question. You stand in a folder and see its folders and \
files. Commands: `cd NAME` enters a folder, `cd ..` leaves it, `cat NAME` shows the beginning of a file, `id NAME` \
names the file that answers the question and ends the search. Every command costs 1 point. Naming a right file pays as \
many points as there are steps in all; naming a wrong one, or running out of steps, costs as many. NAME is a single \
name that you see, never a path, and is written without quotes."""
SHELL_INSTRUCTIONS = """ More commands: `ls` lists the folder, `head NAME` and `tail NAME` show the first and the last \
ten lines of a file, `exit` gives up, which costs as much as naming a wrong file."""
Place = tuple[str, ...]


class Folder(NamedTuple):
    """Names in a folder, sorted."""

    folders: list[str]
    files: list[str]


EMPTY = Folder([], [])


class AutoExplore(gymnasium.Env):
    """The search as a text environment; see `lightrlhf.envs.TextEnv`.

    task_dir:           folder written by `datasets_prep.text_envs.make_tasks`
    repo_dir:           the tree, if it has moved since the tasks were made
    horizon:            steps until an episode is truncated
    discretize_actions: only `cd`, `cat` (once a file) and `id`; otherwise also `ls`, `head`, `tail` and `exit`, for
                        language models that write their commands
    max_entries:        maximum names shown of a folder; which other names are hidden depends on the task alone
    leaveout_prob:      probability that a name off the path is hidden for an episode, for training
    first_step:         end after one step, a success if a shortest path begins with it
    output_limit:       characters of a file that `cat` shows
    split, level:       pool of starts for a `reset` without options; all levels when no level is given
    """

    metadata = {"render_modes": ["ansi"]}
    actions = None
    levels = LEVELS

    def __init__(
        self,
        task_dir: str,
        repo_dir: str | None = None,
        horizon: int = 15,
        discretize_actions: bool = True,
        max_entries: int = 20,
        leaveout_prob: float = 0.0,
        first_step: bool = False,
        error_cost: float = 2.0,
        warning_cost: float = 1.0,
        output_limit: int = 400,
        split: str = "train",
        level: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        if not 1 <= max_entries <= MAX_ENTRIES:
            raise ValueError(f"max_entries {max_entries} must be from 1 to {MAX_ENTRIES}")
        if not 0 <= output_limit <= TEXT_LIMIT // 2:
            raise ValueError(f"output_limit {output_limit} must be from 0 to {TEXT_LIMIT // 2}")
        if min(error_cost, warning_cost) < 0:
            raise ValueError(f"error_cost {error_cost} and warning_cost {warning_cost} must be at least 0")
        self.episode = {"horizon": horizon, "leaveout_prob": leaveout_prob, "first_step": first_step}
        check_episode(self.episode)
        self.discretize_actions, self.max_entries, self.output_limit = discretize_actions, max_entries, output_limit
        self.error_cost, self.warning_cost, self.render_mode = error_cost, warning_cost, render_mode
        self.instructions = INSTRUCTIONS + ("" if discretize_actions else SHELL_INSTRUCTIONS)
        stored, self._tasks = read_tasks(task_dir)
        self._tree = Tree(repo_dir or stored["repo_dir"], "repo_dir")
        self._children = children_of(stored["files"])
        self._drawn_from = self.starts(split, level)
        if not self._drawn_from:
            wanted = "" if level is None else f" of level {level}"
            raise ValueError(
                f"task_dir {task_dir} has no task{wanted} in its split {split}; make tasks of another tree"
            )
        # Observations are restricted to these letters, so that a gymnasium space contains all of them.
        words = [stored["files"], [row["task"] for rows in self._tasks.values() for row in rows]]
        self._letters = frozenset(string.printable + UNKNOWN).union(*(set(text) for texts in words for text in texts))
        self.observation_space = text_space(TEXT_LIMIT, "".join(sorted(self._letters)))
        self.action_space = text_space(1024, "".join(sorted(self._letters)))
        self._over = True

    def starts(self, split: str, level: int | None = None) -> list[Start]:
        """Fixed starts: dicts of `task`, `targets` (paths that answer), `level`, `kind`. Raises: ValueError."""
        if split not in self._tasks:
            raise ValueError(f"split {split} must be one of {', '.join(self._tasks)}")
        return [row for row in self._tasks[split] if level is None or row["level"] == level]

    # ------------------------------------------------------------------------------------------------------- episodes
    def reset(self, *, seed: int | None = None, options: Start | None = None) -> tuple[str, Info]:
        """`options`: a start, and `horizon`, `leaveout_prob` or `first_step` for this episode alone."""
        super().reset(seed=seed)
        options = options or {}
        if "task" not in options:
            options = self._drawn_from[int(self.np_random.integers(len(self._drawn_from)))] | options
        settings = {name: options.get(name, value) for name, value in self.episode.items()}
        check_episode(settings)
        self._horizon, self._leaveout_prob, self._first_step = settings.values()
        self._task, self._level = str(options["task"]), int(options["level"])
        targets = [tuple(path.split("/")) for path in options["targets"]]
        self._targets = sorted(path for path in targets if path[-1] in self._children.get(path[:-1], EMPTY).files)
        if not self._targets:
            raise ValueError(f"no file of the tree answers the task {self._task!r}; make the tasks again")
        self._goals = sorted(self._targets, key=len)[: self.max_entries]  # a file may have very many copies
        self._draw = int(self.np_random.integers(2**62))  # seeds what `leaveout_prob` hides in this episode
        self._shown: dict[Place, Folder] = {}
        self._here: Place = ()
        self._read: set[Place] = set()
        self._history: list[tuple[str, str]] = []
        self._output, self._cost = "", 0.0
        self._over = self._success = False
        return self._text(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """One command; one that fails costs more, and the next observation contains the reason."""
        if self._over:
            raise RuntimeError("the episode is over; call reset")
        action = action.strip()
        was_right = self._first_step and not self._objection(action)
        extra, result, self._output = self._do(action)
        self._history.append((self._in_letters(action[:ECHO_LIMIT]), self._in_letters(result)))
        if self._first_step:
            self._over, self._success = True, was_right
        terminated = self._over
        truncated = not terminated and len(self._history) >= self._horizon
        self._over = terminated or truncated
        ending = 0 if not self._over else -self._horizon if self._success else self._horizon
        cost = 1.0 + extra + ending
        self._cost += cost
        return self._text(), -cost, terminated, truncated, self._info(invalid=extra > 0)

    def expert(self) -> str | None:
        """The next command of a shortest path: to the folder, `cat`, `id`; without `cat` if too few steps are left."""
        if self._over:
            return None
        path = min((self._path_to(target) for target in self._goals), key=len)
        left = self._horizon - len(self._history)
        return path[0] if len(path) <= left else next(command for command in path if not command.startswith("cat "))

    def reflection(self, action: str | None = None) -> str:
        """Information about the folder and the file read last, and the next command."""
        best = self.expert()
        if best is None:
            return ""
        if action is None:
            return f"{self._situation(best)} Next: {best}."
        objection = self._objection(action)
        return f"Not {action}: {objection}. {self._situation(best)} Instead: {best}." if objection else ""

    def render(self) -> str:
        """The observation with its task."""
        return f"{self._task}\n{self._text()}"

    # ------------------------------------------------------------------------------------------------------- commands
    def _do(self, action: str) -> tuple[float, str, str]:
        """Execute a command: its extra cost, the result in a few words, and the text it shows."""
        command, _, name = action.partition(" ")
        listing = self._listing()
        if action == "cd ..":
            if not self._here:
                return self.warning_cost, "This is the root.", ""
            self._here = self._here[:-1]
            return 0.0, f"Now in {self._place()}", ""
        if command == "cd" and name in listing.folders:
            self._here = (*self._here, name)
            return 0.0, f"Now in {self._place()}", ""
        if command == "id" and name in listing.files:
            self._over, self._success = True, (*self._here, name) in self._targets
            return 0.0, "Right." if self._success else "Wrong.", ""
        if name in listing.files and command in (["cat"] if self.discretize_actions else ["cat", "head", "tail"]):
            return self._show(command, (*self._here, name))
        if action == "ls" and not self.discretize_actions:
            return 0.0, "Listed.", "\n".join([*(f"{folder}/" for folder in listing.folders), *listing.files])
        if action == "exit" and not self.discretize_actions:
            self._over = True
            return 0.0, "Given up.", ""
        known = self.discretize_actions and command in ("cd", "cat", "id")
        known |= not self.discretize_actions and command in ("cd", "cat", "id", "head", "tail")
        wanted = "folder" if command == "cd" else "file"
        what = f"There is no {wanted} {name[:ECHO_LIMIT]!r} here." if known else f"No command: {action[:ECHO_LIMIT]!r}"
        return self.error_cost, f"Error. {what}", ""

    def _show(self, command: str, path: Place) -> tuple[float, str, str]:
        limit = READ_LIMIT if command != "cat" else 4 * self.output_limit + 4  # a character has at most four bytes
        try:
            text = as_text(self._tree.read("/".join(path), limit, from_end=command == "tail"))
        except Refused as problem:
            return self.error_cost, f"Error. {path[-1]} cannot be read: {problem}.", ""
        again = path in self._read and command == "cat"
        self._read.add(path)
        if command == "head":
            text = "\n".join(text.split("\n")[:SHOWN_LINES])
        elif command == "tail":
            text = "\n".join(text.rstrip("\n").split("\n")[-SHOWN_LINES:])
        text = self._in_letters(text)
        shown = text[-self.output_limit :] if command == "tail" and self.output_limit else text[: self.output_limit]
        return (self.warning_cost if again else 0.0), "Read again." if again else "Read.", shown or "It is empty."

    # ---------------------------------------------------------------------------------------------------- observations
    def _listing(self) -> Folder:
        """The visible entries of the current folder: those on the path to the answer, and a sample of the others."""
        if self._here not in self._shown:
            folders, files = self._children.get(self._here, EMPTY)
            depth = len(self._here)
            needed = {target[depth] for target in self._goals if target[:depth] == self._here}
            others = [name for name in (*folders, *files) if name not in needed]
            of_task, of_episode = (random.Random(f"{key}\n{self._place()}") for key in (self._task, self._draw))
            sample = of_task.sample(others, min(len(others), max(0, self.max_entries - len(needed))))
            shown = needed.union(name for name in sample if of_episode.random() >= self._leaveout_prob)
            self._shown[self._here] = Folder([n for n in folders if n in shown], [n for n in files if n in shown])
        return self._shown[self._here]

    def _admissible(self) -> list[str]:
        folders, files = self._listing()
        unread = [name for name in files if (*self._here, name) not in self._read]
        commands = ["cd .."] if self._here else []
        commands += [f"cd {name}" for name in folders] + [f"cat {name}" for name in unread]
        if not self.discretize_actions:
            commands += [f"{command} {name}" for command in ("head", "tail") for name in files] + ["ls", "exit"]
        return commands + [f"id {name}" for name in files]

    def _text(self) -> str:
        folders, files = self._listing()
        marked = [name + " (read)" * ((*self._here, name) in self._read) for name in files]
        lines = [f"Folder: {self._place()}"]
        lines += [f"Folders: {', '.join(folders) or '-'}", f"Files: {', '.join(marked) or '-'}"]
        if self._history:
            action, result = self._history[-1]
            lines += [f"Last: {action}", self._output or result]
        return "\n".join(lines)[:TEXT_LIMIT]

    def _info(self, invalid: bool = False) -> Info:
        return information(
            None,
            [] if self._over else self._admissible(),
            max_commands=(2 if self.discretize_actions else 4) * self.max_entries + 3,
            task=self._task,
            history=self._history,
            success=self._success,
            cost=self._cost,
            level=self._level,
            invalid=invalid,
        )

    def _place(self) -> str:
        return "/" + "/".join(self._here)

    def _in_letters(self, text: str) -> str:
        return "".join(letter if letter in self._letters else UNKNOWN for letter in text)

    # ---------------------------------------------------------------------------------------------------------- oracle
    def _path_to(self, target: Place) -> list[str]:
        """The commands from the current folder to naming `target`."""
        *folders, name = target
        shared = 0
        while shared < min(len(folders), len(self._here)) and folders[shared] == self._here[shared]:
            shared += 1
        path = ["cd .."] * (len(self._here) - shared) + [f"cd {folder}" for folder in folders[shared:]]
        return path + ([] if target in self._read else [f"cat {name}"]) + [f"id {name}"]

    def _situation(self, best: str) -> str:
        """The oracle's view of the state, in a sentence or two."""
        command, _, name = best.partition(" ")
        last = self._history[-1][0].partition(" ") if self._history else ("", "", "")
        seen = ""
        if last[0] == "cat" and last[2] in self._listing().files and (*self._here, last[2]) not in self._targets:
            seen = f"{last[2]} does not answer the question. "
        if best == "cd ..":
            return f"{seen}The answer is not below {self._place()}."
        if command == "cd":
            return f"{seen}The answer is below {name}."
        return seen + (f"{name} fits the question." if command == "cat" else f"{name} answers the question.")

    def _objection(self, action: str) -> str:
        """Why a command is wrong in this state; "" if it is not."""
        paths = [self._path_to(target) for target in self._goals]
        shortest = min(map(len, paths))
        if any(action == path[0] and len(path) == shortest for path in paths) or action == self.expert():
            return ""
        command, _, name = action.partition(" ")
        listing = self._listing()
        if command in ("cat", "id") and name in listing.files:
            if (*self._here, name) not in self._targets:
                ending = ", and the search would end" if command == "id" else ""
                return f"{name} does not answer the question{ending}"
            return "it was read already" if command == "cat" and (*self._here, name) in self._read else ""
        if action == "cd ..":
            return "it leads away from the answer" if self._here else "this is the root"
        if command == "cd" and name in listing.folders:
            return f"the answer is not below {name}"
        return "it does not bring the answer nearer" if action in self._admissible() else "that cannot be done here"


# ------------------------------------------------------------------------------------------------------------- files
def check_episode(settings: dict[str, Any]) -> None:
    """Raises: ValueError when a setting of an episode is out of range."""
    if settings["horizon"] < 1:
        raise ValueError(f"horizon {settings['horizon']} must be at least 1")
    if not 0 <= settings["leaveout_prob"] <= 1:
        raise ValueError(f"leaveout_prob {settings['leaveout_prob']} must lie in [0, 1]")


def read_tasks(task_dir: str) -> tuple[dict[str, Any], dict[str, list[Start]]]:
    """The contents of `tree.json`, and the tasks of each split. Raises: ValueError, UsageError."""
    path = Path(task_dir) / "tree.json"
    make = f"write it by python -m datasets_prep.text_envs.make_tasks --repo_dir TREE --destination_dir {task_dir}"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        for file in stored["files"]:
            if not all(map(is_plain_name, parts_of(file))):
                raise ValueError(f"{path} lists a file that cannot be shown, {file!r}; {make}")
    except FileNotFoundError:
        raise ValueError(f"task_dir {task_dir} has no tree.json; {make}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, Refused) as problem:
        raise ValueError(f"{path} cannot be used ({type(problem).__name__}: {problem}); {make}") from None
    needs = ("task", "targets", "level")
    return stored, {split: read_jsonl(Path(task_dir) / f"tasks_{split}.jsonl", needs) for split in SPLITS}


def children_of(files: list[str]) -> dict[Place, Folder]:
    """Sorted names of folders and files by the folder that contains them; no folder is empty."""
    folders: dict[Place, set[str]] = defaultdict(set)
    plain: dict[Place, set[str]] = defaultdict(set)
    for file in files:
        parts = tuple(file.split("/"))
        plain[parts[:-1]].add(parts[-1])
        for depth in range(len(parts) - 1):
            folders[parts[:depth]].add(parts[depth])
    return {path: Folder(sorted(folders[path]), sorted(plain[path])) for path in {*folders, *plain}}
