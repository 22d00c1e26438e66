"""The wait for a first token that a router expects from the streams that have none yet.

By Little's law, a new stream waits for the number of such streams divided by the rate at which
streams start. Both are known without a report from the replicas, so this works with every server.
The rate is measured only while some stream waits without a pause, because it would otherwise be
the rate of arrivals. Until it is known, the age of the oldest waiting stream is the estimate.
"""

from __future__ import annotations

from typing import Final

from goodput_core.units import NS_PER_S

__all__ = ["FirstTokenWait"]

_BUSY_NS: Final = NS_PER_S
"""Shortest time without a pause from which a rate is measured."""
_VALID_NS: Final = 60 * NS_PER_S
"""Time for which a measured rate is used."""
_NEW: Final = 0.3
"""Weight of a new measurement of the rate."""


class FirstTokenWait:
    """The streams without a token, and the wait that a new one can expect."""

    __slots__ = ("_busy_ns", "_measured_ns", "_per_s", "_starts", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[object, int] = {}
        self._busy_ns = 0
        self._starts = 0
        self._measured_ns = 0
        self._per_s: float | None = None

    def begin(self, stream: object, now_ns: int) -> None:
        """Record that a stream is sent to a replica."""
        if not self._waiting:
            self._busy_ns, self._starts = now_ns, 0
        self._waiting[stream] = now_ns

    def end(self, stream: object, now_ns: int, *, started: bool) -> None:
        """Record the first token of a stream, or its end without one; later calls do nothing."""
        if self._waiting.pop(stream, None) is None:
            return
        self._starts += started
        busy_ns = now_ns - self._busy_ns
        if busy_ns < _BUSY_NS:
            return
        per_s = self._starts * NS_PER_S / busy_ns
        old = self._rate(now_ns)
        self._per_s = per_s if old is None else old + _NEW * (per_s - old)
        self._measured_ns = self._busy_ns = now_ns
        self._starts = 0

    def expected_ns(self, now_ns: int) -> int:
        """Return the expected wait of a new stream; at least the age of the oldest waiting one."""
        if not self._waiting:
            return 0
        oldest_ns = now_ns - next(iter(self._waiting.values()))
        rate = self._rate(now_ns)
        if not rate:
            return oldest_ns
        return max(oldest_ns, round(len(self._waiting) * NS_PER_S / rate))

    def _rate(self, now_ns: int) -> float | None:
        """Return the starts per second while streams waited; None if unknown."""
        return self._per_s if now_ns - self._measured_ns < _VALID_NS else None
