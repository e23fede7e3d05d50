"""Text environments: what the programs expect of one, and how one is found by its name.

A text environment is a `gymnasium.Env` whose observations and actions are strings. Beside gymnasium's API it offers
fixed sets of starts, levels of a curriculum, and an oracle, from which demonstrations and reflections are made:
`TextEnv` below says what each part does. It keeps no state outside itself, never changes the working directory, and
two environments that get the same seed, start and actions say the same to the letter.

Yours is named by its import path, `package.module:Class`, wherever a program takes `--env`.

Left out: images, several players, and texts that depend on the clock or the network.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import string
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from lightrlhf.cli.args import needs_package
from lightrlhf.cli.errors import UsageError

ENVIRONMENTS = {
    "alfworld": "lightrlhf.envs.alfworld:AlfWorld",
    "auto_explore": "lightrlhf.envs.auto_explore:AutoExplore",
    "dangerous_taxi": "lightrlhf.envs.dangerous_taxi:DangerousTaxi",
}
MEMBERS = ("actions", "levels", "instructions", "reset", "step", "starts", "expert", "reflection")

Info = dict[str, Any]
Start = dict[str, Any]


class TextEnv(Protocol):
    """What an environment offers; inherit from `gymnasium.Env`, this class only describes.

    `info`, from `reset` and `step` alike, has the keys that `information` below takes.
    """

    actions: list[str] | None
    """All commands there are, in a fixed order; None where they depend on the state."""
    levels: list[str]
    """Names of the curriculum's levels, easy ones first."""
    instructions: str
    """The rules in full: for language models that meet the environment for the first time."""

    def reset(self, *, seed: int | None = None, options: Start | None = None) -> tuple[str, Info]:
        """A new episode. `options` is a start, plus whatever else the environment allows for one episode; without it
        a start is drawn by the environment's own generator, which `seed` sets.

        The text is the observation without the list of commands. Raises: ValueError for a start that cannot be.
        """

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Text, reward, whether the episode is over, whether the horizon cut it, info. Any string may come."""

    def starts(self, split: str, level: int | None = None) -> list[Start]:
        """The fixed starts of `train`, `validation` or `test`, of one level or all: plain dicts that JSON can hold,
        each with its `level`. No start is in two splits."""

    def expert(self) -> str | None:
        """The oracle's next command; None when the episode is over."""

    def reflection(self, action: str | None = None) -> str:
        """A short comment from what the oracle knows: where things stand, what is dangerous, what comes next.

        With `action`, which has not been taken: why it would be wrong here and what to do instead; "" when nothing is
        wrong with it.
        """


def information(
    actions: Sequence[str] | None,
    admissible: Iterable[str],
    *,
    most: int = 0,
    task: str = "",
    history: Sequence[tuple[str, str]] = (),
    success: bool = False,
    cost: float = 0.0,
    level: int = 0,
    invalid: bool = False,
) -> Info:
    """The `info` of a state.

    admissible:  the commands offered here, in the order of `actions` where these are fixed
    most:        commands a state may offer where they are not fixed: `gymnasium.vector` stacks masks of one length only
    task:        what stays the same during an episode and differs between episodes
    history:     (command, result in a few words) of each step so far
    cost:        minus the sum of rewards so far, undiscounted
    invalid:     whether the last command changed nothing or was not offered
    Adds `action_mask`, bool: over `actions` where these are fixed, else over `admissible`, all True, and False behind
    them up to `most`.
    """
    offered = list(admissible)
    here = set(offered)
    mask = [action in here for action in actions or offered]
    return {
        "admissible": offered,
        "action_mask": np.array(mask + [False] * (most - len(mask)), dtype=bool),
        "task": task,
        "history": list(history),
        "success": success,
        "cost": cost,
        "level": level,
        "invalid": invalid,
    }


def text_space(max_length: int, letters: str = string.printable) -> Any:
    """A gymnasium space of texts over `letters`, the empty one included."""
    from gymnasium.spaces import Text

    return Text(max_length, min_length=0, charset=letters)


def make_env(name: str, **options: Any) -> Any:
    """The environment of a name in `ENVIRONMENTS` or an import path; `options` go to its constructor.

    Raises: UsageError, one line, when there is none, a package is missing, or an option cannot be used.
    """
    environment = _class_of(name)
    try:
        inspect.signature(environment).bind(**options)
    except TypeError as problem:
        known = ", ".join(inspect.signature(environment).parameters) or "none"
        raise UsageError(f"--env {name}: {problem}; its options are: {known}") from None
    try:
        made = environment(**options)
    except ValueError as problem:
        raise UsageError(f"--env {name}: {problem}") from None
    missing = [member for member in MEMBERS if not hasattr(made, member)]
    if missing:
        raise UsageError(f"--env {name} has no {missing[0]}; see TextEnv in lightrlhf.envs for what one needs")
    return made


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """`horizon=30 split=train` as options of `make_env`: numbers and True or False as such, else text.

    Raises: ValueError when a word has no name and value.
    """
    options = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--env_options {word} must be name=value, such as horizon=30")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def _class_of(name: str) -> Any:
    path = ENVIRONMENTS.get(name, name)
    module, colon, member = path.partition(":")
    if not colon:
        known = ", ".join(ENVIRONMENTS)
        raise UsageError(f"--env {name} is unknown; give {known} or an import path such as package.module:Class")
    try:
        return getattr(importlib.import_module(module), member)
    except ModuleNotFoundError as problem:
        missing = (problem.name or "").partition(".")[0]
        if name in ENVIRONMENTS:
            extra = "alfworld" if name == "alfworld" else "envs"
            raise UsageError(needs_package(f"--env {name}", missing, extra)) from None
        raise UsageError(f"--env {name} cannot be imported: {problem}") from None
    except (ImportError, AttributeError) as problem:
        raise UsageError(f"--env {name} cannot be imported: {problem}") from None
