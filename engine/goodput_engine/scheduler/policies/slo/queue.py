"""A queue that is sorted before every step, because time alone can change its order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_engine.scheduler.request_table import FcfsQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["RankedQueue"]


class RankedQueue(FcfsQueue):
    """The waiting requests, and their order in the next step."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        super().__init__()
        self._order: list[ScheduledRequest] = []

    def rank(self, order: Sequence[ScheduledRequest]) -> None:
        """Set the order of the next step; a request that is missing from it does not start."""
        self._order = list(reversed(order))

    def peek(self, now_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - ranked for this step
        """Return the first request of the order that still waits."""
        order = self._order
        while order:
            if order[-1].rid in self._waiting:
                return order[-1]
            order.pop()
        return None
