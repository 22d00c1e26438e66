"""The operator's time: one object, handed to everything that waits, dates or decides by time."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Where time comes from."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds: intervals and deadlines are measured by it."""
        ...

    def unix_ns(self) -> int:
        """Nanoseconds since 1970: what people are shown."""
        ...


class SystemClock:
    """This machine's clocks."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        return time.monotonic_ns()

    def unix_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns()
