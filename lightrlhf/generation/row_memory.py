"""Blocks of a paged KV cache for the rows of an open batch: when they start, wait, go on and end.

A row starts with the blocks of the longest known prefix, or shares the prompt of another row, and takes further
ones as it grows. When they run out, waiting rows lose theirs first, then the rows that began last; such a row is
read again later, from what is still known.

Left out: blocks on disk or in the memory of the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from lightrlhf.cli.errors import UsageError
from lightrlhf.generation.engine import check_architecture, decoding
from lightrlhf.generation.paged import Pages, Runner, make_runner
from lightrlhf.generation.tickets import Counts, Row, Shared, Ticket
from lightrlhf.models.roles import Policy

MOST_PACKED = 2**31  # bytes of packed weights of several policies
LOOKAHEAD = 32  # columns for which a row takes blocks ahead, so that lists of blocks live as long


class RowMemory:
    """Which rows run, and with which blocks. num_slots: rows that run at a time; cache_bytes: of keys and values."""

    def __init__(self, num_slots: int, cache_bytes: int, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self.num_slots, self.cache_bytes, self.autocast = num_slots, cache_bytes, autocast
        self.counts = Counts()
        self.tickets: list[Ticket] = []
        self.running: list[Row] = []
        self.fresh: list[tuple[Row, Tensor]] = []  # rows that begin with logits (V,)
        self.pages: Pages | None = None
        self.runners: dict[Policy, Runner] = {}
        self.listed: list[tuple[int, int]] = []  # rows of the last step, with their numbers of blocks
        self.numbers = itertools.count(1)

    def open_pages(self, policy: Policy) -> Pages:
        """The cache, and the runner of a policy, which its first row makes."""
        if self.pages is None or policy not in self.runners:
            with self.autocast(), decoding(policy):
                check_architecture(policy)
                self._make_runner(policy)
                if self.pages is None:
                    positions = getattr(policy.model.config, "max_position_embeddings", None) or 2**20
                    self.pages = Pages(self.runners[policy], self.cache_bytes, 2 * self.num_slots * positions)
        return self.pages

    def _make_runner(self, policy: Policy) -> None:
        """Pack the weights, and drop other policies' unused ones when all would take too much memory."""
        size = sum(parameter.numel() for parameter in policy.model.parameters()) * 4
        used = {row.ticket.policy for row in self.running}
        for other in [other for other in self.runners if other not in used]:
            if (len(self.runners) + 1) * size > MOST_PACKED:
                del self.runners[other]
        self.runners[policy] = make_runner(policy.model)

    def forget_weights(self) -> None:
        """Drop what was computed by weights that change; called by a job that runs alone."""
        self.runners.clear()
        self.pages = None

    def start(self, row: Row) -> bool:
        """Let a row run; returns whether there was memory for it. Raises: UsageError when there never is."""
        ticket, pages = row.ticket, self.open_pages(row.ticket.policy)
        blocks = pages.blocks
        total = len(row.ask.prompt) + row.ask.sampling.max_new_tokens
        if blocks.needed(total) > blocks.count:
            raise UsageError(
                f"a prompt with its response of up to {total} tokens does not fit into the KV cache of "
                f"{blocks.count * blocks.size} tokens; use fewer max_tokens, or a larger --kv_cache_gb"
            )
        shared = row.shared
        is_new, found = not row.blocks, row.blocks
        begins = is_new and shared.logits is not None and not row.is_counted  # with what another row has read
        if is_new:
            found = [*shared.blocks] if begins else blocks.find(ticket.namespace, row.ids)[0]
            blocks.share(found)
        own_last = begins and len(row.ids) % blocks.size > 0
        missing = max(blocks.needed(len(row.ids) + 1) - len(found), 0)
        has_room = self.make_room(missing + own_last)  # perhaps by dropping blocks that this row needs
        if not has_room or (begins and shared.logits is None) or not (is_new or row.blocks):
            if is_new:
                blocks.release(found)
            return False
        if is_new:
            row.blocks, row.done = found, len(found) * blocks.size
            if own_last:  # which it goes on to write to
                row.blocks[-1:] = blocks.take(1)
                pages.copy(found_last := shared.blocks[-1], row.blocks[-1])
                blocks.release([found_last])
            if not row.is_counted:
                self._begin(row, shared)
        row.blocks += blocks.take(missing)
        row.serial, row.steps = next(self.numbers), 0
        ticket.waiting.remove(row)
        ticket.num_running += 1
        ticket.has_begun = True
        self.running.append(row)
        return True

    def _begin(self, row: Row, shared: Shared) -> None:
        """The first start of a row: it reads the prompt, or begins with the logits of the row that did."""
        row.is_counted = True
        shared.num_waiting -= 1
        self.counts.prompt += len(row.ids)
        if shared.logits is not None:
            row.done = len(row.ids)
            self.fresh.append((row, shared.logits))
        else:
            shared.reader = row
            row.ticket.cached += row.done
        self.counts.cached += row.done
        if not shared.num_waiting:
            self.drop_shared(shared)

    def suspend(self, row: Row) -> None:
        """Let a row wait, with its blocks."""
        self.running.remove(row)
        if row.left == 0:  # it has not used the logits that it began with
            self.fresh = [one for one in self.fresh if one[0] is not row]
            self.drop_blocks(row)
        row.ticket.waiting.appendleft(row)
        row.ticket.num_running -= 1
        row.ticket.order = next(self.numbers)

    def make_room(self, count: int, but: Row | None = None) -> bool:
        """Have `count` blocks free, taken from rows that wait; for a running row (`but`) from newer ones, too."""
        assert self.pages is not None
        blocks = self.pages.blocks
        while blocks.room() < count:
            waiting = [row for ticket in self.tickets for row in ticket.waiting if row.blocks]
            shared = [one for ticket in self.tickets for one in ticket.shared if one.blocks]
            if waiting:
                self.drop_blocks(max(waiting, key=lambda row: row.ticket.order))
            elif shared:
                self.drop_shared(shared[-1])
                shared[-1].reader = None
            elif but is not None:
                newest = max(self.running, key=lambda row: row.serial)
                self.suspend(newest)
                self.drop_blocks(newest)
                if newest is but:
                    return False
            else:
                return False
        return True

    def reserve(self, row: Row, tokens: int) -> None:
        """Give a running row blocks for its first `tokens` tokens, or suspend it."""
        assert self.pages is not None
        blocks = self.pages.blocks
        missing = blocks.needed(tokens) - len(row.blocks)
        if missing > 0 and self.make_room(missing, but=row):
            row.blocks += blocks.take(missing)

    def take_ahead(self, rows: Sequence[Row]) -> None:
        """Give rows blocks for the next steps, when they are listed anew anyway."""
        assert self.pages is not None
        blocks = self.pages.blocks
        listed = [(row.serial, len(row.blocks)) for row in rows]
        if self.listed != listed:
            for row in rows:
                missing = blocks.needed(row.done + LOOKAHEAD) - len(row.blocks)
                row.blocks += blocks.take(min(max(missing, 0), blocks.room()))
            self.listed = [(row.serial, len(row.blocks)) for row in rows]

    def drop_blocks(self, row: Row) -> None:
        """Take a row's blocks; it is read again from what is still known of them."""
        if self.pages is not None and row.blocks:
            self.pages.blocks.learn(row.ticket.namespace, row.ids[: row.done], row.blocks)
            self.pages.blocks.release(row.blocks)
        row.blocks, row.done = [], 0

    def drop_shared(self, shared: Shared) -> None:
        if self.pages is not None and shared.blocks:
            self.pages.blocks.release(shared.blocks)
        shared.blocks, shared.logits = [], None
