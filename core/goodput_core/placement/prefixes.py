"""Which prompts went to which replica: a bounded guess at what is in each prefix cache.

The guess needs no word from the replicas and is made the same way in every world. A table for
each replica holds the keys of the prompts that it was given, the least recently used of them
dropped first, as a replica's own cache drops blocks. It is the one mutable part of a
placement's state.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["MAX_KEYS", "KnownPrefixes"]

MAX_KEYS: Final = 512
"""Keys of one prompt that are looked at: the work of placing a request is bounded."""

_MOST_OF_ONE: Final = 32_768
_MOST_OF_ALL: Final = 524_288
"""Keys held of one replica, and of all together: about 130 bytes each."""


class KnownPrefixes:
    """The keys of prompts by replica.

    A key stands for its block and all before it. A prompt's keys are touched from the last to
    the first, so a key is always more recent than those that follow it: what is known of a
    prompt is its beginning, without a hole, and its length is found by halving.

    Args:
        most_of_one: keys that are kept of a replica.
        most_of_all: keys that are kept of all together; each has an equal part, but never less
            than one prompt's.
    """

    __slots__ = ("_most_of_all", "_most_of_one", "_tables")

    def __init__(self, *, most_of_one: int = _MOST_OF_ONE, most_of_all: int = _MOST_OF_ALL) -> None:
        self._most_of_one = most_of_one
        self._most_of_all = most_of_all
        self._tables: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """Keys that are held."""
        return sum(map(len, self._tables.values()))

    def length(self, replica: str, keys: Sequence[int]) -> int:
        """How many of a prompt's first keys the replica was given."""
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
        """Note that the replica is given a prompt.

        Args:
            replica: its name.
            keys: the prompt's, at most `MAX_KEYS`.
            present: the names of all replicas; tables of others go when there are too many.
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
