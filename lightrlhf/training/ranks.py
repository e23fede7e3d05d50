"""Ranks: the processes of a run, their collectives, and each rank's part of rows and random numbers.

Without tensor parallelism each process is a data-parallel rank. With it, the processes of a tensor-parallel group read
the same rows and count as one.

Left out: how the processes start (`distributed.py`), and how one notices that another is gone (`watchdog.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.cli.groups import TrainArgs
from lightrlhf.cli.patience import RANK, patience
from lightrlhf.data.batch import mix_seed
from lightrlhf.data.flat import Rows
from lightrlhf.storage.shards import Shard
from lightrlhf.training.distributed import tensor_parallel
from lightrlhf.training.watchdog import RankWatchdog

Item = TypeVar("Item")


class Ranks:
    """This process among the run's.

    rank, world_size: data-parallel; num_processes: of all tensor-parallel groups together; is_first: whether this
    process writes and prints. fabric: launched.
    """

    def __init__(self, fabric: Any, args: TrainArgs) -> None:
        self.fabric, self.seed = fabric, args.seed
        self.device: torch.device = fabric.device
        self.tensor_parallel = tensor_parallel(args)
        self.rank: int = fabric.global_rank // self.tensor_parallel
        self.world_size: int = fabric.world_size // self.tensor_parallel
        self.num_processes: int = fabric.world_size
        self.is_first: bool = fabric.is_global_zero
        self.is_sharded = args.strategy == "fsdp"
        self.watchdog: RankWatchdog | None = None

    # ------------------------------------------------------------------------------------------------ collectives
    def sum(self, value: Tensor) -> Tensor:
        """Sum of a tensor over the data-parallel ranks; the tensor itself on one."""
        if self.world_size == 1:
            return value
        with self.waiting():
            total = self.fabric.all_reduce(value.to(self.device), group=self._data_group(), reduce_op="sum")
            return total.to(value.device)

    def total(self, value: float) -> float:
        """Sum of a number over the data-parallel ranks."""
        if self.world_size == 1:
            return float(value)
        return float(self.sum(torch.tensor(float(value), dtype=torch.float64, device=self.device)))

    def max(self, value: int) -> int:
        """The maximum of a number over all processes, on all of them."""
        if self.num_processes == 1:
            return value
        with self.waiting():
            return int(self.fabric.all_reduce(torch.tensor(value, device=self.device), reduce_op="max"))

    def gather(self, value: Item) -> list[Item]:
        """The values of the data-parallel ranks, in their order; any object that can be pickled."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.waiting():
            torch.distributed.all_gather_object(values, value, group=self._data_group())
        return values

    def gather_processes(self, value: Item) -> list[Item]:
        """The values of all processes, in their order; any object that can be pickled."""
        if self.num_processes == 1:
            return [value]
        values: list[Any] = [None] * self.num_processes
        torch.distributed.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """The first process's value, on all of them; any object that can be pickled."""
        if self.num_processes == 1:
            return value
        with self.waiting():
            return self.fabric.broadcast(value)

    def once(self, work: Callable[[], Item]) -> Item:
        """Run `work` on one rank of each tensor-parallel group and broadcast the result, so that weights stay equal.

        Raises: on the whole group, the UsageError or RunFailure that `work` raised.
        """
        if self.tensor_parallel == 1:
            return work()
        group = self.fabric.strategy.device_mesh["tensor_parallel"].get_group()
        found: list[Any] = [None, None]  # the result, and what was raised instead
        if torch.distributed.get_rank(group) == 0:
            try:
                found[0] = work()
            except UsageError as problem:
                found[1] = problem
        with self.waiting():
            torch.distributed.broadcast_object_list(found, group=group, group_src=0)
        if found[1] is not None:
            raise found[1]
        result: Item = found[0]
        return result

    def _data_group(self) -> Any:
        """Data-parallel process group; None for all processes."""
        if self.tensor_parallel == 1:
            return None
        return self.fabric.strategy.device_mesh["data_parallel"].get_group()

    def waiting(self, counted: bool = True) -> AbstractContextManager[None]:
        """Context manager around a collective, which the watchdog then times; see `RankWatchdog.waiting`."""
        return self.watchdog.waiting(counted) if self.watchdog else nullcontext()

    def watch(self, last_good: Callable[[], str]) -> None:
        """Watch the other processes, if there are any. last_good: returns the end of the line when one is gone."""
        if self.num_processes > 1:
            self.watchdog = RankWatchdog(self.fabric, patience(RANK), last_good)

    def close(self) -> None:
        """Stop watching the other processes; called on all of them."""
        if self.watchdog:
            self.watchdog.close()
            self.watchdog = None

    # ------------------------------------------------------------------------------------------- each rank's part
    def shard(self, rows: Sequence[Item] | Tensor) -> Any:
        """This rank's contiguous shard of the rows of a global batch; sizes differ by at most one.

        A list, but of `Rows` a view.
        """
        mine = rows[Shard(self.rank, self.world_size).span(len(rows))]
        return mine if isinstance(mine, Rows) else list(mine)

    def pad_passes(self, parts: Iterable[Item], num_models: int = 1) -> list[Any]:
        """This rank's micro-batches, padded with empty ones where all ranks have to run equally many passes.

        That is under `fsdp`, where every pass gathers weights from all ranks, and where a micro-batch passes through
        several trained models: DDP's ranks agree on the buckets of each before the first pass of its second update, so
        a rank that already sums the first model's gradients, with its only micro-batch, would deadlock.
        """
        parts = list(parts)
        if self.world_size == 1 or not (self.is_sharded or num_models > 1):
            return parts
        return parts + [[]] * (self.max(len(parts)) - len(parts))

    def generator(self, *key: int) -> torch.Generator:
        """A random generator that depends on the run's seed and `key` only, and is the same on every rank."""
        return torch.Generator().manual_seed(mix_seed(*key, start=self.seed))

    def noise(self, num_rows: int, width: int, *key: int) -> Tensor:
        """This rank's rows of uniform numbers (num_rows of all ranks, width) that depend on seed and `key` only."""
        mine = self.shard(range(num_rows))
        return torch.rand(num_rows, width, generator=self.generator(*key))[mine]

    def print0(self, text: str) -> None:
        """Print a line on the first process, above the progress bar."""
        if self.is_first:
            from tqdm import tqdm

            tqdm.write(text)


class LocalRanks(Ranks):
    """One process that was not launched, of programs that do not train."""

    def __init__(self, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.fabric, self.seed, self.device = None, seed, torch.device(device)
        self.tensor_parallel, self.rank, self.world_size, self.num_processes = 1, 0, 1, 1
        self.is_first, self.is_sharded, self.watchdog = True, False, None
