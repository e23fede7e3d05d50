"""Python functions named by flags as `package.module:name`, and the check that they accept the data's columns."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from lightrlhf.cli.errors import UsageError, first_line
from lightrlhf.cli.packages import check_package

REWARD_SHAPE = "f(prompts, completions, **columns) -> list[float]"
VERL = ("data_source", "solution_str", "ground_truth")  # parameters of a function of one response, as verl calls it


def load_function(path: str, flag: str, shape: str = REWARD_SHAPE, takes_columns: bool = True) -> Callable[..., Any]:
    """Import a function by `package.module:name`. Raises: UsageError naming `flag`, and the `shape` it must have."""
    module, colon, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as problem:  # whatever the module raises
        kind = "" if isinstance(problem, ImportError | AttributeError | ValueError) else f"{type(problem).__name__}: "
        raise UsageError(
            f"{flag} {path} cannot be imported as package.module:function: {kind}{first_line(problem)[:300]}"
        ) from None
    if not colon or not callable(function):
        raise UsageError(f"{flag} {path} is not of the form package.module:function")
    if takes_columns:
        check_columns(function, f"{flag} {path}", shape)
    if package := getattr(function, "needs", None):
        check_package(f"{flag} {path}", package, UsageError)
    return function


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
    """Whether it has the parameters of verl's `compute_score`, which is called for each response."""
    return set(VERL) <= {parameter.name for parameter in parameters_of(function) or []}
