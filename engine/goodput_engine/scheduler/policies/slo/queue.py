"""A queue that is put in order before every step: for orders that time alone can change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_engine.scheduler.request_table import FcfsQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_engine.scheduler.request_table import ScheduledRequest

__all__ = ["RankedQueue"]


class RankedQueue(FcfsQueue):
    """Who waits, and the order of this step."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        super().__init__()
        self._order: list[ScheduledRequest] = []

    def rank(self, order: Sequence[ScheduledRequest]) -> None:
        """The order of the next step, first to last; who is not in it does not start."""
        self._order = list(reversed(order))

    def peek(self, now_ns: int) -> ScheduledRequest | None:  # noqa: ARG002 - ranked for this step
        """The first of the order that still waits."""
        order = self._order
        while order:
            if order[-1].rid in self._waiting:
                return order[-1]
            order.pop()
        return None
