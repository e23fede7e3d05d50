"""Requests to the scheduler, their rows, and jobs that take turns with them.

Left out: what computes them (`open_batch`) and when (`scheduler`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from lightrlhf.cli.groups import SamplingArgs
from lightrlhf.cpu import Piece
from lightrlhf.models.roles import Policy


class Ask(NamedTuple):
    """A response to sample. Log-probabilities are at the temperature, over `allowed` where it is given."""

    prompt: Sequence[int]
    sampling: SamplingArgs
    ends: Sequence[int]  # token ids that end it, besides `sampling.eos_ids`
    noise: Tensor  # (max_new_tokens,) uniform numbers
    allowed: Sequence[int] | None = None  # the only tokens that may be sampled


class Token(NamedTuple):
    """A sampled token of row `index` of a request; finish: stop or length at its last one."""

    index: int  # type: ignore[assignment]  # hides the method of tuples
    token: int
    logprob: float
    finish: str | None


class Failed(NamedTuple):
    """A request ended without its answer."""

    problem: BaseException


Emit = Callable[[list[Token] | Failed], None]


@dataclass
class Counts:
    """What the scheduler has done so far, in tokens."""

    prompt: int = 0  # of prompts of requests
    cached: int = 0  # of those, whose keys and values were known
    prefilled: int = 0  # that were read, also those read again
    sampled: int = 0


@dataclass(eq=False)
class Row:
    """A response that is sampled; `ids` begin with the prompt, and the first `done` of them are in the blocks."""

    ticket: Ticket
    index: int
    ask: Ask
    ids: list[int]
    stops: frozenset[int]
    settings: tuple[Any, ...]  # rows with equal ones are sampled together
    shared: Shared
    serial: int = 0  # of its latest start
    done: int = 0
    steps: int = 0  # since its latest start
    blocks: list[int] = field(default_factory=list)
    is_counted: bool = False  # among the prompts

    @property
    def sampled(self) -> int:
        """How many tokens were sampled."""
        return len(self.ids) - len(self.ask.prompt)

    @property
    def left(self) -> int:
        """Tokens that are not in the blocks; 1 in a row that decodes."""
        return len(self.ids) - self.done

    def piece(self, count: int) -> Piece:
        """Its next tokens to compute."""
        return Piece(self.ids[self.done : self.done + count], self.done, self.blocks)


class Shared:
    """A prompt of several rows: the first one reads it, the others begin with its blocks and its logits."""

    def __init__(self) -> None:
        self.reader: Row | None = None
        self.num_waiting = 0
        self.blocks: list[int] = []
        self.logits: Tensor | None = None  # (V,)


class Ticket:
    """A request: rows of one policy. cached: tokens of its prompts whose keys and values were known when it began."""

    policy: Policy

    def __init__(self, find_policy: Callable[[], Policy], namespace: Hashable, asks: Sequence[Ask], emit: Emit) -> None:
        self.find_policy, self.namespace, self.emit = find_policy, namespace, emit
        self.waiting: deque[Row] = deque(make_rows(self, asks))
        self.num_open, self.num_running = len(asks), 0
        self.order = 0  # among tickets with as many running rows
        self.cached = 0
        self.has_begun = self.is_cancelled = False
        self.events: list[Token] = []  # of this turn
        self.shared = [*{id(row.shared): row.shared for row in self.waiting}.values()]

    def cancel(self) -> None:
        """End the request before the next turn; it emits nothing any more."""
        self.is_cancelled = True


def make_rows(ticket: Ticket, asks: Sequence[Ask]) -> Iterator[Row]:
    """Rows that have not begun."""
    shared: dict[tuple[int, ...], Shared] = {}
    for index, ask in enumerate(asks):
        args = ask.sampling
        allowed = None if ask.allowed is None else tuple(ask.allowed)
        kept = (args.temperature, args.do_sample, args.top_k, args.top_p, args.min_p, args.repetition_penalty)
        settings = (*kept, allowed)
        prompt = shared.setdefault(tuple(ask.prompt), Shared())
        prompt.num_waiting += 1
        yield Row(ticket, index, ask, [*ask.prompt], frozenset([*ask.ends, *args.eos_ids]), settings, prompt)


class Job:
    """Work by turns: each `next` of the iterator is one; its value is what the iterator returns.

    alone: begins when all before it has ended, and all after it waits; num_bytes: of caches that it takes.
    """

    def __init__(self, turns: Generator[Any, None, Any], alone: bool = False, num_bytes: int = 0) -> None:
        self.turns, self.alone, self.num_bytes = turns, alone, num_bytes
        self.future: Future[Any] = Future()
        self.has_begun = self.is_cancelled = False

    def cancel(self) -> None:
        """End the job before its next turn."""
        self.is_cancelled = True

    def advance(self) -> bool:
        """Take a turn; returns whether there are more. A future that was cancelled gets no result."""
        self.has_begun = True
        try:
            if not self.is_cancelled:
                next(self.turns)
                return True
            self.turns.close()
            self.future.cancel()
        except StopIteration as end:
            with suppress(InvalidStateError):
                self.future.set_result(end.value)
        except BaseException as problem:
            with suppress(InvalidStateError):
                self.future.set_exception(problem)
        return False
