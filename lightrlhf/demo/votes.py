"""Human votes on pairs of answers: stored as JSON lines, tallied, and read as data for a reward model.

A row is one rater's vote: `pair` (id of the prompt and its two answers, independent of their order), `rater`, `prompt`,
`responses` and `models` (two each, in the order shown; `cut` marks those truncated at the length limit), `verdict` (A:
the answer shown first, B, tie or skip) and `comment`. Rows are only ever appended: one with the verdict `withdrawn`
takes back the rater's vote on the pair, who may then vote on it again.
Threads, processes and servers may append to the same file. A vote is on disk before the demo confirms it; a kill loses
at most the vote being written. Left out: editing a vote (until it is withdrawn, a rater's first vote on a pair counts).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.maths.ops import wilson_interval
from lightrlhf.storage.jsonl import append_whole
from lightrlhf.storage.run_dir import read_growing
from lightrlhf.storage.writing import make_folder, sync_folder, writing

VERDICTS = ("A", "B", "tie", "skip")
WITHDRAWN = "withdrawn"
COLUMNS = ("pair", "rater", "prompt", "responses", "models", "verdict")
Vote = dict[str, Any]


def pair_id(prompt: Any, models: Sequence[str], responses: Sequence[str]) -> str:
    """Hash of a prompt and its two answers, independent of their order."""
    content = json.dumps([prompt, sorted(zip(models, responses))], ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------- the file
def append_vote(path: str | Path, vote: Vote) -> bool:
    """Append a vote; False if this rater has already voted on this pair (for example by a double click).

    With the verdict `withdrawn` it takes back the rater's vote on the pair; False if there is no such vote.
    Raises: UsageError when the file cannot be written or has a row that is not a vote.
    """
    path, replaces = Path(path), vote["verdict"] == WITHDRAWN
    with writing(path, kept=lambda: "earlier votes are kept", error=UsageError):
        make_folder(path.parent)
        is_new = not path.exists()
        with path.open("ab", buffering=0) as file:
            _lock(file)
            content = path.read_bytes()
            complete = content.rfind(b"\n") + 1
            if complete < len(content) and not _is_json(content[complete:]):  # the last row of a killed server
                if not content[complete:].startswith(b"{"):
                    raise UsageError(f"{path} ends with a line that is not a vote; name another file")
                file.truncate(complete)
            elif complete < len(content):  # written by others, without an end of line
                append_whole(file, b"\n")
            if replaces != any(_key(row) == _key(vote) for row in read_votes(path)):
                return False
            append_whole(file, (json.dumps(vote, ensure_ascii=False) + "\n").encode("utf-8"))
            os.fsync(file.fileno())
            if is_new:
                sync_folder(path.parent)
            return True


def read_votes(path: str | Path) -> list[Vote]:
    """Return the valid votes of a file, one per rater and pair; an incomplete last line is ignored.

    Returns no votes if the file does not exist. Raises: UsageError naming file and row when a row is not a vote.
    """
    votes: dict[tuple[str, str], Vote] = {}
    for number, row in enumerate(read_growing(Path(path)), start=1):
        missing = [name for name in COLUMNS if not isinstance(row, dict) or name not in row]
        if missing:
            raise UsageError(f"{path}: row {number} is not a vote: it has no {missing[0]!r}")
        if row["verdict"] not in (*VERDICTS, WITHDRAWN) or len(row["responses"]) != 2 or len(row["models"]) != 2:
            raise UsageError(f"{path}: row {number} is not a vote: it needs two responses and A, B, tie or skip")
        if row["verdict"] == WITHDRAWN:
            votes.pop(_key(row), None)
        else:
            votes.setdefault(_key(row), row)
    return list(votes.values())


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _key(vote: Vote) -> tuple[str, str]:
    return vote["pair"], vote["rater"]


def _lock(file: IO[bytes]) -> None:
    """Lock a file for this thread until it is closed or the process dies; not on Windows."""
    with suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


# ---------------------------------------------------------------------------------------------------------- counting
def sides(vote: Vote) -> list[tuple[str, str]]:
    """(model, response) of both answers in canonical order, the same for all raters of a pair."""
    return sorted(zip(vote["models"], vote["responses"]))


def winner(vote: Vote) -> int | None:
    """Index of the preferred answer in `sides`, 0 or 1; None for a tie or a skip."""
    if vote["verdict"] not in ("A", "B"):
        return None
    shown = "AB".index(vote["verdict"])
    return sides(vote).index((vote["models"][shown], vote["responses"][shown]))


def majority(votes: Sequence[Vote]) -> int | None:
    """Majority vote on one pair: the index in `sides` with more votes, 0 or 1; None if both have equally many."""
    counts = Counter(winner(vote) for vote in votes)
    return None if counts[0] == counts[1] else int(counts[1] > counts[0])


def by_pair(votes: Iterable[Vote]) -> dict[str, list[Vote]]:
    """Votes grouped by pair, without skips."""
    groups: dict[str, list[Vote]] = defaultdict(list)
    for vote in votes:
        if vote["verdict"] != "skip":
            groups[vote["pair"]].append(vote)
    return dict(groups)


def tally(votes: Sequence[Vote]) -> list[dict[str, Any]]:
    """Wins, ties and losses of each two models, and the win rate of the first with its 95% Wilson interval.

    The win rate is the mean over pairs of a pair's mean score, where a win is 1, a tie 1/2 and a loss 0. A pair counts
    once whatever its number of raters, so the interval is over independent prompts. `prefers_shown_first` is the share
    of votes for the answer shown first among votes with a winner; 0.5 means no position bias.
    """
    groups: dict[tuple[str, str], list[list[Vote]]] = defaultdict(list)
    for pair in by_pair(votes).values():
        (first, _), (second, _) = sides(pair[0])
        groups[first, second].append(pair)
    rows = []
    for (first, second), pairs in sorted(groups.items()):
        scores = [sum(_score(vote) for vote in pair) / len(pair) for pair in pairs]
        cast = [vote for pair in pairs for vote in pair]
        winners = Counter(winner(vote) for vote in cast)
        shown_first = [vote["verdict"] == "A" for vote in cast if winner(vote) is not None]
        rows.append(
            {
                "model": first,
                "against": second,
                "pairs": len(pairs),
                "votes": len(cast),
                "wins": winners[0],
                "ties": winners[None],
                "losses": winners[1],
                "win_rate": sum(scores) / len(scores),
                "win_rate_interval": wilson_interval(sum(scores), len(scores)),
                "prefers_shown_first": sum(shown_first) / len(shown_first) if shown_first else None,
            }
        )
    return rows


def _score(vote: Vote) -> float:
    """1 for a win of the first of `sides`, 0 for a loss, 1/2 for a tie."""
    index = winner(vote)
    return 0.5 if index is None else 1.0 - index


def agreement(votes: Sequence[Vote]) -> dict[str, Any]:
    """Inter-rater agreement on pairs with at least two votes, skips left out.

    `pairs`: their number. `equal`: share of equal verdicts among two votes on the same pair, each pair weighted by its
    number of votes. `alpha`: Krippendorff's alpha for nominal data (Krippendorff 2011, "Computing Krippendorff's
    alpha-reliability", section C), 1 - D_o / D_e with the observed and the expected disagreement: over the coincidence
    matrix o_ck with margins n_c and total n, alpha = 1 - (n - 1) (n - sum_c o_cc) / (n^2 - sum_c n_c^2). It is 1 for
    perfect agreement and 0 for agreement by chance; None without such pairs, or if all verdicts are equal.
    """
    units = [[winner(vote) for vote in pair] for pair in by_pair(votes).values() if len(pair) > 1]
    coincidences: dict[tuple[int | None, int | None], float] = defaultdict(float)  # o_ck
    for unit in units:
        for two in itertools.permutations(unit, 2):
            coincidences[two] += 1 / (len(unit) - 1)
    margins: dict[int | None, float] = defaultdict(float)  # n_c
    for (one, _), count in coincidences.items():
        margins[one] += count
    total = sum(margins.values())
    unequal = sum(count for (one, other), count in coincidences.items() if one != other)
    by_chance = total**2 - sum(count**2 for count in margins.values())
    return {
        "pairs": len(units),
        "equal": 1 - unequal / total if total else None,
        "alpha": 1 - (total - 1) * unequal / by_chance if by_chance else None,
    }
