"""The exact maximum number of requests in flight in each interval of a run.

The number changes at each send and each end. If these times do not fit into memory, they are
counted in bins, and the bins are then looked at in slices, one slice for each pass over the run.
Memory is bounded, unless more requests are sent at the same time.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["InFlightSearch"]

_MAX_KEPT: Final = 1 << 19
_BINS: Final = 1 << 16
_SHORTEST_S: Final = 1e-9


class _Pass(Enum):
    KEEP_ALL = auto()
    """Keep all times, unless they are too many."""
    COUNT = auto()
    """Count the times in bins."""
    SLICE = auto()
    """Keep the times of one slice."""


class InFlightSearch:
    """Finds the maximum number of requests in flight in each interval.

    Call `add` for all requests and then `end_pass`, and repeat this until `finished`.

    Args:
        edges_s: starts of the intervals and the end of the last one.
        max_kept: maximum number of times to keep.
        bins: number of bins if there are more times.

    Attributes:
        maxima: the maximum of each interval; times outside the intervals count in the first or last
            one.
        finished: True if the maxima were found.
    """

    def __init__(
        self, edges_s: NDArray[np.float64], *, max_kept: int = _MAX_KEPT, bins: int = _BINS
    ) -> None:
        self._edges_s = edges_s
        self._max_kept = max_kept
        self._pass = _Pass.KEEP_ALL
        self._span_s = (math.inf, -math.inf)
        self._counts: NDArray[np.int64] = np.zeros(bins, dtype=np.int64)
        self._slices: list[range] = []
        self._starts: list[NDArray[np.float64]] = []
        self._ends: list[NDArray[np.float64]] = []
        self._kept = 0
        self._level = 0
        self.maxima: NDArray[np.int64] = np.zeros(len(edges_s) - 1, dtype=np.int64)
        self.finished = False

    def add(self, sent_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> None:
        """Add requests.

        Args:
            sent_s: time of each send; NaN if the request was not sent.
            end_s: time of each end; NaN if the request did not end.
        """
        was_sent = np.isfinite(sent_s)
        starts, ends = sent_s[was_sent], end_s[was_sent & np.isfinite(end_s)]
        if self._pass is _Pass.COUNT:
            for times in (starts, ends):
                self._counts += np.bincount(self._bin(times), minlength=len(self._counts))
            return
        if self._pass is _Pass.SLICE:
            starts, ends = self._in_slice(starts), self._in_slice(ends)
        else:
            both = np.concatenate((starts, ends))
            if len(both):
                low_s, high_s = self._span_s
                self._span_s = min(low_s, float(both.min())), max(high_s, float(both.max()))
            self._kept += len(both)
            if self._kept > self._max_kept:
                self._starts.clear()
                self._ends.clear()
                return
        self._starts.append(starts)
        self._ends.append(ends)

    def end_pass(self) -> None:
        """End a pass over all requests."""
        if self._pass is _Pass.KEEP_ALL and self._kept > self._max_kept:
            self._pass = _Pass.COUNT
            return
        if self._pass is _Pass.COUNT:
            self._pass = _Pass.SLICE
            self._slices = list(_cut(self._counts.tolist(), self._max_kept))
            return
        if self._pass is _Pass.SLICE:
            self._find_maxima(self._in_slice(self._edges_s[:-1]))
            self._slices.pop(0)
        else:
            self._find_maxima(self._edges_s[:-1])
        self.finished = not self._slices

    def _find_maxima(self, edges_s: NDArray[np.float64]) -> None:
        """Find the maxima at the kept times.

        Args:
            edges_s: starts of intervals among these times.
        """
        none = np.empty(0)
        starts = np.sort(np.concatenate([*self._starts, none]))
        ends = np.sort(np.concatenate([*self._ends, none]))
        self._starts.clear()
        self._ends.clear()
        # The number increases only at a send, so its maximum is at the start or at a send.
        times = np.concatenate((edges_s, starts))
        started = np.searchsorted(starts, times, side="right")
        level = self._level + started - np.searchsorted(ends, times, side="right")
        index = np.searchsorted(self._edges_s, times, side="right") - 1
        np.maximum.at(self.maxima, np.clip(index, 0, len(self.maxima) - 1), level)
        self._level += len(starts) - len(ends)

    def _in_slice(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        bins = self._bin(times_s)
        chosen: NDArray[np.bool_] = (bins >= self._slices[0].start) & (bins < self._slices[0].stop)
        return times_s[chosen]

    def _bin(self, times_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the bin of each time; a later time never has a lower bin."""
        low_s, high_s = self._span_s
        share = (np.clip(times_s, low_s, high_s) - low_s) / max(high_s - low_s, _SHORTEST_S)
        return np.minimum((share * len(self._counts)).astype(np.int64), len(self._counts) - 1)


def _cut(counts: list[int], most: int) -> Iterator[range]:
    """Cut bins into slices, each of one bin or of bins with at most `most` times."""
    first = total = 0
    for index, count in enumerate(counts):
        if index > first and total + count > most:
            yield range(first, index)
            first, total = index, 0
        total += count
    yield range(first, len(counts))
