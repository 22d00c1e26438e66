"""The data of charts: values that `charts.js` draws, without knowledge of runs or services.

A figure has one horizontal axis, and series of one unit. The browser stacks, formats and colours
them. FigureSeries of a group are shown and hidden together in all figures of a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = [
    "COLOURS",
    "Draw",
    "Figure",
    "FigureSeries",
    "FigureUnit",
    "Mark",
    "XAxis",
    "numbers",
    "place_of_share",
]

COLOURS: Final = 8
"""Number of colours of classes in `style.css`: --c0, --c1, …"""

_DIGITS: Final = 6


class XAxis(StrEnum):
    """Meaning of the horizontal axis."""

    TIME = "time"
    """Seconds. Each value of a step or a stack holds until the next place."""
    CLOCK = "clock"
    """Unix time in seconds, shown as the time of day; otherwise as TIME."""
    PERCENTILE = "percentile"
    """Places of `place_of_share`: each further nine has the same width."""


class FigureUnit(StrEnum):
    """Unit of the vertical axis."""

    SHARE = "share"
    """0 to 1, drawn as percentages up to 100 %."""
    PERCENT = "percent"
    """0 to 1, drawn as percentages from 0."""
    RATE = "rate"
    """Per second, from 0."""
    COUNT = "count"
    """A number of things, from 0."""
    NUMBER = "number"
    """Any number, from 0."""
    MS = "ms"
    """Milliseconds on a logarithmic axis; values must be above 0."""


class Draw(StrEnum):
    """How a series is drawn."""

    STEP = "step"
    LINE = "line"
    STACK = "stack"
    """An area on top of the stacked series before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSeries:
    """One line or area.

    Args:
        label: name in the legend.
        colour: variable of `style.css` without its dashes, such as `c0` or `ink`.
        values: one value for each place of the figure; None where there is no value.
        draw: how the series is drawn.
        group: index of the group in the page's data; None if it belongs to no group.
        dotted: True for a thin dotted line beside the main line of its group.
        lower, upper: bounds of each value, drawn as a band; empty without bounds.
    """

    label: str
    colour: str
    values: Sequence[float | None]
    draw: Draw = Draw.STEP
    group: int | None = None
    dotted: bool = False
    lower: Sequence[float | None] = ()
    upper: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A dashed horizontal line: an objective, a target or a limit.

    Args:
        label: text at the end of the line.
        value: its place on the vertical axis.
        colour: as in `FigureSeries`.
        group: as in `FigureSeries`.
    """

    label: str
    value: float
    colour: str
    group: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One chart.

    Args:
        name: identifies the chart on its page.
        title: measured quantity.
        note: explanation of the lines.
        axis: meaning of `x`.
        unit: unit of the values.
        x: ascending places.
        series: lines and areas, those in front last.
        marks: reference lines.
        lowest: lower end of the vertical axis, which may cut values off; None to show all values.
        end: right end of the horizontal axis; None to end at the last place.
        when_empty: sentence to show if no series has a value.
    """

    name: str
    title: str
    note: str
    axis: XAxis
    unit: FigureUnit
    x: Sequence[float]
    series: Sequence[FigureSeries]
    marks: Sequence[Mark] = ()
    lowest: float | None = None
    end: float | None = None
    when_empty: str = "No values."

    @property
    def empty(self) -> bool:
        """True if no series has a value."""
        return all(value is None for one in self.series for value in one.values)


def numbers(values: Iterable[float]) -> list[float | None]:
    """Return values for JSON: five significant digits, None for NaN."""
    return [None if math.isnan(value) else _shorten(value) for value in values]


def _shorten(value: float) -> float:
    shortened = float(f"{value:.{_DIGITS}g}")
    return int(shortened) if shortened.is_integer() else shortened


def place_of_share(share: float) -> float:
    """Return the place of a share on a percentile axis: 90 % at 1, 99 % at 2, 99.9 % at 3."""
    return -math.log10(1 - share)
