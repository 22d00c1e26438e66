"""What a fleet's run adds up to while it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_engine.scheduler.stats import SchedulerStats
from goodput_replay.emulation.settings import FleetOutcome

if TYPE_CHECKING:
    from goodput_replay.emulation.replica import Replica

__all__ = ["Totals"]


class Totals:
    """Sums over replicas and requests.

    Attributes:
        end_ns: when the last request so far ended.
    """

    def __init__(self) -> None:
        self.end_ns = 0
        self._peak = 0
        self._replica_ns = 0
        self._stats = SchedulerStats()

    def in_flight(self, count: int) -> None:
        """So many requests are on replicas now."""
        self._peak = max(self._peak, count)

    def ended(self, at_ns: int) -> None:
        """A request ended; in the order of time."""
        self.end_ns = at_ns

    def add(self, replica: Replica, gone_ns: int) -> None:
        """A replica is gone, or the run is over."""
        self._replica_ns += max(0, gone_ns - replica.created_ns)
        for name in SchedulerStats.__slots__:
            found = getattr(replica.core.scheduler.stats, name)
            setattr(self._stats, name, getattr(self._stats, name) + found)

    def outcome(self, *, requests: int) -> FleetOutcome:
        """The run's."""
        stats = self._stats
        return FleetOutcome(
            end_ns=self.end_ns,
            requests=requests,
            peak_in_flight=self._peak,
            replica_ns=self._replica_ns,
            steps=stats.steps,
            step_ns=stats.step_ns,
            scheduled_tokens=stats.scheduled_tokens,
            output_tokens=stats.output_tokens,
            preemptions=stats.preemptions,
            prefix_queried_tokens=stats.prefix_queried_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
        )
