"""Quantiles of durations in constant memory, for displays and for facts about the client.

Verdicts never rest on this: they come from the records themselves.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

__all__ = ["DurationSketch"]

_PER_E: Final = 50  # buckets per factor of e: a quantile is off by 1 % at most


class DurationSketch:
    """Counts durations in buckets that grow by 2 %. Nanoseconds; negative counts as 0."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.max_ns = 0

    def add(self, ns: int) -> None:
        """Count one duration."""
        ns = max(ns, 1)
        self._buckets[int(math.log(ns) * _PER_E)] += 1
        self.count += 1
        self.max_ns = max(self.max_ns, ns)

    def quantile_ns(self, share: float) -> int:
        """The duration that `share` of them do not exceed, within 1 %; 0 without any."""
        rank, seen = math.ceil(share * self.count), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(self.max_ns, int(math.exp((bucket + 0.5) / _PER_E)))
        return 0
