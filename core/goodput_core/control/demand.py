"""How much device time traffic demands per second, and how sure that is.

Arrivals are counted, so a rate is only as good as the count is large, and requests are uneven:
a few long ones among many short ones make a minute look busier than the next. What is acted upon
at once is what the counts show conclusively; what must hold for a long time may be a mean.
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

    from goodput_core.control.capacity import Carried

__all__ = ["LONG_NS", "Arrivals", "Load", "growth", "load", "mix_of"]

_SHORT_NS: Final = 60 * NS_PER_S
LONG_NS: Final = 300 * NS_PER_S
_SURE: Final = 2.0
"""Standard errors between what was counted and what is acted upon at once."""
_SPANS: Final = 4
"""A trend is what the last four halves of the horizon agree upon."""
_LEAST_SPAN_NS: Final = 15 * NS_PER_S
"""None of them is shorter: in a few seconds a few requests more or less are chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """One interval's traffic.

    Args:
        at_ns: its end.
        interval_ns: how long it was.
        requests: that came.
        finished: lengths of those that were answered.
    """

    at_ns: int
    interval_ns: int
    requests: int
    finished: LengthMix


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Device seconds that are demanded per second.

    Args:
        least: so much at least, conclusively.
        likely: as counted: the larger of what a minute and five minutes say.
        sustained: so much at least over five minutes, conclusively.
        most: so much at most, conclusively, in the last minute and over five.
    """

    least: float
    likely: float
    sustained: float
    most: float


def load(samples: Sequence[Arrivals], carried: Carried, now_ns: int) -> Load:
    """What the samples demand; an empty stretch demands nothing."""
    short, short_error = _rate(samples, carried, now_ns - _SHORT_NS, now_ns)
    long, long_error = _rate(samples, carried, now_ns - LONG_NS, now_ns)
    sustained = max(0.0, long - _SURE * long_error)
    return Load(
        least=max(sustained, short - _SURE * short_error),
        likely=max(short, long),
        sustained=sustained,
        most=max(short + _SURE * short_error, long + _SURE * long_error),
    )


def growth(samples: Sequence[Arrivals], carried: Carried, now_ns: int, horizon_ns: int) -> float:
    """By how much the load will have grown when the horizon has passed, conclusively; at least 0.

    What was gained over twice the horizon must be conclusive, and each of its last three halves
    must have its part in it: a ramp grows in all of them, a sudden step in two at most. Of a
    horizon below half a minute twice as much is looked at: a minute.
    """
    span_ns = max(horizon_ns // 2, _LEAST_SPAN_NS)
    if not samples or samples[0].at_ns - samples[0].interval_ns > now_ns - _SPANS * span_ns:
        return 0.0
    rates = [
        _rate(samples, carried, now_ns - span * span_ns, now_ns - (span - 1) * span_ns)
        for span in range(_SPANS, 0, -1)
    ]
    (first, first_error), (last, last_error) = rates[0], rates[-1]
    if last - first <= _SURE * math.hypot(first_error, last_error):
        return 0.0
    gained = min(after - before for (before, _), (after, _) in pairwise(rates))
    return max(0.0, gained * horizon_ns / span_ns)


def mix_of(samples: Sequence[Arrivals], now_ns: int) -> LengthMix:
    """The lengths that were answered in the last five minutes."""
    recent = (s.finished.bins for s in samples if s.at_ns > now_ns - LONG_NS)
    return LengthMix.of(chain.from_iterable(recent))


def _rate(
    samples: Sequence[Arrivals], carried: Carried, begin_ns: int, end_ns: int
) -> tuple[float, float]:
    """Device seconds per second in (begin, end], and the standard error of that."""
    inside = [s for s in samples if begin_ns < s.at_ns <= end_ns]
    seconds = sum(s.interval_ns for s in inside) / NS_PER_S
    requests = sum(s.requests for s in inside)
    if not requests:
        return 0.0, 0.0
    mean = requests * carried.device_s / seconds
    return mean, mean * math.sqrt(carried.spread / requests)
