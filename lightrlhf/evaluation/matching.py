"""Rows of two files of responses that have the same prompt, matched by hashes, so that files may be large; and what
their comparison says when it may be looked at at any time.

Left out: prompts that differ in white space or case, which are different ones here.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lightrlhf.cli.errors import UsageError
from lightrlhf.data.responses import check_responses, read_responses
from lightrlhf.data.splits import hash64
from lightrlhf.maths import betting
from lightrlhf.rewards import encoding, functions
from lightrlhf.storage.jsonl import Row
from lightrlhf.storage.lazy import Lazy, map_lazily


def match_rows(files: Sequence[str]) -> tuple[Lazy[Row], Row]:
    """Pairs with the same prompt of two files, in the order of A, and the number of unmatched rows of each file.

    A pair has its `index`, `prompt`, the responses `a` and `b`, `samples` of both, and the `columns` of A.
    Repetitions of a prompt are matched in order. Raises: UsageError when the files have no prompt in common.
    """
    read = {side: read_rows(file) for side, file in zip("ab", files)}
    one, two = (prompt_keys(rows) for rows in read.values())
    _, *common = np.intersect1d(one, two, assume_unique=True, return_indices=True)
    places = np.stack(common)[:, common[0].argsort()]  # (2, N) of the rows in both files
    if not places.size:
        raise UsageError(f"--responses_file {' '.join(files)} have no prompt in common")

    def pair(index: int) -> Row:
        lines = dict(zip("ab", places[:, index].tolist()))
        rows = {side: read[side][line] for side, line in lines.items()}
        where = {side: f"{file}: row {lines[side] + 1}" for side, file in zip("ab", files)}
        samples = {side: sample_of(row, where[side]) for side, row in rows.items()}
        columns = {name: value for name, value in rows["a"].items() if isinstance(value, (str, int, float))}
        texts = {side: sample.response for side, sample in samples.items()}
        return {"columns": columns, "samples": samples, "index": index, "prompt": rows["a"]["prompt"], **texts}

    pairs = Lazy(range(places.shape[1]), pair)
    names = dict.fromkeys(name for one in pairs for name in one["columns"])  # and a bad row is found here
    unmatched = {f"only_in_{side}": len(read[side]) - len(pairs) for side in "ab"}
    return map_lazily(pairs, lambda one: {**one, "columns": {**dict.fromkeys(names), **one["columns"]}}), unmatched


def read_rows(file: str) -> Lazy[Row]:
    """The rows of a file with the columns that a judge reads."""
    rows = read_responses(file, ["prompt"], ["response", "responses", "prompt_ids"])
    of_each = (row if row.get("responses") else {} for row in rows)  # elsewhere these columns are of one response
    check_responses(of_each, file, (), ["truncated", "response_ids"])
    return rows


def prompt_keys(rows: Sequence[Row]) -> NDArray[np.uint64]:
    """(N,) different numbers for the rows: a hash of the prompt plus how often it occurred before."""
    hashes = np.fromiter(map(prompt_hash, rows), np.uint64, len(rows))
    order = hashes.argsort(kind="stable")
    is_first = np.diff(hashes[order], prepend=~hashes[order[:1]]) != 0
    places = np.arange(len(hashes), dtype=np.uint64)
    hashes[order] += places - np.maximum.accumulate(np.where(is_first, places, 0))
    return hashes


def prompt_hash(row: Row) -> int:
    """64 bits of a hash of a row's prompt."""
    return hash64(json.dumps(row["prompt"], ensure_ascii=False).encode("utf-8", "surrogatepass"))


def sample_of(row: Row, where: str) -> encoding.Sample:
    """Its `response`, else the first of its `responses`, with the ids that the row has. Raises: UsageError."""
    responses = row.get("responses") or []
    response = row["response"] if "response" in row else next(iter(responses), None)
    if not isinstance(response, str):
        raise UsageError(f"{where}, of the prompt {functions.as_text(row['prompt'])[:60]!r}, has no response")
    if response in responses:
        sample = encoding.samples_of_row(row)[responses.index(response)]
        assert sample is not None
        return sample
    return encoding.Sample(row["prompt"], response, prompt_ids=row.get("prompt_ids"))


def evidence(scores: array[float], prompts: array[int]) -> dict[str, float]:
    """E-values that A is better, and that B is, from scores of A in the order of judging.

    A prompt counts by its first pair: its further pairs depend on that, and a mean would change values seen before.
    """
    _, first = np.unique(np.asarray(prompts), return_index=True)
    better = betting.e_values(torch.from_numpy(2 * np.asarray(scores)[np.sort(first)] - 1))
    return dict(zip(("e_value_a", "e_value_b"), better))
