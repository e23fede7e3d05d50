"""Blocks of a paged KV cache: which are free, which rows use them, and which hold tokens that another row may reuse.

A block has room for the keys and values of `size` neighbouring tokens of one row (Kwon et al. 2023, vLLM). A full block
is known by its tokens and all before them, so rows with a common prefix share its blocks: the longest prefix of whole
blocks is found, also of texts that were sampled. Blocks that no row uses keep their contents until they are needed; the
least recently used goes first.

Left out: sharing parts of a block, and contents on disk or in the memory of the host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

Key = tuple[Hashable, tuple[int, ...]]  # the contents before a block, and its tokens


class Known(NamedTuple):
    """A block with known contents; serial: a number of its contents and all before them."""

    block: int
    serial: int


class Blocks:
    """`count` blocks of `size` tokens, known by number."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.free = list(range(count - 1, -1, -1))
        self.users = [0] * count
        self.known: dict[Key, Known] = {}
        self.key_of: dict[int, Key] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()  # known blocks without users, the least recently used first
        self.last_serial = 0

    def needed(self, tokens: int) -> int:
        """Blocks that these tokens need."""
        return -(-tokens // self.size)

    def room(self) -> int:
        """Blocks that can be taken."""
        return len(self.free) + len(self.idle)

    def take(self, count: int) -> list[int]:
        """Blocks for one user, with any contents. The caller makes sure that there is `room`."""
        assert count <= self.room()
        taken = []
        for _ in range(count):
            if self.free:
                block = self.free.pop()
            else:
                block, _ = self.idle.popitem(last=False)
                del self.known[self.key_of.pop(block)]
            self.users[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add a user to each block."""
        for block in blocks:
            self.users[block] += 1
            self.idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user of each block, of a row's last ones first: a prefix is kept longer than what follows it."""
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                if block in self.key_of:
                    self.idle[block] = None
                else:
                    self.free.append(block)

    def find(self, namespace: Hashable, ids: Sequence[int]) -> tuple[list[int], Key | None]:
        """Blocks with the longest known prefix of the ids, their last id excluded, and the key of the next whole block.

        namespace: of the weights that the contents were computed with.
        """
        parent, found = namespace, list[int]()
        for start in range(0, len(ids), self.size):
            piece = tuple(ids[start : start + self.size])
            key = parent, piece
            if len(piece) < self.size:
                return found, None
            if key not in self.known or start + self.size >= len(ids):
                return found, key
            found.append(self.known[key].block)
            parent = self.known[key].serial
        return found, None

    def learn(self, namespace: Hashable, ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Make the contents of a row's full blocks known; ids: the tokens that they hold."""
        parent = namespace
        for number in range(len(ids) // self.size):
            key = parent, tuple(ids[number * self.size : (number + 1) * self.size])
            if key not in self.known and blocks[number] not in self.key_of:
                self.last_serial += 1
                self.known[key] = Known(blocks[number], self.last_serial)
                self.key_of[blocks[number]] = key
            if key not in self.known:
                return
            parent = self.known[key].serial

    def forget(self, blocks: Sequence[int]) -> None:
        """Let the contents of blocks be found no more."""
        for block in blocks:
            if block in self.key_of:
                del self.known[self.key_of.pop(block)]
                if block in self.idle:
                    del self.idle[block]
                    self.free.append(block)
