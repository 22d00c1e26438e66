"""Until when each client waits: the trace's own cancellations and the one time-out for all."""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

from goodput_core.slo.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Container

    from goodput_replay.plan import PlannedRequest

__all__ = ["Deadlines"]


class Deadlines:
    """When requests are given up, unless they have ended.

    Time-outs come in the order of the arrivals, so they need no sorting; only cancellations do.

    Args:
        timeout_ns: from each scheduled arrival.
    """

    __slots__ = ("_cancels", "_timeout_ns", "_timeouts")

    def __init__(self, timeout_ns: int) -> None:
        self._timeout_ns = timeout_ns
        self._timeouts: deque[tuple[int, int]] = deque()
        self._cancels: list[tuple[int, int]] = []

    def add(self, planned: PlannedRequest, rid: int) -> None:
        """A request arrives; later ones never have an earlier time-out."""
        cancel_ns = planned.cancel_after_ns
        if cancel_ns is not None and cancel_ns < self._timeout_ns:
            heapq.heappush(self._cancels, (planned.scheduled_ns + cancel_ns, rid))
        else:
            self._timeouts.append((planned.scheduled_ns + self._timeout_ns, rid))

    def next_ns(self, live: Container[int]) -> int | None:
        """The next instant at which one of the live requests is given up.

        Those that have ended are let go of here, as soon as nothing older is live.
        """
        timeouts, cancels = self._timeouts, self._cancels
        while timeouts and timeouts[0][1] not in live:
            timeouts.popleft()
        while cancels and cancels[0][1] not in live:
            heapq.heappop(cancels)
        if not cancels:
            return timeouts[0][0] if timeouts else None
        return cancels[0][0] if not timeouts else min(cancels[0][0], timeouts[0][0])

    def take(self, now_ns: int) -> list[tuple[int, Outcome]]:
        """Who is given up now, by rid; some may have ended."""
        taken: list[tuple[int, Outcome]] = []
        while self._cancels and self._cancels[0][0] <= now_ns:
            taken.append((heapq.heappop(self._cancels)[1], Outcome.CANCELLED))
        while self._timeouts and self._timeouts[0][0] <= now_ns:
            taken.append((self._timeouts.popleft()[1], Outcome.TIMEOUT))
        return taken
