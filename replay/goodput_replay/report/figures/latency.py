"""Latency by percentile, one colour per class, with the target as a dashed line.

Each further nine has the same width on the horizontal axis, because targets are about the tail. The
share of requests that met a target is where the curve crosses the dashed line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from goodput_replay.report.figures.canvas import Canvas, colour_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Curve", "draw_latency"]

_POINTS: Final = 160
# Tokens of one read are microseconds apart. No target is that short, and a logarithmic axis down to
# them would compress the relevant latencies.
_MIN_MS: Final = 0.1
_TICKS: Final = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line of a drawing.

    Args:
        colour: index of the class.
        values_ms: measured values in ascending order, or the upper edges of buckets.
        shares: share of all measurements up to each value.
        count: number of measurements.
        thin: True for a thin dotted line beside the class's main line.
        target_ms: target of the class; None if it has none.
    """

    colour: int
    values_ms: NDArray[np.float64]
    shares: NDArray[np.float64]
    count: int
    thin: bool = False
    target_ms: float | None = None


def draw_latency(title: str, curves: Sequence[Curve]) -> str:
    """Draw the curves that have values.

    Args:
        title: measured latency, for the drawing's label.
        curves: at least one curve.
    """
    canvas = Canvas(f"{title} by percentile, by class", y_label="milliseconds")
    with canvas as axes:
        widest = 1.0
        for curve in curves:
            if not curve.count:
                continue
            places, values = _thin_out(curve)
            widest = max(widest, float(places[-1]))
            axes.plot(
                places,
                np.maximum(values, _MIN_MS),
                color=colour_of(curve.colour),
                linewidth=1.0 if curve.thin else 1.6,
                linestyle=(0, (1, 1.6)) if curve.thin else "-",
            )
        for curve in curves:
            if curve.target_ms is not None:
                colour = colour_of(curve.colour)
                axes.axhline(curve.target_ms, color=colour, linestyle=(0, (4, 3)), linewidth=1.1)
                axes.annotate(
                    f"{curve.target_ms:,.10g} ms",
                    (1, curve.target_ms),
                    xycoords=("axes fraction", "data"),
                    xytext=(-2, 3),
                    textcoords="offset points",
                    ha="right",
                    color=colour,
                )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=8))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlim(0, widest)
        ticks = [place for place in (_place(np.array(_TICKS))).tolist() if place <= widest]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: _format_percentile(place)))
        axes.set_xlabel("percentile")
    return canvas.svg()


def _thin_out(curve: Curve) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a bounded number of points of the curve: positions on the axis, and values."""
    # The maximum of n measurements is at 1 − 1/n.
    last = 1 - 1 / max(2, curve.count)
    places = np.linspace(0, float(_place(np.array([last]))[0]), _POINTS)
    index = np.searchsorted(curve.shares, 1 - 10.0**-places - 1e-12, side="right")
    return places, curve.values_ms[np.minimum(index, len(curve.values_ms) - 1)]


def _place(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the position of a share on the axis: 90 % at 1, 99 % at 2, 99.9 % at 3."""
    places: NDArray[np.float64] = -np.log10(1 - shares)
    return places


def _format_percentile(place: float) -> str:
    return f"{(1 - 10.0**-place) * 100:.5g}%"
