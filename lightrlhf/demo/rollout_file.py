"""Index of a growing file of samples (`training/rollout_log.py`), to sort, group and search them.

A row is read from the file only when it is shown. The file is never written, and its descriptor stays open, so that the
index and the rows agree also after a resumed run has replaced the file. Memory: the texts once, and 150 bytes a sample.

Left out: an index on disk, because the page writes nothing into the folder of a run.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lightrlhf.demo.traces import samples_of

CHUNK = 2**21  # bytes that are parsed before the time is looked at
NUMBERS = (  # columns of the index, NaN where the program logs no value
    "step",
    "version",  # of the weights that sampled it
    "group",
    "score",
    "audit",
    "length",  # tokens that the policy sampled
    "kl",  # sum of their log-ratios
    "advantage",  # their mean advantage
    "truncated",
    "deepest advantage",  # largest absolute value of a token
    "deepest value",
    "prompt",  # its number among the distinct prompts
    "start",  # of the row in the file
    "bytes",
    "place",  # among the samples of its line
)
REWARD = "reward "  # and the name of a reward: further columns
MOST = 1e300  # a number beyond it would break sums
TEXT = "string[pyarrow]"
LETTERS = r"\pL\pM\pN_"  # of a word, as Arrow's regular expressions name them
Row = dict[str, Any]  # as in storage/jsonl.py, which imports torch
Flags = NDArray[np.bool_]


class NotASample(Exception):
    """A row that is not a sample; the message follows the number of its line."""


def fold(text: str) -> str:
    """Fold the case of a text and replace its unpaired surrogates."""
    return text.casefold().encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class Samples:
    """A snapshot of a file's samples, numbered as its rows."""

    path: Path
    file: BinaryIO
    all_bytes: int
    table: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=NUMBERS, dtype=np.float64))
    responses: pd.Series = field(default_factory=lambda: pd.Series(dtype=TEXT))  # (N,), folded
    prompts: dict[str, int] = field(default_factory=dict)  # number of a prompt by `prompt_key`; grows with the file
    prompt_texts: list[str] = field(default_factory=list)  # of the distinct prompts, folded
    bad: dict[int, str] = field(default_factory=dict)  # what is wrong with a line, by its number
    read_bytes: int = 0
    is_read: bool = False  # to the last complete line

    def __len__(self) -> int:
        return len(self.table)

    def row(self, number: int) -> Row:
        """Read a row of the file."""
        start, length, place = (int(self.table[name].iat[number]) for name in ("start", "bytes", "place"))
        row: Row = samples_of(json.loads(os.pread(self.file.fileno(), length, start)))[place]
        return row

    def find(self, text: str) -> Flags:
        """Return which samples have a text in prompt or response, without regard to case.

        In double quotes it is matched as whole words.
        """
        is_quoted = len(text) > 2 and text[0] == text[-1] == '"'
        text = fold(text[1:-1] if is_quoted else text)
        sought = rf"(^|[^{LETTERS}]){re.escape(text)}($|[^{LETTERS}])" if is_quoted else text
        prompts, responses = (
            texts.str.contains(sought, regex=is_quoted).to_numpy(bool)
            for texts in (pd.Series(self.prompt_texts, dtype=TEXT), self.responses)
        )
        return np.asarray(responses | prompts[self.table["prompt"].to_numpy(int)])

    def number_prompt(self, prompt: str) -> int:
        """Return the number of a prompt; a new one is appended, which no earlier sample refers to."""
        key = prompt_key(prompt)
        if key not in self.prompts:
            self.prompts[key] = len(self.prompts)
            self.prompt_texts.append(fold(prompt))
        return self.prompts[key]


@functools.cache
def rollout_file(path: Path) -> RolloutFile:
    """Return the index of a file, which all views share."""
    return RolloutFile(path)


