"""The drawings of a report, made from a run's summary and columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from goodput_core.slo.targets import parse_objective
from goodput_core.units import NS_PER_MS
from goodput_replay.report.figures.canvas import COLOURS
from goodput_replay.report.figures.latency import Curve, draw_latency
from goodput_replay.report.figures.over_time import (
    draw_attainment,
    draw_goodput,
    draw_in_flight,
    draw_lag,
    draw_misses,
    draw_rates,
)
from goodput_replay.report.timeline import cut_timeline
from goodput_replay.run.columns import RunColumns
from goodput_replay.run.summary import SLOSummary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_replay.run.columns import GapCounts
    from goodput_replay.run.summary import Summary

__all__ = ["Drawings", "LatencyDrawing", "draw_all"]

_CLASSES_PER_DRAWING: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyDrawing:
    """A drawing of latencies.

    Args:
        title: measured latency.
        note: explanation of the lines.
        svg: drawing as markup.
        classes: colour index and name of each class in the drawing.
    """

    title: str
    note: str
    svg: Markup
    classes: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawings:
    """All drawings of a report, as markup.

    Args:
        miss_reasons: reasons stacked in `misses`, from the bottom.
        interval_s: length of an interval of the time-series plots, seconds.
    """

    attainment: Markup
    goodput: Markup
    misses: Markup
    miss_reasons: tuple[str, ...]
    rates: Markup
    in_flight: Markup
    lag: Markup
    latencies: tuple[LatencyDrawing, ...]
    interval_s: float


def draw_all(summary: Summary, columns: RunColumns, gaps: dict[str, GapCounts]) -> Drawings:
    """Draw a run.

    Args:
        summary: summary of the run.
        columns: judged requests of the run.
        gaps: gaps between tokens by class.
    """
    timeline = cut_timeline(
        columns,
        tuple(one.name for one in summary.classes),
        start_s=summary.window.start_s,
        length_s=summary.window.length_s,
    )
    objectives = {
        p.name: float(parse_objective(p.objective)) for p in summary.promises if p.objective
    }
    return Drawings(
        attainment=_mark_safe(draw_attainment(timeline, objectives)),
        goodput=_mark_safe(draw_goodput(timeline)),
        misses=_mark_safe(draw_misses(timeline)),
        miss_reasons=tuple(reason.value for reason in timeline.misses),
        rates=_mark_safe(draw_rates(timeline)),
        in_flight=_mark_safe(draw_in_flight(timeline)),
        lag=_mark_safe(draw_lag(timeline, summary.validity.lag_p99_limit_ms)),
        latencies=tuple(_draw_latencies(summary, columns, gaps)),
        interval_s=timeline.width_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """A latency to draw, with a main line, an optional thin line and a target."""

    title: str
    note: str
    main_ms: Callable[[RunColumns], NDArray[np.float64]]
    thin_ms: Callable[[RunColumns], NDArray[np.float64]] | None
    target_ms: Callable[[SLOSummary], int | None]


_TBT: Final = _Measure(
    title="Time between tokens",
    note=(
        "the request's own p99, which a TBT target bounds; "
        "dotted: all gaps, those under 0.1 ms drawn there"
    ),
    main_ms=lambda columns: columns.tbt_p99_us / 1000,
    thin_ms=None,
    target_ms=lambda slo: slo.tbt_p99_ms,
)
_MEASURES: Final = (
    _Measure(
        title="Time to first token",
        note="from the scheduled arrival; dotted: from the actual send",
        main_ms=lambda columns: columns.ttft_ns / NS_PER_MS,
        thin_ms=lambda columns: columns.ttft_from_send_ns / NS_PER_MS,
        target_ms=lambda slo: slo.ttft_ms,
    ),
    _Measure(
        title="Time per output token",
        note="mean over each request, after its first token",
        main_ms=lambda columns: columns.tpot_ns / NS_PER_MS,
        thin_ms=None,
        target_ms=lambda slo: slo.tpot_ms,
    ),
    _TBT,
    _Measure(
        title="End-to-end latency",
        note="complete responses, from the scheduled arrival",
        main_ms=lambda columns: columns.e2e_ns / NS_PER_MS,
        thin_ms=None,
        target_ms=lambda slo: slo.e2e_ms,
    ),
)


def _draw_latencies(
    summary: Summary, columns: RunColumns, gaps: dict[str, GapCounts]
) -> Iterator[LatencyDrawing]:
    names = [one.name for one in summary.classes if one.requests]
    colours = {one.name: index for index, one in enumerate(summary.classes)}
    slo_by_class = {slo.name: slo for slo in summary.promises}
    for first in range(0, len(names), _CLASSES_PER_DRAWING):
        together = names[first : first + _CLASSES_PER_DRAWING]
        for measure in _MEASURES:
            curves: list[Curve] = []
            for name in together:
                slo = slo_by_class.get(name)
                target = None if slo is None else measure.target_ms(slo)
                curves += _make_curves(columns, measure, name, colours[name], target)
                if measure is _TBT and name in gaps and gaps[name].total:
                    curves.append(_make_gap_curve(gaps[name], colours[name]))
            yield LatencyDrawing(
                title=measure.title,
                note=measure.note,
                svg=_mark_safe(draw_latency(measure.title, curves)),
                classes=tuple((colours[name] % COLOURS, name) for name in together),
            )


def _make_curves(
    columns: RunColumns, measure: _Measure, name: str, colour: int, target_ms: int | None
) -> Iterator[Curve]:
    mine = columns.of_class(name)
    yield _make_curve(measure.main_ms(columns)[mine], colour, target_ms=target_ms)
    if measure.thin_ms is not None:
        yield _make_curve(measure.thin_ms(columns)[mine], colour, thin=True)


def _make_curve(
    values_ms: NDArray[np.float64], colour: int, *, thin: bool = False, target_ms: int | None = None
) -> Curve:
    measured = np.sort(values_ms[np.isfinite(values_ms)])
    return Curve(
        colour=colour,
        values_ms=measured,
        shares=(np.arange(len(measured)) + 1) / max(1, len(measured)),
        count=len(measured),
        thin=thin,
        target_ms=target_ms,
    )


def _make_gap_curve(gaps: GapCounts, colour: int) -> Curve:
    edges_us, shares = gaps.cumulative()
    return Curve(
        colour=colour, values_ms=edges_us / 1000, shares=shares, count=gaps.total, thin=True
    )


def _mark_safe(svg: str) -> Markup:
    """Mark a drawing as markup; it contains numbers and texts of this package only."""
    return Markup(svg)  # noqa: S704 - see above
