"""The prompts that were sent to each replica: a bounded estimate of its prefix cache.

The estimate needs no report of the replica. A table for each replica holds the keys of the prompts
that were sent to it; like the replica's own cache it evicts the least recently used first. It is
the only mutable part of a placement's state.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["MAX_KEYS", "KnownPrefixes"]

MAX_KEYS: Final = 512
"""The most keys of one prompt that are used, to bound the cost of a placement."""

_MOST_OF_ONE: Final = 32_768
_MOST_OF_ALL: Final = 524_288
"""The most keys of one replica and of all together, about 130 bytes each."""


class KnownPrefixes:
    """The keys of prompts by replica.

    A key stands for its block and all blocks before it. A prompt's keys are touched from the last
    to the first, so a key is always more recent than the ones that follow it. The known keys of a
    prompt are therefore its first ones, and binary search finds their number.

    Args:
        most_of_one: the most keys of one replica.
        most_of_all: the most keys of all replicas; each has an equal share, but at least enough
            for one prompt.
    """

    __slots__ = ("_most_of_all", "_most_of_one", "_tables")

    def __init__(self, *, most_of_one: int = _MOST_OF_ONE, most_of_all: int = _MOST_OF_ALL) -> None:
        self._most_of_one = most_of_one
        self._most_of_all = most_of_all
        self._tables: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """The number of keys of all replicas."""
        return sum(map(len, self._tables.values()))

    def length(self, replica: str, keys: Sequence[int]) -> int:
        """Return how many of a prompt's first keys were sent to the replica."""
        table = self._tables.get(replica)
        if table is None or not keys or keys[0] not in table:
            return 0
        known, unknown = 1, len(keys) + 1
        while known + 1 < unknown:
            middle = (known + unknown) // 2
            if keys[middle - 1] in table:
                known = middle
            else:
                unknown = middle
        return known

    def add(self, replica: str, keys: Sequence[int], present: Collection[str]) -> None:
        """Record that a prompt is sent to the replica.

        Args:
            replica: its name.
            keys: the prompt's first keys, at most `MAX_KEYS`.
            present: the names of all replicas; tables of others are dropped if there are too
                many.
        """
        table = self._tables.get(replica)
        if table is None:
            if len(self._tables) >= 2 * len(present):
                kept = set(present)
                self._tables = {n: t for n, t in self._tables.items() if n in kept}
            table = self._tables[replica] = OrderedDict()
        for key in reversed(keys):
            table[key] = None
            table.move_to_end(key)
        share = max(MAX_KEYS, self._most_of_all // len(present))
        for _ in range(len(table) - min(self._most_of_one, share)):
            table.popitem(last=False)
