"""Watchdog: a heartbeat thread on each rank that ends the run when another rank dies or stalls.

A collective waits for dead or stuck ranks until its time-out. Each rank therefore publishes a heartbeat and its
progress in a key-value store on rank 0. The first rank to notice that another one is gone or late prints which one and
where, and all of them exit.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from lightrlhf.cli.patience import RANK

HEARTBEAT_SECONDS = 2.0  # seconds between two signs of life
HEARTBEAT_TIMEOUT = 40.0  # a rank that gave none for so long is gone; long enough for a thread that gets no turn
SUSPECT_TIMEOUT = 4 * HEARTBEAT_SECONDS  # the same once a collective has failed
COLLECTIVE_GRACE = 60  # seconds by which a collective's own time-out comes after ours, which has the better message


class RankWatchdog(threading.Thread):
    """Heartbeat thread: publishes this rank's progress and exits when another rank dies or stalls.

    A rank is lost when its process is gone, when it has exited early, or when others have waited for it for `patience`
    seconds. The first rank to notice prints which one and where; exit status 1. last_good: returns the end of that
    line, with the last good checkpoint.
    """

    def __init__(self, fabric: Any, patience: float, last_good: Callable[[], str]) -> None:
        super().__init__(daemon=True, name="rank-watchdog")
        self.rank, self.world_size = fabric.global_rank, fabric.world_size
        self.patience, self.last_good = patience, last_good
        self.is_first_here = fabric.local_rank == 0
        self.where = "its start"
        self.arrivals = 0  # collectives that this rank has reached
        self.waiting_since: float | None = None
        self.failure: str | None = None  # message of a failed collective
        self._closing = threading.Event()
        self._heartbeats = 0
        self.store = self._connect(fabric)
        self._publish()
        fabric.barrier()
        atexit.register(self._end_early)
        _disable_observer()
        self.start()

    def _connect(self, fabric: Any) -> Any:
        host, timeout = os.environ["MASTER_ADDR"], timedelta(seconds=HEARTBEAT_TIMEOUT)
        store = partial(torch.distributed.TCPStore, host, timeout=timeout, wait_for_workers=False)
        server = store(0, is_master=True) if self.rank == 0 else None
        port = fabric.broadcast(server.port if server else None)
        return server or store(port, is_master=False)

    @contextmanager
    def waiting(self, counted: bool) -> Iterator[None]:
        """Wrap a collective; `counted` if every rank executes it equally often.

        Raises: what the collective raised, unless another rank is the cause, which ends the process.
        """
        self.arrivals += counted
        self.waiting_since = time.monotonic()
        try:
            yield
        except RuntimeError as problem:
            self.explain(problem)
            raise
        finally:
            self.waiting_since = None

    def explain(self, problem: Exception) -> None:
        """End the process with the rank that a failed collective waited for; return for any other error."""
        text = str(problem)
        if isinstance(problem, torch.distributed.DistError) or "gloo" in text or "NCCL" in text:
            self.failure = " ".join(text.split())[:200]
            self.join(HEARTBEAT_TIMEOUT)

    def close(self) -> None:
        """Stop watching at the end of a successful run; called on all ranks."""
        self._closing.set()  # from now on the store may be gone
        self.join()
        atexit.unregister(self._end_early)
        torch.distributed.barrier()

    # ------------------------------------------------------------------------------------------------- the thread
    def run(self) -> None:
        seen = {rank: (-1, time.monotonic()) for rank in range(self.world_size)}
        failed_since = None
        while not self._closing.wait(HEARTBEAT_SECONDS):
            try:
                self._publish()
                reports = self._reports()
            except RuntimeError:  # the store, which is on rank 0
                if not self._closing.is_set():
                    self._end("rank 0 is gone", claim=self.rank == 1 or self.is_first_here)
                return
            now = time.monotonic()
            for rank, report in enumerate(reports):
                if report["heartbeats"] != seen[rank][0]:
                    seen[rank] = report["heartbeats"], now
            ended = [rank for rank, report in enumerate(reports) if report["ended"]]
            silent = [
                rank
                for rank, (_, last) in seen.items()
                if now - last > (SUSPECT_TIMEOUT if self.failure else HEARTBEAT_TIMEOUT)
            ]
            if ended:
                self._end(f"rank {ended[0]} failed during {reports[ended[0]]['where']}; see its error above")
            if silent:
                self._end(
                    f"rank {silent[0]} is gone (killed, or its machine is); last seen at {reports[silent[0]]['where']}"
                )
            if self.waiting_since and now - self.waiting_since > self.patience:
                self._end(f"{_late(reports)} within {RANK} {self.patience:g} s")
            if self.failure:
                failed_since = failed_since or now
                if now - failed_since > 2 * SUSPECT_TIMEOUT:
                    self._end(f"{_late(reports)}: {self.failure}")

    def _publish(self, ended: bool = False) -> None:
        self._heartbeats += 1
        report = {"heartbeats": self._heartbeats, "arrivals": self.arrivals, "where": self.where, "ended": ended}
        self.store.set(f"rank {self.rank}", json.dumps(report))

    def _reports(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.store.multi_get([f"rank {r}" for r in range(self.world_size)])]

    def _end(self, verdict: str, claim: bool | None = None) -> None:
        """Print the verdict, unless another rank has printed one, and end this process."""
        if claim is None:
            try:
                claim = self.store.compare_set("verdict", "", f"{self.rank}") == f"{self.rank}".encode()
                self._publish(ended=True)
            except RuntimeError:
                claim = True
        if claim:
            print(f"\nerror: {verdict}{self.last_good()}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if self.rank == 0:
            self._linger()
        os._exit(1)  # the main thread may hang in a collective

    def _end_early(self) -> None:
        """Report to the other ranks that this process exits before the end of its run."""
        self._closing.set()
        try:
            self._publish(ended=True)
            if self.rank == 0:
                self._linger()
        except RuntimeError:
            return

    def _linger(self) -> None:
        """Keep rank 0, which has the store, alive until the others have read the reports."""
        until = time.monotonic() + SUSPECT_TIMEOUT
        while time.monotonic() < until and not all(report["ended"] for report in self._reports()):
            time.sleep(0.1)


def _late(reports: list[dict[str, Any]]) -> str:
    fewest = min(report["arrivals"] for report in reports)
    late = [f"rank {rank} (at {r['where']})" for rank, r in enumerate(reports) if r["arrivals"] == fewest]
    if len(late) == len(reports):
        return "ranks are out of sync: " + ", ".join(late)
    return f"{' and '.join(late)} did not reach the collective that the others wait in"


def _disable_observer() -> None:
    """Disable Fabric's thread that kills all processes when a child exits: the watchdog does that with a message."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            setattr(thread, "_run", lambda: True)  # noqa: B010  # an attribute of Fabric's own thread class
