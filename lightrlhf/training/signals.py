"""SIGTERM and SIGUSR1, which batch systems send before they kill a job: the run is saved and ends with status 143.

On one rank a signal interrupts any phase that changes no weight. An update, an evaluation or a write is finished first,
since an exception would leave it half done. Several ranks must save the same step, so their handlers only record the
signal, and the ranks agree on it after each phase.

Left out: SIGUSR1 on Windows, which does not have it; SIGINT, which Python handles.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightrlhf.cli.errors import TERMINATED

NAMES = ("SIGTERM", "SIGUSR1")
_all: weakref.WeakSet[StopSignals] = weakref.WeakSet()


class Terminated(SystemExit):
    """Ends the program after a signal; not an error, so `except Exception` in a user's function does not catch it."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class StopSignals:
    """The handlers of both signals, until `close`; signals that the process ignores or handles itself are left alone.

    Only the main thread can install handlers; elsewhere nothing is changed. line: printed by a handler when it raises
    outside of all phases; interrupts: whether a handler may raise at all.
    """

    def __init__(self, line: str, interrupts: bool = True) -> None:
        self.line, self.interrupts = line, interrupts
        self.received = ""  # name of the first signal; later ones change nothing
        self.is_between = True  # no loop has begun, so the handler may also raise between phases
        self._in_phase: bool | None = None  # whether it may raise in the current phase
        self.is_closed = False
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            numbers = [number for name in NAMES if (number := getattr(signal, name, None))]
            handlers = {number: signal.getsignal(number) for number in numbers}
            self._before = {n: handler for n, handler in handlers.items() if _is_free(handler)}
            _all.add(self)
            for number in self._before:
                signal.signal(number, self._handle)

    def close(self) -> None:
        """Restore the previous handlers, unless these were replaced."""
        self.is_closed = True
        with suppress(ValueError):  # not in the main thread; `_handle` restores them then
            for number, handler in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, handler)

    @contextmanager
    def phase(self, may_stop: bool) -> Iterator[bool]:
        """Context manager of a phase; yields whether it may stop here, never inside a phase that may not."""
        before, self._in_phase = self._in_phase, may_stop and self._in_phase is not False
        try:
            if self._in_phase and self.interrupts and self.received:  # received between phases
                raise Terminated
            yield self._in_phase
        finally:
            self._in_phase = before

    def _handle(self, number: int, frame: Any) -> None:
        if self.is_closed:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)
            return
        if self.received:
            return
        self.received = signal.Signals(number).name
        if self.interrupts and self._in_phase:
            raise Terminated
        if self.interrupts and self._in_phase is None and self.is_between:
            line = f"\nstopped by {self.received}{self.line}\n"  # on a new line after a progress bar
            os.write(2, line.encode())  # since the signal may have interrupted a print
            raise Terminated


def _is_free(handler: Any) -> bool:
    """Whether a handler may be replaced: the default one, or an enclosing run's, but none of a user's."""
    return handler == signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), StopSignals)


def _restore_in_child() -> None:
    """Restore the handlers in a forked child, such as a worker of a user's pool, so that signals end it as usual."""
    for one in list(_all):
        one.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)
