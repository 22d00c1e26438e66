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

__all__ = ["BUSY", "ArrivalBlocks", "Capacities", "LearntCapacity", "RecentBlocks"]

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
_PEAK_BLOCK_NS: Final = 20 * NS_PER_S
"""Minimum length of the blocks in which peaks are found."""
_PEAKS_NS: Final = 1800 * NS_PER_S
"""Peaks are remembered for this long."""
_PEAKS: Final = 3
"""A rate that was reached in this many separate peaks recurs."""
_ERRORS_OF_A_PEAK: Final = 3.0
"""Standard errors by which a block must differ from a rate to be above it or below it."""


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
        peak_per_s, peak_ns: requests per second of the bursts that recur, and the end of the last
            one; 0 if none recur.
        of_requests: True if both loads are requests per second, because no device is known.
    """

    proven: float = 0.0
    proven_ns: int = 0
    failed: float = 0.0
    failed_ns: int = 0
    burstiness: float = 1.0
    peak_per_s: float = 0.0
    peak_ns: int = 0
    of_requests: bool = False

    def in_unit(self, *, of_requests: bool) -> LearntCapacity:
        """Return this without loads in the other unit."""
        if self.of_requests is of_requests:
            return self
        return replace(self, proven=0.0, failed=0.0, of_requests=of_requests)

    def without_expired(self, now_ns: int) -> LearntCapacity:
        """Return this without the observations that are too old."""
        learnt = self
        if learnt.proven and now_ns - learnt.proven_ns > _REMEMBER_NS:
            learnt = replace(learnt, proven=0.0)
        if learnt.failed and now_ns - learnt.failed_ns > _REMEMBER_NS:
            learnt = replace(learnt, failed=0.0)
        if learnt.peak_per_s and now_ns - learnt.peak_ns > _PEAKS_NS:
            learnt = replace(learnt, peak_per_s=0.0)
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
        A miss at a higher load than an earlier one says nothing about the lower load, which
        expires in its own time.
        """
        if self.failed and share > self.failed:
            return self
        proven = min(self.proven, share * _BELOW_FAILED)
        return replace(self, failed=share, failed_ns=now_ns, proven=proven)

    def with_peak(self, peak_per_s: float, last_ns: int) -> LearntCapacity:
        """Return this after bursts of this rate recurred, the last one until this time."""
        if not peak_per_s or peak_per_s < self.peak_per_s:
            return self
        return replace(self, peak_per_s=peak_per_s, peak_ns=last_ns)

    @property
    def factor(self) -> float:
        """Correction of the predicted load."""
        factor = max(1.0, self.proven)
        return min(factor, self.most_sustained)

    @property
    def most_sustained(self) -> float:
        """The highest load that is not known to miss a target; infinite if none is."""
        return self.failed * _BELOW_FAILED if self.failed else math.inf


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


@dataclass(frozen=True, slots=True)
class _Block:
    """Arrivals of one block: its end, its requests, and its length in seconds."""

    end_ns: int
    requests: int
    length_s: float

    def bound_per_s(self, errors: float) -> float:
        """Return the rate plus so many standard errors of independent arrivals."""
        return (self.requests + errors * math.sqrt(self.requests)) / self.length_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentBlocks:
    """Arrivals of the last half hour in blocks of at least twenty seconds, to find bursts.

    A burst is shorter than the time in which replicas could follow it. If bursts recur, the
    replicas that serve them must be kept between them.

    Args:
        blocks: complete blocks, oldest first.
        requests, length_ns: arrivals so far, and length so far, of the block being counted.
    """

    blocks: tuple[_Block, ...] = ()
    requests: int = 0
    length_ns: int = 0

    def add(self, requests: int, interval_ns: int, now_ns: int) -> RecentBlocks:
        """Add the arrivals of an interval that ends now."""
        requests, length_ns = self.requests + requests, self.length_ns + interval_ns
        kept = tuple(b for b in self.blocks if b.end_ns > now_ns - _PEAKS_NS)
        if length_ns < _PEAK_BLOCK_NS:
            return RecentBlocks(blocks=kept, requests=requests, length_ns=length_ns)
        return RecentBlocks(blocks=(*kept, _Block(now_ns, requests, length_ns / NS_PER_S)))

    @property
    def is_new(self) -> bool:
        """True if the last added interval completed a block."""
        return not self.length_ns

    def recurring_peak(self) -> tuple[float, int]:
        """Return the requests per second of recurring bursts, and the end of the last burst.

        A rate recurs if three separate bursts exceeded it by more than chance, and the arrivals
        fell below it by more than chance between them. The rate of the bursts is the mean of the
        blocks that are not below the highest such rate by more than chance. 0 if none recurs.
        """
        highs = [b.bound_per_s(-_ERRORS_OF_A_PEAK) for b in self.blocks]
        lows = [b.bound_per_s(_ERRORS_OF_A_PEAK) for b in self.blocks]
        lowest = min(lows, default=0.0)
        for rate in sorted({high for high in highs if high > lowest}, reverse=True):
            if _count_peaks(highs, lows, rate) >= _PEAKS:
                inside = [b for b, low in zip(self.blocks, lows, strict=True) if low >= rate]
                seconds = sum(b.length_s for b in inside)
                return sum(b.requests for b in inside) / seconds, inside[-1].end_ns
        return 0.0, 0


def _count_peaks(highs: Sequence[float], lows: Sequence[float], rate: float) -> int:
    """Count the peaks that reach a rate; between two, the arrivals must fall below it."""
    peaks, inside = 0, False
    for high, low in zip(highs, lows, strict=True):
        if high >= rate:
            peaks += not inside
            inside = True
        elif low < rate:
            inside = False
    return peaks


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

    def known(self, replicas: int) -> float | None:
        """Return the load that one of so many replicas is known to sustain."""
        return self.of(replicas)

    def requests_per_s(self, replicas: int) -> float | None:
        """Return the requests per second that so many replicas sustain; None if not known."""
        if self.predicted is None:
            return None
        return replicas * self.of(replicas) / self.predicted.device_s

    def fewest_for_peaks(self) -> int:
        """Return the fewest replicas that sustain the bursts that recur; 0 if none recur."""
        if self.predicted is None or not self.learnt.peak_per_s:
            return 0
        # Within a burst, arrivals are independent.
        within = Capacities(
            predicted=self.predicted,
            targets=self.targets,
            learnt=replace(self.learnt, burstiness=1.0),
            shared=self.shared,
        )
        return within.fewest_for(self.learnt.peak_per_s * self.predicted.device_s)

    def fewest_for_queue(
        self,
        load: float,  # noqa: ARG002 - the engine orders or drops late requests
        waiting: int,  # noqa: ARG002 - as above
        replicas: int,  # noqa: ARG002 - as above
        startup_ns: int,  # noqa: ARG002 - as above
    ) -> int:
        """Return the fewest replicas that also serve a long queue; 0 if it is no demand."""
        return 0

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
