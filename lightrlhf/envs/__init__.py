"""Text environments: their interface, and making one by name.

A text environment is a `gymnasium.Env` whose observations and actions are strings. In addition to gymnasium's API it
has fixed splits of starts, levels of a curriculum, and an oracle, from which demonstrations and reflections are
generated; `TextEnv` below documents each part. It keeps no state outside itself, never changes the working directory,
and two environments with the same seed, start and actions return identical texts.

Programs that take `--env` accept the import path of your own, `package.module:Class`.

Left out: images, several players, and texts that depend on the clock or the network.
"""

from __future__ import annotations

import ast
import inspect
import string
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any, Protocol, get_args, get_type_hints

import numpy as np

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.functions import import_member
from lightrlhf.cli.groups.agents import ENVIRONMENTS
from lightrlhf.cli.packages import needs_package
from lightrlhf.cli.values import TYPES, check_value

MEMBERS = ("actions", "levels", "instructions", "reset", "step", "starts", "expert", "reflection")

Info = dict[str, Any]
Start = dict[str, Any]


class TextEnv(Protocol):
    """The interface of an environment, for documentation and type checks; inherit from `gymnasium.Env`.

    `info`, from both `reset` and `step`, has the keys that `information` below takes.
    """

    actions: list[str] | None
    """All commands, in a fixed order; None if they depend on the state."""
    levels: list[str]
    """Names of the curriculum's levels, from easy to hard."""
    instructions: str
    """The complete rules, for language models that were not trained on the environment."""

    def reset(self, *, seed: int | None = None, options: Start | None = None) -> tuple[str, Info]:
        """Begin an episode. `options` is a start, plus any settings the environment accepts for one episode; without a
        start one is drawn by the environment's own generator, which `seed` sets.

        The text is the observation without the list of commands. Raises: ValueError for an invalid start.
        """
        ...

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Returns observation, reward, terminated, truncated by the horizon, info. `action` may be any string."""
        ...

    def starts(self, split: str, level: int | None = None) -> list[Start]:
        """The fixed starts of `train`, `validation` or `test`, of one level or all: dicts of JSON values, each with
        its `level`. No start is in two splits."""
        ...

    def expert(self) -> str | None:
        """The oracle's next command; None when the episode is over."""
        ...

    def reflection(self, action: str | None = None) -> str:
        """A short comment from the oracle's knowledge: the situation, dangers, and the next command.

        With an `action` that has not been taken: why it would be wrong here and what to do instead; "" if it is not
        wrong.
        """
        ...


def information(
    actions: Sequence[str] | None,
    admissible: Iterable[str],
    *,
    max_commands: int = 0,
    task: str = "",
    history: Sequence[tuple[str, str]] = (),
    success: bool = False,
    cost: float = 0.0,
    level: int = 0,
    invalid: bool = False,
) -> Info:
    """The `info` of a state.

    admissible:    the commands available in this state, in the order of `actions` if these are fixed
    max_commands:  width of the mask if commands are not fixed: `gymnasium.vector` stacks only masks of equal length
    task:          constant during an episode, different between episodes
    history:       (command, result in a few words) of each step so far
    cost:          minus the sum of rewards so far, undiscounted
    invalid:       whether the last command changed nothing or was not admissible
    Adds `action_mask`, bool: over `actions` if these are fixed, otherwise True for each of `admissible`, then False up
    to `max_commands`.
    """
    commands = list(admissible)
    available = set(commands)
    mask = [action in available for action in actions or commands]
    return {
        "admissible": commands,
        "action_mask": np.array(mask + [False] * (max_commands - len(mask)), dtype=bool),
        "task": task,
        "history": list(history),
        "success": success,
        "cost": cost,
        "level": level,
        "invalid": invalid,
    }


def text_space(max_length: int, letters: str = string.printable) -> Any:
    """A gymnasium space of texts over `letters`, the empty text included."""
    from gymnasium.spaces import Text

    return Text(max_length, min_length=0, charset=letters)


def make_env(name: str, /, **options: Any) -> TextEnv:
    """A text environment by its name in `ENVIRONMENTS` or its import path; `options` are passed to its constructor.

    Raises: UsageError, one line, when it lacks a part of `TextEnv`, and see `construct`.
    """
    made = construct(name, **options)
    missing = [member for member in MEMBERS if not hasattr(made, member)]
    if missing:
        raise UsageError(f"--env {name} has no {missing[0]}; see TextEnv in lightrlhf.envs for the interface")
    return made


def construct(name: str, /, **options: Any) -> Any:
    """The object that a class or function of `--env` makes.

    Raises: UsageError, one line, when it does not exist, a package is missing, or an option is invalid.
    """
    environment = _class_of(name)
    try:
        inspect.signature(environment).bind(**options)
    except TypeError as problem:
        known = ", ".join(inspect.signature(environment).parameters) or "none"
        raise UsageError(f"--env {name}: {problem}; its options are: {known}") from None
    try:
        _check_options(environment, options)
        return environment(**options)
    except ValueError as problem:
        raise UsageError(f"--env {name}: {problem}") from None
    except (TypeError, ArithmeticError) as problem:  # from values without a type annotation in the constructor
        if not options:
            raise
        raise UsageError(f"--env {name} cannot be made with these --env_options: {first_line(problem)}") from None


def _check_options(environment: Any, options: dict[str, Any]) -> None:
    """Raises: ValueError for an option whose type differs from the constructor's annotation, where that is plain."""
    try:
        hints = get_type_hints(environment.__init__ if inspect.isclass(environment) else environment)
    except (NameError, TypeError):  # names that only a type checker can resolve
        return
    for name, value in options.items():
        kinds = get_args(hints.get(name)) or (hints.get(name),)
        if len(plain := [kind for kind in kinds if kind in TYPES]) == 1 and not (value is None and NoneType in kinds):
            check_value(f"env_options {name}", value, plain[0])


def check_option(word: str, flag: str) -> None:
    """Raises: ValueError when a word is not name=value."""
    name, equals, _ = word.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"{flag} {word} must be name=value, such as horizon=30")


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse `horizon=30 split=train` into options of `make_env`: Python literals where possible, otherwise text.

    Raises: ValueError when a word is not name=value.
    """
    options: dict[str, Any] = {}
    for word in words:
        check_option(word, "--env_options")
        name, _, value = word.partition("=")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            options[name] = value
    return options


def _class_of(name: str) -> Any:
    path = ENVIRONMENTS.get(name, name)
    if ":" not in path:
        known = ", ".join(ENVIRONMENTS)
        raise UsageError(f"--env {name} is unknown; give {known} or an import path such as package.module:Class")
    try:
        return import_member(path)
    except ModuleNotFoundError as problem:
        missing = (problem.name or "").partition(".")[0]
        if name in ENVIRONMENTS:
            raise UsageError(needs_package(f"--env {name}", "alfworld" if name == "alfworld" else missing)) from None
        raise UsageError(f"--env {name} cannot be imported: {problem}") from None
    except (ImportError, AttributeError) as problem:
        raise UsageError(f"--env {name} cannot be imported: {problem}") from None
