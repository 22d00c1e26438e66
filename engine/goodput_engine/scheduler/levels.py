"""Four levels of urgency, and how waiting moves a request up through them.

A request that has waited for W (`ageing_ns`) counts as one level more urgent, until it is at the
top. What it has earned by waiting it keeps while it runs and when it is preempted; running earns
nothing. Whoever is older at a level goes first there, so nobody waits for ever: after at most 3 W
of waiting, only those who reached the top before are ahead.

That order needs no re-sorting. Of two requests the one that reaches the top first (`top_ns`) is,
at every moment, at the higher level, or first within the same one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["Ageing", "AgeingQueue", "Level"]


class Level(IntEnum):
    """Levels of urgency, the least urgent first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    REALTIME = 3

    @classmethod
    def of(cls, request: ScheduledRequest) -> Level:
        """A request's own: priority 2 and above is realtime, 1 high, 0 normal, below 0 low."""
        return cls(min(cls.REALTIME, max(cls.LOW, request.priority + cls.NORMAL)))


class Ageing:
    """The law by which waiting counts.

    Args:
        ageing_ns: waiting that is worth one level, at least 1.
    """

    __slots__ = ("ageing_ns",)

    def __init__(self, ageing_ns: int) -> None:
        self.ageing_ns = ageing_ns

    def waiting(self, request: ScheduledRequest, now_ns: int) -> int:
        """The level of a request that waits."""
        waited_ns = now_ns - request.arrival_ns - request.ran_ns
        return min(Level.REALTIME, Level.of(request) + max(0, waited_ns) // self.ageing_ns)

    def running(self, request: ScheduledRequest) -> int:
        """The level of a request that runs: what it had when it was admitted."""
        return self.waiting(request, request.admitted_ns)

    def top_ns(self, request: ScheduledRequest) -> int:
        """When a request that waits is, or was, at the top; the smaller, the sooner its turn."""
        to_go = Level.REALTIME - Level.of(request)
        return request.arrival_ns + request.ran_ns + to_go * self.ageing_ns


class AgeingQueue:
    """Who waits, by level and age.

    Args:
        ageing: the law.
    """

    __slots__ = ("_ageing", "_order", "_waiting")

    def __init__(self, ageing: Ageing) -> None:
        self._ageing = ageing
        self._order: list[tuple[int, int]] = []
        self._waiting: dict[int, ScheduledRequest] = {}

    def push(self, request: ScheduledRequest) -> None:
        """A new request goes where its level puts it."""
        self._waiting[request.rid] = request
        insort(self._order, self._key(request))

    push_back = push
    """A preempted request goes where its level and its waiting so far put it."""

    def peek(self, now_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - time keeps the order
        """The most urgent."""
        return self._waiting[self._order[0][1]] if self._order else None

    def remove(self, request: ScheduledRequest) -> None:
        """Admitted or cancelled: it waits no more."""
        del self._waiting[request.rid]
        del self._order[bisect_left(self._order, self._key(request))]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (self._waiting[rid] for _, rid in self._order)

    def _key(self, request: ScheduledRequest) -> tuple[int, int]:
        return self._ageing.top_ns(request), request.rid
