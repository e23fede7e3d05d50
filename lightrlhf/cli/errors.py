"""Errors that a program prints as one line.

A program raises `UsageError` for invalid input (exit status 2) and `RunFailure` for a failure while it runs (exit
status 1). `one_line_errors` decorates each `main`; from Python the exceptions come out as they are.

`write_problem` knows the shapes in which a full or read-only disk shows itself: an OSError, or what the writers of
safetensors, tokenizers, torch and TensorBoard make of one.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pickle import UnpicklingError
from typing import Any

from lightrlhf.cli.packages import missing_line

# remedies for a failed write, by errno
WRITE_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there or raise the quota",
    errno.EROFS: "mount it for writing or name another place",
    errno.EIO: "check the disk (the kernel's log names it) or name another place",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the limit on open files (sysctl fs.file-max)",
    errno.EACCES: "allow access there or name another place",
    errno.EPERM: "allow access there or name another place",
    errno.ESTALE: "mount the network file system again",
    errno.ENAMETOOLONG: "give a shorter one",
}
FOREIGN_ERRNO = re.compile(r"\b(?:os error|errno) (\d+)", re.IGNORECASE)  # as Rust's and Arrow's messages end
CLOSED_PIPE = 141  # exit status that shells give a program whose reader is gone, 128 + SIGPIPE
TERMINATED = 143  # exit status of a run that was saved and ended on SIGTERM or SIGUSR1: 128 + SIGTERM
TORCH_WRITERS = ("inline_container", "PytorchStreamWriter", "PyTorchFileWriter")  # their messages have no errno


class UsageError(Exception):
    """Invalid input. Printed as one line before training starts; exit status 2."""

    exit_status = 2


class RunFailure(UsageError):
    """A failure during the run. Printed as one line; exit status 1."""

    exit_status = 1


class NotFinite(RunFailure):
    """Logits were not finite while sampling.

    indices: positions of the prompts in the call; rows: their row numbers in the data, where known.
    """

    def __init__(self, message: str, indices: Sequence[int] = (), rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.indices, self.rows = indices, rows


class ServersGone(RunFailure):
    """All servers failed; `run.phase` saves a checkpoint."""


class StopTraining(Exception):
    """Raised by `on_step` to end training after the current step, with a last evaluation and checkpoint."""


def first_line(problem: BaseException) -> str:
    """First non-empty line of an exception's message, or the name of its class."""
    text = ""
    with suppress(Exception):  # of a __str__ that raises
        text = str(problem)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(problem).__name__)


def read_problem(problem: BaseException) -> str:
    """Why a file of weights cannot be read, in one line."""
    if isinstance(problem, UnpicklingError):  # its message recommends loading the file anyway
        return "it is a pickle that holds more than tensors and might run code"
    if isinstance(problem, LookupError | AttributeError | TypeError):  # their messages describe the reader's code
        return f"it is damaged ({type(problem).__name__})"
    return first_line(problem)


def list_names(names: Iterable[str]) -> str:
    """The first three of several names, and how many more there are."""
    found = list(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def write_problem(problem: BaseException) -> str | None:
    """Why a write failed and what to do about it; None if the exception is not about a failed write."""
    for one in _causes(problem):
        found = FOREIGN_ERRNO.search(str(one))
        number = one.errno if isinstance(one, OSError) and one.errno else int(found[1]) if found else None
        if number in WRITE_REMEDIES:
            return f"{os.strerror(number)}; {WRITE_REMEDIES[number]}"
        if isinstance(one, RuntimeError) and any(name in str(one) for name in TORCH_WRITERS):
            return "torch could not write the file, perhaps because the disk is full; free space there"
    return None


def _causes(problem: BaseException | None) -> Iterator[BaseException]:
    """An exception and its causes."""
    while problem is not None:
        yield problem
        hidden = problem.__suppress_context__  # raised `from` another, or from None
        problem = problem.__cause__ if hidden else problem.__context__


def one_line_errors(main: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a program's `main`: a UsageError is printed as one line and becomes the exit status.

    So is a missing package, a given path that is too long for the file system, and a failed write that no caller
    handles: in another package, or to a full standard output.
    If the reader of a pipe has ended, as with `head`, the program ends silently.
    """

    @functools.wraps(main)
    def guarded(argv: list[str] | None = None) -> Any:
        try:
            return _call_and_flush(main, argv)
        except UsageError as problem:
            with suppress(OSError):  # standard error may be a file on the full disk
                print(f"error: {problem}", file=sys.stderr)
            sys.exit(problem.exit_status)
        except Exception as problem:
            if isinstance(problem, BrokenPipeError) and _pipes_closed():
                sys.exit(CLOSED_PIPE)
            if missing := missing_line(problem):
                print(f"error: {missing}", file=sys.stderr)
                sys.exit(UsageError.exit_status)
            reason = write_problem(problem)
            if reason is None:
                raise
            names = (getattr(one, "filename", None) for one in _causes(problem))
            where = next((f"{name}: " for name in names if name), "")
            is_given = isinstance(problem, OSError) and problem.errno == errno.ENAMETOOLONG  # a user's
            with suppress(OSError):
                print(f"error: {where}{reason}{'' if is_given else ', then run this again'}", file=sys.stderr)
            sys.exit((UsageError if is_given else RunFailure).exit_status)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return guarded


def _call_and_flush(main: Callable[..., Any], argv: list[str] | None) -> Any:
    """Call `main` and flush its output here, where an error is caught, not at interpreter exit."""
    try:
        result = main(argv)
    except SystemExit:  # of --help
        print(end="", flush=True)
        raise
    print(end="", flush=True)
    return result


def _pipes_closed() -> bool:
    """Whether standard output or error has lost its reader; buffered text is then lost."""
    closed = []
    if not hasattr(select, "poll"):  # on Windows, where a write to a closed pipe raises another error
        return False
    for stream in filter(None, (sys.stdout, sys.stderr)):
        poll = select.poll()
        with suppress(OSError):  # a stream without a file descriptor, as in a test
            poll.register(stream.fileno(), 0)  # only errors are printed there
        closed += [number for number, _ in poll.poll(0)]
    for number in closed:  # Python writes what is left at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return bool(closed)
