"""Exact order statistics of values that do not fit into memory.

The values are read in several passes. If they are few, the first pass keeps and sorts them.
Otherwise it counts them in bins, and each further pass divides the bins with a wanted rank, until
the values of these bins are few, or a bin has one value. Memory is bounded by the number of wanted
ranks, and the results are those of a sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["RankSearch"]

_MAX_KEPT: Final = 1 << 19
_MAX_BINS: Final = 1 << 20
_KEY_BITS: Final = 64
_SIGN: Final = np.uint64(1 << 63)
_MAGNITUDE: Final = np.int64((1 << 63) - 1)


class RankSearch:
    """Finds the values at some ranks of several groups of values.

    Call `add` for all values and then `end_pass`, and repeat this until `finished`. Every pass must
    add the same values, in any order.

    Args:
        groups: number of groups.
        choose_ranks: returns the ranks to find in each group, counted from 0, for the number of
            values in each group; called once, at the end of the first pass.
        max_kept: maximum number of values to keep.
        max_bins: maximum number of bins to count, unless there are more wanted ranks.

    Attributes:
        finished: True if the ranks were found.
    """

    def __init__(
        self,
        groups: int,
        choose_ranks: Callable[[list[int]], Sequence[Sequence[int] | NDArray[np.int64]]],
        *,
        max_kept: int = _MAX_KEPT,
        max_bins: int = _MAX_BINS,
    ) -> None:
        self._groups = [_ValueGroup() for _ in range(groups)]
        self._choose_ranks = choose_ranks
        self._max_kept = max_kept
        self._max_bins = max_bins
        self._first_pass = True
        self._bin_bits = _KEY_BITS
        self._digit_bits = self._choose_digit_bits()
        self._kept = 0
        self._counting = False
        self.finished = False

    def add(self, group: int, values: NDArray[np.float64]) -> None:
        """Add values of a group; NaN and infinities are left out."""
        one = self._groups[group]
        keys = _to_keys(values[np.isfinite(values)])
        if self._first_pass:
            one.count += len(keys)
        else:
            keys = one.select(keys, self._bin_bits)
        if not len(keys):
            return
        if self._counting:
            one.count_keys(keys, self._bin_bits, self._digit_bits)
            return
        one.kept.append(keys)
        self._kept += len(keys)
        if self._kept > self._max_kept:
            self._counting = True
            for each in self._groups:
                for kept in each.kept:
                    each.count_keys(kept, self._bin_bits, self._digit_bits)
                each.kept.clear()

    def end_pass(self) -> None:
        """End a pass over all values."""
        if self._first_pass:
            self._first_pass = False
            chosen = self._choose_ranks([one.count for one in self._groups])
            for one, ranks in zip(self._groups, chosen, strict=True):
                one.want(ranks)
        if self._counting:
            self._bin_bits -= self._digit_bits
            for one in self._groups:
                one.divide(self._bin_bits, self._digit_bits)
            self.finished = self._bin_bits == 0
        else:
            for one in self._groups:
                one.sort()
            self.finished = True
        self._digit_bits = self._choose_digit_bits()
        self._kept = 0
        self._counting = False

    def count(self, group: int) -> int:
        """Return the number of values of a group."""
        return self._groups[group].count

    def values(self, group: int) -> NDArray[np.float64]:
        """Return the values at the chosen ranks of a group, once the search is finished."""
        one = self._groups[group]
        return _from_keys(one.lows[one.bin_of_rank])

    def _choose_digit_bits(self) -> int:
        """Return the binary logarithm of the number of bins into which a bin can be divided."""
        bins = max(1, sum(len(one.lows) for one in self._groups))
        bits = (self._max_bins // bins).bit_length() - 1
        return min(max(bits, 1), self._bin_bits)


class _ValueGroup:
    """Values of one group, of which only those in open bins are looked at.

    Attributes:
        count: number of values.
        lows: lowest key of each open bin, ascending; in the end, the keys at the wanted ranks.
        below: number of values below each open bin.
        ranks: wanted ranks.
        bin_of_rank: index of the open bin of each wanted rank.
        kept: keys in open bins, unless they are counted.
    """

    def __init__(self) -> None:
        self.count = 0
        self.lows: NDArray[np.uint64] = np.zeros(1, dtype=np.uint64)
        self.below: NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self.ranks: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.bin_of_rank: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.kept: list[NDArray[np.uint64]] = []
        self._counts: NDArray[np.int64] | None = None

    def want(self, ranks: Sequence[int] | NDArray[np.int64]) -> None:
        """Set the wanted ranks."""
        self.ranks = np.asarray(ranks, dtype=np.int64)
        self.bin_of_rank = np.zeros(len(self.ranks), dtype=np.int64)

    def select(self, keys: NDArray[np.uint64], bin_bits: int) -> NDArray[np.uint64]:
        """Return the keys in open bins."""
        if not len(self.lows):
            return keys[:0]
        index = np.searchsorted(self.lows, keys, side="right") - 1
        offsets = keys - self.lows[np.maximum(index, 0)]
        chosen: NDArray[np.bool_] = (index >= 0) & (offsets >> np.uint64(bin_bits) == 0)
        return keys[chosen]

    def count_keys(self, keys: NDArray[np.uint64], bin_bits: int, digit_bits: int) -> None:
        """Count keys of open bins, each of which is divided into 2^digit_bits bins."""
        if self._counts is None:
            self._counts = np.zeros(len(self.lows) << digit_bits, dtype=np.int64)
        index = np.searchsorted(self.lows, keys, side="right") - 1
        digits = (keys - self.lows[index]) >> np.uint64(bin_bits - digit_bits)
        np.add.at(self._counts, (index << digit_bits) + digits.astype(np.int64), 1)

    def divide(self, bin_bits: int, digit_bits: int) -> None:
        """Replace the open bins by those of the last count that have a wanted rank.

        Args:
            bin_bits: binary logarithm of the width of the new bins.
            digit_bits: binary logarithm of the number of new bins in an old one.
        """
        if self._counts is None:
            self._counts = np.zeros(len(self.lows) << digit_bits, dtype=np.int64)
        ends = np.concatenate(([0], np.cumsum(self._counts)))
        self._counts = None
        first = self.bin_of_rank << digit_bits
        places = ends[first] + self.ranks - self.below[self.bin_of_rank]
        found = np.searchsorted(ends, places, side="right") - 1
        lows = self.lows[self.bin_of_rank] + ((found - first).astype(np.uint64) << bin_bits)
        below = self.below[self.bin_of_rank] + ends[found] - ends[first]
        self.lows, chosen, self.bin_of_rank = np.unique(
            lows, return_index=True, return_inverse=True
        )
        self.below = below[chosen]

    def sort(self) -> None:
        """Replace the open bins by the keys at the wanted ranks."""
        keys = np.sort(np.concatenate([*self.kept, np.empty(0, dtype=np.uint64)]))
        self.kept.clear()
        starts = np.searchsorted(keys, self.lows[self.bin_of_rank])
        self.lows = keys[starts + self.ranks - self.below[self.bin_of_rank]]
        self.bin_of_rank = np.arange(len(self.ranks))


def _to_keys(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return integers in the order of the values."""
    bits = (values + 0.0).view(np.int64)  # turns −0.0 into 0.0
    keys: NDArray[np.uint64] = (bits ^ ((bits >> 63) & _MAGNITUDE)).view(np.uint64) ^ _SIGN
    return keys


def _from_keys(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    bits = (keys ^ _SIGN).view(np.int64)
    values: NDArray[np.float64] = (bits ^ ((bits >> 63) & _MAGNITUDE)).view(np.float64)
    return values
