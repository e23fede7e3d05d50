"""Reading rows and encoding them in a stream, by several processes and in the order of the source.

A chunk of rows is read at a time and encoded into the spool (`spool.py`), a few chunks ahead, so memory does not grow
with the source. A preparation that was killed continues after the rows in the spool.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice

from tqdm import tqdm

from datasets_prep.encoding import Dropped, Encoder
from datasets_prep.reading import Source
from datasets_prep.spool import Packed, Spool, pack
from datasets_prep.turns import BadRow
from lightrlhf.cli.errors import RunFailure
from lightrlhf.cli.processes import end_with_parent
from lightrlhf.storage.jsonl import Row

CHUNK = 1000  # rows encoded per call


class SourceRows:
    """Rows of a source; `Dropped` for a raw row that `to_row` rejects.

    to_row: takes the raw columns and returns a row or raises `BadRow(reason)`. num_samples: read at most so many.
    """

    def __init__(self, source: Source, to_row: Callable[[dict], Row], num_samples: int | None) -> None:
        self.source, self.to_row, self.num_samples = source, to_row, num_samples

    def __iter__(self) -> Iterator[Row | Dropped]:
        return self.behind(0)

    def behind(self, number: int) -> Iterator[Row | Dropped]:
        """The rows but the first ones."""
        for raw in islice(self.source, number, self.num_samples):
            if raw.broken:
                yield Dropped(raw.broken, raw.source)
                continue
            try:
                row = self.to_row(raw.values)
            except BadRow as bad:
                yield Dropped(str(bad), raw.source, row=raw.values)  # few, so kept even if they are not saved
                continue
            held_out = raw.split if raw.split != "train" else None  # `Placement` carves missing splits out of train
            yield {"split": held_out, **row, "source": raw.source}


def encode(rows: Iterable[Row | Dropped], encoder: Encoder, spool: Spool, num_proc: int) -> None:
    """Encode rows into a spool, whatever the number of processes in the same way. Raises: RunFailure."""
    left = rows.behind(spool.rows) if isinstance(rows, SourceRows) else iter(rows)
    counted = iter(tqdm(left, unit=" rows", unit_scale=True, initial=spool.rows, disable=None))
    chunks = iter(lambda: list(islice(counted, CHUNK)), [])
    with rare_collections():
        for number, rejected, packed in _encoded(chunks, encoder, num_proc):
            spool.append(packed._replace(dropped=[*rejected, *packed.dropped]), number)
    spool.note()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for cyclic garbage rarely: rows have none, and what is imported stays."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _encoded(
    chunks: Iterator[list[Row | Dropped]], encoder: Encoder, num_proc: int
) -> Iterator[tuple[int, list[Dropped], Packed]]:
    """What each chunk gives, in order, with its number of rows and those that were rejected before.

    In this process if there is only one chunk.
    """
    first = list(islice(chunks, 2))
    if num_proc == 1 or len(first) < 2:
        for chunk in chain(first, chunks):
            rows, rejected = _parted(chunk)
            yield len(chunk), rejected, pack(*encoder(rows))
        return
    waiting: deque[tuple[int, list[Dropped], Future[Packed]]] = deque()
    with _pool(num_proc, encoder) as pool:
        for chunk in chain(first, chunks):  # a few chunks are queued at a time, so memory does not grow with the file
            rows, rejected = _parted(chunk)
            waiting.append((len(chunk), rejected, pool.submit(work, rows)))
            if len(waiting) > 3 * num_proc:
                number, rejected, done = waiting.popleft()
                yield number, rejected, done.result()
        for number, rejected, done in waiting:
            yield number, rejected, done.result()


def _parted(chunk: list[Row | Dropped]) -> tuple[list[Row], list[Dropped]]:
    rows = [row for row in chunk if not isinstance(row, Dropped)]
    return rows, [row for row in chunk if isinstance(row, Dropped)]


@contextmanager
def _pool(num_proc: int, encoder: Encoder) -> Iterator[ProcessPoolExecutor]:
    try:
        with ProcessPoolExecutor(num_proc, initializer=start_worker, initargs=(encoder,)) as pool:
            yield pool
    except BrokenProcessPool:
        raise RunFailure("a tokenising process was killed, perhaps for memory; use a lower --num_proc") from None


_encoders: list[Encoder] = []  # of a worker process: one, sent at its start instead of with each chunk


def start_worker(encoder: Encoder) -> None:
    """Initialise a worker process with its encoder."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_parent()
    _encoders[:] = [encoder]


def work(rows: list[Row]) -> Packed:
    """Encode a chunk in a worker process."""
    return pack(*_encoders[0](rows))
