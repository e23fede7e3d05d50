"""Continuous batching over requests: rows come and go, each with its own sampling settings.

    scheduler = Scheduler(tokenizer)
    ticket = scheduler.submit(lambda: policy, "its name", [Ask(ids, sampling, ends, noise), ...], emit)
    ticket.cancel()  # both from any thread; emit gets a list of `Token`, or `Failed`

One thread computes, in turns. A turn reads pieces of prompts, at most `PREFILL_TOKENS` of them while others decode, and
decodes a token of every running row; rows of one policy (an adapter) together, policies one after another. Slots go to
the request with the fewest running rows, the longest waiting first, and where one has waited a row that had `QUANTUM`
steps makes room: its blocks stay, so that it goes on later. When blocks run out, waiting rows lose theirs first, and
are read again later. Prompts are read from the longest known prefix of blocks (`blocks`), once for all rows of a
request with the same prompt.

A row's noise is its own, but its bits are not: products with weights may round otherwise with other rows beside it.
A request whose bits count, such as a rollout, is a separate `Job` (`engine.generate_turns`) with turns in this loop.

Left out: sharded models, for which see `engine`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.open_batch import OpenBatch
from lightrlhf.generation.row_memory import RowMemory
from lightrlhf.generation.tickets import Ask, Emit, Failed, Job, Row, Ticket
from lightrlhf.models.roles import Policy

QUANTUM = 64  # steps of a row before it makes room for a request that has none


class Scheduler:
    """Samples for all requests, in one thread.

    num_slots: rows that run at a time; cache_bytes: of keys and values; autocast: makes the context of all passes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_slots: int = 64,
        cache_bytes: int = 2**30,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.memory = RowMemory(num_slots, cache_bytes, autocast)
        self.batch = OpenBatch(self.memory, tokenizer)
        self.wake = threading.Condition()
        self.line: deque[Ticket | Job] = deque()  # that have not been looked at
        self.jobs: list[Job] = []
        self.is_closed = False
        self.thread: threading.Thread | None = None  # from the first request on

    # ---- from other threads
    def submit(self, find_policy: Callable[[], Policy], namespace: Hashable, asks: Sequence[Ask], emit: Emit) -> Ticket:
        """Sample rows; `emit` is called in the scheduler's thread, after each turn with what is new.

        find_policy: called when jobs that run alone and came before have ended; namespace: of the policy, requests with
        another share no prefixes with this one.
        """
        ticket = Ticket(find_policy, namespace, asks, emit)
        self._enter(ticket)
        return ticket

    def run(self, job: Job) -> Job:
        """Take the turns of a job beside requests; its `future` gets the result."""
        self._enter(job)
        return job

    def num_waiting(self) -> int:
        """Requests and jobs that have not begun."""
        return sum(not one.has_begun for one in (*self.line, *self.memory.tickets, *self.jobs))

    def metrics(self) -> dict[str, int]:
        """Rows and requests now, blocks of the cache, and tokens so far."""
        pages = self.memory.pages
        count, free = (pages.blocks.count, pages.blocks.room()) if pages else (0, 0)
        now = {"running_rows": len(self.memory.running), "waiting_requests": self.num_waiting()}
        now |= {"cache_blocks": count, "cache_blocks_used": count - free}
        return now | {f"{name}_tokens_total": value for name, value in vars(self.memory.counts).items()}

    def close(self) -> None:
        """End the thread after its turn."""
        with self.wake:
            self.is_closed = True
            self.wake.notify()

    def _enter(self, one: Ticket | Job) -> None:
        with self.wake:
            self.line.append(one)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
                self.thread.start()
            self.wake.notify()

    # ---- turns
    def _run(self) -> None:
        while True:
            with self.wake:
                while not (self.line or self.memory.tickets or self.jobs or self.is_closed):
                    self.wake.wait()
            if self.is_closed:
                return
            try:
                self.turn()
            except Exception as problem:  # a fault of this file: end every request with it
                for ticket in [*self.memory.tickets]:
                    self.batch.fail(ticket, problem)

    def turn(self) -> None:
        """Look at new requests, then compute once for each job and each running row."""
        self._take_in()
        for ticket in [ticket for ticket in self.memory.tickets if ticket.is_cancelled]:
            self.batch.remove(ticket)
        self._advance_jobs()
        self._admit()
        self.batch.step()

    def _take_in(self) -> None:
        while self.line:
            one = self.line[0]
            if isinstance(one, Job) and one.alone:
                if self.memory.tickets or self.jobs:
                    return
                while one.advance():
                    pass
            elif isinstance(one, Job):
                self.jobs.append(one)
            else:
                self._accept(one)
            self.line.popleft()

    def _accept(self, ticket: Ticket) -> None:
        try:
            ticket.policy = ticket.find_policy()
        except Exception as problem:
            self.batch.emit(ticket, Failed(problem))
            return
        ticket.order = next(self.memory.numbers)
        self.memory.tickets.append(ticket)

    def _advance_jobs(self) -> None:
        """A turn of each job; a further one begins when the caches of all fit, or it is the only one."""
        used = sum(job.num_bytes for job in self.jobs if job.has_begun)
        for job in [*self.jobs]:
            if not job.has_begun:
                if used and used + job.num_bytes > self.memory.cache_bytes and not job.is_cancelled:
                    return
                used += job.num_bytes
            if not job.advance():
                self.jobs.remove(job)

    def _admit(self) -> None:
        """Start rows: of the requests with the fewest running rows, the longest waiting first."""
        skipped: set[Ticket] = set()  # whose rows wait for another row
        while candidates := [one for one in self.memory.tickets if one.waiting and one not in skipped]:
            ticket = min(candidates, key=lambda one: (one.num_running, one.order))
            row = next((row for row in ticket.waiting if self._is_ready(row)), None)
            if row is None:
                skipped.add(ticket)
                continue
            if len(self.memory.running) >= self.memory.num_slots:
                victim = self._victim(ticket)
                if victim is None:
                    return
                self.memory.suspend(victim)
                skipped.add(victim.ticket)
            try:
                if not self.memory.start(row):
                    return
            except Exception as problem:
                self.batch.fail(ticket, problem)

    def _is_ready(self, row: Row) -> bool:
        """Whether no other row reads the prompt, or its next block, which both have."""
        shared = row.shared
        if row.is_counted or shared.logits is not None:
            return True
        if shared.reader is not None:
            return False
        if self.memory.pages is None:
            return True
        blocks, namespace = self.memory.pages.blocks, row.ticket.namespace
        following = blocks.find(namespace, row.ids)[1]
        read = (other for other in self.memory.running if other.left > 1 and other.ticket.namespace == namespace)
        return following is None or all(blocks.find(namespace, other.ids)[1] != following for other in read)

    def _victim(self, ticket: Ticket) -> Row | None:
        """The row that makes room for a request: of one that has two more, or one that had its steps."""
        most = max(row.ticket.num_running for row in self.memory.running)
        if most >= ticket.num_running + 2:
            return max(
                (row for row in self.memory.running if row.ticket.num_running == most), key=lambda row: row.serial
            )
        oldest = max(self.memory.running, key=lambda row: row.steps)
        return oldest if ticket.num_running == 0 and oldest.steps >= QUANTUM else None
