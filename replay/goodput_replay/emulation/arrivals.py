"""Arrivals of a fleet in virtual time, in the order of their scheduled times."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_replay.plan import PlannedRequest
    from goodput_replay.sessions import FollowUps

__all__ = ["ArrivalQueue"]


class ArrivalQueue:
    """Requests of a plan; a follow-up arrives a think time after the end of its predecessor.

    Requests at the same time arrive in the order of the plan. Only the next start,
    and follow-ups whose scheduled time is known, are in memory.

    Args:
        starts: requests with known times, in the order of these times.
        follow_ups: requests that follow others; None if there are none.

    Attributes:
        depend_on_ends: True if the end of a request can cause an arrival.
    """

    def __init__(
        self, starts: Iterator[PlannedRequest], follow_ups: FollowUps | None = None
    ) -> None:
        self._starts = starts
        self._follow_ups = follow_ups
        self._start: PlannedRequest | None = None
        self._start_read = False
        self._due: list[tuple[int, int, PlannedRequest]] = []
        self._unsent_follow_ups = 0 if follow_ups is None else len(follow_ups)
        self.depend_on_ends = follow_ups is not None

    @property
    def open(self) -> bool:
        """True if more requests will arrive."""
        return self._unsent_follow_ups > 0 or self._next_start() is not None

    @property
    def next_ns(self) -> int | None:
        """Time of the next known arrival; None if none is known."""
        start = self._next_start()
        if not self._due:
            return None if start is None else start.scheduled_ns
        due_ns = self._due[0][0]
        return due_ns if start is None else min(due_ns, start.scheduled_ns)

    def take(self, now_ns: int) -> PlannedRequest | None:
        """Remove and return the next request that has arrived; None if there is none."""
        next_ns = self.next_ns
        if next_ns is None or next_ns > now_ns:
            return None
        start = self._start
        if start is None or (self._due and self._due[0] < (start.scheduled_ns, start.number)):
            self._unsent_follow_ups -= 1
            return heappop(self._due)[2]
        self._start_read = False
        return start

    def ended(self, planned: PlannedRequest, end_ns: int) -> None:
        """Schedule the follow-ups that follow a request."""
        if self._follow_ups is None:
            return
        for number, think_ns in self._follow_ups.after(planned.number):
            follow_up = replace(self._follow_ups.load(number), scheduled_ns=end_ns + think_ns)
            heappush(self._due, (follow_up.scheduled_ns, number, follow_up))

    def _next_start(self) -> PlannedRequest | None:
        """Return the next start, which is read only when the one before it was received."""
        if not self._start_read:
            self._start, self._start_read = next(self._starts, None), True
        return self._start
