"""The figures of the server's metrics, on the time axis of the client's figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from goodput_core.units import NS_PER_S
from goodput_replay.report.figures import (
    COLOURS,
    Figure,
    FigureSeries,
    FigureUnit,
    XAxis,
    numbers,
)
from goodput_replay.runs.formatting import format_percent, format_rate, format_seconds
from goodput_replay.runs.server_metrics import SERIES, SeriesKind, ServerSeries, is_counter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from goodput_replay.runs.server_metrics import ServerMetrics

__all__ = ["compared_server_figures", "describe_sources", "server_figures", "server_table"]

_MAX_INTERVALS: Final = 120
_SUMMED: Final = {SeriesKind.REQUESTS, SeriesKind.RATE}
_UNITS: Final = {
    SeriesKind.REQUESTS: FigureUnit.COUNT,
    SeriesKind.LEVEL: FigureUnit.NUMBER,
    SeriesKind.SHARE: FigureUnit.PERCENT,
    SeriesKind.RATE: FigureUnit.RATE,
}


def server_figures(metrics: ServerMetrics, *, start_s: float, length_s: float) -> Iterator[Figure]:
    """Yield a figure for each series, with a line for each source that has it.

    Each interval has the maximum of a level or a share, and the mean of a rate. An interval without
    a successful scrape is a gap.

    Args:
        metrics: values of the run.
        start_s: start of the window, seconds since the run's time zero.
        length_s: length of the window.
    """
    intervals = _Intervals.of(metrics.every_ns, start_s, length_s)
    sources = sorted(
        (one for one in metrics.sources.values() if one.series), key=lambda one: one.name
    )
    for index, series in enumerate(_all_series(metrics.metrics)):
        lines = []
        for place, source in enumerate(sources):
            if series.name not in source.series:
                continue
            shown = numbers(_read_intervals(metrics, source.name, series, intervals).tolist())
            lines.append(
                FigureSeries(
                    label=_shorten(source.name),
                    colour=f"c{place % COLOURS}",
                    # The last value is repeated, so that the last step reaches the end.
                    values=[*shown, *shown[-1:]],
                )
            )
        yield _figure(index, series, intervals, lines)


def compared_server_figures(
    runs: Sequence[tuple[str, float, ServerMetrics | None]], *, length_s: float
) -> Iterator[Figure]:
    """Yield a figure for each series that a run has, with a line for each run.

    The line of a run is the sum of its sources, for a share and for a level that the user named
    their maximum.

    Args:
        runs: label, start of the window in seconds since the run's time zero, and values of each
            run; None for a run that was not scraped.
        length_s: length of the longest window.
    """
    scraped = [metrics for _, _, metrics in runs if metrics is not None]
    if not scraped:
        return
    every_ns = max(metrics.every_ns for metrics in scraped)
    named = dict.fromkeys(name for metrics in scraped for name in metrics.metrics)
    intervals = [_Intervals.of(every_ns, start_s, length_s) for _, start_s, _ in runs]
    for index, series in enumerate(_all_series(tuple(named))):
        lines = []
        for group, (label, _, metrics) in enumerate(runs):
            if metrics is None:
                continue
            values = [
                _read_intervals(metrics, source.name, series, intervals[group])
                for source in metrics.sources.values()
                if series.name in source.series
            ]
            if not values:
                continue
            adds = series.kind in _SUMMED
            shown = numbers((np.sum if adds else np.fmax.reduce)(values, axis=0).tolist())
            lines.append(
                FigureSeries(
                    label=label,
                    colour=f"c{group % COLOURS}",
                    values=[*shown, *shown[-1:]],
                    group=group,
                )
            )
        if lines:
            how = "sum" if series.kind in _SUMMED else "maximum"
            yield _figure(index, series, intervals[0], lines, f"{how} of all metrics pages")


class _Intervals(NamedTuple):
    """Equal intervals of a window.

    Args:
        start_s: start of the window, seconds since the run's time zero.
        every_s: interval between scrapes.
        width_s: length of an interval, a multiple of `every_s`.
        edges_s: starts of the intervals since the start of the window, and the end of the last.
    """

    start_s: float
    every_s: float
    width_s: float
    edges_s: NDArray[np.float64]

    @classmethod
    def of(cls, every_ns: int, start_s: float, length_s: float) -> _Intervals:
        every_s = every_ns / NS_PER_S
        width_s = every_s * max(1, math.ceil(length_s / every_s / _MAX_INTERVALS))
        count = max(1, math.ceil(length_s / width_s))
        edges_s = np.minimum(np.arange(count + 1) * width_s, max(length_s, 1e-9))
        return cls(start_s, every_s, width_s, edges_s)


def _figure(
    index: int,
    series: ServerSeries,
    intervals: _Intervals,
    lines: Sequence[FigureSeries],
    combined: str = "",
) -> Figure:
    """Return the figure of a series.

    Args:
        index: number of the series, for the name of the figure.
        series: the series.
        intervals: intervals of the lines.
        lines: the lines.
        combined: how a line combines several sources; empty if each has a line.
    """
    held = "mean" if series.kind is SeriesKind.RATE else "maximum"
    each = f"{held} in each {format_seconds(intervals.width_s)}"
    several = intervals.width_s > intervals.every_s
    return Figure(
        name=f"server-{index}",
        title=series.title,
        note=", ".join(filter(None, (series.note, combined, each if several else ""))),
        axis=XAxis.TIME,
        unit=_UNITS[series.kind],
        x=[value for value in numbers(intervals.edges_s.tolist()) if value is not None],
        series=list(lines),
        when_empty="No scraped page has had this metric.",
    )


def _all_series(metrics: Sequence[str]) -> Iterator[ServerSeries]:
    """Yield the known series, and those of metrics that the user named."""
    yield from SERIES
    for metric in metrics:
        kind = SeriesKind.RATE if is_counter(metric) else SeriesKind.LEVEL
        yield ServerSeries(name=metric, title=metric, note="", kind=kind)


def _read_intervals(
    metrics: ServerMetrics, source: str, series: ServerSeries, intervals: _Intervals
) -> NDArray[np.float64]:
    """Return the value of each interval; NaN for one without a successful scrape."""
    rate = series.kind is SeriesKind.RATE
    # A rate belongs to the interval that ends with its scrape, which may be a little late.
    from_s = intervals.start_s + (intervals.every_s / 4 if rate else 0.0)
    times, values = metrics.values(source, series.name)
    at_s = np.array(times) / NS_PER_S - from_s
    count = len(intervals.edges_s) - 1
    return _cut(at_s, np.array(values), intervals.width_s, count, mean=rate)


def _cut(
    at_s: NDArray[np.float64],
    values: NDArray[np.float64],
    width_s: float,
    count: int,
    *,
    mean: bool,
) -> NDArray[np.float64]:
    """Return the mean or the maximum of each interval; NaN for one without values."""
    inside = (at_s >= 0) & (at_s < count * width_s)
    interval, chosen = (at_s[inside] // width_s).astype(np.int64), values[inside]
    if mean:
        samples = np.bincount(interval, minlength=count)
        sums = np.bincount(interval, weights=chosen, minlength=count)
        return np.where(samples > 0, sums / np.maximum(samples, 1), np.nan)
    highest = np.full(count, -np.inf)
    np.maximum.at(highest, interval, chosen)
    return np.where(np.isfinite(highest), highest, np.nan)


def _format_number(value: float) -> str:
    return f"{value:,}"


def _shorten(source: str) -> str:
    return source.removeprefix("http://").removeprefix("https://").removesuffix("/metrics")


def server_table(figures: Sequence[Figure]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table with the values of the figures."""
    head = ["From"]
    columns: list[list[str]] = []
    formats = {
        FigureUnit.COUNT: _format_number,
        FigureUnit.NUMBER: _format_number,
        FigureUnit.PERCENT: format_percent,
        FigureUnit.RATE: format_rate,
    }
    for figure in figures:
        for line in figure.series:
            head.append(f"{figure.title}: {line.label}")
            columns.append(
                ["–" if v is None else formats[figure.unit](v) for v in line.values[:-1]]
            )
    if not columns:
        return head, []
    starts = [format_seconds(x) for x in figures[0].x[:-1]]
    return head, [list(row) for row in zip(starts, *columns, strict=True)]


def describe_sources(metrics: ServerMetrics | None) -> dict[str, object]:
    """Return the variables of the template `parts/scrapes.html.j2`; None if nothing is scraped."""
    sources = [] if metrics is None else list(metrics.sources.values())
    return {
        "pages": len(sources),
        "every_s": 0.0 if metrics is None else metrics.every_ns / NS_PER_S,
        "failing": [one for one in sources if one.failed],
    }
