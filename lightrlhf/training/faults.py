"""Error messages of a failed step: its rows, and which tensors of the models are not finite.

Left out: which row of a batch made a gradient or a weight not finite; a sum does not tell.
"""

from __future__ import annotations

import threading
from bisect import bisect
from collections.abc import Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from lightrlhf.cli.errors import write_problem
from lightrlhf.maths.finite import leaves, not_finite

NAMED_ROWS = 16  # at most, in an error message


def describe_rows(names: Sequence[Any], kind: str, ends: Sequence[int], folders: Sequence[str]) -> str:
    """Rows as part of an error, each once: numbers, or names such as prompts.

    ends: of several sets among all rows; a number is then that in its own set, with the set's folder.
    """

    def describe(name: Any) -> str:
        if not ends or not isinstance(name, int):
            return str(name)
        number = bisect(ends, name)
        return f"{name - (ends[number - 1] if number else 0)} of {folders[number]}"

    texts = list(dict.fromkeys(map(describe, names)))
    if not texts:
        return ""
    more = f" and {len(texts) - NAMED_ROWS} more" if len(texts) > NAMED_ROWS else ""
    return f" ({kind} {', '.join(texts[:NAMED_ROWS])}{more}, counted from 0)"


def first_not_finite(
    models: Mapping[str, Any], optimizers: Mapping[str, Any], extra: Mapping[str, Any], skipped: Set[str]
) -> str:
    """Name of the first weight, buffer, optimiser state or value of the loop that is not finite; "" if all are.

    With `fsdp` this rank's shards are looked at. skipped: names, within their model, of buffers that never are finite,
    such as masks.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, model in models.items():
        for owner in (model, getattr(model, "model", model)):  # a shared backbone is not registered
            buffers = [(key, b) for key, b in owner.named_buffers() if not {key, key.partition(".")[2]} & skipped]
            for key, tensor in [*owner.named_parameters(), *buffers]:
                found.setdefault(id(tensor), (f"{name} weight {key.removeprefix('model.')}", tensor))
    tensors = list(found.values())
    for name, optimizer in optimizers.items():
        for parameter, state in getattr(getattr(optimizer, "optimizer", optimizer), "state", {}).items():
            of = found[id(parameter)][0] if id(parameter) in found else name
            tensors += [(f"{key} of {of}", tensor) for key, tensor in leaves(state)]
    bad = not_finite(tensors + [(f"{key} of the loop", tensor) for key, tensor in leaves(dict(extra))])
    return f"{bad[0]}{f' and {len(bad) - 1} more' if len(bad) > 1 else ''}" if bad else ""


def quiet_event_writer() -> None:
    """Print no traceback of TensorBoard's thread on a full disk: the run stops at the same error with one line."""

    def print_others(failed: Any) -> None:
        if type(failed.thread).__name__ != "_AsyncWriterThread" or write_problem(failed.exc_value) is None:
            threading.__excepthook__(failed)

    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = print_others
