"""Timeouts in seconds, each set by an environment variable.

They are not flags, since they do not change the trained model.
"""

from __future__ import annotations

import math
import os

from lightrlhf.cli.errors import UsageError

REQUEST, SERVER, RANK = (f"LIGHTRLHF_{name}_TIMEOUT" for name in ("REQUEST", "SERVER", "RANK"))
DEFAULTS = {
    REQUEST: 600.0,  # until an unanswered request counts as failed
    SERVER: 600.0,  # until every server is up, and for a rollout server when all have failed
    RANK: 1800.0,  # until a run ends and names the rank that did not come
}


def patience(variable: str) -> float:
    """Seconds of a limit. Raises: UsageError when its environment variable is not a number above 0."""
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else DEFAULTS[variable]
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{variable} {text} must be a number of seconds above 0")
    return seconds
