"""The last hour of one service: per-second counts of its routers on the operator's clock.

A router numbers seconds on its own monotonic clock. The offset between both clocks is computed from
the first response after the router's start and then stays fixed, so no second is counted twice.
After a gap, the next response of a router contains the missing seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.slo.window import SecondRing
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from goodput_core.control import ClassOutcomes
    from goodput_core.slo.attainment import SecondCounts
    from goodput_core.slo.window import RecentSeconds
    from goodput_operator.control.readings import RouterScrape

__all__ = ["ServiceWindow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Router:
    """Position in the counts of one router.

    Args:
        epoch: identifier of the router's start.
        offset_s: the operator's second minus the router's.
        next_s: the router's first second that has not been added yet.
    """

    epoch: str
    offset_s: int
    next_s: int


class ServiceWindow:
    """Sums the per-second counts of a service's routers."""

    def __init__(self) -> None:
        self._ring: SecondRing | None = None
        self._routers: dict[str, _Router] = {}

    def since(self) -> dict[str, int]:
        """Return the first second to request from each known router, by uid."""
        return {uid: router.next_s for uid, router in self._routers.items()}

    def add(self, scrapes: Iterable[RouterScrape], now_ns: int) -> None:
        """Add the responses of the routers.

        Args:
            scrapes: a scrape of each existing router; the state of other routers is removed.
            now_ns: time on the operator's clock.
        """
        routers: dict[str, _Router] = {}
        for scrape in scrapes:
            uid, position = scrape.target.uid, self._routers.get(scrape.target.uid)
            if scrape.counters is None or scrape.counters.seconds is None:
                if position is not None:
                    routers[uid] = position
                continue
            epoch, seconds = scrape.counters.epoch, scrape.counters.seconds
            offset_s = now_ns // NS_PER_S - seconds.end_s
            if position is not None and position.epoch != epoch:
                # The router has restarted, so this response may begin too late. Request all seconds
                # of the new process next.
                routers[uid] = _Router(epoch=epoch, offset_s=offset_s, next_s=0)
                continue
            if position is None:
                position = _Router(epoch=epoch, offset_s=offset_s, next_s=seconds.first_s)
            self._add(seconds, position)
            routers[uid] = _Router(
                epoch=epoch,
                offset_s=position.offset_s,
                next_s=max(position.next_s, seconds.end_s),
            )
        self._routers = routers
        if self._ring is not None:
            self._ring.advance(now_ns // NS_PER_S)

    def add_interval(
        self, outcomes: Iterable[ClassOutcomes], interval_ns: int, now_ns: int
    ) -> None:
        """Distribute the counts of an interval evenly over its seconds.

        Args:
            outcomes: outcomes of the interval by class.
            interval_ns: length of the interval.
            now_ns: end of the interval, on one clock for all intervals.
        """
        end_s, length_s = now_ns // NS_PER_S, max(1, interval_ns // NS_PER_S)
        ring = self._ring_from(end_s - length_s)
        ring.advance(end_s)
        for counts in outcomes:
            for k in range(length_s):
                good, missed = (
                    count * (k + 1) // length_s - count * k // length_s
                    for count in (counts.good, counts.total - counts.good)
                )
                if good or missed:
                    ring.add(counts.name, end_s - length_s + k, good=good, total=good + missed)

    def counts(self, classes: Sequence[str]) -> Mapping[str, SecondCounts] | None:
        """Return the counts of the last hour by class; None before the first second."""
        ring = self._ring
        if ring is None or ring.first_s == ring.end_s:
            return None
        return {name: ring.counts(name, ring.first_s, ring.end_s) for name in classes}

    def _add(self, seconds: RecentSeconds, router: _Router) -> None:
        ring = self._ring_from(seconds.first_s + router.offset_s)
        for name, counts in seconds.classes.items():
            pairs = zip(counts.good, counts.total, strict=True)
            for second, (good, total) in enumerate(pairs, start=seconds.first_s):
                if total and second >= router.next_s:
                    ring.add(name, second + router.offset_s, good=good, total=total)
        ring.advance(seconds.end_s + router.offset_s)

    def _ring_from(self, first_s: int) -> SecondRing:
        """Return the ring, extended back to this second if necessary."""
        if self._ring is None:
            self._ring = SecondRing(first_s)
        self._ring.extend_back(first_s)
        return self._ring
