"""The check before the first update: the same weights give the same log-probabilities in two ways."""

from __future__ import annotations

from lightrlhf.cli.errors import RunFailure


def check_start(gap: float, limit: float, other: str) -> None:
    """Raises: RunFailure unless the policy's log-probabilities are less than `limit` nats a token from the others."""
    if not gap < limit:
        raise RunFailure(
            f"before the first update the policy's log-probabilities differ from {other} by {gap:.3g} nats a token"
        )
