"""All gaps between tokens of a run, counted in bounded memory.

An hour of traffic holds a hundred million gaps, too many to sort. They are counted in buckets
that are exact below 2,048 µs and a thousandth of the value wide above, so a quantile is at most
0.1 % above the gap that was measured; the largest gap is kept as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from fractions import Fraction

    from numpy.typing import NDArray

__all__ = ["GapCounts"]

# Values below 2^11 have their own bucket; above, a bucket keeps the 11 leading bits.
_BITS: Final = 11
_LINEAR: Final = 1 << _BITS
_HALF: Final = _LINEAR // 2
_BUCKETS: Final = _LINEAR + (31 - _BITS) * _HALF


class GapCounts:
    """Counts gaps; adding is vectorised, memory is constant (about 100 kB)."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_BUCKETS, dtype=np.int64)
        self._largest_us = 0

    @classmethod
    def merged(cls, parts: Iterable[GapCounts]) -> GapCounts:
        """All parts counted together."""
        whole = cls()
        for part in parts:
            whole._counts += part.counts
            whole._largest_us = max(whole._largest_us, part.largest_us)
        return whole

    @property
    def counts(self) -> NDArray[np.int64]:
        """Gaps in each bucket."""
        return self._counts

    @property
    def total(self) -> int:
        """Gaps counted."""
        return int(self._counts.sum())

    @property
    def largest_us(self) -> int:
        """The largest gap, exact; 0 when there were none."""
        return self._largest_us

    def add(self, gaps_us: NDArray[np.int32]) -> None:
        """Count gaps of 0 … 2³¹−1 µs; a negative one counts as 0."""
        if not len(gaps_us):
            return
        values = np.maximum(gaps_us, 0).astype(np.int64)
        self._largest_us = max(self._largest_us, int(values.max()))
        self._counts += np.bincount(_bucket(values), minlength=_BUCKETS)

    def quantile_us(self, q: Fraction) -> int:
        """The nearest-rank quantile, at most 0.1 % above the measured gap.

        Raises:
            ValueError: nothing was counted.
        """
        total = self.total
        if not total:
            raise ValueError("a quantile needs at least one gap")
        rank = max(1, -(-q.numerator * total // q.denominator))
        at = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(int(_upper_us(np.array([at]))[0]), self._largest_us)

    def cumulative(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Upper edge of each filled bucket in microseconds, and the share of gaps up to it."""
        filled = np.flatnonzero(self._counts)
        edges = np.minimum(_upper_us(filled), self._largest_us)
        return edges, np.cumsum(self._counts[filled]) / max(1, self.total)


def _bucket(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bucket of each value in 0 … 2³¹−1."""
    _, exponents = np.frexp(values.astype(np.float64))
    shifts = np.maximum(exponents.astype(np.int64) - _BITS, 0)
    above: NDArray[np.int64] = _LINEAR + (shifts - 1) * _HALF + (values >> shifts) - _HALF
    return np.where(shifts == 0, values, above)


def _upper_us(buckets: NDArray[Any]) -> NDArray[np.int64]:
    """The largest value that falls into each bucket."""
    shifts = np.maximum((buckets - _LINEAR) // _HALF + 1, 0)
    mantissas = np.where(buckets < _LINEAR, buckets, (buckets - _LINEAR) % _HALF + _HALF)
    upper: NDArray[np.int64] = ((mantissas + 1).astype(np.int64) << shifts) - 1
    return upper
