"""Which encoded examples are kept, where and in which order: decided on arrays of numbers, when all rows are encoded.

Of examples with the same input the first is kept. A group that has rows of its own in a held-out split has none in
train; the test split wins over validation.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from datasets_prep.encoding import STAGES, Dropped
from datasets_prep.spool import Encoded
from lightrlhf.data.splits import SPLITS

NAMED = 5  # unreadable lines shown of each kind


class Drops:
    """Dropped rows by reason and stage: how many, and where the first are."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str | None]] = Counter()
        self.sources: dict[tuple[str, str | None], list[str]] = {}  # of the first; a few of unreadable lines of a file

    def add(self, row: Dropped) -> None:
        """Count a row."""
        kind = (row.reason, row.stage)
        self.counts[kind] += 1
        first = self.sources.setdefault(kind, [row.source])
        is_next = row.reason.startswith("bad_line") and self.counts[kind] > 1 and len(first) < NAMED
        if is_next and row.source.rpartition(":")[0] == first[0].rpartition(":")[0]:
            first.append(row.source)

    def first(self, kind: tuple[str, str | None]) -> str:
        """The source of the first row of a kind; for an unreadable line, the first few such lines of its file."""
        first, *more = self.sources[kind]
        return ", ".join([first, *(source.rpartition(":")[2] for source in more)])

    def most(self, number: int) -> list[tuple[str, int]]:
        """The most frequent reasons, with their numbers of rows."""
        reasons: Counter[str] = Counter()
        for (reason, _), count in self.counts.items():
            reasons[reason] += count
        return reasons.most_common(number)


class Selection:
    """The examples of a preparation that are kept, by stage and split, in their order."""

    def __init__(self, args: Any, encoded: Encoded) -> None:
        self.encoded, self.drops = encoded, Drops()
        self._late: list[tuple[str, np.ndarray]] = []  # reasons, and the examples dropped for each, in order
        for row in encoded.dropped():
            self.drops.add(row)
        index = encoded.index
        stages, splits = (np.array(index[name]) for name in ("stage", "split"))
        kept = np.ones(len(index), dtype=bool)
        for number, stage in enumerate(STAGES):
            if args.remove_same_inputs or stage == "dialogue":
                own = np.flatnonzero(stages == number)
                _, first = np.unique(index["key"][own], return_index=True)
                same = np.delete(own, first)
                kept[same] = False
                self._drop("same_dialogue" if stage == "dialogue" else "same_input", same)
        groups, belongs = np.array(index["group"]), np.zeros(len(index), dtype=np.uint8)
        for number, split in enumerate(SPLITS):
            if split != "train":  # test wins over validation, both over train
                belongs[are_among(groups, np.unique(groups[kept & (splits == number)]))] = number
        for number, split in enumerate(SPLITS):
            crossing = np.flatnonzero(kept & (belongs == number) & (splits != number))
            self._drop(f"prompt_also_in_{split}", crossing)
            kept[crossing] = False
        self.splits: dict[str, dict[str, np.ndarray]] = {}  # numbers of examples
        for number, stage in enumerate(STAGES):
            for place, split in enumerate(SPLITS):
                own = np.flatnonzero(kept & (stages == number) & (splits == place))
                if len(own):
                    order = _order(len(own), f"{args.seed}/{stage}/{split}" if args.shuffle else None)
                    self.splits.setdefault(stage, {})[split] = own[order]

    def _drop(self, reason: str, numbers: np.ndarray) -> None:
        self._late.append((reason, numbers))
        for stage in np.unique(self.encoded.index["stage"][numbers]):
            own = numbers[self.encoded.index["stage"][numbers] == stage]
            kind = (reason, STAGES[stage])
            self.drops.counts[kind] += len(own)
            self.drops.sources.setdefault(kind, [self.encoded.source(int(own[0]))[0]])

    def dropped(self) -> Iterator[Dropped]:
        """All dropped rows, those that were not encoded first."""
        yield from self.encoded.dropped()
        for reason, numbers in self._late:
            for number in numbers.tolist():
                source, row = self.encoded.source(number)
                yield Dropped(reason, source, STAGES[self.encoded.index["stage"][number]], row)

    def of_stage(self, stage: str) -> np.ndarray:
        """Numbers of the examples of a stage, of all splits."""
        return np.concatenate(list(self.splits[stage].values()))


def are_among(values: np.ndarray, few: np.ndarray) -> np.ndarray:
    """(N,) bool: `np.isin` of a few sorted values, in 16 bytes a value instead of 49."""
    if not len(few):
        return np.zeros(len(values), dtype=bool)
    return few[np.minimum(np.searchsorted(few, values), len(few) - 1)] == values


def _order(count: int, seed: str | None) -> np.ndarray:
    """Numbers below `count`, shuffled if there is a seed."""
    numbers = array("q", range(count))
    if seed is not None:
        random.Random(seed).shuffle(numbers)
    return np.frombuffer(numbers, dtype=np.int64)
