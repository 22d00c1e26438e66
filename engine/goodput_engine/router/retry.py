"""The retry budget, which prevents routers from amplifying an overload.

The router and virtual time both use it, so this module has none of the router's state and I/O.
"""

from __future__ import annotations

__all__ = ["RetryBudget"]


class RetryBudget:
    """A token bucket that requests fill and retries empty, independent of time.

    In n requests there are at most `burst + n · percent / 100` retries.

    Args:
        percent: hundredths of a retry that each request adds, 0 to 100.
        burst: capacity of the bucket in retries; it starts full.
    """

    __slots__ = ("_balance", "_capacity", "_percent")

    def __init__(self, *, percent: int, burst: int) -> None:
        self._percent = percent
        self._capacity = burst * 100
        self._balance = self._capacity  # in hundredths of a retry

    def earn(self) -> None:
        """Add the hundredths of a retry for one client request."""
        self._balance = min(self._capacity, self._balance + self._percent)

    def spend(self) -> bool:
        """Take one retry; return False if none is left."""
        if self._balance < 100:
            return False
        self._balance -= 100
        return True
