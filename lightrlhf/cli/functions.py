"""Python functions named by flags as `package.module:name`, and the check that they accept the data's columns."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from lightrlhf.cli.errors import UsageError

REWARD_SHAPE = "f(prompts, completions, **columns) -> list[float]"


def load_function(path: str, flag: str, shape: str = REWARD_SHAPE) -> Callable[..., Any]:
    """Import a function by `package.module:name`. Raises: UsageError naming `flag`, and the `shape` it must have."""
    module, colon, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise UsageError(f"{flag} {path} cannot be imported as package.module:function: {problem}") from None
    if not colon or not callable(function):
        raise UsageError(f"{flag} {path} is not of the form package.module:function")
    check_columns(function, f"{flag} {path}", shape)
    return function


def check_columns(function: Any, name: str, shape: str = REWARD_SHAPE) -> None:
    """Raises: UsageError naming the function when it cannot be called with columns of the data."""
    if not callable(function):
        raise UsageError(f"{name} is not a function {shape}, but a {type(function).__name__}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C have no signature
        return
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise UsageError(f"{name} must accept **columns: {shape}")
