"""Backlogs: stretches in which somebody was kept waiting for a first token beyond its promise.

Requests of one backlog stand in one queue and miss together, so a backlog bounds how far one
request's fate tells about another's. Why a wait counts only from the TTFT target on, and not
from the arrival: docs/adr/0002-backlog.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Backlogs", "effective_size", "find_backlogs"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backlogs:
    """The backlogs of a run, disjoint and in order.

    Args:
        start_ns: int64 `[num_backlogs]`, nanoseconds since the run's zero.
        end_ns: int64 `[num_backlogs]`.
    """

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]

    @property
    def longest_ns(self) -> int:
        """The length of the longest one; 0 without any."""
        return int((self.end_ns - self.start_ns).max(initial=0))

    def of(self, scheduled_ns: NDArray[np.int64], until_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of the first backlog during which each request waited, −1 where none.

        Args:
            scheduled_ns: scheduled arrivals, int64 `[num_requests]`.
            until_ns: first tokens, or ends without one, int64 `[num_requests]`.
        """
        if not len(self.start_ns):
            return np.full(len(scheduled_ns), -1, dtype=np.int64)
        index = np.searchsorted(self.end_ns, scheduled_ns, side="left")
        candidate = np.minimum(index, len(self.start_ns) - 1)
        inside = (index < len(self.start_ns)) & (self.start_ns[candidate] <= until_ns)
        return np.where(inside, candidate, -1)


def find_backlogs(overdue_ns: NDArray[np.int64], until_ns: NDArray[np.int64]) -> Backlogs:
    """Maximal stretches in which at least one request was overdue for its first token.

    Args:
        overdue_ns: when each request's patience ended, int64 `[num_requests]`.
        until_ns: when it got its first token, or ended without one; requests that got it in
            time (`until_ns` ≤ `overdue_ns`) are never overdue.
    """
    late = until_ns > overdue_ns
    order = np.argsort(overdue_ns[late], kind="stable")
    start, end = overdue_ns[late][order], until_ns[late][order]
    reach = np.maximum.accumulate(end)
    first = np.ones(len(start), dtype=np.bool_)
    first[1:] = start[1:] > reach[:-1]
    last = np.ones(len(start), dtype=np.bool_)
    last[:-1] = first[1:]
    return Backlogs(start_ns=start[first], end_ns=reach[last])


def effective_size(clusters: NDArray[np.int64]) -> float:
    """How many independent requests a sample is worth if all of a cluster share one fate.

    Args:
        clusters: each request's cluster, any integers, int64 `[num_requests]`, not empty.

    Source: Kish, "Survey Sampling", 1965: (Σ m)² / Σ m² for clusters of m requests.
    """
    _, sizes = np.unique(clusters, return_counts=True)
    return float(sizes.sum()) ** 2 / float((sizes.astype(np.float64) ** 2).sum())
