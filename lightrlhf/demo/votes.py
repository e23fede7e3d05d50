"""Votes of people on pairs of answers: kept as JSON lines, counted, and turned into what a reward model learns from.

A row is what one person saw and said: `pair` (which answers to which prompt, whatever their order), `rater`, `prompt`,
`responses` and `models` (two each, in the order shown; `cut` says of each whether its length ended it), `verdict` (A:
the first shown, B, tie or skip) and `comment`.
Several people, threads and servers may append to one file. A vote is on the disk before the page says thanks; a kill
loses at most the vote it interrupts. Left out: editing a vote (the first one of a person on a pair stays).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lightrlhf.cli.errors import UsageError
from lightrlhf.maths.ops import wilson_interval
from lightrlhf.storage.run_dir import read_growing

VERDICTS = ("A", "B", "tie", "skip")
COLUMNS = ("pair", "rater", "prompt", "responses", "models", "verdict")
Vote = dict[str, Any]


def pair_id(prompt: Any, models: Sequence[str], responses: Sequence[str]) -> str:
    """A name for two answers to a prompt that does not depend on their order."""
    content = json.dumps([prompt, sorted(zip(models, responses))], ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------- the file
def append_vote(path: str | Path, vote: Vote) -> bool:
    """Write a vote at the end of the file; False where this rater has voted on this pair already (a double click).

    Raises: UsageError when the file cannot be written or holds something else.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file, _locked(file):
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):  # a killed server's last line
                file.truncate(whole)
            if any(_by(row) == _by(vote) for row in read_votes(path)):
                return False
            file.write((json.dumps(vote, ensure_ascii=False) + "\n").encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
            return True
    except OSError as problem:
        raise UsageError(f"{path} cannot be written: {problem.strerror}; the votes before are kept") from None


def read_votes(path: str | Path) -> list[Vote]:
    """The votes of a file, one a rater and pair, without a last line that is not whole; none where there is no file.

    Raises: UsageError naming file and row when a row is no vote.
    """
    found: dict[tuple[str, str], Vote] = {}
    for number, row in enumerate(read_growing(Path(path)) or [], start=1):
        missing = [name for name in COLUMNS if not isinstance(row, dict) or name not in row]
        if missing:
            raise UsageError(f"{path}: row {number} is no vote: it has no {missing[0]!r}")
        if row["verdict"] not in VERDICTS or len(row["responses"]) != 2 or len(row["models"]) != 2:
            raise UsageError(f"{path}: row {number} is no vote of A, B, tie or skip on two responses")
        found.setdefault(_by(row), row)
    return list(found.values())


def _by(vote: Vote) -> tuple[str, str]:
    return vote["pair"], vote["rater"]


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Alone with a file, among threads and processes; it ends with the file's closing, or its holder's death."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


# ---------------------------------------------------------------------------------------------------------- counting
def winner(vote: Vote) -> int | None:
    """0 or 1 for the response preferred, in the order of `sides`; None for a tie or a skip."""
    if vote["verdict"] not in ("A", "B"):
        return None
    shown = sides(vote)
    return shown.index((vote["models"]["AB".index(vote["verdict"])], vote["responses"]["AB".index(vote["verdict"])]))


def sides(vote: Vote) -> list[tuple[str, str]]:
    """(model, response) of both answers in an order that all raters of a pair share."""
    return sorted(zip(vote["models"], vote["responses"]))


def by_pair(votes: Iterable[Vote]) -> dict[str, list[Vote]]:
    """The votes on each pair that are no skips."""
    found: dict[str, list[Vote]] = defaultdict(list)
    for vote in votes:
        if vote["verdict"] != "skip":
            found[vote["pair"]].append(vote)
    return dict(found)


def preferred(votes: Sequence[Vote]) -> int | None:
    """What most raters of a pair prefer, 0 or 1 in the order of `sides`; None where it is a tie."""
    counts = Counter(winner(vote) for vote in votes)
    return None if counts[0] == counts[1] else int(counts[1] > counts[0])


def tally(votes: Sequence[Vote]) -> list[dict[str, Any]]:
    """For each two models how often the first wins, ties and loses, and its win rate with a 95% Wilson interval.

    Ties count half. A pair counts once however many people saw it, with their mean, so that the interval is one of
    independent prompts. `prefers_shown_first` of the votes with a winner: half without a bias of position.
    """
    groups: dict[tuple[str, str], list[list[Vote]]] = defaultdict(list)
    for members in by_pair(votes).values():
        first, second = sides(members[0])
        groups[first[0], second[0]].append(members)
    rows = []
    for (one, other), pairs in sorted(groups.items()):
        scores = [sum({0: 1.0, 1: 0.0}.get(winner(vote), 0.5) for vote in pair) / len(pair) for pair in pairs]
        cast = [vote for pair in pairs for vote in pair]
        decided = Counter(winner(vote) for vote in cast)
        rows.append(
            {
                "model": one,
                "against": other,
                "pairs": len(pairs),
                "votes": len(cast),
                "wins": decided[0],
                "ties": decided[None],
                "losses": decided[1],
                "win_rate": sum(scores) / len(scores),
                "win_rate_interval": wilson_interval(sum(scores), len(scores)),
                "prefers_shown_first": _share(vote["verdict"] == "A" for vote in cast if winner(vote) is not None),
            }
        )
    return rows


def agreement(votes: Sequence[Vote]) -> dict[str, Any]:
    """How far raters agree on the pairs that two or more of them judged: their number, the share of equal verdicts
    among two of a pair, and Krippendorff's alpha for nominal values (Krippendorff 2011, section C).

    alpha is 1 for perfect agreement and 0 for that of chance; None where there is nothing to compare, or where all
    verdicts of all are the same.
    """
    units = [[winner(vote) for vote in members] for members in by_pair(votes).values() if len(members) > 1]
    together: Counter[tuple[int | None, int | None]] = Counter()  # coincidences of two verdicts
    for unit in units:
        for i, one in enumerate(unit):
            for j, other in enumerate(unit):
                if i != j:
                    together[one, other] += 1 / (len(unit) - 1)
    values = Counter()
    for (one, _), count in together.items():
        values[one] += count
    total = sum(values.values())
    apart = sum(count for (one, other), count in together.items() if one != other)
    by_chance = total**2 - sum(count**2 for count in values.values())
    return {
        "pairs": len(units),
        "equal": 1 - apart / total if total else None,
        "alpha": 1 - (total - 1) * apart / by_chance if by_chance else None,
    }


def _share(values: Iterable[bool]) -> float | None:
    counted = list(values)
    return sum(counted) / len(counted) if counted else None
