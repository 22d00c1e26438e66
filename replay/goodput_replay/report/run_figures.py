"""The figures of a run: over time, and latencies by percentile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from goodput_core.units import NS_PER_MS
from goodput_replay.report.figures import (
    COLOURS,
    Draw,
    Figure,
    FigureSeries,
    FigureUnit,
    Mark,
    XAxis,
    numbers,
    place_of_share,
)
from goodput_replay.runs.columns import RunColumns
from goodput_replay.runs.formatting import format_ms, format_seconds
from goodput_replay.runs.summary import SLOSummary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from goodput_replay.report.timeline import SoFar, Timeline
    from goodput_replay.runs.columns import GapCounts

__all__ = ["MEASURES", "Curve", "class_label", "latency_figure", "run_curves", "time_figures"]

_POINTS: Final = 120
# Tokens of one read are microseconds apart. No target is that short, and a logarithmic axis down to
# them would compress the relevant latencies.
_MIN_MS: Final = 0.1
_MIN_LAG_MS: Final = 1e-3


def class_label(name: str) -> str:
    """Return the name of a class for people; requests may have no class."""
    return name or "without a class"


def time_figures(
    timeline: Timeline,
    so_far: Mapping[str, SoFar],
    objectives: Mapping[str, float],
    *,
    lag_limit_ms: float | None,
    length_s: float | None = None,
) -> Iterator[Figure]:
    """Yield the figures over time.

    Args:
        timeline: the run over time.
        so_far: attainment until several times, by class.
        objectives: objective by class; classes without an objective are omitted.
        lag_limit_ms: limit of the p99 send lag; None in virtual time, which has no lag.
        length_s: length of the window if the timeline ends before it; None for a finished run.
    """
    over_time = partial(Figure, axis=XAxis.TIME, x=_steps_x(timeline), end=length_s)
    each = format_seconds(timeline.width_s)
    groups = list(enumerate(timeline.classes))
    marks = tuple(
        Mark(
            label=f"{objectives[one.name] * 100:.6g}%",
            value=objectives[one.name],
            colour=_colour(group),
            group=group,
        )
        for group, one in groups
        if one.name in objectives
    )
    yield _draw_so_far(timeline, so_far, marks, length_s)
    yield over_time(
        name="attainment",
        title="Attainment",
        note=f"share of the requests scheduled in each {each}; dashed: the objective",
        unit=FigureUnit.SHARE,
        series=[
            _step(class_label(one.name), _colour(group), one.attainment, group)
            for group, one in groups
        ],
        marks=marks,
    )
    yield over_time(
        name="goodput",
        title="Goodput",
        note="requests that met their targets, stacked; the space below the line is missed "
        "requests",
        unit=FigureUnit.RATE,
        series=[
            *(
                _stack(class_label(one.name), _colour(group), one.good / timeline.widths_s, group)
                for group, one in groups
            ),
            _step("judged", "ink", timeline.judged / timeline.widths_s),
        ],
    )
    yield over_time(
        name="misses",
        title="Misses",
        note="each request by its first reason, stacked",
        unit=FigureUnit.RATE,
        series=[
            _stack(reason.value, _colour(index), counts / timeline.widths_s)
            for index, (reason, counts) in enumerate(timeline.misses.items())
        ],
        when_empty="No judged request missed a target.",
    )
    yield over_time(
        name="rates",
        title="Offered and served",
        note="requests by their scheduled arrival, complete responses by their end",
        unit=FigureUnit.RATE,
        series=[
            _step("offered", "ink", timeline.offered / timeline.widths_s),
            _step("served", "c0", timeline.served / timeline.widths_s),
        ],
    )
    yield over_time(
        name="in-flight",
        title="In flight",
        note="maximum number of requests sent and not ended",
        unit=FigureUnit.COUNT,
        series=[_step("in flight", "c0", timeline.in_flight.astype(np.float64))],
    )
    if lag_limit_ms is not None:
        yield over_time(
            name="lag",
            title="Send lag of the client",
            note="delay of sends, which is included in every latency; dashed: limit of the p99",
            unit=FigureUnit.MS,
            series=[
                _step("median", "c0", np.maximum(timeline.lag_p50_ms, _MIN_LAG_MS)),
                _step("maximum", "c1", np.maximum(timeline.lag_max_ms, _MIN_LAG_MS)),
            ],
            marks=[Mark(label=format_ms(lag_limit_ms), value=lag_limit_ms, colour="alert")],
        )


def _draw_so_far(
    timeline: Timeline,
    so_far: Mapping[str, SoFar],
    marks: tuple[Mark, ...],
    length_s: float | None,
) -> Figure:
    x = sorted({0, *(end for one in so_far.values() for end in one.end_s)})
    # Of the first seconds, the bounds are so wide that nothing else would be seen.
    settled = [
        lower
        for one in so_far.values()
        for end, lower in zip(one.end_s, one.lower, strict=True)
        if lower is not None and 2 * end >= x[-1]
    ]
    series = []
    for group, one in enumerate(timeline.classes):
        if one.name not in so_far:
            continue
        mine = so_far[one.name]
        place = {end: index for index, end in enumerate(mine.end_s)}

        def at(
            values: Sequence[float | None], place: Mapping[int, int] = place
        ) -> list[float | None]:
            shown = ((values[place[end]] if end in place else None) for end in x)
            return numbers(np.nan if value is None else value for value in shown)

        series.append(
            FigureSeries(
                label=class_label(one.name),
                colour=_colour(group),
                values=at(mine.share),
                draw=Draw.LINE,
                group=group,
                lower=at(mine.lower),
                upper=at(mine.upper),
            )
        )
    return Figure(
        name="so-far",
        title="Attainment so far",
        note="from the start of the window, with the bounds of a verdict; dashed: the objective",
        axis=XAxis.TIME,
        unit=FigureUnit.SHARE,
        x=x,
        series=series,
        marks=marks,
        lowest=min(settled, default=None),
        end=length_s,
    )


def _colour(index: int) -> str:
    return f"c{index % COLOURS}"


def _step(
    label: str, colour: str, values: NDArray[np.float64], group: int | None = None
) -> FigureSeries:
    return FigureSeries(label=label, colour=colour, values=_held(values), group=group)


def _stack(
    label: str, colour: str, values: NDArray[np.float64], group: int | None = None
) -> FigureSeries:
    return FigureSeries(
        label=label, colour=colour, values=_held(values), group=group, draw=Draw.STACK
    )


def _steps_x(timeline: Timeline) -> list[float]:
    return [value for value in numbers(timeline.edges_s.tolist()) if value is not None]


def _held(values: NDArray[np.float64]) -> list[float | None]:
    """Repeat the last value, so that the last step reaches the end of the window."""
    shown = numbers(values.tolist())
    return [*shown, *shown[-1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A latency to draw, with a main line, an optional dotted line and a target.

    Args:
        name: identifies its figure.
        title: measured quantity.
        note: explanation of the lines.
        main_ms: values of the main line.
        dotted_ms: values of the dotted line; None if it has no such values.
        dotted: name of the dotted line.
        target_ms: target of a class; None if it has none.
    """

    name: str
    title: str
    note: str
    main_ms: Callable[[RunColumns], NDArray[np.float64]]
    dotted_ms: Callable[[RunColumns], NDArray[np.float64]] | None
    dotted: str
    target_ms: Callable[[SLOSummary], int | None]


