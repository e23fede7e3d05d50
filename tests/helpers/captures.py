"""What a CUDA graph needs of a step, as far as a CPU can tell, and a graph on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {"item", "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "equal", "isin"}
INDEXING = {"index", "index_put", "index_put_"}
HOST = {"tolist", "numpy", "cpu", "tensor", "as_tensor", "from_numpy"}


class HostRead(AssertionError):
    pass


def refuse(name: str) -> None:
    raise HostRead(name)


class NoReads(TorchDispatchMode):
    """Finds operators for which the host waits for the device."""

    def __init__(self, found: Callable[[str], None] = refuse) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in READS or name in INDEXING and has_mask(args[1]):
            self.found(name)
        return func(*args, **(kwargs or {}))


def has_mask(indices) -> bool:
    """Whether the values of an index decide a shape."""
    return any(index is not None and index.dtype is torch.bool for index in indices)


class NoCopies(TorchFunctionMode):
    """Finds functions that copy between the host and the device."""

    def __init__(self, found: Callable[[str], None] = refuse) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in HOST:
            self.found(function.__name__)
        return function(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """A graph on the CPU: the operators of a step with the very tensors that it read and wrote, run again on them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
