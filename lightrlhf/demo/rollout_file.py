"""Index of a growing file of samples (`training/rollout_log.py`): what they are sorted, grouped and searched by.

A row is read from the file only when it is shown. The file is never written, and its descriptor stays open, so that the
index and the rows agree also after a resumed run has replaced the file. Memory: the texts once, and 150 bytes a sample.

Left out: an index on disk, because the page writes nothing into the folder of a run.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

CHUNK = 2**21  # bytes that are parsed before the time is looked at
NUMBERS = (  # of each sample; NaN where the program has none
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
)
MOST = 1e300  # a number beyond it would break sums
SEPARATOR = b"\0"  # between two texts; in a text it is replaced
WORD = rb"[0-9a-z_\x80-\xff]"  # a byte of a word without its case; those from 128 on are of other letters
Row = dict[str, Any]  # as in storage/jsonl.py, which imports torch
Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]


class NotASample(Exception):
    """What is wrong with a row, to follow the number of its line."""


class Texts:
    """Many texts without their case, to be searched as one."""

    def __init__(self) -> None:
        self.content, self.starts = bytearray(SEPARATOR), array("q")

    def append(self, text: str) -> None:
        self.starts.append(len(self.content))
        self.content += folded(text).replace(SEPARATOR, b" ") + SEPARATOR

    def __getitem__(self, number: int) -> str:
        start = self.starts[number]
        return self.content[start : self.content.index(SEPARATOR, start)].decode()

    def having(self, text: str, count: int) -> Flags:
        """Which of the first `count` texts have `text` in them; in double quotes it is matched as whole words."""
        is_quoted = len(text) > 2 and text[0] == text[-1] == '"'
        sought = re.escape(folded(text[1:-1] if is_quoted else text).replace(SEPARATOR, b" "))
        if is_quoted:  # the literal comes first, because it is what the regular expression is found by
            sought += b"(?<!" + WORD + sought + b")(?!" + WORD + b")"
        rest = b"[^" + SEPARATOR + b"]*"  # of a text that has been found
        copy = bytes(self.content)  # another thread may append
        places = [found.start() for found in re.finditer(sought + rest, copy)]
        numbers = np.searchsorted(np.array(self.starts), places, side="right") - 1
        flags = np.zeros(len(self.starts), dtype=bool)
        flags[numbers] = True
        return flags[:count]


def folded(text: str) -> bytes:
    """A text without its case, as UTF-8."""
    return text.casefold().encode("utf-8", "replace")


@dataclass(frozen=True)
class Samples:
    """The samples of a file at one time, numbered as its rows."""

    path: Path
    file: BinaryIO
    offsets: NDArray[np.int64]  # (N+1,) of the rows in the file
    numbers: Mapping[str, Numbers]  # (N,) by the names in `NUMBERS`
    rewards: Mapping[str, Numbers]  # (N,) by the names of the rewards
    prompt: NDArray[np.int64]  # (N,) number of each sample's prompt among the distinct ones
    prompts: dict[str, int]  # that number by `prompt_key`; grows with the file
    prompt_texts: Texts  # of the distinct ones
    response_texts: Texts
    bad: Mapping[int, str]  # what is wrong with a line, by its number
    read_bytes: int
    all_bytes: int
    is_read: bool  # to the last complete line

    def __len__(self) -> int:
        return len(self.prompt)

    def row(self, number: int) -> Row:
        """A row of the file."""
        start, end = self.offsets[number : number + 2].tolist()
        row: Row = json.loads(os.pread(self.file.fileno(), end - start, start).split(b"\n", 1)[0])
        return row

    def having(self, text: str) -> Flags:
        """Which samples have `text` in prompt or response, without regard to case; see `Texts.having`."""
        prompts = self.prompt_texts.having(text, len(self.prompt_texts.starts))
        return np.asarray(self.response_texts.having(text, len(self)) | prompts[self.prompt])

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """The logged steps."""
        return np.unique(self.numbers["step"]).astype(np.int64)

    @cached_property
    def step_index(self) -> NDArray[np.int64]:
        """(N,) place of each sample's step in `steps`."""
        return np.searchsorted(self.steps, self.numbers["step"])

    @property
    def share_read(self) -> float:
        """How much of the file has been read."""
        return self.read_bytes / self.all_bytes if self.all_bytes else 1.0


