"""Divide a run into equal intervals, for the charts over time.

There are at most 120 intervals, or one per hour in longer runs, so the size of a report hardly
depends on the length of the run. A request belongs to the interval of its scheduled arrival, a
response to the interval of its end. The attainment so far, with the bounds of a verdict, is
computed at 60 times at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.intervals import WindowEstimate
from goodput_core.slo.judging import JudgementKind, MissReason
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from goodput_replay.runs.columns import RunColumns

__all__ = [
    "ClassTimeline",
    "SoFar",
    "Timeline",
    "attainment_so_far",
    "count_seconds",
    "cut_timeline",
    "interval_edges",
]

_WIDTHS_S: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)
_MAX_INTERVALS: Final = 120
_MAX_TIMES: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTimeline:
    """Counts of a class over time; every array has the shape [num_intervals]."""

    name: str
    good: NDArray[np.int64]
    total: NDArray[np.int64]

    @property
    def attainment(self) -> NDArray[np.float64]:
        """Good over total; NaN if no request was judged."""
        share: NDArray[np.float64] = np.where(
            self.total > 0, self.good / np.maximum(self.total, 1), np.nan
        )
        return share


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run over time; every array has the shape [num_intervals].

    Args:
        edges_s: start of each interval, and the end of the window; shape [num_intervals + 1].
        widths_s: length of each interval; the last may be shorter.
        classes: counts by class, in the requested order.
        offered: scheduled requests.
        served: complete responses.
        in_flight: maximum number of requests in flight.
        misses: missed requests by first reason; reasons without a miss are omitted.
        lag_p50_ms: median send lag; NaN if no request was sent.
        lag_max_ms: maximum send lag; NaN if no request was sent.
    """

    edges_s: NDArray[np.float64]
    widths_s: NDArray[np.float64]
    classes: tuple[ClassTimeline, ...]
    offered: NDArray[np.int64]
    served: NDArray[np.int64]
    in_flight: NDArray[np.int64]
    misses: dict[MissReason, NDArray[np.int64]]
    lag_p50_ms: NDArray[np.float64]
    lag_max_ms: NDArray[np.float64]

    @property
    def good(self) -> NDArray[np.int64]:
        """Requests of all classes that met their targets."""
        return sum((one.good for one in self.classes), np.zeros_like(self.offered))

    @property
    def judged(self) -> NDArray[np.int64]:
        """Requests of all classes that met or missed their targets."""
        return sum((one.total for one in self.classes), np.zeros_like(self.offered))

    @property
    def width_s(self) -> float:
        """Length of a full interval."""
        return float(self.widths_s[0])


