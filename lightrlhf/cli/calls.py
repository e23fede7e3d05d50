"""Calls of the library's programs by keyword, each printed as the command line it stands for."""

from __future__ import annotations

import shlex
import time
from types import ModuleType
from typing import Any


def call(program: ModuleType, **flags: Any) -> Any:
    """Print the command, run the program's `main` in this process, print the seconds it took.

    A list becomes several words; a flag that is None is left out.
    """
    words = words_of(flags)
    print(f"\n$ python -m {program.__name__} {shlex.join(words)}", flush=True)
    started = time.perf_counter()
    result = program.main(words)
    print(f"({time.perf_counter() - started:.0f} s)", flush=True)
    return result


def words_of(flags: dict[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    words = []
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words
