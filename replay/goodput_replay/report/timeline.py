"""Divide a run into equal intervals, for the charts over time.

There are at most 120 intervals, or one per hour in longer runs, so the size of a report hardly
depends on the length of the run. A request belongs to the interval of its scheduled arrival, a
response to the interval of its end. The attainment so far, with the bounds of a verdict, is
computed at 60 times at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.intervals import WindowEstimate
from goodput_core.slo.judging import JudgementKind, MissReason
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.report.in_flight import InFlightSearch
from goodput_replay.runs.columns import read_parts
from goodput_replay.statistics.rank_search import RankSearch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from goodput_replay.runs.columns import RunColumns

__all__ = [
    "AttainmentReader",
    "ClassTimeline",
    "SecondsReader",
    "SoFar",
    "Timeline",
    "TimelineReader",
    "attainment_so_far",
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
        widths_s: length of each interval; that of the last is 0.5 to 1.5 times the others'.
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
    parts: Iterable[RunColumns], names: tuple[str, ...], *, start_s: float, length_s: float
) -> Timeline:
    """Divide the window into intervals.

    Args:
        parts: judged requests; passed over several times.
        names: names of the classes.
        start_s: start of the window, seconds since the run's time zero.
        length_s: length of the window.
    """
    reader = TimelineReader(names, start_s=start_s, length_s=length_s)
    read_parts(parts, [reader])
    return reader.timeline()


class AttainmentReader:
    """Counts the judged requests of each class by interval of the window; a `PartReader`.

    Args:
        names: names of the classes.
        start_s: start of the window, seconds since the run's time zero.
        length_s: length of the window.
    """

    def __init__(self, names: Iterable[str], *, start_s: float, length_s: float) -> None:
        self._start_s = start_s
        self._length_s = length_s
        self._count = len(interval_edges(length_s)) - 1
        self._good = {name: np.zeros(self._count, dtype=np.int64) for name in names}
        self._total = {name: np.zeros(self._count, dtype=np.int64) for name in self._good}
        self.finished = False

    def add(self, part: RunColumns) -> None:
        """Add the next part."""
        interval = self.interval(part)
        good = part.of_kind(JudgementKind.ATTAINED)
        judged = good | part.of_kind(JudgementKind.MISSED)
        for name in self._good:
            mine = part.of_class(name)
            self._good[name] += _count(interval, good & mine, self._count)
            self._total[name] += _count(interval, judged & mine, self._count)

    def end_pass(self) -> None:
        """End the only pass."""
        self.finished = True

    def interval(self, part: RunColumns) -> NDArray[np.int64]:
        """Return the interval of each request."""
        since_start_s = part.scheduled_ns / NS_PER_S - self._start_s
        index = (since_start_s // _interval_width(self._length_s)).astype(np.int64)
        return np.clip(index, 0, self._count - 1)

    def classes(self) -> tuple[ClassTimeline, ...]:
        """Return the counts of each class, in the order of the names."""
        return tuple(
            ClassTimeline(name=name, good=good, total=self._total[name])
            for name, good in self._good.items()
        )


class TimelineReader:
    """Divides the window of a run into intervals; a `PartReader`.

    Args:
        names: names of the classes.
        start_s: start of the window, seconds since the run's time zero.
        length_s: length of the window.
    """

    def __init__(self, names: tuple[str, ...], *, start_s: float, length_s: float) -> None:
        self._start_s = start_s
        self._length_s = length_s
        self._edges_s = interval_edges(length_s)
        count = len(self._edges_s) - 1
        self._first_pass = True
        self._attainment = AttainmentReader(names, start_s=start_s, length_s=length_s)
        self._offered = np.zeros(count, dtype=np.int64)
        self._served = np.zeros(count, dtype=np.int64)
        self._misses = {reason: np.zeros(count, dtype=np.int64) for reason in MissReason}
        self._lag_max_ms = np.full(count, np.nan)
        self._lag_p50 = RankSearch(count, _choose_medians)
        self._in_flight = InFlightSearch(self._edges_s)

    @property
    def finished(self) -> bool:
        """True if no further pass is needed."""
        return self._lag_p50.finished and self._in_flight.finished

    def add(self, part: RunColumns) -> None:
        """Add the next part."""
        interval = self._attainment.interval(part)
        lag_ms = part.lag_ns / NS_PER_MS
        end_s = part.end_ns / NS_PER_S - self._start_s
        if self._first_pass:
            self._attainment.add(part)
            self._count(part, interval, end_s)
            was_sent = np.isfinite(lag_ms)
            np.fmax.at(self._lag_max_ms, interval[was_sent], lag_ms[was_sent])
        if not self._lag_p50.finished:
            for index in np.unique(interval).tolist():
                self._lag_p50.add(index, lag_ms[interval == index])
        if not self._in_flight.finished:
            self._in_flight.add(part.sent_ns / NS_PER_S - self._start_s, end_s)

    def end_pass(self) -> None:
        """End a pass over all parts."""
        self._first_pass = False
        for search in (self._lag_p50, self._in_flight):
            if not search.finished:
                search.end_pass()

    def timeline(self) -> Timeline:
        """Return the timeline, once the reader has finished."""
        lag_p50_ms = np.full(len(self._offered), np.nan)
        for index in range(len(lag_p50_ms)):
            if self._lag_p50.count(index):
                lag_p50_ms[index] = self._lag_p50.values(index)[0]
        return Timeline(
            edges_s=self._edges_s,
            widths_s=np.diff(self._edges_s),
            classes=self._attainment.classes(),
            offered=self._offered,
            served=self._served,
            in_flight=self._in_flight.maxima,
            misses={reason: counts for reason, counts in self._misses.items() if counts.any()},
            lag_p50_ms=lag_p50_ms,
            lag_max_ms=self._lag_max_ms,
        )

    def _count(
        self, part: RunColumns, interval: NDArray[np.int64], end_s: NDArray[np.float64]
    ) -> None:
        count = len(self._offered)
        self._offered += np.bincount(interval, minlength=count)
        served = part.of_outcome(Outcome.OK) & (end_s >= 0) & (end_s <= self._length_s)
        self._served += np.histogram(end_s[served], bins=self._edges_s)[0]
        for reason in MissReason:
            self._misses[reason] += _count(interval, part.of_first_reason(reason), count)


def interval_edges(length_s: float) -> NDArray[np.float64]:
    """Return the starts of the intervals of a window, and its end; shape [num_intervals + 1].

    A rest of less than half an interval is a part of the last one, because the rate in a fraction
    of a second says nothing.
    """
    width = _interval_width(length_s)
    count = max(1, int(length_s / width + 0.5))
    edges = np.arange(count + 1, dtype=np.float64) * width
    edges[-1] = max(length_s, 1e-9)
    return edges


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


class SecondsReader:
    """Counts the judged requests of each class by second of the window; a `PartReader`.

    Args:
        names: names of the classes.
        start_s: start of the window, seconds since the run's time zero.
        length_s: length of the window.
    """

    def __init__(self, names: Iterable[str], *, start_s: float, length_s: float) -> None:
        length = max(1, int(np.ceil(length_s)))
        self._start_s = start_s
        self._counts = {name: np.zeros((2, length), dtype=np.int64) for name in names}
        self.finished = False

    def add(self, part: RunColumns) -> None:
        """Add the next part."""
        good = part.of_kind(JudgementKind.ATTAINED)
        judged = good | part.of_kind(JudgementKind.MISSED)
        second = (part.scheduled_ns / NS_PER_S - self._start_s).astype(np.int64)
        for name, counts in self._counts.items():
            mine = part.of_class(name)
            length = counts.shape[1]
            at = np.clip(second, 0, length - 1)
            counts[0] += _count(at, good & mine, length)
            counts[1] += _count(at, judged & mine, length)

    def end_pass(self) -> None:
        """End the only pass."""
        self.finished = True

    def counts(self, name: str) -> SecondCounts:
        """Return the counts of a class."""
        good, total = self._counts[name].tolist()
        return SecondCounts(good=good, total=total)


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


def _choose_medians(counts: Sequence[int]) -> list[list[int]]:
    """Return the nearest rank of the median of each group."""
    return [[(count + 1) // 2 - 1] if count else [] for count in counts]
