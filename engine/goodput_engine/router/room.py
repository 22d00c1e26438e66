"""How much the router holds of all requests' bodies together, so that a flood cannot fill memory.

A body is held until the first token of its answer, because it may have to be sent again.
"""

from __future__ import annotations

from goodput_engine.router.errors import Crowded

__all__ = ["Room"]


class Room:
    """Counts the bytes that are held.

    Args:
        limit_bytes: how many may be.
    """

    __slots__ = ("_limit_bytes", "held_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, count: int) -> None:
        """Hold some more.

        Raises:
            Crowded: there is no room for them; nothing was taken.
        """
        if self.held_bytes + count > self._limit_bytes:
            raise Crowded("the router holds too many requests")
        self.held_bytes += count

    def give(self, count: int) -> None:
        """Hold them no longer."""
        self.held_bytes -= count
