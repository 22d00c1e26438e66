"""Demanded device time: the arrivals of the last minutes, multiplied by the time of one request.

Demand is estimated from a count of arrivals, with a standard error that grows with the differences
between the requests. Decisions that take effect immediately use conservative bounds of the demand.
A trend is a rise that lasts, and neither a sudden step nor chance.

This module must not know the number of replicas or whether targets were met.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final

from goodput_core.histogram import LengthMix
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.control.capacity import ReplicaCapacity

__all__ = [
    "LONG_NS",
    "TREND_NS",
    "ArrivalSample",
    "Demand",
    "estimate_demand",
    "estimate_growth",
    "recent_lengths",
]

_NEWEST_NS: Final = 20 * NS_PER_S
_SHORT_NS: Final = 60 * NS_PER_S
LONG_NS: Final = 300 * NS_PER_S
_ERRORS_TO_BOUND: Final = 2.0
"""Standard errors between an estimated rate and its conservative bound."""
_ERRORS_OF_A_STEP: Final = 4.0
"""The same for the latest seconds and for a trend, which are estimated again in each interval."""
_MOST_ERROR: Final = 0.1
"""Largest standard error of the latest demand, as a share of it."""
_SPANS: Final = 4
"""The demand must grow from each of the last four spans to the next."""
_MIN_SPAN_NS: Final = 30 * NS_PER_S
_SPANS_NS: Final = (75 * NS_PER_S, 150 * NS_PER_S)
"""Longer spans, which find a ramp that is slow or has few requests."""
TREND_NS: Final = _SPANS * _SPANS_NS[-1]
"""Minimum time for which samples are kept."""
_SLOPE_WEIGHTS: Final = (-0.3, -0.1, 0.1, 0.3)
"""Weights of four equally spaced values in the slope of the line through them (least squares)."""
_MOST_RESIDUALS: Final = 6.0
"""Sum of the squared residuals of that line, in standard errors, that chance exceeds in 5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSample:
    """Traffic of one interval.

    Args:
        at_ns: end of the interval.
        interval_ns: length of the interval.
        requests: arrivals.
        finished: lengths of the requests that finished.
        in_flight: requests that have not ended.
        ready: routable replicas.
        missed: ended requests that missed a target.
    """

    at_ns: int
    interval_ns: int
    requests: int
    finished: LengthMix
    in_flight: int = 0
    ready: int = 0
    missed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Demanded device seconds per second.

    Args:
        lower: the largest of the lower bounds over twenty seconds, one minute and five.
        likely: the larger of the means over one minute and over five.
        newest: the mean over twenty seconds.
        latest: the mean over one minute, or over the time with enough requests for an estimate if
            that is longer, at most five minutes.
        steady: the mean over five minutes.
        risen: the mean over twenty seconds if the demand has just made a step up, otherwise
            `likely`; at least `likely`.
        sustained: lower bound over five minutes.
        upper: the larger of the upper bounds over one minute and over five.
    """

    lower: float
    likely: float
    newest: float
    latest: float
    steady: float
    risen: float
    sustained: float
    upper: float


def estimate_demand(
    samples: Sequence[ArrivalSample], capacity: ReplicaCapacity, now_ns: int
) -> Demand:
    """Estimate the current demand; 0 without arrivals."""
    newest, newest_error = _measure_rate(samples, capacity, now_ns - _NEWEST_NS, now_ns)
    short, short_error = _measure_rate(samples, capacity, now_ns - _SHORT_NS, now_ns)
    long, long_error = _measure_rate(samples, capacity, now_ns - LONG_NS, now_ns)
    sustained = max(0.0, long - _ERRORS_TO_BOUND * long_error)
    lowest = newest - _ERRORS_OF_A_STEP * newest_error
    likely = max(short, long)
    return Demand(
        lower=max(sustained, short - _ERRORS_TO_BOUND * short_error, lowest),
        likely=likely,
        newest=newest,
        latest=_measure_latest(samples, capacity, now_ns),
        steady=long,
        risen=max(likely, newest) if lowest > short else likely,
        sustained=sustained,
        upper=max(short + _ERRORS_TO_BOUND * short_error, long + _ERRORS_TO_BOUND * long_error),
    )


def estimate_growth(
    samples: Sequence[ArrivalSample], capacity: ReplicaCapacity, now_ns: int, horizon_ns: int
) -> float:
    """Estimate the growth of the demand until the horizon has passed; 0 without a clear trend.

    The time before is divided into four spans. The demand must grow from each span to the next by
    more than a standard error: a ramp grows in all three transitions, a sudden step in at most two.
    The four must be near a line whose slope exceeds chance. Chance may add a third transition to
    the two of a step, so a step must not explain the arrivals better than a rise. Spans of half a
    horizon find a steep ramp soonest, longer ones find a ramp of few requests.
    """
    if not samples:
        return 0.0
    # A span that contains no end of an interval would look like a pause.
    shortest_ns = max(horizon_ns // 2, _MIN_SPAN_NS, *(s.interval_ns for s in samples))
    spans_ns = {shortest_ns, 2 * shortest_ns, *(s for s in _SPANS_NS if s > shortest_ns)}
    growth = max(_growth_per_ns(samples, capacity, now_ns, span_ns) for span_ns in spans_ns)
    return growth * (horizon_ns + _SHORT_NS / 2)  # from the middle of the last minute


def _growth_per_ns(
    samples: Sequence[ArrivalSample], capacity: ReplicaCapacity, now_ns: int, span_ns: int
) -> float:
    """Return the least growth from one of four spans to the next; 0 without a clear trend."""
    if samples[0].at_ns - samples[0].interval_ns > now_ns - _SPANS * span_ns:
        return 0.0
    # A span without arrivals is as uncertain as one with a single arrival.
    least_error = capacity.device_s * math.sqrt(capacity.spread) * NS_PER_S / span_ns
    rates: list[float] = []
    errors: list[float] = []
    for span in range(_SPANS, 0, -1):
        end_ns = now_ns - (span - 1) * span_ns
        rate, error = _measure_rate(samples, capacity, end_ns - span_ns, end_ns)
        rates.append(rate)
        errors.append(max(error, least_error))
    growths = [after - before for before, after in pairwise(rates)]
    if any(g <= math.hypot(*both) for g, both in zip(growths, pairwise(errors), strict=True)):
        return 0.0
    slope = sum(w * rate for w, rate in zip(_SLOPE_WEIGHTS, rates, strict=True))
    slope_error = math.hypot(*(w * e for w, e in zip(_SLOPE_WEIGHTS, errors, strict=True)))
    middle = sum(rates) / _SPANS - slope * (_SPANS - 1) / 2
    residuals = [
        (rate - middle - slope * i) / error
        for i, (rate, error) in enumerate(zip(rates, errors, strict=True))
    ]
    is_line = sum(r * r for r in residuals) <= _MOST_RESIDUALS
    is_clear = is_line and slope > _ERRORS_OF_A_STEP * slope_error
    if not is_clear or _is_step(samples, capacity, now_ns - _SPANS * span_ns):
        return 0.0
    return min(growths) / span_ns


def _is_step(samples: Sequence[ArrivalSample], capacity: ReplicaCapacity, begin_ns: int) -> bool:
    """Return True if a sudden step explains the arrivals better than a rise that still lasts.

    A step has two constant rates, and a rise a constant rate and then a line. Both may begin at any
    sample. The better fit of the step must exceed chance by two standard errors.
    """
    inside = [s for s in samples if s.at_ns > begin_ns]
    total = _RateSums()
    parts: list[tuple[_RateSums, float]] = []  # the sums before each sample, and its begin
    for sample in inside:
        begin_s = (sample.at_ns - sample.interval_ns - begin_ns) / NS_PER_S
        parts.append((total, begin_s))
        total = total.plus(sample.interval_ns / NS_PER_S, begin_s, sample.requests)
    step = max((total.explained_by_step(part) for part, _ in parts[1:]), default=0.0)
    rise = max((total.explained_by_rise(part, begin_s) for part, begin_s in parts), default=0.0)
    mean = total.requests / total.seconds if inside else 0.0
    return step - rise > _ERRORS_TO_BOUND**2 * mean * capacity.spread


@dataclass(frozen=True, slots=True)
class _RateSums:
    """Sums over samples for a fit by least squares, each sample weighted by its length.

    Args:
        seconds: lengths of the samples.
        requests: their requests.
        time_s, time_squares: the middles of the samples and their squares, times the lengths.
        time_requests: the middles times the requests.
    """

    seconds: float = 0.0
    requests: float = 0.0
    time_s: float = 0.0
    time_squares: float = 0.0
    time_requests: float = 0.0

    def plus(self, seconds: float, begin_s: float, requests: int) -> _RateSums:
        """Return the sums with one more sample."""
        middle_s = begin_s + seconds / 2
        return _RateSums(
            self.seconds + seconds,
            self.requests + requests,
            self.time_s + seconds * middle_s,
            self.time_squares + seconds * middle_s**2,
            self.time_requests + requests * middle_s,
        )

    def explained_by_step(self, before: _RateSums) -> float:
        """Return by how much a step after these samples lowers the squared deviations."""
        after_s = self.seconds - before.seconds
        change = before.requests / before.seconds - (self.requests - before.requests) / after_s
        return change**2 * before.seconds * after_s / self.seconds

    def explained_by_rise(self, before: _RateSums, begin_s: float) -> float:
        """Return the same for a constant rate before this time, and a line after it."""
        seconds, time_s = self.seconds - before.seconds, self.time_s - before.time_s
        requests = self.requests - before.requests
        risen = time_s - begin_s * seconds
        squares = self.time_squares - before.time_squares
        squares += begin_s**2 * seconds - 2 * begin_s * time_s
        product = self.time_requests - before.time_requests - begin_s * requests
        varied = squares - risen**2 / self.seconds
        together = product - risen * self.requests / self.seconds
        return together**2 / varied if varied > 0 else 0.0


def recent_lengths(samples: Sequence[ArrivalSample], now_ns: int) -> LengthMix:
    """Return the lengths of the requests that finished in the last five minutes."""
    recent = (s.finished.bins for s in samples if s.at_ns > now_ns - LONG_NS)
    return LengthMix.of(chain.from_iterable(recent))


def _measure_latest(
    samples: Sequence[ArrivalSample], capacity: ReplicaCapacity, now_ns: int
) -> float:
    """Return the demand of the shortest time, from one to five minutes, that is not all chance."""
    span_ns, requests = 0, 0
    for sample in reversed(samples):
        span_ns = now_ns - sample.at_ns + sample.interval_ns
        requests += sample.requests
        if requests * _MOST_ERROR**2 >= capacity.spread:
            break
    span_ns = min(max(span_ns, _SHORT_NS), LONG_NS)
    return _measure_rate(samples, capacity, now_ns - span_ns, now_ns)[0]


def _measure_rate(
    samples: Sequence[ArrivalSample], capacity: ReplicaCapacity, begin_ns: int, end_ns: int
) -> tuple[float, float]:
    """Return the demanded device seconds per second in (begin, end], and the standard error."""
    inside = [s for s in samples if begin_ns < s.at_ns <= end_ns]
    seconds = sum(s.interval_ns for s in inside) / NS_PER_S
    requests = sum(s.requests for s in inside)
    if not requests:
        return 0.0, 0.0
    mean = requests * capacity.device_s / seconds
    return mean, mean * math.sqrt(capacity.spread / requests)
