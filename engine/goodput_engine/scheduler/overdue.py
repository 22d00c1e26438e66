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
        deadlines = _deadlines(request, now_ns)
        if not deadlines:
            return
        # A target may pass hours after its request has ended.
        if len(self._due) > _MIN_CHECKS + 2 * len(self._requests):
            self._due[:] = [check for check in self._due if check[1] in self._requests]
            heapq.heapify(self._due)
        heapq.heappush(self._due, (min(deadlines.values()), request.rid))

    def take(self, now_ns: int) -> list[tuple[ScheduledRequest, str]]:
        """Return the requests that became overdue, each once, with the missed target."""
        overdue: list[tuple[ScheduledRequest, str]] = []
        due = self._due
        while due and due[0][0] < now_ns:
            _, rid = heapq.heappop(due)
            request = self._requests.get(rid)
            if request is None:
                continue
            deadlines = _deadlines(request, now_ns).items()
            missed = next((target for target, due_ns in deadlines if due_ns < now_ns), None)
            if missed is None:
                self.watch(request, now_ns)
            elif request.state in DROPPABLE:
                overdue.append((request, missed))
            elif request.state not in (RequestState.FINISHED, RequestState.CANCELLED):
                heapq.heappush(due, (now_ns + _RETRY_NS, rid))
        return overdue


def _deadlines(request: ScheduledRequest, now_ns: int) -> dict[str, int]:
    """Return the time after which each target of a request is certainly missed.

    A target for the first token that was met is omitted.
    """
    targets, arrival_ns, first_ns = request.targets, request.arrival_ns, request.first_token_ns
    deadlines: dict[str, int] = {}
    if targets.ttft_ns is not None:
        due_ns = arrival_ns + targets.ttft_ns
        if not 0 < first_ns <= due_ns:
            deadlines["time to first token"] = due_ns
    if targets.e2e_ns is not None:
        deadlines["end-to-end time"] = arrival_ns + targets.e2e_ns
    if targets.tpot_ns is not None and request.output_limit > 1:
        # TPOT is a mean, so the longest output gives the latest possible deadline.
        gaps_ns = targets.tpot_ns * (request.output_limit - 1)
        deadlines["time per output token"] = (first_ns or now_ns) + gaps_ns
    return deadlines
