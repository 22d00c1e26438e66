"""The figures of a run's latencies by percentile.

The curves of a finished run are exact. Their values are searched in several passes over the
records, so that memory does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from goodput_core.units import NS_PER_MS
from goodput_replay.report.figures import (
    Draw,
    Figure,
    FigureSeries,
    FigureUnit,
    Mark,
    XAxis,
    numbers,
    place_of_share,
)
from goodput_replay.report.run_figures import class_label, group_colour
from goodput_replay.runs.columns import RunColumns
from goodput_replay.runs.formatting import format_ms
from goodput_replay.runs.summary import SLOSummary
from goodput_replay.statistics.rank_search import RankSearch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goodput_replay.runs.columns import GapCounts

__all__ = [
    "MEASURES",
    "Curve",
    "CurveReader",
    "Measure",
    "choose_ranks",
    "latency_figure",
    "ranked_curve",
]

_POINTS: Final = 120
# Tokens of one read are microseconds apart. No target is that short, and a logarithmic axis down to
# them would compress the relevant latencies.
_MIN_MS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A latency to draw, with a main line, an optional dotted line and a target.

    Args:
        name: identifies its figure.
        title: measured quantity.
        note: explanation of the lines.
        main_ms: values of the main line.
        target_ms: target of a class; None if it has none.
        dotted_ms: values of the dotted line; None if it has no such values.
        dotted: name of the dotted line.
    """

    name: str
    title: str
    note: str
    main_ms: Callable[[RunColumns], NDArray[np.float64]]
    target_ms: Callable[[SLOSummary], int | None]
    dotted_ms: Callable[[RunColumns], NDArray[np.float64]] | None = None
    dotted: str = ""


