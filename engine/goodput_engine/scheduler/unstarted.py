"""Waiting requests that have never started, by importance: the victims of a full queue.

A new request is enqueued at every arrival, but a victim is needed only when the queue is full. So
new requests are only remembered, and ordered at the next search. Requests are not removed from this
index when they start: entries of started or ended requests are skipped when they are found, and all
entries are rebuilt when most of them are obsolete. The amortised cost of an arrival is O(1) if the
queue is never full, and O(log n) otherwise.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from goodput_core.slo.importance import Importance
from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["UnstartedRequests"]

_MIN_ENTRIES: Final = 256
"""Below this number of entries, obsolete ones are not worth a rebuild."""


class _Level:
    """Requests of one level of priority, in two orders.

    Attributes:
        by_worth: heap by weight, then target, then the newest arrival.
        by_due: heap by the time at which the first token is due.
    """

    __slots__ = ("by_due", "by_worth")

    def __init__(self) -> None:
        self.by_worth: list[tuple[int, int, int, int, ScheduledRequest]] = []
        self.by_due: list[tuple[int, int, ScheduledRequest]] = []


class UnstartedRequests:
    """Finds the least important waiting request that has never started.

    Args:
        waiting: the queue.
        level: returns the level of a waiting request at a time, and the time at which the request
            reaches the next level; None if it never does.
    """

    __slots__ = ("_entries", "_level", "_levels", "_new", "_present", "_rising", "_waiting")

    def __init__(
        self,
        waiting: Iterable[ScheduledRequest],
        level: Callable[[ScheduledRequest, int], tuple[int, int | None]],
    ) -> None:
        self._waiting = waiting
        self._level = level
        self._levels: dict[int, _Level] = {}
        self._present: list[int] = []
        """Heap of the levels."""
        self._rising: list[tuple[int, int, ScheduledRequest]] = []
        """Heap by the time at which a request reaches its next level."""
        self._new: list[ScheduledRequest] = []
        """Requests that are not ordered yet."""
        self._entries = 0
        """Number of requests added since the last rebuild, obsolete ones included."""

    def add(self, request: ScheduledRequest, *, waiting: int) -> None:
        """Add a new request.

        Args:
            request: a request that was enqueued.
            waiting: number of waiting requests.
        """
        self._entries += 1
        if self._entries > _MIN_ENTRIES + 2 * waiting:
            self._rebuild()
        else:
            self._new.append(request)

    def importance(self, request: ScheduledRequest, now_ns: int) -> Importance:
        """Return the importance of a waiting or new request."""
        level, _ = self._level(request, now_ns)
        return Importance.of(
            request.targets,
            priority=level,
            weight=request.weight,
            waited_ns=now_ns - request.arrival_ns,
        )

    def least(self, now_ns: int) -> ScheduledRequest | None:
        """Return the least important request; None if every waiting request has started once."""
        for request in self._new:
            if _is_unstarted(request):
                self._insert(request, now_ns)
        self._new.clear()
        self._raise_levels(now_ns)
        while self._present:
            number = self._present[0]
            level = self._levels[number]
            due, worth = level.by_due, level.by_worth
            while due and not self._is_current(due[0][-1], number, now_ns):
                heapq.heappop(due)
            if due and due[0][0] < now_ns:
                return due[0][-1]
            while worth and not self._is_current(worth[0][-1], number, now_ns):
                heapq.heappop(worth)
            if worth:
                return worth[0][-1]
            heapq.heappop(self._present)
            del self._levels[number]
        return None

    def _is_current(self, request: ScheduledRequest, level: int, now_ns: int) -> bool:
        """Return True unless the request has started, ended, or risen above the level.

        A commit is dated at the end of its step, which may be before the latest arrival. So a
        request that has risen may be below its new level at `now_ns` again.
        """
        return _is_unstarted(request) and self._level(request, now_ns)[0] <= level

    def _insert(self, request: ScheduledRequest, now_ns: int) -> None:
        number, rises_ns = self._level(request, now_ns)
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level()
            heapq.heappush(self._present, number)
        rid, arrival_ns = request.rid, request.arrival_ns
        _, weight, target_ns = self.importance(request, arrival_ns)
        heapq.heappush(level.by_worth, (weight, target_ns, -arrival_ns, -rid, request))
        heapq.heappush(level.by_due, (arrival_ns + target_ns, rid, request))
        if rises_ns is not None:
            heapq.heappush(self._rising, (rises_ns, rid, request))

    def _raise_levels(self, now_ns: int) -> None:
        """Insert the requests that have reached a higher level again."""
        rising = self._rising
        while rising and rising[0][0] <= now_ns:
            request = heapq.heappop(rising)[-1]
            if _is_unstarted(request):
                self._insert(request, now_ns)

    def _rebuild(self) -> None:
        self._levels.clear()
        self._present.clear()
        self._rising.clear()
        self._new = [request for request in self._waiting if _is_unstarted(request)]
        self._entries = len(self._new)


def _is_unstarted(request: ScheduledRequest) -> bool:
    return request.state is RequestState.WAITING and not request.admitted_tokens
