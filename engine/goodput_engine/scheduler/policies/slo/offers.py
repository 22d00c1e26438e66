"""The work that was offered recently, by the value of a request per work.

Where more is offered than can be done, the work is given to the requests that are worth most per
unit of work. The account tells, for a new request, how much of the capacity is asked for by
requests that are worth more. The demand fades, so the answers follow the load.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BINS_PER_DOUBLING", "OfferedWork"]

_FADE_NS: Final = 20 * NS_PER_S
BINS_PER_DOUBLING: Final = 4
_EQUAL: Final = 1
"""Ranks that lie at most this many bins apart count as equal. The work of equal requests is
predicted from the number of running decodes, so it differs by some per cent, and without this they
would leave room to each other at the edge of two bins."""
_CLEARLY: Final = 2
"""A request is worth clearly more if it lies more than this many bins higher, which is a factor of
1.4 to 1.7. Predictions of equal requests differ by less, so equals do not outbid each other."""
_HELD_BACK: Final = 0.6
"""Share of the capacity that requests worth the least leave to others under full load."""
_MOST_HELD_BACK: Final = 0.95
_LEAST_RESERVE: Final = 0.7
"""Reserved share of the work of requests that are worth little more. To refuse one of them later
costs little more than to refuse the request that is decided now."""
_MOST_RESERVE: Final = 1.5
"""Reserved share of the work of requests that are worth many times as much: more than they are
expected to ask for, as more of them may arrive."""
_WORTH_THE_MOST: Final = 5
"""Doublings of the value per work from which the most is reserved."""
_WHOLE_LOAD: Final = 1.5
"""Load from which all of this share is held back. Up to a load of 1, nothing is."""
_FULL_LOAD: Final = 0.95
"""Load from which requests that are worth more fill the capacity."""
_REFUSED: Final = 0.02
"""Share of their work that must have been refused, because predicted loads have errors."""
_EVIDENCE: Final = 64
"""Offers before a rank is outbid."""
_LEAST_HORIZON_NS: Final = NS_PER_S // 10
"""Shortest time over which the recent load is a mean."""
_LEAST_EVIDENCE: Final = 8
"""Offers before anything is held back. A few requests that arrive together are no load."""
_LASTING_NS: Final = NS_PER_S
"""Age of the load from which the complete share is held back. In a short burst, room for later
requests is lost at its end."""
_MIN_WORK: Final = 1e-9
_MAX_RANKS: Final = 256


class OfferedWork:
    """Work offered per level of priority and value per work.

    Args:
        reserves: True if a share of the work that better requests offer is held back for them;
            False if it is counted over time, by `expected_above`.
    """

    __slots__ = (
        "_busy_since_ns",
        "_due_ns",
        "_first_ns",
        "_full",
        "_held_back",
        "_held_back_ns",
        "_horizon_ns",
        "_last_ns",
        "_load",
        "_offers",
        "_overloaded_since_ns",
        "_recent_ns",
        "_recent_squares",
        "_refused_ns",
        "_reserves",
        "_seen_ns",
        "_squares",
        "_stays_ns",
        "_windows_ns",
        "_work_ns",
    )

    def __init__(self, *, reserves: bool = False) -> None:
        self._reserves = reserves
        self._work_ns: dict[tuple[int, int], float] = {}
        self._refused_ns: dict[tuple[int, int], float] = {}
        self._windows_ns: dict[tuple[int, int], float] = {}
        """Mean time from the arrival to the latest start of a request."""
        self._stays_ns: dict[tuple[int, int], float] = {}
        """Mean time from the start to the end of a request."""
        self._seen_ns: dict[tuple[int, int], int] = {}
        """Time of the last offer."""
        self._squares = 0.0
        """Sum of the squares of the work of each request, which fades as the work does."""
        self._recent_ns = self._recent_squares = 0.0
        """The same work and squares, which fade over the horizon."""
        self._due_ns, self._horizon_ns = 0.0, float(_LEAST_HORIZON_NS)
        """Sum of the work of each request times its horizon, and the mean horizon."""
        self._first_ns: int | None = None
        self._last_ns = 0
        self._busy_since_ns = 0
        """First offer of the present load. A load ends if nothing is offered for a horizon, because
        most of its requests have then ended or are late."""
        self._offers = 0
        self._held_back: dict[tuple[int, int], float] = {}
        """Shares that were computed since the last offer, by rank, and the time for which."""
        self._held_back_ns: int | None = None
        self._load = self._full = 0.0
        """At this time: the load as a share of the capacity, and the part of the share to be held
        back."""
        self._overloaded_since_ns: int | None = None
        """Time since which the load is above the capacity; None if it is not."""

    @staticmethod
    def rank(priority: int, value: float, work_ns: float) -> tuple[int, int]:
        """Return the rank of a request: its priority, then its value per work."""
        density = max(value, _MIN_WORK) / max(work_ns, _MIN_WORK)
        return priority, math.floor(BINS_PER_DOUBLING * math.log2(density))

    def add(
        self,
        rank: tuple[int, int],
        work_ns: float,
        *,
        window_ns: float,
        stay_ns: float,
        now_ns: int,
    ) -> None:
        """Add the work of a new request, admitted or not.

        Args:
            rank: its rank.
            work_ns: its work.
            window_ns: time until its latest start; negative if it would be late.
            stay_ns: time from its start to its end.
            now_ns: the time.
        """
        if self._first_ns is None:
            self._first_ns = self._last_ns = now_ns
        passed_ns, window_ns = now_ns - self._last_ns, min(max(0.0, window_ns), _FADE_NS)
        if not self._offers or passed_ns > max(_LASTING_NS, self._horizon_ns):
            self._busy_since_ns = now_ns
        fade, recent = (math.exp(-passed_ns / span) for span in (_FADE_NS, self._horizon_ns))
        self._last_ns = now_ns
        self._squares = self._squares * fade**2 + work_ns**2
        self._recent_ns = self._recent_ns * recent + work_ns
        self._recent_squares = self._recent_squares * recent**2 + work_ns**2
        self._due_ns = self._due_ns * fade + work_ns * (window_ns + stay_ns / 2)
        for account in (self._work_ns, self._refused_ns):
            for key in account:
                account[key] *= fade
        if rank not in self._work_ns and len(self._work_ns) >= _MAX_RANKS:
            least = min(self._work_ns, key=self._work_ns.__getitem__)
            for by_rank in (self._work_ns, self._windows_ns, self._stays_ns, self._seen_ns):
                del by_rank[least]
            self._refused_ns.pop(least, None)
        self._work_ns[rank] = self._work_ns.get(rank, 0.0) + work_ns
        for means, value in ((self._windows_ns, window_ns), (self._stays_ns, stay_ns)):
            mean = means.get(rank, value)
            means[rank] = mean + 0.1 * (value - mean)
        self._seen_ns[rank] = now_ns
        total_ns = max(1.0, sum(self._work_ns.values()))
        self._horizon_ns = max(_LEAST_HORIZON_NS, self._due_ns / total_ns)
        self._offers += 1
        self._held_back_ns = None

    def refuse(self, rank: tuple[int, int], work_ns: float) -> None:
        """Note that a request that was added before is refused."""
        if rank in self._work_ns:
            self._refused_ns[rank] = self._refused_ns.get(rank, 0.0) + work_ns

    def held_back(self, rank: tuple[int, int], now_ns: int) -> float:
        """Return the share of the capacity that a request must leave to others, 0 to 0.95.

        It grows with the load, with the work that is worth more, and with its share of all work;
        and, if work is reserved, with how much more it is worth. Equals count half, or less if they
        are most of the work: nothing is held back for equals alone. While the load is young, it is
        reduced by its standard error, and less is held back.
        """
        self._look(now_ns)
        held = self._held_back.get(rank)
        if held is None:
            held = self._held_back[rank] = self._share_held_back(rank)
        return held

    def overloaded_ns(self, now_ns: int) -> int:
        """Return the time for which the load has been above the capacity."""
        self._look(now_ns)
        since_ns = self._overloaded_since_ns
        return 0 if since_ns is None else now_ns - since_ns

    def _look(self, now_ns: int) -> None:
        """Compute the load at a time."""
        if now_ns == self._held_back_ns:
            return
        self._held_back.clear()
        self._held_back_ns = now_ns
        self._load = self._full = 0.0
        total_ns = sum(self._work_ns.values())
        if total_ns and self._offers > _LEAST_EVIDENCE:
            self._load = self._load_at(now_ns, total_ns)
            full = min(1.0, max(0.0, self._load - 1) / (_WHOLE_LOAD - 1))
            # The predicted begin of a step may lie before that of an earlier prediction.
            self._full = full * min(1.0, max(0, now_ns - self._busy_since_ns) / _LASTING_NS)
        if self._load <= 1:
            self._overloaded_since_ns = None
        elif self._overloaded_since_ns is None:
            self._overloaded_since_ns = now_ns

    def _load_at(self, now_ns: int, total_ns: float) -> float:
        # What arrives in a burst may be done until it is due.
        due_ns = sum(work_ns * self._windows_ns[key] for key, work_ns in self._work_ns.items())
        window_ns = due_ns / total_ns
        span_ns = max(1.0, window_ns, self._span_ns(now_ns))
        # Until the account has its full span, a burst at the start may pass for a lasting load.
        young = 1 - self._span_ns(now_ns) / _FADE_NS
        sure_ns = max(0.0, total_ns - young * math.sqrt(self._squares))
        # A load that jumps shows first in the time in which its requests must be served.
        fade = math.exp((self._last_ns - now_ns) / self._horizon_ns)
        recent_ns = fade * (self._recent_ns - math.sqrt(self._recent_squares))
        recent_span_ns = max(1.0, window_ns, self._span_ns(now_ns, self._horizon_ns))
        return max(sure_ns / span_ns, recent_ns / recent_span_ns)

    def _share_held_back(self, rank: tuple[int, int]) -> float:
        if not self._full:
            return 0.0
        total_ns = sum(self._work_ns.values())
        level, density = rank
        lowest, highest = (level, density - _EQUAL), (level, density + _EQUAL)
        above_ns = equal_ns = reserved_ns = 0.0
        for key, work_ns in self._work_ns.items():
            if key > highest:
                above_ns += work_ns
                reserved_ns += work_ns * _reserve(rank, key)
            elif key >= lowest:
                equal_ns += work_ns
        equal = equal_ns / total_ns
        contested = above_ns / total_ns + equal * (1 - equal) / 2
        reserved = self._load * reserved_ns / total_ns if self._reserves else 0.0
        return self._full * min(_MOST_HELD_BACK, max(reserved, _HELD_BACK * contested))

    def load(self, rank: tuple[int, int], now_ns: int) -> float:
        """Return the offered work of at least a rank, as a share of the capacity.

        0 until enough requests were seen.
        """
        if self._offers < _EVIDENCE:
            return 0.0
        work_ns = sum(work_ns for key, work_ns in self._work_ns.items() if key >= rank)
        return work_ns / max(NS_PER_S, self._span_ns(now_ns))

    def shortest_window_ns(self, now_ns: int) -> float:
        """Return the shortest mean time that a recent rank has until its latest start."""
        recent = [key for key, seen_ns in self._seen_ns.items() if now_ns - seen_ns < _FADE_NS]
        return min((self._windows_ns[key] for key in recent), default=math.inf)

    def outbids(self, rank: tuple[int, int], now_ns: int) -> bool:
        """Return True if requests that are worth clearly more fill the capacity, and are refused.

        False until enough requests were seen.
        """
        if self._first_ns is None or self._offers < _EVIDENCE or now_ns - self._first_ns < NS_PER_S:
            return False
        least = (rank[0], rank[1] + _CLEARLY)
        newest_ns = max((at for key, at in self._seen_ns.items() if key > least), default=0)
        if now_ns - newest_ns > max(_LASTING_NS, self._horizon_ns):
            return False
        above_ns = sum(work_ns for key, work_ns in self._work_ns.items() if key > least)
        if above_ns <= _FULL_LOAD * self._span_ns(now_ns):
            return False
        refused_ns = sum(work_ns for key, work_ns in self._refused_ns.items() if key > least)
        return refused_ns > _REFUSED * above_ns

    def expected_above(self, rank: tuple[int, int], now_ns: int) -> Callable[[float], float]:
        """Return a function: what requests worth more use within a time, if they start late.

        Requests of a rank arrive at its rate, start at the latest, and then use the resource evenly
        until their end. The function takes the time in ns and returns ns.
        """
        span_ns = 1.0 if self._first_ns is None else self._span_ns(now_ns)
        # The use grows faster from the first starts on, and evenly from the first ends on.
        changes: list[tuple[float, float]] = []
        for key, work_ns in self._work_ns.items():
            if key > rank:
                begins_ns, stay_ns = self._windows_ns[key], max(1.0, self._stays_ns[key])
                half = work_ns / (2 * stay_ns)
                changes += [(begins_ns, half), (begins_ns + stay_ns, -half)]
        if not changes:
            return lambda horizon_ns: 0.0  # noqa: ARG005 - no work at any time
        changes.sort()
        times_ns = [at_ns for at_ns, _ in changes]
        used_ns = slope = bend = at_ns = 0.0
        pieces = [(at_ns, used_ns, slope, bend)]
        for next_ns, change in changes:
            passed_ns = next_ns - at_ns
            used_ns += (slope + bend * passed_ns) * passed_ns
            slope, bend, at_ns = slope + 2 * bend * passed_ns, bend + change, next_ns
            pieces.append((at_ns, used_ns, slope, bend))

        def expected(horizon_ns: float) -> float:
            at_ns, used_ns, slope, bend = pieces[bisect_left(times_ns, horizon_ns)]
            passed_ns = horizon_ns - at_ns
            used_ns += (slope + bend * passed_ns) * passed_ns
            return max(0.0, used_ns) / max(1.0, span_ns + horizon_ns)

        return expected

    def _span_ns(self, now_ns: int, fade_ns: float = _FADE_NS) -> float:
        """Return the time in which work was offered that fades over a time."""
        assert self._first_ns is not None
        return fade_ns * -math.expm1((self._first_ns - now_ns) / fade_ns)


def _reserve(rank: tuple[int, int], higher: tuple[int, int]) -> float:
    """Return the share of the work of a higher rank that is reserved for it.

    It grows with the value per work, up to the most. A higher level has the least reserve: with the
    most for it, at four times the knee of two classes, the higher one keeps 72.5 % instead of
    72.0 % of its requests, and the lower one 2.6 % instead of 15.3 %.
    """
    if higher[0] > rank[0]:
        return _LEAST_RESERVE
    doublings = (higher[1] - rank[1]) / BINS_PER_DOUBLING
    much = min(1.0, doublings / _WORTH_THE_MOST) ** 2
    return _LEAST_RESERVE + (_MOST_RESERVE - _LEAST_RESERVE) * much
