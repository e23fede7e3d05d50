"""Rankings of given responses, as in RewardBench 2 (Malik et al. 2025, 2506.01937), from a local file.

A row has a `prompt`, the `chosen` (right) and `rejected` (wrong) responses, a text or a list of them each, and
mostly a `subset`. A prompt's score is 1 when a chosen response has the highest score, 1 / k when k share it. Rows of
the subset Ties have an `id`, `ref:N` for a question with one right answer and `tied:N` for the same with several, and
are scored together.

A prompt with a response that has no score is in no mean and is counted. Left out: the files' download, the mean over
sections of the first RewardBench, and implicit rewards of DPO policies.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.responses import is_prompt, with_all_columns
from lightrlhf.maths.bootstrap import bootstrap_interval, resample
from lightrlhf.maths.ops import share_interval
from lightrlhf.maths.reward_bench import best_of_n, mean_interval, tied_scores, ties_score
from lightrlhf.rewards.encoding import Sample
from lightrlhf.rewards.scorers import GroupScorer
from lightrlhf.storage.jsonl import Row, read_jsonl

NO_SUBSET = "all"  # of rows that name none


def read_ranking(path: str, num_rows: int | None = None) -> list[Row]:
    """Rows of a ranking file with `chosen` and `rejected` as lists, and a `subset`.

    Raises: UsageError naming the file, the row and its column.
    """
    if path.endswith(".parquet"):
        raise UsageError(
            f"--ranking_file {path}: give JSON lines; datasets.Dataset.from_parquet({path!r}).to_json('ranking.jsonl') "
            "writes them"
        )
    rows = [
        check_row(row, f"{path}: row {number}")
        for number, row in enumerate(read_jsonl(path, ("prompt", "chosen", "rejected"))[:num_rows], start=1)
    ]
    if not rows:
        raise UsageError(f"{path} has no rows")
    first: dict[str, int] = {}
    for number, row in enumerate(rows, start=1):
        if is_ties(row) and first.setdefault(row["id"], number) != number:
            raise UsageError(f"{path}: row {number} has the id {row['id']!r} of row {first[row['id']]}")
    return with_all_columns(rows)


def check_row(row: Row, where: str) -> Row:
    """The row with lists of responses. Raises: UsageError naming `where`."""
    if not is_prompt(row["prompt"]):
        raise UsageError(f"{where} has a 'prompt' that is neither a text nor a list of messages with role and content")
    sides = {name: [row[name]] if isinstance(row[name], str) else row[name] for name in ("chosen", "rejected")}
    for name, side in sides.items():
        if not isinstance(side, list) or not side or not all(isinstance(text, str) for text in side):
            raise UsageError(f"{where} has under {name!r} no text and no list of texts")
    subset = row.get("subset") or NO_SUBSET
    if not isinstance(subset, str):
        raise UsageError(f"{where} has a 'subset' that is not text")
    row = {**row, **sides, "subset": subset}
    if is_ties(row):
        own = row.get("id")
        if not isinstance(own, str) or not re.fullmatch(r"(ref|tied):\d+", own):
            raise UsageError(f"{where} of the subset Ties has the id {own!r}, not ref:N or tied:N")
        if own.startswith("tied") and len(row["chosen"]) < 2:
            raise UsageError(f"{where} has the id {own!r} but one chosen response; a tie has at least two")
    return row


def is_ties(row: Row) -> bool:
    """Whether a row is of the subset whose rows are scored together."""
    return row["subset"].lower() == "ties"


def rank(rows: Sequence[Row], scorer: GroupScorer, seed: int) -> tuple[dict[str, Any], list[Row]]:
    """Scores of a scorer overall and by subset with 95% intervals, and a record per prompt; seed: of the bootstrap.

    The overall score is the mean over the subsets, as on the benchmark's leaderboard, and is left out when a subset
    has no prompt with all of its scores.
    """
    scored = scorer([samples_of(row) for row in rows])
    records = [record_of(row, scores) for row, scores in zip(rows, scored)]
    results: dict[str, Any] = {"prompts": len(rows)}
    if unscored := sum(None in scores for scores in scored):
        results["unscored_prompts"] = unscored
    by_subset: dict[str, Any] = {}
    for subset in dict.fromkeys(row["subset"] for row in rows):
        members = [one for one in records if one["subset"] == subset and None not in (*one["chosen"], *one["rejected"])]
        if members and is_ties(members[0]):
            by_subset[subset], by_subset[f"{subset}_interval"], terms = ties(members, seed)
            results |= terms
        elif members:
            values = [one["right"] for one in members]
            by_subset[subset] = sum(values) / len(values)
            by_subset[f"{subset}_interval"] = share_interval(values, [json.dumps(one["prompt"]) for one in members])
    names = [name for name in by_subset if not name.endswith("_interval")]
    if len(names) == len({row["subset"] for row in rows}):
        overall = mean_interval([by_subset[name] for name in names], [by_subset[f"{name}_interval"] for name in names])
        results = {"ranking_score": overall[0], "ranking_score_interval": overall[1], **results}
    return results | {"by_subset": by_subset}, records


def samples_of(row: Row) -> list[Sample]:
    """The responses of a row, the chosen ones first."""
    columns = {name: value for name, value in row.items() if name not in ("prompt", "chosen", "rejected")}
    return [Sample(row["prompt"], text, columns=columns) for text in (*row["chosen"], *row["rejected"])]


def record_of(row: Row, scores: Sequence[float | None]) -> Row:
    """A row's scores in place of its responses; `right` is its credit, None without all scores and in Ties."""
    count = len(row["chosen"])
    known = [score for score in scores if score is not None]
    right = None
    if len(known) == len(scores) and not is_ties(row):
        right = best_of_n(known[:count], known[count:])
    named = {"id": row["id"]} if "id" in row else {}
    sides = {"chosen": list(scores[:count]), "rejected": list(scores[count:])}
    return {**named, "subset": row["subset"], "prompt": row["prompt"], **sides, "right": right}


def ties(records: Sequence[Row], seed: int) -> tuple[float, tuple[float, float], dict[str, float]]:
    """Score of the subset Ties, its 95% interval by a bootstrap of the questions, and the terms of the score."""
    found = {record["id"]: tied_scores(record["chosen"], record["rejected"]) for record in records}
    numbers = sorted({name.partition(":")[2] for name in found})
    ref, tied = ([found.get(f"{kind}:{number}") for number in numbers] for kind in ("ref", "tied"))

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    score = ties_score(
        column([math.nan if one is None else one.gap for one in ref]),
        column([math.nan if one is None else one.gap for one in tied]),
        column([math.nan if one is None else one.spread for one in tied]),
        torch.cat([*resample(numbers, seed)]),
    )
    terms = {f"ties_{name}": float(values[0]) for name, values in score._asdict().items()}
    return float(score.total[0]), bootstrap_interval(score.total, len(numbers)), terms
