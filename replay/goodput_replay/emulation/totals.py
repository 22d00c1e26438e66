"""What a fleet's run adds up to while it goes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from goodput_replay.emulation.settings import FleetOutcome

if TYPE_CHECKING:
    from goodput_replay.emulation.replica import Replica

__all__ = ["Totals"]

_SUMMED: Final = (
    "steps",
    "step_ns",
    "scheduled_tokens",
    "output_tokens",
    "preemptions",
    "recomputed_tokens",
    "swapped_tokens",
    "prefix_queried_tokens",
    "prefix_hit_tokens",
)


class Totals:
    """Sums over replicas and requests.

    Attributes:
        end_ns: when the last request so far ended.
    """

    def __init__(self) -> None:
        self.end_ns = 0
        self._peak = 0
        self._peak_replicas = 0
        self._replica_ns = 0
        self._events = 0
        self._sums: Counter[str] = Counter()

    def in_flight(self, count: int) -> None:
        """So many requests are on replicas now."""
        self._peak = max(self._peak, count)

    def replicas(self, count: int) -> None:
        """So many replicas exist now."""
        self._peak_replicas = max(self._peak_replicas, count)

    def ended(self, at_ns: int) -> None:
        """A request ended; in the order of time."""
        self.end_ns = at_ns

    def add(self, replica: Replica, gone_ns: int) -> None:
        """A replica is gone, or the run is over."""
        self._replica_ns += max(0, gone_ns - replica.created_ns)
        self._events += replica.events
        stats = replica.core.scheduler.stats
        self._sums.update({name: getattr(stats, name) for name in _SUMMED})

    def outcome(self, *, requests: int, final_replicas: int) -> FleetOutcome:
        """The run's."""
        return FleetOutcome(
            end_ns=self.end_ns,
            requests=requests,
            peak_in_flight=self._peak,
            replica_ns=self._replica_ns,
            peak_replicas=self._peak_replicas,
            final_replicas=final_replicas,
            events=requests + self._events,
            **{name: self._sums[name] for name in _SUMMED},
        )