_TBT: Final = Measure(
    name="tbt",
    title="Time between tokens",
    note=(
        "the request's own p99, which a TBT target bounds; "
        "dotted: all gaps, those under 0.1 ms drawn there"
    ),
    main_ms=lambda columns: columns.tbt_p99_us / 1000,
    dotted_ms=None,
    dotted="all gaps",
    target_ms=lambda slo: slo.tbt_p99_ms,
)
MEASURES: Final = (
    Measure(
        name="ttft",
        title="Time to first token",
        note="from the scheduled arrival; dotted: from the actual send",
        main_ms=lambda columns: columns.ttft_ns / NS_PER_MS,
        dotted_ms=lambda columns: columns.ttft_from_send_ns / NS_PER_MS,
        dotted="from the send",
        target_ms=lambda slo: slo.ttft_ms,
    ),
    Measure(
        name="tpot",
        title="Time per output token",
        note="mean over each request, after its first token",
        main_ms=lambda columns: columns.tpot_ns / NS_PER_MS,
        dotted_ms=None,
        dotted="",
        target_ms=lambda slo: slo.tpot_ms,
    ),
    _TBT,
    Measure(
        name="e2e",
        title="End-to-end latency",
        note="complete responses, from the scheduled arrival",
        main_ms=lambda columns: columns.e2e_ns / NS_PER_MS,
        dotted_ms=None,
        dotted="",
        target_ms=lambda slo: slo.e2e_ms,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The distribution of a latency in one class.

    Args:
        group: index of the class.
        name: the class.
        values_ms: measured values in ascending order, or the upper edges of buckets.
        shares: share of all measurements up to each value.
        count: number of measurements.
        dotted: True for the dotted line beside the class's main line.
    """

    group: int
    name: str
    values_ms: NDArray[np.float64]
    shares: NDArray[np.float64]
    count: int
    dotted: bool = False


def run_curves(
    measure: Measure, columns: RunColumns, gaps: Mapping[str, GapCounts], names: Sequence[str]
) -> Iterator[Curve]:
    """Yield the distributions of one latency.

    Args:
        measure: the latency.
        columns: judged requests of the run.
        gaps: gaps between tokens by class.
        names: the classes, in the order of the page's groups.
    """
    for group, name in enumerate(names):
        mine = columns.of_class(name)
        yield _sorted_curve(measure.main_ms(columns)[mine], group, name)
        if measure.dotted_ms is not None:
            yield _sorted_curve(measure.dotted_ms(columns)[mine], group, name, dotted=True)
        if measure is _TBT and name in gaps and gaps[name].total:
            edges_us, shares = gaps[name].cumulative()
            yield Curve(
                group=group,
                name=name,
                values_ms=edges_us / 1000,
                shares=shares,
                count=gaps[name].total,
                dotted=True,
            )


def _sorted_curve(
    values_ms: NDArray[np.float64], group: int, name: str, *, dotted: bool = False
) -> Curve:
    measured = np.sort(values_ms[np.isfinite(values_ms)])
    return Curve(
        group=group,
        name=name,
        values_ms=measured,
        shares=(np.arange(len(measured)) + 1) / max(1, len(measured)),
        count=len(measured),
        dotted=dotted,
    )


def latency_figure(
    measure: Measure, curves: Sequence[Curve], slo_by_class: Mapping[str, SLOSummary]
) -> Figure:
    """Return the figure of one latency by percentile.

    The share of requests that met a target is where the line crosses the target.

    Args:
        measure: the latency.
        curves: its distributions.
        slo_by_class: targets by class.
    """
    shown = [curve for curve in curves if curve.count]
    lasts = {_last_place(curve) for curve in shown}
    places = np.unique([*np.linspace(0, max(lasts, default=1.0), _POINTS), *lasts])
    series = [
        FigureSeries(
            label=", ".join(filter(None, (class_label(curve.name), measure.dotted * curve.dotted))),
            colour=_colour(curve.group),
            values=numbers(_read_curve(curve, places).tolist()),
            draw=Draw.LINE,
            group=curve.group,
            dotted=curve.dotted,
        )
        for curve in shown
    ]
    marks = []
    for group, name in {curve.group: curve.name for curve in shown}.items():
        slo = slo_by_class.get(name)
        target_ms = None if slo is None else measure.target_ms(slo)
        if target_ms is not None:
            marks.append(
                Mark(
                    label=format_ms(target_ms), value=target_ms, colour=_colour(group), group=group
                )
            )
    return Figure(
        name=measure.name,
        title=measure.title,
        note=f"{measure.note}; dashed: the target" if marks else measure.note,
        axis=XAxis.PERCENTILE,
        unit=FigureUnit.MS,
        x=[round(place, 4) for place in places.tolist()],
        series=series,
        marks=marks,
    )


def _last_place(curve: Curve) -> float:
    """Return a place of the maximum, which is each quantile above 1 − 1/n of n measurements."""
    return place_of_share(1 - 1 / (2 * curve.count))


def _read_curve(curve: Curve, places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the value at each place; NaN beyond the maximum."""
    index = np.searchsorted(curve.shares, 1 - 10.0**-places - 1e-12, side="right")
    values = curve.values_ms[np.minimum(index, len(curve.values_ms) - 1)]
    return np.where(places <= _last_place(curve) + 1e-9, np.maximum(values, _MIN_MS), np.nan)