@dataclass
class RolloutFile:
    """A file and what has been read of it."""

    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `refresh`
    samples: Samples | None = None
    _lines: int = 0
    _last: tuple[int, bytes] = (0, b"")  # offset and content of the last line that was read

    def refresh(self, seconds: float = math.inf) -> Samples | None:
        """Read what is new for at most so many seconds, and all again if the file is another one; None: no file.

        While another thread reads, what it has read so far. Raises: OSError when the file cannot be read.
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
        """Begin anew unless the file is the one that was read, and only has grown."""
        now = os.stat(self.path)
        if self.samples is not None:
            descriptor = self.samples.file.fileno()
            before = os.fstat(descriptor)
            offset, line = self._last
            is_same = (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino) and now.st_size >= offset + len(line)
            if is_same and os.pread(descriptor, len(line), offset) == line:
                return
        none: Numbers = np.zeros(0)
        self.samples = Samples(
            path=self.path,
            file=self.path.open("rb", buffering=0),
            offsets=np.zeros(1, dtype=np.int64),
            numbers=dict.fromkeys(NUMBERS, none),
            rewards={},
            prompt=np.zeros(0, dtype=np.int64),
            prompts={},
            prompt_texts=Texts(),
            response_texts=Texts(),
            bad={},
            read_bytes=0,
            all_bytes=now.st_size,
            is_read=False,
        )
        self._lines, self._last = 0, (0, b"")

    def _read_chunk(self) -> bool:
        """Read some complete lines; whether there may be more."""
        old = self.samples
        assert old is not None
        start, descriptor = old.read_bytes, old.file.fileno()
        chunk = os.pread(descriptor, CHUNK, start)
        while chunk and b"\n" not in chunk and (more := os.pread(descriptor, CHUNK, start + len(chunk))):
            chunk += more
        end = chunk.rfind(b"\n") + 1
        size = os.fstat(descriptor).st_size
        if not end:
            self.samples = dataclasses.replace(old, all_bytes=size, is_read=True)
            return False
        self.samples = self._extended(old, chunk[:end], size)
        return not self.samples.is_read

    def _extended(self, old: Samples, chunk: bytes, size: int) -> Samples:
        place, bad = old.read_bytes, dict(old.bad)
        offsets, prompts, rows, rewards = [], [], [], []
        for line in chunk.split(b"\n")[:-1]:
            self._lines += 1
            self._last = (place, line)
            if line.strip():
                try:
                    prompt, response, numbers, reward = summary(json.loads(line))
                except NotASample as problem:
                    bad[self._lines] = str(problem)
                except (ValueError, RecursionError):
                    bad[self._lines] = "is not JSON"
                else:
                    offsets.append(place)
                    rows.append(numbers)
                    rewards.append(reward)
                    prompts.append(_number_of(prompt, old))
                    old.response_texts.append(response)
            place += len(line) + 1
        table = np.array(rows, dtype=np.float64).reshape(-1, len(NUMBERS))
        return dataclasses.replace(
            old,
            offsets=np.concatenate([old.offsets[:-1], np.array([*offsets, place], dtype=np.int64)]),
            numbers={name: np.concatenate([old.numbers[name], table[:, i]]) for i, name in enumerate(NUMBERS)},
            rewards=_rewards(old, rewards),
            prompt=np.concatenate([old.prompt, np.array(prompts, dtype=np.int64)]),
            bad=bad,
            read_bytes=place,
            all_bytes=size,
            is_read=place == size,
        )


def _number_of(prompt: str, samples: Samples) -> int:
    """The number of a prompt; a new one is appended, which the samples before it do not refer to."""
    key = prompt_key(prompt)
    if key not in samples.prompts:
        samples.prompts[key] = len(samples.prompts)
        samples.prompt_texts.append(prompt)
    return samples.prompts[key]


def _rewards(old: Samples, rows: Sequence[Mapping[str, float]]) -> dict[str, Numbers]:
    """The columns of the rewards with new rows'; NaN where a row has no reward of a name."""
    names = dict.fromkeys([*old.rewards, *(name for row in rows for name in row)])
    missing: Numbers = np.full(len(old), math.nan)
    return {
        name: np.concatenate([old.rewards.get(name, missing), [row.get(name, math.nan) for row in rows]])
        for name in names
    }


def summary(row: Any) -> tuple[str, str, list[float], dict[str, float]]:
    """Prompt, response, `NUMBERS` and rewards of a row; what it lacks is NaN.

    Raises: NotASample.
    """
    if not isinstance(row, dict):
        raise NotASample("is not a JSON object")
    prompt, response, step = row.get("prompt"), row.get("response"), row.get("step")
    if not isinstance(prompt, str) or not isinstance(response, str) or not isinstance(step, int) or abs(step) >= 2**53:
        raise NotASample("is not a sample: step, prompt or response is missing")
    mask = mask_of(row)
    log_ratios, advantages, values = (sampled(row.get(name), mask) for name in ("log_ratio", "advantages", "values"))
    rewards = row.get("rewards")
    numbers = [
        step,
        number(row.get("version")),
        number(row.get("group"), 0),
        number(row.get("score")),
        number(row.get("audit")),
        sum(mask) if mask else math.nan,
        math.fsum(log_ratios) if log_ratios else math.nan,
        math.fsum(advantages) / len(advantages) if advantages else math.nan,
        number(row.get("truncated")),
        max(map(abs, advantages), default=math.nan),
        max(map(abs, values), default=math.nan),
    ]
    by_name = rewards.items() if isinstance(rewards, dict) else ()
    return prompt, response, numbers, {name: number(value) for name, value in by_name}


def mask_of(row: Row) -> list[int]:
    """1 for each token of a row's response that the policy sampled, else 0; without a mask all are 1."""
    ids, mask = row.get("response_ids"), row.get("mask")
    count = len(ids) if isinstance(ids, list) else 0
    if isinstance(mask, list) and len(mask) == count == mask.count(0) + mask.count(1):
        return mask
    return [1] * count


def by_token(values: Any, mask: Sequence[int]) -> list[float | None] | None:
    """A number for each token of a response, None where there is none; None for values that do not fit the response."""
    if not isinstance(values, list) or len(values) != len(mask):
        return None
    return [None if math.isnan(value) else value for value in map(number, values)]


def sampled(values: Any, mask: Sequence[int]) -> list[float]:
    """The numbers of the tokens that the policy sampled."""
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
    """A value as a finite number; the default for what is none."""
    return float(value) if isinstance(value, (int, float)) and abs(value) <= MOST else default


def prompt_key(prompt: str) -> str:
    """A short name of a prompt, the same in all files."""
    return blake2b(prompt.encode("utf-8", "replace"), digest_size=5).hexdigest()