def cut_timeline(
    columns: RunColumns, names: tuple[str, ...], *, start_s: float, length_s: float
) -> Timeline:
    """Divide the window into intervals.

    Args:
        columns: judged requests.
        names: names of the classes.
        start_s: start of the window, seconds since the run's time zero.
        length_s: length of the window.
    """
    edges = interval_edges(length_s)
    count, width = len(edges) - 1, _interval_width(length_s)
    since_start_s = columns.scheduled_ns / NS_PER_S - start_s
    interval = np.clip((since_start_s // width).astype(np.int64), 0, count - 1)
    good = columns.of_kind(JudgementKind.ATTAINED)
    judged = good | columns.of_kind(JudgementKind.MISSED)
    end_s = columns.end_ns / NS_PER_S - start_s
    served = columns.of_outcome(Outcome.OK) & (end_s >= 0) & (end_s <= length_s)
    lag_ms = columns.lag_ns / NS_PER_MS
    return Timeline(
        edges_s=edges,
        widths_s=np.diff(edges),
        classes=tuple(
            ClassTimeline(
                name=name,
                good=_count(interval, good & columns.of_class(name), count),
                total=_count(interval, judged & columns.of_class(name), count),
            )
            for name in names
        ),
        offered=_count(interval, np.ones(len(interval), dtype=np.bool_), count),
        served=np.histogram(end_s[served], bins=edges)[0].astype(np.int64),
        in_flight=_max_in_flight(columns.sent_ns / NS_PER_S - start_s, end_s, edges),
        misses=_count_misses(columns, interval, count),
        lag_p50_ms=_quantile_per_interval(interval, lag_ms, count, 0.5),
        lag_max_ms=_quantile_per_interval(interval, lag_ms, count, 1.0),
    )


def interval_edges(length_s: float) -> NDArray[np.float64]:
    """Return the starts of the intervals of a window, and its end; shape [num_intervals + 1]."""
    width = _interval_width(length_s)
    count = max(1, int(np.ceil(length_s / width)))
    return np.minimum(np.arange(count + 1, dtype=np.float64) * width, max(length_s, 1e-9))


def _interval_width(length_s: float) -> int:
    return next((w for w in _WIDTHS_S if length_s / w <= _MAX_INTERVALS), _WIDTHS_S[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SoFar:
    """The attainment of a class from the start of the window until several times.

    Args:
        end_s: the times, seconds since the start of the window.
        share: attainment until each time; None if no request was judged.
        lower, upper: bounds of the attainment, as a verdict on that part of the window uses them.
    """

    end_s: tuple[int, ...]
    share: tuple[float | None, ...]
    lower: tuple[float | None, ...]
    upper: tuple[float | None, ...]


def count_seconds(
    columns: RunColumns, name: str, *, start_s: float, length_s: float
) -> SecondCounts:
    """Return the judged requests of a class by second of the window."""
    length = max(1, int(np.ceil(length_s)))
    second = np.clip((columns.scheduled_ns / NS_PER_S - start_s).astype(np.int64), 0, length - 1)
    good = columns.of_kind(JudgementKind.ATTAINED) & columns.of_class(name)
    judged = good | (columns.of_kind(JudgementKind.MISSED) & columns.of_class(name))
    return SecondCounts(
        good=_count(second, good, length).tolist(), total=_count(second, judged, length).tolist()
    )


def attainment_so_far(counts: SecondCounts, *, confidence: float, outage_s: int = 0) -> SoFar:
    """Return the attainment and its bounds at up to 60 times of a window.

    Args:
        counts: judged requests of the window.
        confidence: confidence of each one-sided bound.
        outage_s: the longest outage that the bounds take into account.
    """
    length = len(counts.total)
    step = -(-length // _MAX_TIMES)
    ends = tuple(sorted({*range(step, length, step), length}))
    totals = list(accumulate(counts.total, initial=0))
    goods = list(accumulate(counts.good, initial=0))
    share: list[float | None] = []
    lower: list[float | None] = []
    upper: list[float | None] = []
    for end in ends:
        if not totals[end]:
            for bounds in (share, lower, upper):
                bounds.append(None)
            continue
        part = SecondCounts(good=counts.good[:end], total=counts.total[:end])
        interval = WindowEstimate(part, outage_s=outage_s).interval(confidence)
        share.append(goods[end] / totals[end])
        lower.append(interval.lower)
        upper.append(interval.upper)
    return SoFar(end_s=ends, share=tuple(share), lower=tuple(lower), upper=tuple(upper))


def _count(interval: NDArray[np.int64], chosen: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    return np.bincount(interval[chosen], minlength=count).astype(np.int64)


def _count_misses(
    columns: RunColumns, interval: NDArray[np.int64], count: int
) -> dict[MissReason, NDArray[np.int64]]:
    found = {
        reason: _count(interval, columns.of_first_reason(reason), count) for reason in MissReason
    }
    return {reason: counts for reason, counts in found.items() if counts.any()}


def _max_in_flight(
    sent_s: NDArray[np.float64], end_s: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the maximum number of requests in flight in each interval."""
    was_sent = np.isfinite(sent_s)
    starts = np.sort(sent_s[was_sent])
    ends = np.sort(np.where(np.isfinite(end_s), end_s, np.inf)[was_sent])
    # The number increases only at a send, so its maximum is at the start or at a send.
    times = np.concatenate((edges[:-1], starts))
    level = np.searchsorted(starts, times, side="right") - np.searchsorted(
        ends, times, side="right"
    )
    index = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, len(edges) - 2)
    most = np.zeros(len(edges) - 1, dtype=np.int64)
    np.maximum.at(most, index, level)
    return most


def _quantile_per_interval(
    interval: NDArray[np.int64], values: NDArray[np.float64], count: int, q: float
) -> NDArray[np.float64]:
    """Return a quantile of the values of each interval; NaN for an interval without values."""
    found = np.full(count, np.nan)
    finite = np.isfinite(values)
    order = np.argsort(interval[finite], kind="stable")
    ordered = values[finite][order]
    bounds = np.searchsorted(interval[finite][order], np.arange(count + 1))
    for index, (first, last) in enumerate(pairwise(bounds.tolist())):
        if first < last:
            found[index] = np.quantile(ordered[first:last], q, method="inverted_cdf")
    return found
