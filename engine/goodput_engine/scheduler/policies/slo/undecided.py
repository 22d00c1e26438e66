"""Requests that wait for a later decision on their admission."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_engine.scheduler.policies.slo.forecast import Forecast
    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["UndecidedRequests"]

_MOST: Final = 256
"""Requests that may wait for a later decision; at most a quarter of the queue."""
_LEFT_OPEN: Final = 512
"""Decisions that are tried again before a step and left open again, times the number of requests
that wait for one; at least two, and at most eight."""
_LEAST_LEFT_OPEN, _MOST_LEFT_OPEN = 2, 8
_AGAIN: Final = 32
"""Part of the time that a request has left after which a decision is tried again. It is tried at
once if a request has ended."""


class UndecidedRequests:
    """Waiting requests that are neither admitted nor refused yet.

    Attributes:
        by_rid: the requests, in the order of the last decision.
        changed: True if decisions may differ from those that were left open last.
    """

    __slots__ = ("_added", "_again_ns", "_retries", "_until_ns", "by_rid", "changed")

    def __init__(self) -> None:
        self.by_rid: dict[int, ScheduledRequest] = {}
        self.changed = False
        self._retries: set[int] = set()
        """The rids of those that are retries."""
        self._until_ns: dict[int, float] = {}
        """By rid: a time until which a request can start and be in time."""
        self._again_ns: dict[int, float] = {}
        """By rid: the time of the next decision, if nothing changes before."""
        self._added = 0

    def has_place(self, max_waiting: int) -> bool:
        """Return True if one more request may wait for a decision.

        Args:
            max_waiting: the places of the queue.
        """
        return len(self.by_rid) < min(_MOST, max_waiting // 4)

    def add(self, request: ScheduledRequest, forecast: Forecast, *, retry: bool) -> None:
        """Add a request whose decision is left open.

        Args:
            request: the request.
            forecast: the state in which it was left open.
            retry: True if the request was refused before and is sent again at the stated time.
        """
        rid, begins_ns = request.rid, forecast.begins_ns
        self.by_rid[rid] = request
        if retry:
            self._retries.add(rid)
        until_ns = self._until_ns[rid] = _latest_start_ns(request, forecast)
        self._again_ns[rid] = begins_ns + (until_ns - begins_ns) / _AGAIN
        self._added += 1

    def decided_again(self, forecast: Forecast) -> Iterator[tuple[ScheduledRequest, bool]]:
        """Remove and return the requests to decide on before a step, the most important first.

        Each comes with True if it is a retry. If enough of them were added again, only those follow
        that can no longer be in time, or have left the queue.
        """
        begins_ns, changed = forecast.begins_ns, self.changed
        most = min(max(_LEAST_LEFT_OPEN, _LEFT_OPEN // len(self.by_rid)), _MOST_LEFT_OPEN)
        self.changed, self._added = False, 0
        for request in sorted(self.by_rid.values(), key=lambda request: -request.priority):
            rid = request.rid
            waits = request.state is RequestState.WAITING
            tried = self._added < most and (changed or begins_ns >= self._again_ns[rid])
            if waits and not tried and self._can_be_in_time(request, forecast):
                continue
            is_retry = rid in self._retries
            self._retries.discard(rid)
            del self.by_rid[rid], self._until_ns[rid], self._again_ns[rid]
            yield request, is_retry

    def _can_be_in_time(self, request: ScheduledRequest, forecast: Forecast) -> bool:
        if forecast.begins_ns > self._until_ns[request.rid]:
            self._until_ns[request.rid] = _latest_start_ns(request, forecast)
        return forecast.begins_ns <= self._until_ns[request.rid]


def _latest_start_ns(request: ScheduledRequest, forecast: Forecast) -> float:
    prompt = forecast.prompt(request)
    return prompt.last_ns - prompt.work_ns
