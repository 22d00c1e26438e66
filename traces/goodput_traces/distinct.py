"""How many different things there are among many, in bounded memory.

Exact up to a limit. Beyond it only the things whose scrambled value ends in enough zero bits
are remembered, and their number is scaled up: with a million remembered, the error is a
fraction of a per cent.

Source: Wegman's adaptive sampling, in Flajolet, "On adaptive sampling", Computing 43, 1990.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

__all__ = ["DistinctCounter"]

_U64 = np.ndarray[Any, np.dtype[np.uint64]]
_LIMIT: Final = 2_000_000


class DistinctCounter:
    """Counts distinct 64-bit values.

    Args:
        limit: values remembered at most.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._shift = 0
        self._seen: _U64 = np.empty(0, dtype=np.uint64)

    @property
    def exact(self) -> bool:
        """Whether nothing had to be left out."""
        return self._shift == 0

    @property
    def count(self) -> int:
        """Distinct values so far; an estimate unless `exact`."""
        return len(self._seen) << self._shift

    def add(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Add a batch of values, in any order, with repeats."""
        new = self._kept(_scramble(values.view(np.uint64)))
        # Sorted rather than `np.unique`, whose hash table is fifty times slower on these.
        merged = np.sort(np.concatenate((self._seen, new)))
        first = np.ones(len(merged), dtype=np.bool_)
        np.not_equal(merged[1:], merged[:-1], out=first[1:])
        self._seen = merged[first]
        while len(self._seen) > self._limit:
            self._shift += 1
            self._seen = self._kept(self._seen)

    def _kept(self, values: _U64) -> _U64:
        mask = np.uint64((1 << self._shift) - 1)
        return values[(values & mask) == 0] if self._shift else values


def _scramble(values: _U64) -> _U64:
    """One-to-one and well mixed: the finalizer of splitmix64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
