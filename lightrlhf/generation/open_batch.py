"""A batch whose rows come and go: a turn computes and samples a token of each, and reads pieces of prompts.

Rows have their own sampling settings; those with equal ones are sampled together, as rollouts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightrlhf.cli.errors import NotFinite
from lightrlhf.data.batch import to_device
from lightrlhf.data.types import Tokenizer
from lightrlhf.generation.engine import decoding
from lightrlhf.generation.row_memory import RowMemory
from lightrlhf.generation.sampling import check_sampled, first_stop, sample
from lightrlhf.generation.tickets import Failed, Row, Ticket, Token
from lightrlhf.models.roles import Policy

PREFILL_TOKENS = 128  # of a turn in which rows decode; about the time of a few steps
MOST_PREFILL_TOKENS = 1024  # of any turn, after which new requests are looked at


class OpenBatch:
    """The rows that run; tokenizer: for stop strings."""

    def __init__(self, memory: RowMemory, tokenizer: Tokenizer) -> None:
        self.memory, self.tokenizer = memory, tokenizer

    def step(self) -> None:
        """Compute once for each running row; rows of one policy together."""
        memory = self.memory
        for policy in dict.fromkeys(row.ticket.policy for row in memory.running):
            rows = [row for row in memory.running if row.ticket.policy is policy]
            try:
                with memory.autocast(), decoding(policy):
                    self._compute(policy, rows)
            except Exception as problem:  # such as too little memory
                for ticket in dict.fromkeys(row.ticket for row in rows):
                    self.fail(ticket, problem)
        for ticket in [*memory.tickets]:
            self._deliver(ticket)

    def _compute(self, policy: Policy, rows: list[Row]) -> None:
        """Sample a token of the rows that decode, and read pieces of the prompts of others."""
        pages, runner = self.memory.open_pages(policy), self.memory.runners[policy]
        fresh = [(row, logits) for row, logits in self.memory.fresh if row.ticket.policy is policy]
        self.memory.fresh = [one for one in self.memory.fresh if one[0].ticket.policy is not policy]
        stepping, reading = [row for row in rows if row.left == 1], [row for row in rows if row.left > 1]
        for row in stepping:
            if row in self.memory.running:
                self.memory.reserve(row, row.done + 1)
        stepping, reading = ([row for row in part if row in self.memory.running] for part in (stepping, reading))
        if stepping:
            self.memory.take_ahead(stepping)
            listed = [(row.serial, len(row.blocks)) for row in stepping]
            logits = runner.step([row.piece(1) for row in stepping], pages.layers, listed)  # (S, V)
            for row in stepping:
                row.done, row.steps = row.done + 1, row.steps + 1
            self._sample(stepping, logits)
        reading = [row for row in reading if row in self.memory.running]  # whose request has not failed just now
        if reading:
            parts = share_tokens([row.left for row in reading], PREFILL_TOKENS if stepping else MOST_PREFILL_TOKENS)
            chosen = [(row, count) for row, count in zip(reading, parts) if count]
            logits = runner.prefill([row.piece(count) for row, count in chosen], pages.layers)  # (R, V)
            for row, count in chosen:
                row.done += count
                self.memory.counts.prefilled += count
                pages.blocks.learn(row.ticket.namespace, row.ids[: row.done], row.blocks)
            read = [number for number, (row, _) in enumerate(chosen) if row.left == 0]
            self._sample([chosen[number][0] for number in read], logits[read])
        fresh = [(row, logits) for row, logits in fresh if row in self.memory.running]
        if fresh:
            self._sample([row for row, _ in fresh], torch.stack([logits for _, logits in fresh]))

    def _sample(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Sample the next token of each row from logits (S, V): rows with equal settings together."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, row in enumerate(rows):
            self._share_prompt(row, logits[number])
            groups.setdefault(row.settings, []).append(number)
        for members in groups.values():
            own = [rows[number] for number in members]
            part = logits if len(members) == len(rows) else logits[members]
            args, allowed = own[0].ask.sampling, own[0].ask.allowed
            if allowed is not None:
                part = restricted_to(part, allowed)
            noise = to_device(torch.stack([row.ask.noise[row.sampled] for row in own]), part.device)
            tokens, logprobs, _ = sample(part, noise, args, seen_in(own, part))
            for row, token, logprob in zip(own, tokens.tolist(), logprobs.tolist()):
                self._append(row, token, logprob)

    def _share_prompt(self, row: Row, logits: Tensor) -> None:
        """Keep what other rows with the same prompt begin with."""
        shared = row.shared
        if row.sampled == 0 and shared.num_waiting and shared.logits is None and self.memory.pages is not None:
            blocks = self.memory.pages.blocks
            shared.logits, shared.blocks = logits.clone(), row.blocks[: blocks.needed(len(row.ids))]
            blocks.share(shared.blocks)

    def _append(self, row: Row, token: int, logprob: float) -> None:
        """Add a sampled token to a row, which may end with it."""
        if row not in self.memory.running:  # its request has failed
            return
        if logprob != logprob:
            try:
                check_sampled(torch.tensor([logprob]), row.ticket.policy.model)
            except NotFinite as problem:
                self.fail(row.ticket, problem)
            return
        row.ids.append(token)
        self.memory.counts.sampled += 1
        finish = self._finish(row, token)
        row.ticket.events.append(Token(row.index, token, logprob, finish))
        if finish is not None:
            self.memory.drop_blocks(row)
            self.memory.running.remove(row)
            row.ticket.num_running -= 1
            row.ticket.num_open -= 1

    def _finish(self, row: Row, token: int) -> str | None:
        """Why a row ends with its last token, if it does."""
        args = row.ask.sampling
        if args.stop_strings:
            window = 4 * max(map(len, args.stop_strings)) + 8  # tokens that may spell one: each has a byte or more
            latest = row.ids[max(len(row.ask.prompt), len(row.ids) - window) :]
            if first_stop(self.tokenizer, latest, args.stop_strings):
                return "stop"
        if token in row.stops:
            return "stop"
        return "length" if row.sampled == args.max_new_tokens else None

    def _deliver(self, ticket: Ticket) -> None:
        events, ticket.events = ticket.events, []
        if ticket.num_open == 0:
            self.remove(ticket)
        if events:
            self.emit(ticket, events)

    def emit(self, ticket: Ticket, events: list[Token] | Failed) -> None:
        """Tell a request's client what is new, unless it has gone."""
        try:
            if not ticket.is_cancelled:
                ticket.emit(events)
        except RuntimeError:  # the loop of its client has ended
            ticket.is_cancelled = True

    def fail(self, ticket: Ticket, problem: BaseException) -> None:
        """End a request whose numbers may not be finite: nothing of its blocks is used again."""
        if ticket not in self.memory.tickets:  # it has failed already
            return
        pages = self.memory.pages
        if pages is not None:
            held = {block for row in self._rows(ticket) for block in row.blocks}
            pages.blocks.forget(sorted(held))
            self.remove(ticket)
            pages.clear([block for block in held if pages.blocks.users[block] == 0])
        else:
            self.remove(ticket)
        self.emit(ticket, Failed(problem))

    def _rows(self, ticket: Ticket) -> list[Row]:
        """The rows of a request that are not complete."""
        return [*ticket.waiting, *(row for row in self.memory.running if row.ticket is ticket)]

    def remove(self, ticket: Ticket) -> None:
        """End a request."""
        for row in self._rows(ticket):
            self.memory.drop_blocks(row)
        for shared in ticket.shared:
            self.memory.drop_shared(shared)
        self.memory.running = [row for row in self.memory.running if row.ticket is not ticket]
        self.memory.fresh = [(row, logits) for row, logits in self.memory.fresh if row.ticket is not ticket]
        self.memory.tickets.remove(ticket)


def share_tokens(lengths: Sequence[int], most: int) -> list[int]:
    """How many of each row's tokens are read in a turn, `most` in total.

    Half are the first row's, so that a long prompt comes to its end; the others go to the shortest first.
    """
    parts = [min(lengths[0], most if len(lengths) == 1 else most // 2)] + [0] * (len(lengths) - 1)
    most -= parts[0]
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number] - parts[number]):
        more = min(lengths[number] - parts[number], most)
        parts[number], most = parts[number] + more, most - more
    return parts


def restricted_to(logits: Tensor, allowed: Sequence[int]) -> Tensor:
    """Logits (S, V) in which all other tokens have probability 0."""
    index = torch.tensor(allowed, device=logits.device)
    return torch.full_like(logits, -torch.inf).index_copy_(-1, index, logits[:, index])


def seen_in(rows: Sequence[Row], logits: Tensor) -> Tensor | None:
    """Tokens (S, V) that occur in each row, where there is a penalty on them."""
    if rows[0].ask.sampling.repetition_penalty == 1:
        return None
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for number, row in enumerate(rows):
        seen[number, row.ids] = True
    return seen.to(logits.device)
