"""Errors that a program prints as one line.

A program raises `UsageError` for invalid input (exit status 2) and `RunFailure` for a failure while it runs (exit
status 1). `one_line_errors` decorates each `main`; from Python the exceptions come out as they are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any


class UsageError(Exception):
    """Invalid input. Printed as one line before training starts; exit status 2."""

    exit_status = 2


class RunFailure(UsageError):
    """A failure during the run. Printed as one line; exit status 1."""

    exit_status = 1


class NotFinite(RunFailure):
    """Logits that are not finite, in sampling; rows: places of the prompts among those of the call."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class StopTraining(Exception):
    """Raised by `on_step` to end training after the current step, with a last evaluation and checkpoint."""


def first_line(problem: BaseException) -> str:
    """First non-empty line of an exception's message, or the name of its class."""
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


def one_line_errors(main: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a program's `main`: a UsageError is printed as one line and becomes the exit status."""

    @functools.wraps(main)
    def guarded(argv: list[str] | None = None) -> Any:
        try:
            return main(argv)
        except UsageError as problem:
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(problem.exit_status)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return guarded
