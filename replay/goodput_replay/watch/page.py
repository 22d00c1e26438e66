"""The page of a running service: attainment of its classes, load, replicas and decisions."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from goodput_core.slo.evidence import class_evidence
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.targets import format_objective
from goodput_core.slo.verdict import Verdict, decide
from goodput_replay.live.page import LIVE_SCRIPTS
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
from goodput_replay.report.page import PageData, encode_texts, load_template, render_page
from goodput_replay.report.run_figures import class_label
from goodput_replay.runs.formatting import format_seconds
from goodput_replay.watch.history import WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from goodput_core.slo.attainment import SecondCounts
    from goodput_core.slo.evidence import ClassEvidence
    from goodput_replay.runs.slo import SLOClasses
    from goodput_replay.watch.history import ServiceHistory
    from goodput_replay.watch.readings import EngineLoad, RouterView

__all__ = ["WatchPage"]

_PARTS: Final = ("service", "promises", "replicas", "decisions")
_INTERVAL_S: Final = 10


class WatchPage:
    """Renders the page of a service; the command replaces its readings.

    Args:
        history: readings of the service.
        slo: SLO classes with their objectives; empty if they are unknown.

    Attributes:
        router: the latest state of the router; None before the first.
        engines: the latest loads of the engines by name.
        problem: sentence if the last reading failed; empty otherwise.
        url: URL of the router's admin port.
    """

    def __init__(self, history: ServiceHistory, slo: SLOClasses) -> None:
        self._slo = slo
        self.problem = "waiting for the service"
        self.url = ""
        self.restart(history)

    def restart(self, history: ServiceHistory) -> None:
        """Show another history, and drop the latest readings."""
        self._history = history
        self.router: RouterView | None = None
        self.engines: dict[str, EngineLoad] = {}

    def set_slo(self, slo: SLOClasses) -> None:
        """Replace the SLO classes, which may change while a service runs."""
        self._slo = slo

    def render(self) -> str:
        """Return the complete page."""
        title, context, data = self._make()
        return render_page(
            "watch.html.j2",
            title=title,
            data=data,
            context=context,
            scripts=LIVE_SCRIPTS,
            live=True,
        )

    def update(self) -> bytes:
        """Return the changing parts of the page, as JSON for `live.js`."""
        title, context, data = self._make()
        parts = {name: load_template(f"parts/{name}.html.j2").render(context) for name in _PARTS}
        return encode_texts({"title": title, "parts": parts, "data": data}).encode()

    def _make(self) -> tuple[str, dict[str, object], PageData]:
        counts = self._history.counts()
        order = [one.name for one in self._slo.classes]
        names = [*order, *sorted(set(counts) - set(order))]
        evidence = [self._judge(name, counts[name]) for name in names if name in counts]
        verdict = decide(evidence, None)
        figures = list(self._figures(names, counts))
        name = self.router.llmservice if self.router is not None else ""
        context: dict[str, object] = {
            "router": self.router,
            "engines": self.engines,
            "problem": self.problem,
            "url": self.url,
            "heading": name or self.url or "a service",
            "window": format_seconds(max((len(one.total) for one in counts.values()), default=0)),
            "verdict": verdict,
            "cards": list(self._cards(evidence, verdict)),
            "changes": [(_clock(change.at_s), change) for change in self._history.changes],
            "watch_figures": figures,
        }
        title = f"{verdict.kind}: {name}" if self.router is not None else "waiting"
        return title, context, PageData(groups=[class_label(n) for n in names], figures=figures)

    def _judge(self, name: str, counts: SecondCounts) -> ClassEvidence:
        slo = self._slo.by_name().get(name)
        return class_evidence(
            name,
            None if slo is None else slo.objective,
            counts,
            classes=max(1, sum(one.objective is not None for one in self._slo.classes)),
            outage_s=self._slo.outage_s,
        )

    def _cards(self, evidence: Sequence[ClassEvidence], verdict: Verdict) -> Iterator[Any]:
        kinds = {one.name: one.kind.value for one in verdict.classes}
        by_name = self._slo.by_name()
        for one in evidence:
            slo = by_name.get(one.name)
            yield {
                "name": one.name,
                "good": one.attainment.good,
                "total": one.attainment.total,
                "share": one.attainment.share and float(one.attainment.share),
                "interval": one.interval,
                "verdict": kinds.get(one.name),
                "objective": None if one.objective is None else format_objective(one.objective),
                "slo": slo,
                "confidence": DEFAULT_CONFIDENCE,
            }

    def _figures(self, names: Sequence[str], counts: dict[str, SecondCounts]) -> Iterator[Figure]:
        now_s = self._history.samples[-1].at_s if self._history.samples else time.time()
        length = max((len(one.total) for one in counts.values()), default=0)
        begin_s = now_s - min(WINDOW_S, max(length, 6 * _INTERVAL_S))

        def figure(name: str, title: str, note: str, unit: FigureUnit, **values: Any) -> Figure:
            return Figure(name=name, title=title, note=note, axis=XAxis.CLOCK, unit=unit, **values)

        # Whole intervals of the wall clock, so that points do not move.
        edges = np.arange(begin_s // _INTERVAL_S, now_s // _INTERVAL_S + 1) * _INTERVAL_S
        at = np.clip(
            (np.arange(length) + now_s - length - edges[0]) // _INTERVAL_S, 0, len(edges) - 1
        ).astype(np.int64)
        shares, rates = [], []
        for group, name in enumerate(names):
            good, total = (
                np.bincount(at, weights=values, minlength=len(edges))
                if name in counts
                else np.zeros(len(edges))
                for values in (
                    (counts[name].good, counts[name].total) if name in counts else ((), ())
                )
            )
            share = np.where(total > 0, good / np.maximum(total, 1), np.nan)
            colour, label = f"c{group % COLOURS}", class_label(name)
            shares.append(
                FigureSeries(label=label, colour=colour, values=numbers(share), group=group)
            )
            rates.append(
                FigureSeries(
                    label=label,
                    colour=colour,
                    values=numbers(good / _INTERVAL_S),
                    group=group,
                    draw=Draw.STACK,
                )
            )
        x = edges.tolist()
        marks = [
            Mark(
                label=format_objective(one.objective),
                value=float(one.objective),
                colour=f"c{group % COLOURS}",
                group=group,
            )
            for group, one in enumerate(self._slo.classes)
            if one.objective is not None
        ]
        yield figure(
            "attainment",
            "Attainment",
            f"share of the requests judged in each {_INTERVAL_S} s; dashed: the objective",
            FigureUnit.SHARE,
            x=x,
            series=shares,
            marks=marks,
        )
        yield figure(
            "goodput",
            "Goodput",
            "requests that met their targets, stacked",
            FigureUnit.RATE,
            x=x,
            series=rates,
        )
        samples = list(self._history.samples)
        sample_x = [round(one.at_s, 1) for one in samples]

        def sampled(label: str, colour: str, values: Sequence[float | None]) -> FigureSeries:
            return FigureSeries(
                label=label,
                colour=colour,
                values=numbers(np.nan if value is None else value for value in values),
                draw=Draw.STEP,
            )

        yield figure(
            "load",
            "Requests",
            "in flight at the router; running and waiting in the engines",
            FigureUnit.COUNT,
            x=sample_x,
            series=[
                sampled("in flight", "ink", [one.in_flight for one in samples]),
                sampled("running", "c0", [one.running for one in samples]),
                sampled("waiting", "c1", [one.waiting for one in samples]),
            ],
        )
        yield figure(
            "replica-count",
            "Replicas",
            "listed by the router, and ready",
            FigureUnit.COUNT,
            x=sample_x,
            series=[
                sampled("listed", "c7", [one.replicas for one in samples]),
                sampled("ready", "c0", [one.ready for one in samples]),
            ],
        )
        yield figure(
            "budget",
            "Token budget",
            "smallest token budget of a step in the engines",
            FigureUnit.COUNT,
            x=sample_x,
            series=[sampled("token budget", "c2", [one.token_budget for one in samples])],
            when_empty="No engine on the router's host reported its limits.",
        )
        yield figure(
            "kv",
            "KV memory",
            "share of the KV blocks in use",
            FigureUnit.PERCENT,
            x=sample_x,
            series=[sampled("in use", "c3", [one.kv_used for one in samples])],
        )


def _clock(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%H:%M:%S} UTC"
