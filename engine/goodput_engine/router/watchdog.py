"""Ends an attempt that makes no progress, without a timer per chunk.

The hot path only stores the time of the last chunk. When the timer fires, it compares this time
with the limit and either cancels the task or starts again.
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
    """A context that cancels its own task and raises `Expired` after a time without progress.

    `end` cancels the task at once and raises another error.

    Args:
        clock: returns monotonic nanoseconds.
        limit_ns: longest time without progress.

    Attributes:
        touched_ns: time of the last progress; the guarded code sets it.
    """

    __slots__ = (
        "_cancelling",
        "_clock",
        "_error",
        "_fired",
        "_handle",
        "_limit_ns",
        "_loop",
        "_task",
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
        self._fired = False
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
        # As in asyncio.timeout, a cancellation from outside takes precedence.
        if (
            self._fired
            and self._task.uncancel() <= self._cancelling
            and kind is asyncio.CancelledError
        ):
            raise self._error from error

    def allow(self, limit_ns: int) -> None:
        """Restart the watchdog with another limit."""
        self._limit_ns = limit_ns
        self.touched_ns = self._clock()
        if self._handle is not None:
            self._handle.cancel()
            self._arm(limit_ns)

    def end(self, error: RouterError) -> None:
        """Cancel the task now and raise an error, unless the watchdog has already fired."""
        if not self._fired:
            self._error = error
            self._fire()

    def _arm(self, left_ns: int) -> None:
        self._handle = self._loop.call_later(left_ns / NS_PER_S, self._check)

    def _check(self) -> None:
        left_ns = self.touched_ns + self._limit_ns - self._clock()
        if left_ns > 0:
            self._arm(left_ns)
        else:
            self._fire()

    def _fire(self) -> None:
        if not self._fired:
            self._fired = True
            self._task.cancel()
