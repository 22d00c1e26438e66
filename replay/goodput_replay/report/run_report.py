"""Write the report of a run as one HTML file.

The size of the page is bounded: charts have at most 120 intervals or percentiles, and at most 24
classes are shown. A run's folder has no prompts, so the page has none.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from goodput_core.files import write_output
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.judging import MissReason
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import parse_objective
from goodput_replay.report.latency_figures import MEASURES, CurveReader, latency_figure
from goodput_replay.report.page import PageData, render_page
from goodput_replay.report.run_figures import class_label, time_figures
from goodput_replay.report.server_figures import (
    describe_sources,
    server_figures,
    server_table,
)
from goodput_replay.report.slowest import SlowestReader
from goodput_replay.report.timeline import SecondsReader, TimelineReader, attainment_so_far
from goodput_replay.runs.columns import ColumnParts, count_gaps, read_parts
from goodput_replay.runs.files import REPORT_FILE, require_digest
from goodput_replay.runs.formatting import describe_sessions, describe_warmup
from goodput_replay.runs.server_metrics import try_server_metrics
from goodput_replay.runs.summary import (
    ClassSummary,
    LengthPinning,
    Quantiles,
    SLOSummary,
    Summary,
    read_summary,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from goodput_replay.report.figures import Figure
    from goodput_replay.report.timeline import Timeline
    from goodput_replay.runs.server_metrics import ServerMetrics

__all__ = [
    "ClassCard",
    "choose_classes",
    "describe_run",
    "render",
    "summary_context",
    "write_report",
]

_PINNING: Final = {
    LengthPinning.HEADER: "pinned, hidden from the scheduler",
    LengthPinning.MAX_TOKENS: "disclosed by max_tokens",
    LengthPinning.LIMIT: "limited by max_tokens",
    LengthPinning.NONE: "not pinned",
}
_SCALE_STARTS: Final = (0.99, 0.95, 0.9, 0.8, 0.5, 0.0)
_MAX_CLASSES: Final = 24


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of the run in `folder`.

    Args:
        folder: folder of a finished run.
        out: file to write; None for `report.html` in the folder.

    Returns:
        The written file.

    Raises:
        InputError: the folder has no readable run.
        OSError: the file could not be written.
    """
    path = folder / REPORT_FILE if out is None else out
    write_output(path, render(folder).encode())
    return path


def render(folder: Path) -> str:
    """Return the HTML of the report.

    Raises:
        InputError: the folder has no readable run.
    """
    summary = read_summary(folder)
    shown = choose_classes(summary.classes)
    names = [one.name for one in shown]
    start_s, length_s = summary.window.start_s, summary.window.length_s
    timelines = TimelineReader(tuple(names), start_s=start_s, length_s=length_s)
    seconds = SecondsReader(names, start_s=start_s, length_s=length_s)
    curves = CurveReader(count_gaps(folder), names)
    slowest = SlowestReader(folder, start_s=start_s)
    read_parts(ColumnParts(folder), [timelines, seconds, curves, slowest])
    require_digest(folder, summary.records_digest)
    timeline = timelines.timeline()
    figures = list(_time_figures(summary, seconds, timeline, shown))
    latencies = _latency_figures(summary, curves)
    metrics, unreadable = try_server_metrics(folder)
    server = list(_server_figures(summary, metrics))
    head, rows = server_table(server)
    return render_page(
        "run.html.j2",
        title=f"{summary.verdict.kind}: {describe_run(summary)}",
        data=PageData(
            groups=[class_label(name) for name in names], figures=[*figures, *server, *latencies]
        ),
        context={
            **summary_context(summary, shown),
            "live": False,
            "time_figures": figures,
            "latency_figures": latencies,
            "server_figures": server,
            "server_head": head,
            "server_rows": rows,
            "server_unreadable": unreadable,
            **describe_sources(metrics),
            "timeline": list(_make_timeline_rows(timeline)),
            "slowest": slowest.slowest(),
        },
    )


def summary_context(summary: Summary, shown: Sequence[ClassSummary]) -> dict[str, object]:
    """Return the variables of the templates in `assets/parts` and of the page's head.

    Args:
        summary: the run, finished or until now.
        shown: classes to show.
    """
    lag = summary.validity.lag_ms
    rows = [*shown, summary.overall]
    return {
        "summary": summary,
        "started": _format_start(summary.run.started_at),
        "heading": describe_run(summary),
        "cards": [ClassCard.of(summary, one) for one in shown],
        "hidden_classes": len(summary.classes) - len(shown),
        "lag_p99": None if lag is None else lag.p99,
        "lag_max": None if lag is None else lag.max,
        "sessions": summary.run.sessions and describe_sessions(summary.run.sessions),
        "warmup": describe_warmup(summary.window),
        "pinning": _PINNING[summary.target.pinning],
        "quantiles": list(_make_quantile_rows(summary, shown)),
        "rows": rows,
        "outcome_names": [o.value for o in Outcome if any(o.value in r.outcomes for r in rows)],
        "reason_names": [m.value for m in MissReason if any(m.value in r.misses for r in rows)],
        "command": shlex.join(summary.run.command),
    }


