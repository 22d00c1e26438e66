"""The clocks, and the fence that admits writes only while the Lease is certainly held.

The fence closes when its deadline passes, without any action of the process. Therefore a process
that was suspended for a minute writes nothing when it resumes, and neither does one that cannot
reach the API server.
"""

from __future__ import annotations

import time
from typing import Protocol

from goodput_operator.kube.errors import LeaseLostError

__all__ = ["ClockSource", "Fence", "SystemClock"]


class ClockSource(Protocol):
    """A source of monotonic and calendar time."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds, for intervals and deadlines."""
        ...

    def unix_ns(self) -> int:
        """Nanoseconds since 1970, for timestamps in objects."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        return time.monotonic_ns()

    def unix_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns()


class Fence:
    """Admits writes until a deadline that each renewal of the Lease extends.

    Args:
        clock: source of monotonic time.
    """

    def __init__(self, clock: ClockSource) -> None:
        self._clock = clock
        self._until_ns: int | None = None

    @property
    def open(self) -> bool:
        """True if a write may start now."""
        return self.remaining_ns() > 0

    def remaining_ns(self) -> int:
        """Return the time that a write may take if it starts now; 0 if it must not start."""
        if self._until_ns is None:
            return 0
        return max(0, self._until_ns - self._clock.now_ns())

    def admit(self, name: str) -> int:
        """Admit a write.

        Args:
            name: name of the written object, for the error.

        Returns:
            Nanoseconds after which the write must be cancelled.

        Raises:
            LeaseLostError: the Lease is no longer held.
        """
        remaining_ns = self.remaining_ns()
        if remaining_ns <= 0:
            raise LeaseLostError(f"{name} not written: the Lease is no longer held")
        return remaining_ns

    def extend(self, until_ns: int) -> None:
        """Admit writes until this monotonic time."""
        self._until_ns = until_ns

    def close(self) -> None:
        """Admit no more writes."""
        self._until_ns = None
