"""What an error must name: a flag with its value, a file, a number; never its wording, which may change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def error_naming(kind: type[BaseException], *facts: object) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Context manager: the block must raise an error of this kind whose text has all of the facts."""
    with pytest.raises(kind) as problem:
        yield problem
    text = str(problem.value)
    missing = [str(fact) for fact in facts if str(fact) not in text]
    assert not missing, f"{missing} not in {text!r}"


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines on stderr since the last look, without progress bars."""
    text = capsys.readouterr().err.replace("\r", "\n")
    return [line for line in text.splitlines() if line.strip() and "it/s" not in line and "?it" not in line]


def refused(
    capsys: pytest.CaptureFixture[str], call: Callable[[list[str]], Any], *words: object, status: int = 2
) -> str:
    """The one line on stderr with which a program refuses its flags, and ends with that status."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        call([str(word) for word in words])
    lines = error_lines(capsys)
    assert stopped.value.code == status and len(lines) == 1, (stopped.value.code, lines)
    return lines[0]
