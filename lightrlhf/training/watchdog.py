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
from typing import Any

import torch

HEARTBEAT_SECONDS = 2.0  # seconds between two signs of life
HEARTBEAT_TIMEOUT = 40.0  # a rank that gave none for so long is gone; long enough for a thread that gets no turn
SUSPECT_TIMEOUT = 4 * HEARTBEAT_SECONDS  # the same once a collective has failed
COLLECTIVE_GRACE = 60  # seconds by which a collective's own time-out comes after ours, which has the better message


class RankWatchdog(threading.Thread):
    """Tells the other ranks that this one lives and how far it is, and ends it when one of them is lost.

    A rank is lost when its process is gone, when it has ended early, or when others have waited for it for `patience`
    seconds. The first to notice prints which and where; exit status 1.
    """

    def __init__(self, fabric: Any, patience: float, good: Callable[[], str]) -> None:
        super().__init__(daemon=True, name="watch")
        self.rank, self.world_size, self.patience, self.good = fabric.global_rank, fabric.world_size, patience, good
        self.first_here = fabric.local_rank == 0
        self.where = "its start"
        self.arrivals = 0  # how many meeting points of all ranks this one has come to
        self.waiting_since: float | None = None
        self.in_doubt: str | None = None  # what a failed collective said
        self._closing = threading.Event()
        self._beats = 0
        self.store = self._connect(fabric)
        self._beat()
        fabric.barrier()
        atexit.register(self._end_early)
        _relieve_observer()
        self.start()

    def _connect(self, fabric: Any) -> Any:
        host, options = (
            os.environ["MASTER_ADDR"],
            {"timeout": timedelta(seconds=HEARTBEAT_TIMEOUT), "wait_for_workers": False},
        )
        server = torch.distributed.TCPStore(host, 0, is_master=True, **options) if self.rank == 0 else None
        port = fabric.broadcast(server.port if server else None)
        return server or torch.distributed.TCPStore(host, port, is_master=False, **options)

    @contextmanager
    def waiting(self, counted: bool) -> Iterator[None]:
        """Around what may wait for other ranks; `counted` where every rank comes equally often.

        A collective that fails inside is explained: a run may meet the others outside its phases, too.
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
        """A collective failed: find out whom it waited for, and end. Returns when it was no collective."""
        text = str(problem)
        if isinstance(problem, torch.distributed.DistError) or "gloo" in text or "NCCL" in text:
            self.in_doubt = " ".join(text.split())[:200]
            self.join(HEARTBEAT_TIMEOUT)

    def close(self) -> None:
        """The end of a run that went well; all ranks come here."""
        self._closing.set()  # from now on a store that is gone is no news
        self.join()
        atexit.unregister(self._end_early)
        torch.distributed.barrier()

    # ------------------------------------------------------------------------------------------------- the thread
    def run(self) -> None:
        seen = {rank: (-1, time.monotonic()) for rank in range(self.world_size)}
        doubted_since = None
        while not self._closing.wait(HEARTBEAT_SECONDS):
            try:
                self._beat()
                reports = self._reports()
            except RuntimeError:  # rank 0, which has the store
                if not self._closing.is_set():
                    self._end("rank 0 is gone", claim=self.rank == 1 or self.first_here)
                return
            now = time.monotonic()
            for rank, report in enumerate(reports):
                if report["beats"] != seen[rank][0]:
                    seen[rank] = report["beats"], now
            ended = [rank for rank, report in enumerate(reports) if report["ended"]]
            silent = [
                rank
                for rank, (_, last) in seen.items()
                if now - last > (SUSPECT_TIMEOUT if self.in_doubt else HEARTBEAT_TIMEOUT)
            ]
            if ended:
                self._end(f"rank {ended[0]} stopped at {reports[ended[0]]['where']}; it says above why")
            if silent:
                self._end(
                    f"rank {silent[0]} is gone (killed, or its machine is); last seen at {reports[silent[0]]['where']}"
                )
            if self.waiting_since and now - self.waiting_since > self.patience:
                self._end(f"{_late(reports)} within --ddp_timeout {self.patience:g} s")
            if self.in_doubt:
                doubted_since = doubted_since or now
                if now - doubted_since > 2 * SUSPECT_TIMEOUT:
                    self._end(f"{_late(reports)}: {self.in_doubt}")

    def _beat(self, ended: bool = False) -> None:
        self._beats += 1
        report = {"beats": self._beats, "arrivals": self.arrivals, "where": self.where, "ended": ended}
        self.store.set(f"rank {self.rank}", json.dumps(report))

    def _reports(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.store.multi_get([f"rank {r}" for r in range(self.world_size)])]

    def _end(self, verdict: str, claim: bool | None = None) -> None:
        """Say what happened, if no other rank has said it, and end this process."""
        if claim is None:
            try:
                claim = self.store.compare_set("verdict", "", f"{self.rank}") == f"{self.rank}".encode()
                self._beat(ended=True)
            except RuntimeError:
                claim = True
        if claim:
            print(f"\nerror: {verdict}{self.good()}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if self.rank == 0:
            self._linger()
        os._exit(1)  # the main thread may hang in a collective for ever

    def _end_early(self) -> None:
        """This process ends before its run does: tell the others, so that they need not guess."""
        self._closing.set()
        try:
            self._beat(ended=True)
            if self.rank == 0:
                self._linger()
        except RuntimeError:
            return

    def _linger(self) -> None:
        """Rank 0 has the store: it stays until the others have read why they end."""
        until = time.monotonic() + SUSPECT_TIMEOUT
        while time.monotonic() < until and not all(report["ended"] for report in self._reports()):
            time.sleep(0.1)


def _late(reports: list[dict[str, Any]]) -> str:
    fewest = min(report["arrivals"] for report in reports)
    late = [f"rank {rank} (at {r['where']})" for rank, r in enumerate(reports) if r["arrivals"] == fewest]
    if len(late) == len(reports):
        return "the ranks did not get on together, " + ", ".join(late)
    return f"{' and '.join(late)} did not arrive where the others wait"


def _relieve_observer() -> None:
    """Stop Fabric's thread that kills all processes when a child ends: the watch does that and says why."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            thread._run = lambda: True
