"""Python functions named by flags as `package.module:name` or `file.py:name`; checks that they accept columns."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightrlhf.cli.errors import UsageError, first_line, list_names
from lightrlhf.cli.packages import check_package

REWARD_SHAPE = "f(prompts, completions, **columns) -> list[float]"
VERL = ("data_source", "solution_str", "ground_truth")  # parameters of a function of one response, as verl calls it


def load_function(path: str, flag: str, shape: str = REWARD_SHAPE, takes_columns: bool = True) -> Callable[..., Any]:
    """Import a function by its path. Raises: UsageError naming `flag`, and the `shape` it must have."""
    if ":" not in path:
        example = f"{path}:function" if path.endswith(".py") else ":".join(path.rsplit(".", 1))
        raise UsageError(f"{flag} {path} is not of the form package.module:function; did you mean {example}?")
    try:
        function = import_member(path)
    except (Exception, SystemExit) as problem:  # whatever the module raises
        raise _not_imported(f"{flag} {path}", problem) from None
    if not callable(function):
        raise UsageError(f"{flag} {path} is not a function but a {type(function).__name__}")
    if takes_columns:
        check_columns(function, f"{flag} {path}", shape)
    if package := getattr(function, "needs", None):
        check_package(f"{flag} {path}", package, UsageError)
    return function


def check_found(path: str, what: str) -> None:
    """Raises: UsageError when the module of `package.module:name` is not found; only its parents are imported."""
    try:
        if find_spec(split_path(path)[0]) is None:
            raise ImportError(f"No module named {split_path(path)[0]!r}")
    except (Exception, SystemExit) as problem:  # whatever a parent raises
        raise _not_imported(what, problem) from None


def _not_imported(what: str, problem: BaseException) -> UsageError:
    """The error of an import, in one line."""
    kind = "" if isinstance(problem, ImportError | AttributeError | ValueError) else f"{type(problem).__name__}: "
    return UsageError(f"{what} cannot be imported: {kind}{first_line(problem)[:300]}")


def import_member(path: str) -> Any:
    """A member of a module by its path. Raises: ImportError, AttributeError, or whatever the module raises."""
    module, name = split_path(path)
    imported = importlib.import_module(module)
    if not hasattr(imported, name):
        own = [key for key, one in vars(imported).items() if getattr(one, "__module__", None) == module]
        own = [*dict.fromkeys([*difflib.get_close_matches(name, own), *own])]
        raise AttributeError(f"{module} has no {name or 'empty name'}; it has {list_names(own) or 'nothing'}")
    return getattr(imported, name)


def split_path(path: str) -> tuple[str, str]:
    """Module and name of `package.module:name`, or of `folder/file.py:name`, whose folder becomes importable.

    Raises: ImportError unless a file can be imported by its own name.
    """
    file, _, name = path.rpartition(":")
    if not file.endswith(".py"):
        module, _, name = path.partition(":")
        return module, name
    place = Path(file).resolve()
    module = place.stem
    if not place.is_file():
        raise ImportError(f"{file} does not exist")
    if not module.isidentifier():
        raise ImportError(f"{file} is not a valid module name; rename it, with letters, digits and underscores")
    if str(place.parent) not in sys.path:
        sys.path.append(str(place.parent))
        importlib.invalidate_caches()
    found = find_spec(module)
    if found is None or found.origin is None or Path(found.origin).resolve() != place:
        raise ImportError(f"{module} is also the name of another module; rename {file}")
    return module, name


def check_columns(function: Any, name: str, shape: str = REWARD_SHAPE) -> None:
    """Raises: UsageError naming the function when it cannot be called with columns of the data."""
    if not callable(function):
        raise UsageError(f"{name} is not a function {shape}, but a {type(function).__name__}")
    parameters = parameters_of(function)
    if parameters is None or (shape == REWARD_SHAPE and scores_one(function)):
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise UsageError(f"{name} must accept two arguments and **columns: {shape}")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise UsageError(f"{name} must accept **columns: {shape}")


def parameters_of(function: Any) -> list[inspect.Parameter] | None:
    """Parameters of a function; None where they are not known."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # some functions written in C have no signature
        return None


def scores_one(function: Any) -> bool:
    """Whether it has the signature of verl's `compute_score`, called once per response."""
    return set(VERL) <= {parameter.name for parameter in parameters_of(function) or []}
