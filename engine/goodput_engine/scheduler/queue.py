"""Who waits, and in which order: the part of a policy that decides whose turn it is."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["FcfsQueue", "WaitingQueue"]


class WaitingQueue(Protocol):
    """The waiting requests, ordered by a policy."""

    def push(self, request: ScheduledRequest) -> None:
        """A new request."""
        ...

    def push_back(self, request: ScheduledRequest) -> None:
        """A preempted request returns: at the head, where the policy has no better order."""
        ...

    def peek(self, now_ns: int) -> ScheduledRequest | None:
        """The request whose turn it is, or None; `remove` takes it out."""
        ...

    def remove(self, request: ScheduledRequest) -> None:
        """Admitted or cancelled: it waits no more."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ScheduledRequest]: ...


class FcfsQueue:
    """First come, first served; every operation takes constant time."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, ScheduledRequest] = OrderedDict()

    def push(self, request: ScheduledRequest) -> None:
        """A new request goes to the tail."""
        self._waiting[request.rid] = request

    def push_back(self, request: ScheduledRequest) -> None:
        """A preempted request returns to the head."""
        self._waiting[request.rid] = request
        self._waiting.move_to_end(request.rid, last=False)

    def peek(self, now_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - no ageing here
        """The oldest."""
        return next(iter(self._waiting.values()), None)

    def remove(self, request: ScheduledRequest) -> None:
        """Admitted or cancelled: it waits no more."""
        del self._waiting[request.rid]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._waiting.values())
