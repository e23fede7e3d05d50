"""What a row of raw results says about how it was made, and how a learning rate is chosen by trials."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightrlhf.training.provenance import git_commit, versions

CPUINFO = Path("/proc/cpuinfo")  # of Linux


def made_by() -> dict[str, Any]:
    """Versions of what results depend on, the library's commit and the processor's name."""
    return {"versions": versions(), "commit": git_commit(), "processor": processor()}


def processor() -> str:
    """Name of the processor, as far as the system tells it."""
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def best_rate(trials: Iterable[dict[str, Any]]) -> float:
    """The learning rate of the trial with the highest validation score; of equals the first."""
    return max(trials, key=lambda row: row["score"])["learning_rate"]
