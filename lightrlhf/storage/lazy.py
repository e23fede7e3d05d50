"""Sequences whose items are made when they are read, so that many rows take a few bytes each.

Left out: caches. Who reads a row several times keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

Item = TypeVar("Item", covariant=True)
Given = TypeVar("Given")


class Lazy(Sequence[Item], Generic[Item]):
    """The items that `make` returns for some places, each made anew when it is read; a slice is lazy, too."""

    def __init__(self, places: Sequence[int], make: Callable[[int], Item]) -> None:
        self.places, self.make = places, make

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Lazy[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Lazy[Item]:
        if isinstance(index, slice):
            return Lazy(self.places[index], self.make)
        return self.make(self.places[index])


def map_lazily(items: Sequence[Given], change: Callable[[Given], Item]) -> Lazy[Item]:
    """The items of a sequence as `change` returns them, each when it is read."""
    return Lazy(range(len(items)), lambda place: change(items[place]))
