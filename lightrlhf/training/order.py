"""Order of the data: which rows each step reads, how many steps there are, and how errors name rows.

The rows of a step follow from its number alone: the order of an epoch from (seed, epoch), of several sets by their
weights. So a resumed run needs no state of a data loader.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import DataSetsArgs, EvalArgs, TrainArgs
from lightrlhf.data.batch import epoch_order, number_rows
from lightrlhf.data.mixtures import mixed_order, mixed_shares
from lightrlhf.data.splits import Row
from lightrlhf.training.beginning import Beginning
from lightrlhf.training.faults import describe_rows
from lightrlhf.training.ranks import Item, Ranks


class Order:
    """The order of a run's rows. began: the values that a resumed run must share with its beginning; data_dirs: of the
    sets, for errors."""

    def __init__(self, args: TrainArgs, ranks: Ranks, began: Beginning, data_dirs: Sequence[str]) -> None:
        self.args, self.ranks, self.began, self.data_dirs = args, ranks, began, list(data_dirs)
        self.data = " + ".join(data_dirs)  # as the model card names it
        self.num_rows, self.batch_size, self.planned_steps = 0, 0, 0  # batch_size: rows of a step on each device
        self.weights = list(args.data_weights) if isinstance(args, DataSetsArgs) else []
        self.ends: list[int] = []  # of several sets among all rows
        self._sizes: tuple[int, ...] = ()  # rows of several sets, drawn by `--data_weights`
        self.kind = "training rows"  # as errors call them
        self.names: Sequence[Any] | None = None  # of the rows, for errors; None: their numbers

    def num_steps(self, rows: Sequence[Any], batch_size: int) -> int:
        """Number of steps of the run at `batch_size` rows per device; the last batch of an epoch may be smaller.

        `--max_steps` alone goes on through as many epochs as it takes; with `--epochs`, whichever ends first.
        Raises: UsageError when a resumed run began with other rows, or another number of them in a step of all ranks.
        """
        self.began.fix_rows(rows, batch_size, " + ".join(self.data_dirs))
        self.num_rows, self.batch_size = len(rows), batch_size
        self.planned_steps = self._limit(math.ceil(len(rows) / (batch_size * self.ranks.world_size)))
        return self.planned_steps

    def _limit(self, per_epoch: int) -> int:
        """Number of steps by `--epochs` and `--max_steps`."""
        epochs, max_steps = self.args.epochs, self.args.max_steps
        if epochs is None or max_steps is None:
            return max_steps or per_epoch * (epochs or 1)
        if per_epoch * epochs < max_steps:
            self.ranks.print0(
                f"--epochs {epochs} ends this run at step {per_epoch * epochs}, before --max_steps {max_steps}; "
                "to go on into further epochs leave --epochs out (of a resumed run, give --epochs null)"
            )
        return min(per_epoch * epochs, max_steps)

    def mix(self, sizes: Sequence[int]) -> None:
        """Draw from sets of these sizes, their rows numbered one set after the other; prints the counts.

        By `--data_weights` an epoch, which is as long as all sets together, has that share of rows of each; without
        them it has every row once.
        Raises: UsageError when a set has no row in an epoch, or given rows replace the sets.
        """
        if self.weights and len(self.weights) != len(sizes):
            raise UsageError(
                "--data_weights belong to the sets of --data_dir, which given rows replace; leave them out"
            )
        if len(sizes) < 2:
            return
        self._sizes = tuple(sizes) if self.weights else ()
        self.ends = list(itertools.accumulate(sizes))
        shares = mixed_shares(sizes, self.weights or sizes)
        for folder, share in zip(self.data_dirs, shares):
            if not share:
                raise UsageError(
                    f"--data_weights give {folder} none of the {sum(sizes)} rows of an epoch; raise its weight"
                )
        counted = []
        for folder, size, share in zip(self.data_dirs, sizes, shares):
            counted.append(f"{folder} ({size:,} rows, {share:,} of {sum(sizes):,} in an epoch)")
            self.ranks.print0(counted[-1])
        self.data = " + ".join(counted)

    def draw(self, num_rows: int, step: int, batch_size: int) -> list[int]:
        """Numbers of the rows of all ranks of one step (counted from 0), in the seeded order of its epoch."""
        size = batch_size * self.ranks.world_size
        epoch, index = divmod(step, math.ceil(num_rows / size))
        order = epoch_order(num_rows, self.args.seed, epoch)
        if self._sizes:
            order = mixed_order(self._sizes, tuple(self.weights), self.args.seed, epoch)
        chosen: list[int] = order[index * size : (index + 1) * size].tolist()
        if len(chosen) < self.ranks.world_size:  # too few for a row per rank: borrow from the epoch's start
            chosen += itertools.islice(itertools.cycle(order.tolist()), self.ranks.world_size - len(chosen))
        return chosen

    def global_batch(self, rows: Sequence[Row], step: int, batch_size: int) -> list[Row]:
        """Copies of the rows of all ranks of one step, which hold their numbers; see `draw`."""
        return number_rows(rows, self.draw(len(rows), step, batch_size))

    @property
    def eval_iters(self) -> int | None:
        """Batches of an evaluation, None for all; one in a dry run."""
        return 1 if self.args.dry_run else self.args.eval_iters if isinstance(self.args, EvalArgs) else None

    def eval_rows(self, rows: Sequence[Item], batch_size: int) -> Sequence[Item]:
        """The first `--eval_iters` batches of all ranks, or all rows."""
        limit = self.eval_iters
        return rows[: limit * batch_size * self.ranks.world_size] if limit else rows

    def name_rows(self, kind: str, names: Sequence[Any] | None = None) -> None:
        """Set how errors name rows, instead of by their numbers."""
        self.kind, self.names = kind, names

    def describe(self, numbers: Iterable[int]) -> str:
        """Rows by their numbers, as part of an error; "" without any."""
        rows = sorted({*numbers})
        names = rows if self.names is None else [self.names[i] for i in rows]
        return describe_rows(names, self.kind, self.ends, self.data_dirs)
