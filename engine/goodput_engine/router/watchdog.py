"""Ends an attempt on which nothing moves, without a timer per chunk, or at somebody's word.

The hot path only stores the time of its last chunk; the timer looks at it when it fires, and
goes off or sets itself again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from goodput_core.units import NS_PER_S
from goodput_engine.router.errors import Expired

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from goodput_engine.router.errors import RouterError

__all__ = ["Watchdog"]


class Watchdog:
    """A context that cancels its own task when it is too quiet, and then raises `Expired`.

    `end` does the same at once with another error; the task takes no further step before it.

    Args:
        clock: nanoseconds, monotonic.
        limit_ns: how long nothing may move.

    Attributes:
        touched_ns: when something moved last; whoever moves something sets it.
    """

    __slots__ = (
        "_cancelling",
        "_clock",
        "_error",
        "_handle",
        "_limit_ns",
        "_loop",
        "_task",
        "_went_off",
        "touched_ns",
    )

    def __init__(self, clock: Callable[[], int], *, limit_ns: int) -> None:
        task = asyncio.current_task()
        assert task is not None, "a watchdog guards a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._cancelling = task.cancelling()
        self._clock = clock
        self._limit_ns = limit_ns
        self._handle: asyncio.TimerHandle | None = None
        self._went_off = False
        self._error: RouterError = Expired()
        self.touched_ns = clock()

    def __enter__(self) -> Self:
        self._arm(self._limit_ns)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        # As in asyncio.timeout: a cancellation from outside stays one even when both came.
        if (
            self._went_off
            and self._task.uncancel() <= self._cancelling
            and kind is asyncio.CancelledError
        ):
            raise self._error from error

    def allow(self, limit_ns: int) -> None:
        """From now on, let nothing move for this long."""
        self._limit_ns = limit_ns
        self.touched_ns = self._clock()
        if self._handle is not None:
            self._handle.cancel()
            self._arm(limit_ns)

    def end(self, error: RouterError) -> None:
        """Leave the context now, with this error; without effect on one that goes off already."""
        if not self._went_off:
            self._error = error
            self._go_off()

    def _arm(self, left_ns: int) -> None:
        self._handle = self._loop.call_later(left_ns / NS_PER_S, self._look)

    def _look(self) -> None:
        left_ns = self.touched_ns + self._limit_ns - self._clock()
        if left_ns > 0:
            self._arm(left_ns)
        else:
            self._go_off()

    def _go_off(self) -> None:
        if not self._went_off:
            self._went_off = True
            self._task.cancel()