@dataclass
class RolloutFile:
    """A file and what has been read of it."""

    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `refresh`
    samples: Samples | None = None
    _lines: int = 0
    _last: tuple[int, bytes] = (0, b"")  # offset and content of the last line that was read

    def refresh(self, seconds: float = math.inf) -> Samples | None:
        """Read new rows for at most `seconds`, or all rows if the file was replaced; None if it does not exist.

        While another thread reads, return what it has read so far. Raises: OSError when the file cannot be read.
        """
        until = time.monotonic() + seconds
        if not self.lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            return self.samples
        try:
            self._reopen()
            while self._read_chunk() and time.monotonic() < until:
                pass
        except FileNotFoundError:
            self.samples = None
        finally:
            self.lock.release()
        return self.samples

    def _reopen(self) -> None:
        """Start from the first row, unless the file has only grown since it was read."""
        now = os.stat(self.path)
        if self.samples is not None:
            descriptor = self.samples.file.fileno()
            offset, line = self._last
            is_same = os.path.samestat(now, os.fstat(descriptor)) and now.st_size >= offset + len(line)
            if is_same and os.pread(descriptor, len(line), offset) == line:
                return
        self.samples = Samples(self.path, self.path.open("rb", buffering=0), now.st_size)
        self._lines, self._last = 0, (0, b"")

    def _read_chunk(self) -> bool:
        """Read some complete lines; returns whether there may be more."""
        old = self.samples
        assert old is not None
        start, descriptor = old.read_bytes, old.file.fileno()
        chunk = os.pread(descriptor, CHUNK, start)
        while chunk and b"\n" not in chunk and (more := os.pread(descriptor, CHUNK, start + len(chunk))):
            chunk += more
        end, size = start + chunk.rfind(b"\n") + 1, os.fstat(descriptor).st_size
        rows, texts, bad = [], [], dict(old.bad)
        for line in chunk[: end - start].split(b"\n")[:-1]:
            self._lines, self._last = self._lines + 1, (start, line)
            try:
                if line.strip():
                    for place, row in enumerate(samples_of(json.loads(line))):
                        prompt, response, numbers = summarize(row)
                        found = {"prompt": old.number_prompt(prompt), "start": start, "bytes": len(line)}
                        rows.append(numbers | found | {"place": place})
                        texts.append(fold(response))
            except NotASample as problem:
                bad[self._lines] = str(problem)
            except (ValueError, RecursionError):
                bad[self._lines] = "is not JSON"
            start += len(line) + 1
        table, responses, is_read = old.table, old.responses, end in (size, old.read_bytes)  # no complete line, too
        if rows:
            table = pd.concat([table, pd.DataFrame(rows, dtype=np.float64)], ignore_index=True)
            responses = pd.concat([responses, pd.Series(texts, dtype=TEXT)], ignore_index=True)
        read = replace(old, table=table, responses=responses, read_bytes=end, all_bytes=size, is_read=is_read)
        self.samples = replace(read, bad=bad)
        return not is_read


def summarize(row: Any) -> tuple[str, str, dict[str, float]]:
    """Return prompt, response, and the numbers and rewards of a row; missing ones are NaN.

    Raises: NotASample.
    """
    if not isinstance(row, dict):
        raise NotASample("is not a JSON object")
    prompt, response, step = row.get("prompt"), row.get("response"), row.get("step")
    if not isinstance(prompt, str) or not isinstance(response, str) or not isinstance(step, int) or abs(step) >= 2**53:
        raise NotASample("is not a sample: step, prompt or response is missing")
    mask, rewards, names = mask_of(row), row.get("rewards"), ("log_ratio", "advantages", "values")
    log_ratios, advantages, values = (sampled_numbers(row.get(name), mask) for name in names)
    numbers = {name: number(row.get(name)) for name in ("version", "score", "audit", "truncated")}
    numbers |= {
        "step": step,
        "group": number(row.get("group"), 0),
        "length": sum(mask) if mask else math.nan,
        "kl": math.fsum(log_ratios) if log_ratios else math.nan,
        "advantage": math.fsum(advantages) / len(advantages) if advantages else math.nan,
        "deepest advantage": max(map(abs, advantages), default=math.nan),
        "deepest value": max(map(abs, values), default=math.nan),
    }
    by_name = rewards.items() if isinstance(rewards, dict) else ()
    return prompt, response, numbers | {REWARD + name: number(value) for name, value in by_name}


def episode_of(row: Row) -> Row:
    """Return the facts of an episode of several turns (`generation.episodes`); empty for any other row."""
    columns = row.get("columns")
    facts = columns.get("episode") if isinstance(columns, dict) else None
    return facts if isinstance(facts, dict) else {}


def list_of(facts: Row, name: str) -> list[Any]:
    """Return a list of facts; empty for anything else."""
    return value if isinstance(value := facts.get(name), list) else []


def mask_of(row: Row) -> list[int]:
    """Return 1 for each token of the response that the policy sampled, else 0; without a mask all are 1."""
    ids, mask = row.get("response_ids"), row.get("mask")
    count = len(ids) if isinstance(ids, list) else 0
    if isinstance(mask, list) and len(mask) == count == mask.count(0) + mask.count(1):
        return mask
    return [1] * count


def by_token(values: Any, mask: Sequence[int]) -> list[float | None] | None:
    """Return a number or None for each token of a response; None for values that do not fit the response."""
    if not isinstance(values, list) or len(values) != len(mask):
        return None
    return [None if math.isnan(value) else value for value in map(number, values)]


def sampled_numbers(values: Any, mask: Sequence[int]) -> list[float]:
    """Return the numbers of the tokens that the policy sampled."""
    if not isinstance(values, list) or len(values) != len(mask):
        return []
    kept = list(compress(values, mask))
    try:
        if abs(math.fsum(kept)) <= MOST:  # the common case: all are numbers
            return kept
    except (TypeError, ValueError, OverflowError):
        pass
    return [value for value in map(number, kept) if not math.isnan(value)]


def number(value: Any, default: float = math.nan) -> float:
    """Return a value as a finite number, or the default."""
    return float(value) if isinstance(value, (int, float)) and abs(value) <= MOST else default


def prompt_key(prompt: str) -> str:
    """Return a short name of a prompt, the same in all files."""
    return blake2b(prompt.encode("utf-8", "replace"), digest_size=5).hexdigest()
