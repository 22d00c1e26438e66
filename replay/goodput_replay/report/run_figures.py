"""The figures of a run over time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_replay.report.figures import (
    COLOURS,
    Draw,
    Figure,
    FigureSeries,
    FigureUnit,
    Mark,
    XAxis,
    numbers,
)
from goodput_replay.runs.formatting import format_ms, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from goodput_replay.report.timeline import SoFar, Timeline

__all__ = ["class_label", "group_colour", "time_figures"]

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
            colour=group_colour(group),
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
            _step(class_label(one.name), group_colour(group), one.attainment, group)
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
                _stack(
                    class_label(one.name), group_colour(group), one.good / timeline.widths_s, group
                )
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
            _stack(reason.value, group_colour(index), counts / timeline.widths_s)
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
                colour=group_colour(group),
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


def group_colour(index: int) -> str:
    """Return the colour of a group of the page, by its index."""
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
