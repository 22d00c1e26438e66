"""How many retries the router may make, so that it never multiplies an overload."""

from __future__ import annotations

__all__ = ["RetryBudget"]


class RetryBudget:
    """A token bucket that requests fill and retries empty; it does not look at the clock.

    In n requests there are never more than `burst + n · percent / 100` retries.

    Args:
        percent: of a retry that each request earns, 0 to 100.
        burst: retries that the bucket holds; it starts full.
    """

    __slots__ = ("_balance", "_capacity", "_percent")

    def __init__(self, *, percent: int, burst: int) -> None:
        self._percent = percent
        self._capacity = burst * 100
        self._balance = self._capacity

    def earn(self) -> None:
        """Count one client request."""
        self._balance = min(self._capacity, self._balance + self._percent)

    def spend(self) -> bool:
        """Take one retry out, if there is one."""
        if self._balance < 100:
            return False
        self._balance -= 100
        return True