_TBT: Final = Measure(
    name="tbt",
    title="Time between tokens",
    note=(
        "the request's own p99, which a TBT target bounds; "
        "dotted: all gaps, those under 0.1 ms drawn there"
    ),
    main_ms=lambda columns: columns.tbt_p99_us / 1000,
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
        target_ms=lambda slo: slo.tpot_ms,
    ),
    _TBT,
    Measure(
        name="e2e",
        title="End-to-end latency",
        note="complete responses, from the scheduled arrival",
        main_ms=lambda columns: columns.e2e_ns / NS_PER_MS,
        target_ms=lambda slo: slo.e2e_ms,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The distribution of a latency in one class.

    Args:
        group: index of the class.
        name: the class.
        values_ms: measured values in ascending order, or the upper edges of buckets; a value that
            the figure does not show may be missing.
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


class CurveReader:
    """Reads the distributions of all latencies for their figures; a `PartReader`.

    A curve has only the values that its figure shows.

    Args:
        gaps: gaps between tokens by class.
        names: the classes, in the order of the page's groups.
    """

    def __init__(self, gaps: Mapping[str, GapCounts], names: Sequence[str]) -> None:
        self._gaps = gaps
        self._names = names
        self._keys = [
            (measure, name, dotted)
            for measure in MEASURES
            for name in names
            for dotted in (False, True)
            if not dotted or measure.dotted_ms is not None
        ]
        self._search = RankSearch(len(self._keys), self._choose_ranks)
        self._ranks: Sequence[NDArray[np.int64]] = ()

    @property
    def finished(self) -> bool:
        """True if no further pass is needed."""
        return self._search.finished

    def add(self, part: RunColumns) -> None:
        """Add the next part."""
        masks = {name: part.of_class(name) for name in self._names}
        values_ms: dict[tuple[str, bool], NDArray[np.float64]] = {}
        for measure in MEASURES:
            values_ms[measure.name, False] = measure.main_ms(part)
            if measure.dotted_ms is not None:
                values_ms[measure.name, True] = measure.dotted_ms(part)
        for key, (measure, name, dotted) in enumerate(self._keys):
            self._search.add(key, values_ms[measure.name, dotted][masks[name]])

    def end_pass(self) -> None:
        """End a pass over all parts."""
        self._search.end_pass()

    def curves(self, measure: Measure) -> list[Curve]:
        """Return the distributions of a latency, once the reader has finished."""
        found = []
        for key, (own, name, dotted) in enumerate(self._keys):
            if own is not measure:
                continue
            count = self._search.count(key)
            group = self._names.index(name)
            values_ms = self._search.values(key)
            found.append(
                ranked_curve(group, name, values_ms, self._ranks[key], count, dotted=dotted)
            )
            if measure is _TBT and name in self._gaps and self._gaps[name].total:
                found.append(_gap_curve(self._gaps[name], group, name))
        return found

    def _choose_ranks(self, counts: Sequence[int]) -> Sequence[NDArray[np.int64]]:
        """Return the ranks of the values that each figure shows."""
        gaps = [gaps.total for name, gaps in self._gaps.items() if name in self._names]
        ranks: list[NDArray[np.int64]] = []
        for measure, keys in groupby(range(len(self._keys)), key=lambda key: self._keys[key][0]):
            own = [counts[key] for key in keys]
            ranks += choose_ranks(own, gaps if measure is _TBT else ())
        self._ranks = ranks
        return ranks


def _gap_curve(gaps: GapCounts, group: int, name: str) -> Curve:
    edges_us, shares = gaps.cumulative()
    return Curve(
        group=group,
        name=name,
        values_ms=edges_us / 1000,
        shares=shares,
        count=gaps.total,
        dotted=True,
    )


def choose_ranks(counts: Sequence[int], others: Sequence[int] = ()) -> list[NDArray[np.int64]]:
    """Return the ranks of the values that a figure shows of each of its curves, from 0.

    Args:
        counts: number of measurements of each curve.
        others: numbers of measurements of further curves of the figure, which are drawn otherwise.
    """
    places = _choose_places([count for count in (*counts, *others) if count])
    return [_find_ranks(count, places) for count in counts]


def ranked_curve(
    group: int,
    name: str,
    values_ms: NDArray[np.float64],
    ranks: NDArray[np.int64],
    count: int,
    *,
    dotted: bool = False,
) -> Curve:
    """Return a curve from the values at the chosen ranks of all `count` measurements."""
    return Curve(
        group=group,
        name=name,
        values_ms=values_ms,
        shares=(ranks + 1) / max(1, count),
        count=count,
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
    places = _choose_places([curve.count for curve in shown])
    series = [
        FigureSeries(
            label=", ".join(filter(None, (class_label(curve.name), measure.dotted * curve.dotted))),
            colour=group_colour(curve.group),
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
                    label=format_ms(target_ms),
                    value=target_ms,
                    colour=group_colour(group),
                    group=group,
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


def _choose_places(counts: Sequence[int]) -> NDArray[np.float64]:
    """Return the places of a figure whose curves have these numbers of measurements."""
    lasts = {_last_place(count) for count in counts}
    places: NDArray[np.float64] = np.unique(
        [*np.linspace(0, max(lasts, default=1.0), _POINTS), *lasts]
    )
    return places


def _last_place(count: int) -> float:
    """Return a place of the maximum, which is each quantile above 1 − 1/n of n measurements."""
    return place_of_share(1 - 1 / (2 * count))


def _shares_at(places: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = 1 - 10.0**-places - 1e-12
    return shares


def _find_ranks(count: int, places: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the ranks, from 0, that `_read_curve` reads of a curve with all measurements."""
    if not count:
        return np.empty(0, dtype=np.int64)
    shares = _shares_at(places)
    ranks = np.clip((shares * count).astype(np.int64), 1, count) - 1
    # The number of measurements whose share, rounded as in a curve, is at most that of the place.
    while (above := (ranks < count) & ((ranks + 1) / count <= shares)).any():
        ranks += above
    return np.unique(np.minimum(ranks, count - 1))


def _read_curve(curve: Curve, places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the value at each place; NaN beyond the maximum."""
    index = np.searchsorted(curve.shares, _shares_at(places), side="right")
    values = curve.values_ms[np.minimum(index, len(curve.values_ms) - 1)]
    last = _last_place(curve.count)
    return np.where(places <= last + 1e-9, np.maximum(values, _MIN_MS), np.nan)
