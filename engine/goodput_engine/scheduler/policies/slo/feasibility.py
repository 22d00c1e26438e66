"""Selection of the largest number of jobs that can meet their deadlines."""

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
    """Work with a deadline.

    Args:
        item: the owner of the work.
        due_ns: the deadline.
        work_ns: duration of the work.
    """

    item: _T
    due_ns: int
    work_ns: int


def most_in_time(jobs: Iterable[Job[_T]], start_ns: int) -> tuple[list[Job[_T]], list[Job[_T]]]:
    """Select the largest number of jobs that can all meet their deadlines, one after the other.

    Args:
        jobs: the jobs, in any order.
        start_ns: start of the first job.

    Returns:
        The selected jobs by deadline, and the other jobs.

    Source: Moore, "An n job, one machine sequencing algorithm for minimizing the number of late
    jobs", Management Science 1968: take the jobs by deadline, and whenever one would be late, drop
    the longest job taken so far.
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
