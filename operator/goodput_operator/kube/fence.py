"""Who may write: open only while the Lease is certainly ours.

Closed by time alone, so that a process that was stopped for a minute, or hears nothing from the
API server, writes nothing when it goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_operator.kube.errors import LeaseLostError

if TYPE_CHECKING:
    from goodput_operator.kube.clock import Clock

__all__ = ["Fence"]


class Fence:
    """Open until an instant that each renewal of the Lease moves on.

    Args:
        clock: whose monotonic time counts.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_ns: int | None = None

    @property
    def open(self) -> bool:
        """Whether a write may start."""
        return self.remaining_ns() > 0

    def remaining_ns(self) -> int:
        """How long a write that starts now may take; 0 when none may start."""
        if self._until_ns is None:
            return 0
        return max(0, self._until_ns - self._clock.now_ns())

    def admit(self, what: str) -> int:
        """Let a write start.

        Args:
            what: is to be written.

        Returns:
            After how many nanoseconds it must be given up.

        Raises:
            LeaseLostError: another operator may write by now.
        """
        left_ns = self.remaining_ns()
        if left_ns <= 0:
            raise LeaseLostError(f"{what} not written: the Lease is held no more")
        return left_ns

    def extend(self, until_ns: int) -> None:
        """Open it until then."""
        self._until_ns = until_ns

    def close(self) -> None:
        """Let nothing through any more."""
        self._until_ns = None
