"""Stalls of a client: spans in which it did not run, so that its time stamps came late.

A client that is stopped or busy reads tokens later than they arrived. The request then looks slow
although the service was not. `judging.without_lag` takes these spans out of a request.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NO_STALLS", "Stall", "Stalls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A span of time that contains one or more stalls.

    Args:
        start_ns: start of the span.
        end_ns: end of the span, after its start.
        stalled_ns: time in the span during which the client did not run; less than its length only
            if several stalls were merged.

    Raises:
        ValueError: the client was stalled for longer than the span.
    """

    start_ns: int
    end_ns: int
    stalled_ns: int

    def __post_init__(self) -> None:
        if not 0 < self.stalled_ns <= self.end_ns - self.start_ns:
            raise ValueError(f"{self.stalled_ns} ns from {self.start_ns} to {self.end_ns}")

    def merged(self, later: Stall) -> Stall:
        """Return one span with the stalls of both."""
        return Stall(
            start_ns=self.start_ns,
            end_ns=later.end_ns,
            stalled_ns=self.stalled_ns + later.stalled_ns,
        )


class Stalls:
    """The stalls of one run, on the clock of its records.

    Args:
        stalls: spans in order, which do not overlap.

    Raises:
        ValueError: the spans overlap or are not in order.
    """

    def __init__(self, stalls: Iterable[Stall] = ()) -> None:
        self._stalls = tuple(stalls)
        self._starts = [stall.start_ns for stall in self._stalls]
        self._before = list(accumulate((s.stalled_ns for s in self._stalls), initial=0))
        ends = [stall.end_ns for stall in self._stalls]
        if any(end > start for end, start in zip(ends, self._starts[1:], strict=False)):
            raise ValueError("the stalls overlap or are not in order")

    def __len__(self) -> int:
        return len(self._stalls)

    @property
    def total_ns(self) -> int:
        """Time during which the client did not run."""
        return self._before[-1]

    def between_ns(self, start_ns: int, end_ns: int) -> int:
        """Return the time between two instants during which the client did not run."""
        return self._until_ns(end_ns) - self._until_ns(start_ns)

    def longest_between_ns(self, start_ns: int, end_ns: int) -> int:
        """Return the longest stall between two instants; 0 if there is none."""
        first = max(0, bisect_right(self._starts, start_ns) - 1)
        last = bisect_right(self._starts, end_ns)
        overlaps = (
            min(s.stalled_ns, self.between_ns(max(s.start_ns, start_ns), min(s.end_ns, end_ns)))
            for s in self._stalls[first:last]
            if s.end_ns > start_ns
        )
        return max(overlaps, default=0)

    def _until_ns(self, at_ns: int) -> int:
        """Return the stalled time before an instant; stalls are spread evenly over their span."""
        index = bisect_right(self._starts, at_ns) - 1
        if index < 0:
            return 0
        stall = self._stalls[index]
        elapsed_ns = min(at_ns, stall.end_ns) - stall.start_ns
        return self._before[index] + stall.stalled_ns * elapsed_ns // (
            stall.end_ns - stall.start_ns
        )


NO_STALLS: Final = Stalls()
