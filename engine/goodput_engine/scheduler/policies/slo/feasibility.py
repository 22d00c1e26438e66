"""Which of those who wait can still be served in time: the most requests, not the most work."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Job", "most_in_time"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[_T]):
    """Work that must be done by a time.

    Args:
        item: whose.
        due_ns: when it must be done.
        work_ns: how long it takes.
    """

    item: _T
    due_ns: int
    work_ns: int


def most_in_time(jobs: Iterable[Job[_T]], start_ns: int) -> tuple[list[Job[_T]], list[Job[_T]]]:
    """Choose the largest number of jobs that can all be done in time, one after the other.

    Args:
        jobs: in any order.
        start_ns: when the first can begin.

    Returns:
        The chosen ones in the order of their due times, and the others.

    Source: Moore, "An n job, one machine sequencing algorithm for minimizing the number of late
    jobs", Management Science 1968: earliest due first, and whenever one would be late, the
    longest so far is given up.
    """
    chosen: list[tuple[int, int, Job[_T]]] = []  # longest first
    late: list[Job[_T]] = []
    at_ns = start_ns
    ordered = sorted(jobs, key=lambda job: job.due_ns)
    for number, job in enumerate(ordered):
        heapq.heappush(chosen, (-job.work_ns, -number, job))
        at_ns += job.work_ns
        if at_ns > job.due_ns:
            longest = heapq.heappop(chosen)[2]
            at_ns -= longest.work_ns
            late.append(longest)
    chosen.sort(key=lambda entry: -entry[1])
    return [job for *_, job in chosen], late
