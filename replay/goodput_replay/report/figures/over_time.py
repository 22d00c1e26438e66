"""Drawings over time: attainment, goodput, rates, requests in flight, send lag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from goodput_replay.report.figures.canvas import Canvas, colour_of, percent_axis, time_axis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from goodput_replay.report.timeline import Timeline

__all__ = [
    "draw_attainment",
    "draw_goodput",
    "draw_in_flight",
    "draw_lag",
    "draw_misses",
    "draw_rates",
]

# A logarithmic axis has no zero; smaller lags are drawn at this value.
_MIN_MS: Final = 1e-3


def draw_attainment(timeline: Timeline, objectives: Mapping[str, float]) -> str:
    """Draw the attainment of each class, and its objective as a dashed line.

    An interval without requests is a gap.

    Args:
        timeline: the run over time.
        objectives: objective by class; classes without an objective are omitted.
    """
    canvas = Canvas("Attainment over time, by class", y_label="attained")
    with canvas as axes:
        lowest = min(objectives.values(), default=1.0)
        for index, one in enumerate(timeline.classes):
            colour = colour_of(index)
            _draw_steps(axes, timeline, one.attainment, colour)
            lowest = float(np.nanmin(one.attainment, initial=lowest))
            if one.name in objectives:
                axes.axhline(objectives[one.name], color=colour, linestyle=(0, (4, 3)), linewidth=1)
        percent_axis(axes, lowest)
        time_axis(axes, float(timeline.edges_s[-1]))
    return canvas.svg()


def draw_goodput(timeline: Timeline) -> str:
    """Draw good requests per second, stacked by class, and a line of all judged requests."""
    canvas = Canvas("Goodput over time, stacked by class", y_label="requests per second")
    with canvas as axes:
        _draw_stack(axes, timeline, [one.good for one in timeline.classes])
        judged = sum((one.total for one in timeline.classes), np.zeros_like(timeline.offered))
        _draw_steps(axes, timeline, judged / timeline.widths_s, Canvas.ink, width=1.1)
        _scale_from_zero(axes, judged / timeline.widths_s)
        time_axis(axes, float(timeline.edges_s[-1]))
    return canvas.svg()


def draw_misses(timeline: Timeline) -> str:
    """Draw missed requests per second, stacked by first reason in the order of `MissReason`."""
    canvas = Canvas("Missed requests over time, by reason", y_label="requests per second")
    with canvas as axes:
        _draw_stack(axes, timeline, list(timeline.misses.values()))
        missed = sum(timeline.misses.values(), np.zeros_like(timeline.offered))
        _scale_from_zero(axes, missed / timeline.widths_s)
        time_axis(axes, float(timeline.edges_s[-1]))
    return canvas.svg()


def draw_rates(timeline: Timeline) -> str:
    """Draw offered requests and complete responses per second."""
    canvas = Canvas("Offered and served rate over time", y_label="requests per second")
    with canvas as axes:
        _draw_steps(axes, timeline, timeline.offered / timeline.widths_s, Canvas.ink, width=1.1)
        _draw_steps(axes, timeline, timeline.served / timeline.widths_s, colour_of(0))
        busier = np.maximum(timeline.offered, timeline.served)
        _scale_from_zero(axes, busier / timeline.widths_s)
        time_axis(axes, float(timeline.edges_s[-1]))
    return canvas.svg()


def draw_in_flight(timeline: Timeline) -> str:
    """Draw the maximum number of requests in flight by interval."""
    canvas = Canvas("Requests in flight over time", y_label="requests in flight")
    with canvas as axes:
        axes.fill_between(
            timeline.edges_s,
            _repeat_last(timeline.in_flight),
            step="post",
            color=colour_of(0),
            alpha=0.2,
            linewidth=0,
        )
        _draw_steps(axes, timeline, timeline.in_flight.astype(np.float64), colour_of(0))
        _scale_from_zero(axes, timeline.in_flight)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        time_axis(axes, float(timeline.edges_s[-1]))
    return canvas.svg()


def draw_lag(timeline: Timeline, limit_ms: float) -> str:
    """Draw the median and the maximum send lag, and the limit of the run's p99.

    Args:
        timeline: the run over time.
        limit_ms: limit of the p99 send lag.
    """
    canvas = Canvas("Send lag of the client over time", y_label="send lag (ms)")
    with canvas as axes:
        _draw_steps(axes, timeline, np.maximum(timeline.lag_p50_ms, _MIN_MS), colour_of(0))
        _draw_steps(
            axes, timeline, np.maximum(timeline.lag_max_ms, _MIN_MS), colour_of(1), width=1.1
        )
        axes.axhline(limit_ms, color=Canvas.alert, linestyle=(0, (4, 3)), linewidth=1.2)
        lowest = np.nanmin(timeline.lag_p50_ms, initial=limit_ms)
        highest = np.nanmax(timeline.lag_max_ms, initial=limit_ms)
        axes.set_ylim(max(lowest, _MIN_MS) / 1.5, highest * 1.5)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.minorticks_off()
        time_axis(axes, float(timeline.edges_s[-1]))
    return canvas.svg()


def _draw_steps(
    axes: Axes, timeline: Timeline, values: NDArray[np.float64], colour: str, *, width: float = 1.6
) -> None:
    axes.stairs(values, timeline.edges_s, baseline=None, color=colour, linewidth=width)


def _draw_stack(
    axes: Axes,
    timeline: Timeline,
    layers: Sequence[NDArray[np.int64]],
) -> None:
    base = np.zeros(len(timeline.widths_s))
    for index, layer in enumerate(layers):
        top = base + layer / timeline.widths_s
        axes.fill_between(
            timeline.edges_s,
            _repeat_last(base),
            _repeat_last(top),
            step="post",
            color=colour_of(index),
            alpha=0.75,
            linewidth=0,
        )
        base = top


def _repeat_last(values: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Repeat the last value, so that the last step reaches the end of the window."""
    return np.concatenate((values, values[-1:])).astype(np.float64)


def _scale_from_zero(axes: Axes, values: NDArray[np.float64] | NDArray[np.int64]) -> None:
    """Scale the vertical axis from 0 to just above the maximum; to 1 without values."""
    axes.set_ylim(0, float(values.max(initial=0)) * 1.06 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
