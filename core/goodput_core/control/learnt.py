"""Learnt capacity of the replicas of a service, and the burstiness of its arrivals.

The prediction of a replica's capacity is corrected by observed loads: one that was served with
slack raises it, and one at which a target was missed lowers it. Both expire. They are stored as
shares of the predicted load, because the prediction follows the mix of lengths and the number of
replicas. A controller stores `LearntCapacity`, so that it survives a restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from goodput_core.control.capacity import ReplicaCapacity
from goodput_core.control.queueing import TTFTTarget, sustained_load
from goodput_core.units import NS_PER_S

__all__ = ["BUSY", "ArrivalBlocks", "Capacities", "LearntCapacity"]

BUSY: Final = 0.8
"""Share of its time that a replica may be busy on average, even if that misses no TTFT target."""
_BELOW_FAILED: Final = 0.95
"""Capacity as a share of the lowest load at which a target was missed."""
_REMEMBER_NS: Final = 6 * 3600 * NS_PER_S
"""Observed loads expire after this time."""
_BLOCK_NS: Final = 10 * NS_PER_S
"""Minimum length of the blocks whose arrivals are compared."""
_BURSTS_NS: Final = 1800 * NS_PER_S
"""Time constant of the burstiness."""
_MAX_BURSTINESS: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntCapacity:
    """Observed loads of one replica, as shares of the predicted load, and the burstiness.

    Args:
        proven, proven_ns: the highest load that was served with slack, and the time of the
            observation; 0 if none was observed.
        failed, failed_ns: the lowest load at which a target was missed, and the time of the last
            miss; 0 if none was observed.
        burstiness: variance of the arrivals in ten seconds, divided by their mean; about 1 if they
            are independent.
    """

    proven: float = 0.0
    proven_ns: int = 0
    failed: float = 0.0
    failed_ns: int = 0
    burstiness: float = 1.0

    def without_expired(self, now_ns: int) -> LearntCapacity:
        """Return this without the observations that are too old."""
        learnt = self
        if learnt.proven and now_ns - learnt.proven_ns > _REMEMBER_NS:
            learnt = replace(learnt, proven=0.0)
        if learnt.failed and now_ns - learnt.failed_ns > _REMEMBER_NS:
            learnt = replace(learnt, failed=0.0)
        return learnt

    def with_proven(self, share: float, now_ns: int) -> LearntCapacity:
        """Return this after a load was served with slack."""
        if share <= self.proven:
            return self
        failed = 0.0 if share >= self.failed else self.failed
        return replace(self, proven=share, proven_ns=now_ns, failed=failed)

    def with_failed(self, share: float, now_ns: int) -> LearntCapacity:
        """Return this after a target was missed at a load.

        The load must be an upper bound: while the load grows, its mean over a minute is too low.
        """
        failed = min(share, self.failed) if self.failed else share
        proven = min(self.proven, failed * _BELOW_FAILED)
        return replace(self, failed=failed, failed_ns=now_ns, proven=proven)

    @property
    def factor(self) -> float:
        """Correction of the predicted load."""
        factor = max(1.0, self.proven)
        return min(factor, self.failed * _BELOW_FAILED) if self.failed else factor


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalBlocks:
    """Arrivals of the block that is being counted, and of the one before it.

    Args:
        requests, length_ns: arrivals so far, and length of the block so far.
        last_requests, last_ns: the same of the block before; a length of 0 if there is none.
    """

    requests: int = 0
    length_ns: int = 0
    last_requests: int = 0
    last_ns: int = 0

    def add(
        self, requests: int, interval_ns: int, burstiness: float
    ) -> tuple[ArrivalBlocks, float]:
        """Add the arrivals of an interval; return the blocks and the new burstiness.

        Differences of neighbouring blocks are compared with those of independent arrivals, so that
        slow changes of the rate are no bursts.

        Source: von Neumann, "Distribution of the Ratio of the Mean Square Successive Difference to
        the Variance", 1941.
        """
        block = replace(
            self, requests=self.requests + requests, length_ns=self.length_ns + interval_ns
        )
        if block.length_ns < _BLOCK_NS:
            return block, burstiness
        after = ArrivalBlocks(last_requests=block.requests, last_ns=block.length_ns)
        total = block.requests + block.last_requests
        if not block.last_ns or not total:
            return after, burstiness
        # Of independent arrivals, the square of the difference has this mean.
        share = block.length_ns / (block.length_ns + block.last_ns)
        expected = total * share * (1 - share)
        ratio = (block.requests - total * share) ** 2 / expected
        weight = 1 - math.exp(-block.length_ns / _BURSTS_NS)
        return after, burstiness + weight * (ratio - burstiness)


@dataclass(slots=True, kw_only=True)
class Capacities:
    """Device seconds per second that one replica sustains, by the number of replicas.

    Args:
        predicted: capacity of a replica that is never idle; None if not known.
        targets: the TTFT targets of the service.
        learnt: observed loads and burstiness.
        shared: True if the replicas share one queue, because the router balances their load.
    """

    predicted: ReplicaCapacity | None
    targets: Sequence[TTFTTarget]
    learnt: LearntCapacity
    shared: bool
    _known: dict[int, float] = field(default_factory=dict)

    def predicted_load(self, replicas: int) -> float:
        """Return the load of one of so many replicas, without the correction."""
        if self.predicted is None:
            return BUSY
        sharing = max(1, replicas) if self.shared else 1
        if sharing not in self._known:
            self._known[sharing] = sustained_load(
                self.predicted,
                self.targets,
                replicas=sharing,
                burstiness=min(max(1.0, self.learnt.burstiness), _MAX_BURSTINESS),
                most=BUSY,
            )
        return self._known[sharing]

    def of(self, replicas: int) -> float:
        """Return the load that one of so many replicas sustains."""
        return self.predicted_load(replicas) * self.learnt.factor

    def requests_per_s(self, replicas: int) -> float | None:
        """Return the requests per second that so many replicas sustain; None if not known."""
        if self.predicted is None:
            return None
        return replicas * self.of(replicas) / self.predicted.device_s

    def fewest_for(self, load: float, *, usable: float = 1.0) -> int:
        """Return the fewest replicas that sustain a load with a share of their capacity."""

        def enough(replicas: int) -> bool:
            return math.ceil(load / (self.of(replicas) * usable)) <= replicas

        if load <= 0:
            return 0
        low = max(1, math.ceil(load / (BUSY * self.learnt.factor * usable)))
        if enough(low):
            return low
        # More replicas sustain at least as much each, so this many are enough.
        high = math.ceil(load / (self.of(low) * usable))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high