def choose_classes(classes: Sequence[ClassSummary]) -> list[ClassSummary]:
    """Return the classes to show in their order; of many, those with the most requests."""
    by_requests = sorted(classes, key=lambda one: (one.objective is None, -one.requests))
    kept = {one.name for one in by_requests[:_MAX_CLASSES]}
    return [one for one in classes if one.name in kept]


def _time_figures(
    summary: Summary, seconds: SecondsReader, timeline: Timeline, shown: Sequence[ClassSummary]
) -> Iterator[Figure]:
    confidence = next(
        (one.interval.confidence for one in shown if one.interval is not None), DEFAULT_CONFIDENCE
    )
    return time_figures(
        timeline,
        {
            one.name: attainment_so_far(
                seconds.counts(one.name), confidence=confidence, outage_s=summary.outage_s
            )
            for one in shown
        },
        {p.name: float(parse_objective(p.objective)) for p in summary.promises if p.objective},
        lag_limit_ms=None if summary.emulation is not None else summary.validity.lag_p99_limit_ms,
    )


def _latency_figures(summary: Summary, curves: CurveReader) -> list[Figure]:
    slo_by_class = {slo.name: slo for slo in summary.promises}
    figures = (
        latency_figure(measure, curves.curves(measure), slo_by_class) for measure in MEASURES
    )
    return [figure for figure in figures if not figure.empty]


def _server_figures(summary: Summary, metrics: ServerMetrics | None) -> Iterator[Figure]:
    if metrics is not None:
        window = summary.window
        drawn = server_figures(metrics, start_s=window.start_s, length_s=window.length_s)
        yield from (figure for figure in drawn if not figure.empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimelineRow:
    """An interval in the table of values; counts of all classes together."""

    start_s: float
    good: int
    total: int
    share: float | None
    offered: int
    served: int
    in_flight: int
    lag_max_ms: float | None


def _make_timeline_rows(timeline: Timeline) -> Iterator[_TimelineRow]:
    good, judged = timeline.good.tolist(), timeline.judged.tolist()
    for index, lag_ms in enumerate(timeline.lag_max_ms.tolist()):
        yield _TimelineRow(
            start_s=float(timeline.edges_s[index]),
            good=good[index],
            total=judged[index],
            share=good[index] / judged[index] if judged[index] else None,
            offered=int(timeline.offered[index]),
            served=int(timeline.served[index]),
            in_flight=int(timeline.in_flight[index]),
            lag_max_ms=None if math.isnan(lag_ms) else lag_ms,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCard:
    """A class on the first screen.

    Args:
        figures: results of the class.
        slo: SLO targets of the class; None if only its rows have targets.
        scale_start: share at the left end of the bar; the right end is 100 %.
        objective: objective of the class; None if it has none.
    """

    figures: ClassSummary
    slo: SLOSummary | None
    scale_start: float
    objective: float | None

    @classmethod
    def of(cls, summary: Summary, figures: ClassSummary) -> ClassCard:
        """Return the card of a class; its bar begins below the objective and the bounds."""
        slo = next((one for one in summary.promises if one.name == figures.name), None)
        objective = None if figures.objective is None else float(parse_objective(figures.objective))
        shown = [share for share in (figures.attainment, objective) if share is not None]
        if figures.interval is not None:
            shown.append(figures.interval.lower)
        lowest = min(shown, default=0.0)
        start = next(s for s in _SCALE_STARTS if s < lowest or s == 0)
        return cls(figures=figures, slo=slo, scale_start=start, objective=objective)

    def place(self, share: float) -> float:
        """Return the position of a share on the bar, percent of its width."""
        return round(100 * (share - self.scale_start) / (1 - self.scale_start), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuantileRow:
    name: str
    first: bool
    measure: str
    target: int | None
    values: Quantiles


def _make_quantile_rows(summary: Summary, shown: Sequence[ClassSummary]) -> Iterator[_QuantileRow]:
    slo_by_class = {slo.name: slo for slo in summary.promises}
    for one in shown:
        slo = slo_by_class.get(one.name)
        ttft, tpot, e2e = (
            (None, None, None) if slo is None else (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms)
        )
        measures = (
            ("TTFT", one.ttft_ms, ttft),
            ("TTFT from send", one.ttft_from_send_ms, None),
            ("TPOT", one.tpot_ms, tpot),
            ("TBT, all gaps", one.tbt_ms, None),
            ("E2E", one.e2e_ms, e2e),
        )
        first = True
        for measure, values, target in measures:
            if values is not None:
                yield _QuantileRow(
                    name=one.name, first=first, measure=measure, target=target, values=values
                )
                first = False


def describe_run(summary: Summary) -> str:
    """Return the heading of a run's page: the trace and the target."""
    target = summary.target.service or summary.target.url
    how = "replayed against" if summary.emulation is None else "emulated on"
    return f"{summary.trace.name}, {how} {target}"


def _format_start(text: str) -> str:
    """Format a time as `4 March 2026, 05:06:07 UTC`; return other text unchanged."""
    try:
        at = datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return text
    return f"{at.day} {at:%B %Y, %H:%M:%S} UTC"
