"""Traces of a server's sessions as samples of the tab Rollouts: each row of ids, beside what the template writes now.

A file `traces.jsonl` in an experiment dir has a trace a line, as `GET /sessions/ID/trace?rendering` answers it.
"""

from __future__ import annotations

from typing import Any

TRACES, SUFFIX = "traces.jsonl", ", sessions"  # the file, and what is behind its run's label


def samples_of(line: Any) -> list[Any]:
    """Return the samples of a line: of a trace its rows, else the line itself."""
    if not isinstance(line, dict) or not isinstance(line.get("rows"), list) or not isinstance(line.get("turns"), list):
        return [line]
    rows = [row for row in line["rows"] if isinstance(row, dict)]
    return [sample_of(row, str(line.get("id")), number, line["turns"]) for number, row in enumerate(rows)]


def sample_of(row: dict[str, Any], session: str, number: int, turns: list[Any]) -> dict[str, Any]:
    """Return a row of a trace as a row of `rollouts.jsonl`."""
    own = [turn for turn in turns if isinstance(turn, dict) and turn.get("row") == number]
    columns = {name: row[name] for name in ("began", "why", "shares") if row.get(name)}
    columns["turns"] = ", ".join(f"{turn.get('stop_reason')} by {turn.get('version')}" for turn in own)
    pairs = pairs_of(row)
    named = {"step": 0, "prompt": f"session {session}", "response": "".join(text for text, _ in pairs)}
    return {**named, "response_ids": row.get("ids"), "mask": row.get("mask"), "columns": columns, "rendering": pairs}


def pairs_of(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return pieces of the ids' text, each with what the chat template writes in its place, if it was asked for."""
    pairs = row.get("rendering")
    try:
        return [(str(one), str(other)) for one, other in pairs] if isinstance(pairs, list) else []
    except (TypeError, ValueError):
        return []
