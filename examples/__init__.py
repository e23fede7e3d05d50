"""What the examples share besides the library."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lightrlhf.cli.errors import RunFailure


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """What is printed inside goes to the end of a file, whose folder is made.

    Raises: RunFailure when a program stops inside with an error, with the line it stopped with: nobody sees the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        try:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield
        except SystemExit as problem:
            if not problem.code:
                raise
            file.flush()
            said = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["an error"]
            raise RunFailure(f"{said[-1].removeprefix('error: ')} ({path})") from None
