"""`latest`: a link to the newest run of an algorithm and data, next to its runs.

A path through it means the run that it links to when a program starts: arguments, labels and model cards hold that
run's own name, so a later run changes nothing of them.
"""

from __future__ import annotations

import os
from pathlib import Path

LATEST = "latest"


def follow_latest(path: str) -> str:
    """A path with the run's own name in place of `latest`; any other text unchanged."""
    parts = Path(path).parts
    for place, part in enumerate(parts):
        link = Path(*parts[: place + 1])
        if part == LATEST and link.is_symlink():
            run = os.readlink(link)
            if Path(run).name == run:  # a sibling folder; other links are not ours
                return str(Path(link.parent, run, *parts[place + 1 :]))
    return path


def why_missing(path: str) -> str:
    """The reason why a path is not a folder; a link such as `best` may lead to a checkpoint that was deleted."""
    if not os.path.islink(path):
        return "does not exist"
    remedy = f"; give {Path(path).parent} for its newest checkpoint" if Path(path).name == "best" else ""
    return f"links to {os.readlink(path)}, which does not exist{remedy}"
