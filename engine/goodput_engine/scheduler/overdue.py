"""Requests that have certainly missed a target, for `lateRequests: drop`.

A request is checked only at the times at which one of its targets passes, so the cost does not
depend on the number of requests. No prediction is used: a request is overdue once no possible
continuation can meet its targets. A policy may drop requests earlier, by its own predictions.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from goodput_engine.scheduler.request_table import RequestState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["DROPPABLE", "OverdueRequests"]

DROPPABLE: Final = (
    RequestState.WAITING,
    RequestState.PREFILLING,
    RequestState.READY,
    RequestState.DECODING,
)
"""States in which a request may be dropped. In all others its last token is in flight, or its
blocks are being copied."""
_RETRY_NS: Final = 1_000_000
"""Time after which an overdue request in another state is checked again."""
_MIN_CHECKS: Final = 256
"""Below this number of checks, those of ended requests are not worth a rebuild."""


class OverdueRequests:
    """Watches the targets of the requests of one scheduler.

    Args:
        requests: the requests of the scheduler by rid. One that has ended stays in it until no
            plan uses its blocks.
    """

    __slots__ = ("_due", "_requests")

    def __init__(self, requests: Mapping[int, ScheduledRequest]) -> None:
        self._requests = requests
        self._due: list[tuple[int, int]] = []
        """Heap of (time of the next check, rid)."""

    def watch(self, request: ScheduledRequest, now_ns: int) -> None:
        """Watch a request until it ends or is overdue."""
        check_ns = _next_check_ns(request, now_ns)
        if check_ns is None:
            return
        # A target may pass hours after its request has ended.
        if len(self._due) > _MIN_CHECKS + 2 * len(self._requests):
            self._due[:] = [check for check in self._due if check[1] in self._requests]
            heapq.heapify(self._due)
        heapq.heappush(self._due, (check_ns, request.rid))

    def take(self, now_ns: int) -> list[tuple[ScheduledRequest, str]]:
        """Return the requests that became overdue, each once, with the missed target."""
        overdue: list[tuple[ScheduledRequest, str]] = []
        due = self._due
        while due and due[0][0] < now_ns:
            _, rid = heapq.heappop(due)
            request = self._requests.get(rid)
            if request is None:
                continue
            missed = _missed_target(request, now_ns)
            if not missed:
                self.watch(request, now_ns)
            elif request.state in DROPPABLE:
                overdue.append((request, missed))
            elif request.state not in (RequestState.FINISHED, RequestState.CANCELLED):
                heapq.heappush(due, (now_ns + _RETRY_NS, rid))
        return overdue


def _next_check_ns(request: ScheduledRequest, now_ns: int) -> int | None:
    """Return the time after which a request may be overdue; None if it never is.

    The time is not before `now_ns`, unless a target has already been missed.
    """
    targets, arrival_ns, first_ns = request.targets, request.arrival_ns, request.first_token_ns
    times_ns: list[int] = []
    if targets.ttft_ns is not None and not first_ns:
        times_ns.append(arrival_ns + targets.ttft_ns)
    if targets.e2e_ns is not None:
        times_ns.append(arrival_ns + targets.e2e_ns)
    if targets.tpot_ns is not None and request.output_limit > 1:
        # TPOT is a mean, so the longest output gives the latest possible deadline.
        times_ns.append((first_ns or now_ns) + targets.tpot_ns * (request.output_limit - 1))
    return min(times_ns, default=None)


def _missed_target(request: ScheduledRequest, now_ns: int) -> str:
    """Return the target that a request has certainly missed; empty if there is none."""
    targets, arrival_ns, first_ns = request.targets, request.arrival_ns, request.first_token_ns
    if targets.ttft_ns is not None and (first_ns or now_ns) - arrival_ns > targets.ttft_ns:
        return "time to first token"
    if targets.e2e_ns is not None and now_ns - arrival_ns > targets.e2e_ns:
        return "end-to-end time"
    if targets.tpot_ns is None or not first_ns or request.output_limit < 2:
        return ""
    late = now_ns - first_ns > targets.tpot_ns * (request.output_limit - 1)
    return "time per output token" if late else ""
