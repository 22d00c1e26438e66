"""The figures of the server's metrics, on the time axis of the client's figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

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

__all__ = ["describe_sources", "server_figures", "server_table"]

_MAX_INTERVALS: Final = 120
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
    every_s = metrics.every_ns / NS_PER_S
    per_interval = max(1, math.ceil(length_s / every_s / _MAX_INTERVALS))
    width_s = every_s * per_interval
    count = max(1, math.ceil(length_s / width_s))
    edges_s = np.minimum(np.arange(count + 1) * width_s, max(length_s, 1e-9))
    sources = sorted(
        (one for one in metrics.sources.values() if one.series), key=lambda one: one.name
    )
    for index, series in enumerate(_all_series(metrics)):
        rate = series.kind is SeriesKind.RATE
        # A rate belongs to the interval that ends with its scrape, which may be a little late.
        from_s = start_s + (every_s / 4 if rate else 0.0)
        lines = []
        for place, source in enumerate(sources):
            if series.name not in source.series:
                continue
            times, values = metrics.values(source.name, series.name)
            at_s = np.array(times) / NS_PER_S - from_s
            held = _cut(at_s, np.array(values), width_s, count, mean=rate)
            shown = numbers(held.tolist())
            lines.append(
                FigureSeries(
                    label=_shorten(source.name),
                    colour=f"c{place % COLOURS}",
                    # The last value is repeated, so that the last step reaches the end.
                    values=[*shown, *shown[-1:]],
                )
            )
        each = f"{'mean' if rate else 'maximum'} in each {format_seconds(width_s)}"
        yield Figure(
            name=f"server-{index}",
            title=series.title,
            note=", ".join(filter(None, (series.note, each if per_interval > 1 else ""))),
            axis=XAxis.TIME,
            unit=_UNITS[series.kind],
            x=[value for value in numbers(edges_s.tolist()) if value is not None],
            series=lines,
            when_empty="No scraped page has had this metric.",
        )


def _all_series(metrics: ServerMetrics) -> Iterator[ServerSeries]:
    yield from SERIES
    for metric in metrics.metrics:
        kind = SeriesKind.RATE if is_counter(metric) else SeriesKind.LEVEL
        yield ServerSeries(name=metric, title=metric, note="", kind=kind)


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
