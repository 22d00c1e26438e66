"""The requests that one replica sustains, from observations alone.

Another server than Goodput's engine reports no step times, so its capacity cannot be predicted. Two
observations bound it: the highest rate of one replica that was served with slack, and the lowest
rate at which a target was missed. Between them, and without either, the capacity is unknown. So
replicas are added for a miss, or for a rate that is known to be too high, and removed down to a
rate that is known to be served. If no such rate is known, a part of the replicas is removed after a
long time with slack, which shows what the others sustain. An expected capacity, from a calibrated
profile, only adds replicas: a profile of other requests or another device must not remove any.

This module must not know step times, lengths of requests or the process that serves them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.control.capacity import ReplicaCapacity
from goodput_core.control.demand import LONG_NS
from goodput_core.control.learnt import Capacities
from goodput_core.control.slo_window import WINDOW_NS, TargetStatus
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.control.demand import ArrivalSample, Demand
    from goodput_core.control.observation import ServiceObservation, ServiceParams
    from goodput_core.control.token_budget import TokenBudgetDecision
    from goodput_core.histogram import LengthMix

__all__ = [
    "REQUEST_UNITS",
    "ObservedCapacities",
    "RecentLoad",
    "are_lighter",
    "fewest_observed",
    "recent_load",
]

REQUEST_UNITS: Final = ReplicaCapacity(device_s=1.0, spread=1.0, batch=0, feasible=True)
"""Demand in requests: each request is one unit, because its device time is unknown."""
_TRIAL_GROWTH: Final = 1.25
"""Growth of a replica's load that a trial with fewer replicas may cause, or that of one replica
fewer if it is more. Slack means that the targets were also met a fifth tighter."""
_TRIAL_SHARE: Final = 0.9
"""Share of the load that is known to be too much, an upper bound, up to which a trial may go."""
_MOST_OCCUPIED: Final = 0.9
"""Share of the batch and of the KV cache that must not be exceeded in such a trial."""
_RECENT_NS: Final = 60 * NS_PER_S
_FALL_NS: Final = WINDOW_NS + _RECENT_NS
"""Time after which a lower load is the one of all requests that are judged."""
_SPAN_NS: Final = 20 * NS_PER_S
_ERRORS: Final = 2.0
"""Standard errors between a rate and its upper bound."""
_LIGHTER: Final = 2 / 3
"""Requests are lighter if their mean prompt and their mean output are at most this share."""
_FEWEST_LENGTHS: Final = 50
"""Means of fewer requests are not compared."""
_LEAST_DRAIN_S: Final = 120.0
"""Replicas are not added to serve a queue sooner than this."""
_ALONE: Final = 0.5
"""Requests of one replica below which a missed TTFT has another cause than the load."""
_NEARLY_ALONE: Final = 2.0
"""The same for TPOT, which is nearly constant in small batches."""


@dataclass(slots=True, kw_only=True)
class ObservedCapacities(Capacities):
    """Requests per second that one replica sustains, from observations.

    Args:
        expected_per_s: expected capacity, which counts until a load with slack shows more; None if
            there is none.
    """

    expected_per_s: float | None = None

    def predicted_load(self, replicas: int) -> float:  # noqa: ARG002 - nothing is predicted
        """Return 1, so that learnt loads are requests per second."""
        return 1.0

    def of(self, replicas: int) -> float:  # noqa: ARG002 - a replica's load is all that is known
        """Return the load above which targets are known or expected to be missed, or infinity."""
        most = self.learnt.most_sustained
        if self.expected_per_s is None:
            return most
        return min(most, max(self.expected_per_s, _TRIAL_GROWTH * self.learnt.proven))

    def known(self, replicas: int) -> float | None:  # noqa: ARG002 - as above
        """Return the load that one replica is known to sustain; None if none is known."""
        return min(self.learnt.proven, self.learnt.most_sustained) or None

    def requests_per_s(self, replicas: int) -> float | None:
        """Return the requests per second that so many replicas are known or expected to sustain."""
        most, proven = self.learnt.most_sustained, self.learnt.proven
        if self.expected_per_s is not None:
            most = min(most, max(self.expected_per_s, proven))
        return replicas * (proven if math.isinf(most) else most) or None

    def fewest_for_peaks(self) -> int:
        """Return the fewest replicas that sustain the bursts that recur; 0 if none recur."""
        return self.fewest_for(self.learnt.peak_per_s)

    def fewest_for(self, load: float, *, usable: float = 1.0) -> int:
        """Return the fewest replicas that are not known to be too few for a load."""
        if load <= 0:
            return 0
        return max(1, math.ceil(load / (self.of(1) * usable) - 1e-9))

    def fewest_for_queue(self, load: float, waiting: int, replicas: int, startup_ns: int) -> int:
        """Return the fewest replicas that serve a load and a queue that outlasts a start-up.

        Such a server runs requests in the order of their arrival, so every request is late until
        the queue is served. 0 if no load is known to be too much, or the queue ends sooner.
        """
        most = self.of(1)
        if not waiting or math.isinf(most):
            return 0
        startup_s = max(startup_ns / NS_PER_S, _LEAST_DRAIN_S)
        left = waiting - (replicas * most - load) * startup_s
        return self.fewest_for(load + left / startup_s) if left > 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentLoad:
    """Requests of a service in the last minute.

    Args:
        in_flight: mean number of requests that had not ended.
        highest_per_s: upper bound of the arrivals per second in the busiest twenty seconds.
        ended_per_s: upper bound of the requests that ended per second in twenty seconds with the
            present replicas, which is what they complete if they are saturated; 0 if not known.
        replicas: the fewest routable replicas of the last five minutes, above 0, which may have
            served the requests that ended; 0 if there were none.
        missed: True if requests that ended in the last twenty seconds missed a target.
        drains: True if clearly fewer requests are in flight than a minute ago.
        falls: True if clearly fewer requests arrive than in the busiest of the minutes before.
    """

    in_flight: float
    highest_per_s: float
    ended_per_s: float
    replicas: int
    missed: bool
    drains: bool
    falls: bool

    def load_at_miss(self, demand: Demand) -> float | None:
        """Return an upper bound of the load of one replica that misses targets; None if not known.

        Requests are judged when they end, minutes after they arrived under a load that may have
        fallen since. While a queue drains, the load of the replicas is what they complete.
        """
        if not self.missed or not self.replicas or self.falls:
            return None
        if self.drains:
            return self.ended_per_s / self.replicas or None
        highest = max(demand.upper, self.highest_per_s)
        # Under overload, replicas complete fewer requests than arrive.
        return min(highest, self.ended_per_s or highest) / self.replicas

    def is_alone(self, budget: TokenBudgetDecision, *, replicas: int) -> bool:
        """True if a replica has too few requests for more replicas to meet the missed target."""
        slow = budget.tpot is TargetStatus.MISSED
        return self.in_flight < (_NEARLY_ALONE if slow else _ALONE) * replicas


def recent_load(samples: Sequence[ArrivalSample], now_ns: int) -> RecentLoad:
    """Return the load of the last minute.

    Requests that ended follow from arrivals and requests in flight, so the server's metrics are not
    needed. While a batch fills, fewer requests end than the replicas sustain. A span is therefore
    not counted if the requests in flight doubled in it, or if clearly more requests ended than in
    the span before.
    """
    inside = [s for s in samples if s.at_ns > now_ns - _RECENT_NS]
    highest = ended = 0.0
    for end in range(1, len(inside) + 1):
        begin = _begin_of_span(inside, end, _SPAN_NS)
        span = inside[begin:end]
        seconds = sum(s.interval_ns for s in span) / NS_PER_S
        arrived = sum(s.requests for s in span)
        highest = max(highest, _upper(arrived) / seconds)
        before = _begin_of_span(inside, begin, _SPAN_NS)
        if before == 0 or {s.ready for s in inside[before:end]} != {inside[-1].ready}:
            continue  # too short, or with other replicas
        old, mid, new = (inside[i - 1].in_flight for i in (before, begin, end))
        served = arrived + mid - new
        earlier = sum(s.requests for s in inside[before:begin]) + old - mid
        grows = served - earlier > _ERRORS * math.sqrt(max(1, served + earlier))
        if 2 * mid >= new > 0 and not grows:
            ended = max(ended, _upper(served) / seconds)
    in_flight = sum(s.in_flight for s in inside) / len(inside) if inside else 0.0
    return RecentLoad(
        in_flight=in_flight,
        highest_per_s=highest,
        ended_per_s=ended,
        replicas=min(
            (s.ready for s in samples if s.ready and s.at_ns > now_ns - LONG_NS), default=0
        ),
        missed=any(s.missed for s in inside[_begin_of_span(inside, len(inside), _SPAN_NS) :]),
        drains=bool(inside) and _upper(inside[-1].in_flight) < inside[0].in_flight,
        falls=_falls([s for s in samples if s.at_ns > now_ns - _FALL_NS]),
    )


def _falls(samples: Sequence[ArrivalSample]) -> bool:
    """True if the last minute has clearly fewer arrivals than the busiest minute."""
    rates: list[tuple[float, float]] = []
    for end in range(1, len(samples) + 1):
        span = samples[_begin_of_span(samples, end, _RECENT_NS) : end]
        seconds = sum(s.interval_ns for s in span) / NS_PER_S
        arrived = sum(s.requests for s in span)
        rates.append(
            ((arrived - _ERRORS * math.sqrt(arrived)) / seconds, _upper(arrived) / seconds)
        )
    return bool(rates) and rates[-1][1] < max(lower for lower, _ in rates)


def _begin_of_span(samples: Sequence[ArrivalSample], end: int, span_ns: int) -> int:
    """Return the first of the samples of the time before `samples[end]`."""
    begin = end
    while begin > 0 and samples[begin - 1].at_ns > samples[end - 1].at_ns - span_ns:
        begin -= 1
    return begin


def _upper(count: float) -> float:
    """Return a count plus two standard errors of independent events."""
    return max(0.0, count) + _ERRORS * math.sqrt(max(0.0, count))


def are_lighter(now: LengthMix, then: LengthMix | None) -> bool:
    """True if requests clearly cost less than earlier ones, in prompts and in outputs.

    What a token of either costs is unknown, so that shorter prompts say nothing if outputs are as
    long as before.
    """
    if then is None or min(now.requests, then.requests) < _FEWEST_LENGTHS:
        return False

    def means(mix: LengthMix) -> tuple[float, float]:
        computed = sum(b.input_tokens - b.cached_tokens for b in mix.bins)
        return computed / mix.requests, sum(b.output_tokens for b in mix.bins) / mix.requests

    return all(new <= _LIGHTER * old for new, old in zip(means(now), means(then), strict=True))


def fewest_observed(
    capacities: ObservedCapacities,
    demand: Demand,
    observation: ServiceObservation,
    budget: TokenBudgetDecision,
    params: ServiceParams,
) -> int:
    """Return the fewest replicas that are known to suffice, or that a trial may leave.

    At most the current number: more are added for other reasons.
    """
    current, ready = observation.desired_replicas, len(observation.ready)
    load = max(demand.latest, demand.steady)
    if not load:
        return 0
    known = capacities.known(current) or 0.0
    if ready > 1 and budget.slack_ns >= min(LONG_NS, params.stabilization_ns) > 0:
        growth = max(ready / (ready - 1), _TRIAL_GROWTH)
        if _has_room(observation, params, growth):
            most = _TRIAL_SHARE * capacities.learnt.most_sustained
            known = max(known, min(growth * load / ready, most))
    if not known:
        return current
    return min(current, max(1, math.ceil(load / known - 1e-9)))


def _has_room(observation: ServiceObservation, params: ServiceParams, growth: float) -> bool:
    """True if batches and KV caches have room for so much more load, as far as they are known.

    Requests take longer beside others, so their number grows faster than the load.
    """
    replicas = observation.fresh
    running = sum(r.running for r in replicas)
    used = sum(r.kv_used_blocks for r in replicas)
    total = sum(r.kv_total_blocks for r in replicas)
    occupied = max(
        running / (params.max_num_seqs * len(replicas)) if replicas else 0.0,
        used / total if total else 0.0,
    )
    return occupied * growth**2 <= _MOST_OCCUPIED
