"""The live page: the report of the run until now, and its changes as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from goodput_core.slo.verdict import Reason
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.live.summary import summarise_so_far
from goodput_replay.report.latency_figures import MEASURES, Curve, latency_figure
from goodput_replay.report.page import PageData, encode_texts, load_template, render_page
from goodput_replay.report.run_figures import class_label, time_figures
from goodput_replay.report.run_report import choose_classes, describe_run, summary_context
from goodput_replay.report.server_figures import describe_sources, server_figures
from goodput_replay.report.timeline import attainment_so_far

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from goodput_core.histogram import DurationHistogram
    from goodput_replay.live.tally import LiveTally, RunProgress
    from goodput_replay.report.figures import Figure
    from goodput_replay.runs.server_metrics import ServerMetrics
    from goodput_replay.runs.summary import Summary
    from goodput_replay.runs.summary_builder import RunInfo

__all__ = ["LIVE_SCRIPTS", "LivePage"]

LIVE_SCRIPTS: Final = ("live.js",)
_PARTS: Final = ("progress", "verdict", "classes", "validity", "quantiles", "outcomes")
_DOTTED: Final = {"ttft": "ttft_from_send"}


class LivePage:
    """Renders the live page of one run.

    Args:
        tally: counts of the run.
        info: information about the run, known before it starts.
        read_progress: returns the current progress.
        server: metrics of the server until now, which another task extends; None if no page is
            scraped.
    """

    def __init__(
        self,
        tally: LiveTally,
        info: RunInfo,
        read_progress: Callable[[], RunProgress],
        server: ServerMetrics | None = None,
    ) -> None:
        self._tally = tally
        self._info = info
        self._read_progress = read_progress
        self._server = server

    def render(self) -> str:
        """Return the complete page."""
        title, context, data = self._make(self._read_progress())
        return render_page(
            "run.html.j2", title=title, data=data, context=context, scripts=LIVE_SCRIPTS, live=True
        )

    def update(self) -> bytes:
        """Return the changing parts of the page, as JSON for `live.js`."""
        title, context, data = self._make(self._read_progress())
        names = _PARTS if self._server is None else (*_PARTS, "scrapes")
        parts = {name: load_template(f"parts/{name}.html.j2").render(context) for name in names}
        return encode_texts({"title": title, "parts": parts, "data": data}).encode()

    def _make(self, progress: RunProgress) -> tuple[str, dict[str, object], PageData]:
        """Return the title, the variables of the templates, and the figures."""
        so_far = self._tally.so_far(progress)
        summary = summarise_so_far(so_far, self._info)
        shown = choose_classes(summary.classes)
        names = [one.name for one in shown]
        over_time = list(self._time_figures(summary, progress))
        latencies = list(self._latency_figures(summary, names))
        server = list(self._server_figures(progress))
        context = {
            **summary_context(summary, shown),
            "live": True,
            "early": so_far.early,
            "progress": _describe(progress),
            "time_figures": over_time,
            "latency_figures": latencies,
            "server_figures": server,
            **describe_sources(self._server),
        }
        data = PageData(
            groups=[class_label(name) for name in names], figures=[*over_time, *server, *latencies]
        )
        closed = summary.verdict.reason is Reason.CLOSED_LOOP
        state = "closed loop" if closed else f"{summary.verdict.kind} so far"
        return f"{state}: {describe_run(summary)}", context, data

    def _time_figures(self, summary: Summary, progress: RunProgress) -> Iterator[Figure]:
        tally = self._tally
        timeline = tally.timeline(progress)
        return time_figures(
            timeline,
            {
                one.name: attainment_so_far(
                    tally.seconds(one.name, progress),
                    confidence=tally.window.confidence,
                    outage_s=tally.window.slo.outage_s,
                )
                for one in timeline.classes
            },
            {
                one.name: float(one.objective)
                for one in tally.window.slo.classes
                if one.objective is not None
            },
            lag_limit_ms=summary.validity.lag_p99_limit_ms,
            length_s=tally.axis_s(progress),
        )

    def _server_figures(self, progress: RunProgress) -> Iterator[Figure]:
        if self._server is None:
            return iter(())
        return server_figures(
            self._server,
            start_s=self._tally.window.start_ns / NS_PER_S,
            length_s=self._tally.axis_s(progress),
        )

    def _latency_figures(self, summary: Summary, names: list[str]) -> Iterator[Figure]:
        latencies = self._tally.latencies
        slo_by_class = {slo.name: slo for slo in summary.promises}
        for measure in MEASURES:
            curves = []
            for group, name in enumerate(names):
                for key, dotted in ((measure.name, False), (_DOTTED.get(measure.name), True)):
                    histogram = None if key is None else latencies.get((key, name))
                    if histogram is not None:
                        curves.append(_make_curve(histogram, group, name, dotted=dotted))
            yield latency_figure(measure, curves, slo_by_class)


def _describe(progress: RunProgress) -> dict[str, Any]:
    elapsed_s = max(0, progress.elapsed_ns) / NS_PER_S
    duration_s = None if progress.duration_ns is None else progress.duration_ns / NS_PER_S
    return {
        "elapsed_s": elapsed_s if duration_s is None else min(elapsed_s, duration_s),
        "duration_s": duration_s,
        "done": progress.done,
        "sent": progress.sent,
        "planned": progress.planned,
        "in_flight": progress.in_flight,
    }


def _make_curve(histogram: DurationHistogram, group: int, name: str, *, dotted: bool) -> Curve:
    values_ns, shares = zip(*histogram.cumulative(), strict=True)
    return Curve(
        group=group,
        name=name,
        values_ms=np.array(values_ns) / NS_PER_MS,
        shares=np.array(shares),
        count=histogram.count,
        dotted=dotted,
    )
