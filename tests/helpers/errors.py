"""What an error must name: a flag with its value, a file, a number; never its wording, which may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def error_naming(kind: type[BaseException], *facts: object) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Context manager: the block must raise an error of this kind whose text has all of the facts."""
    with pytest.raises(kind) as problem:
        yield problem
    text = str(problem.value)
    missing = [str(fact) for fact in facts if str(fact) not in text]
    assert not missing, f"{missing} not in {text!r}"
