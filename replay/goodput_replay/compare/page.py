"""The HTML page of a comparison: overlaid distributions, attainment over time, changed requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from goodput_core.slo.gate import format_points
from goodput_replay.report.figures import (
    COLOURS,
    Figure,
    FigureSeries,
    FigureUnit,
    Mark,
    XAxis,
    numbers,
)
from goodput_replay.report.latency_figures import (
    MEASURES,
    choose_ranks,
    latency_figure,
    ranked_curve,
)
from goodput_replay.report.page import PageData, render_page
from goodput_replay.report.run_figures import class_label
from goodput_replay.report.server_figures import compared_server_figures
from goodput_replay.report.timeline import AttainmentReader, interval_edges
from goodput_replay.runs.columns import ColumnParts
from goodput_replay.runs.formatting import format_ms, format_seconds
from goodput_replay.runs.server_metrics import try_server_metrics
from goodput_replay.statistics.rank_search import RankSearch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from fractions import Fraction

    import numpy as np
    from numpy.typing import NDArray

    from goodput_replay.compare.comparison import ComparisonResult
    from goodput_replay.compare.runs import LoadedRun
    from goodput_replay.report.latency_figures import Curve, Measure
    from goodput_replay.report.timeline import ClassTimeline
    from goodput_replay.runs.columns import RunColumns

__all__ = ["render_comparison"]

_DRAWN: Final = tuple(measure for measure in MEASURES if measure.name in {"ttft", "tpot", "e2e"})
_MAX_CLASSES: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClassSection:
    """One class of the page: its name and its figures."""

    name: str
    figures: tuple[Figure, ...]


def render_comparison(result: ComparisonResult, runs: Sequence[LoadedRun]) -> str:
    """Return the page.

    Args:
        result: the comparison of these runs.
        runs: the runs, the baseline first.
    """
    labels = _labels(runs)
    names = _largest_classes(runs)
    length_s = max(run.summary.window.length_s for run in runs)
    attainments = [
        AttainmentReader(names, start_s=run.summary.window.start_s, length_s=length_s)
        for run in runs
    ]
    curves = _CurveSearch(names, len(runs))
    _read_runs(runs, attainments, curves)
    sections = [
        _ClassSection(
            name=name,
            figures=(
                _attainment_figure(
                    number,
                    runs[0].objective(name),
                    [reader.classes()[number] for reader in attainments],
                    labels,
                    length_s,
                ),
                *_latency_figures(number, name, runs[0], curves, labels),
            ),
        )
        for number, name in enumerate(names)
    ]
    metrics, unreadable = zip(*(try_server_metrics(run.folder) for run in runs), strict=True)
    starts_s = [run.summary.window.start_s for run in runs]
    server = list(
        compared_server_figures(
            list(zip(labels, starts_s, metrics, strict=True)), length_s=length_s
        )
    )
    figures = [figure for section in sections for figure in section.figures]
    return render_page(
        "compare.html.j2",
        title=" and ".join(labels),
        data=PageData(groups=labels, figures=[*figures, *server]),
        context={
            "result": result,
            "labels": labels,
            "runs": [run.summary for run in runs],
            "sections": sections,
            "server_figures": server,
            "unreadable": [sentence for sentence in unreadable if sentence],
            "points": format_points,
            "signed_ms": _format_signed_ms,
        },
    )


def _labels(runs: Sequence[LoadedRun]) -> list[str]:
    """Return the last parts of the folders that tell the runs apart."""
    for depth in range(1, 5):
        labels = ["/".join(run.folder.parts[-depth:]) for run in runs]
        if len(set(labels)) == len(labels):
            return labels
    return [str(run.folder) for run in runs]


def _largest_classes(runs: Sequence[LoadedRun]) -> list[str]:
    """Return the classes with the most requests, in the order of the baseline."""
    names = list(dict.fromkeys(name for run in runs for name in run.class_names))
    by_size = sorted(names, key=lambda name: -sum(run.counts.requests.get(name, 0) for run in runs))
    return [name for name in names if name in by_size[:_MAX_CLASSES]]


class _CurveSearch:
    """Finds the distributions of latencies that the figures show, of several runs.

    Args:
        names: names of the classes.
        runs: number of runs.
    """

    def __init__(self, names: Sequence[str], runs: int) -> None:
        self._names = names
        self._runs = runs
        self._search = RankSearch(len(_DRAWN) * len(names) * runs, self._choose_ranks)
        self._ranks: list[NDArray[np.int64]] = []

    @property
    def finished(self) -> bool:
        """True if no further pass is needed."""
        return self._search.finished

    def add(self, run: int, part: RunColumns) -> None:
        """Add the next part of a run."""
        masks = {name: part.of_class(name) for name in self._names}
        for measure in _DRAWN:
            values_ms = measure.main_ms(part)
            for name, mask in masks.items():
                self._search.add(self._first_key(measure, name) + run, values_ms[mask])

    def end_pass(self) -> None:
        """End a pass over all runs."""
        self._search.end_pass()

    def curves(self, measure: Measure, name: str, labels: Sequence[str]) -> list[Curve]:
        """Return the distributions of a latency of a class in all runs."""
        first = self._first_key(measure, name)
        return [
            ranked_curve(
                run,
                label,
                self._search.values(first + run),
                self._ranks[first + run],
                self._search.count(first + run),
            )
            for run, label in enumerate(labels)
        ]

    def _first_key(self, measure: Measure, name: str) -> int:
        """Return the group of the values of a figure in the first run."""
        return (_DRAWN.index(measure) * len(self._names) + self._names.index(name)) * self._runs

    def _choose_ranks(self, counts: Sequence[int]) -> list[NDArray[np.int64]]:
        for first in range(0, len(counts), self._runs):
            self._ranks += choose_ranks(counts[first : first + self._runs])
        return self._ranks


def _read_runs(
    runs: Sequence[LoadedRun], attainments: Sequence[AttainmentReader], curves: _CurveSearch
) -> None:
    """Pass over the records of all runs until everything is read."""
    sources = [ColumnParts(run.folder) for run in runs]
    while not curves.finished:
        for number, (source, attainment) in enumerate(zip(sources, attainments, strict=True)):
            for part in source:
                curves.add(number, part)
                if not attainment.finished:
                    attainment.add(part)
            attainment.end_pass()
        curves.end_pass()


def _latency_figures(
    number: int, name: str, baseline: LoadedRun, curves: _CurveSearch, labels: Sequence[str]
) -> Iterator[Figure]:
    """Yield the figures of the latencies of one class; each run is a line."""
    promises = {promise.name: promise for promise in baseline.summary.promises}
    slo_by_run = {labels[0]: promises[name]} if name in promises else {}
    for measure in _DRAWN:
        plain = replace(
            measure,
            note=measure.note.partition(";")[0],
            dotted_ms=None,
            name=f"{measure.name}-{number}",
        )
        figure = latency_figure(plain, curves.curves(measure, name, labels), slo_by_run)
        # The target is that of all runs, so it stays when one of them is hidden.
        yield replace(
            figure, marks=[replace(mark, colour="ink", group=None) for mark in figure.marks]
        )


def _attainment_figure(
    number: int,
    objective: Fraction | None,
    classes: Sequence[ClassTimeline],
    labels: Sequence[str],
    length_s: float,
) -> Figure:
    """Return the attainment of one class in each run over time."""
    edges = interval_edges(length_s)
    marks = []
    if objective is not None:
        share = float(objective)
        marks = [Mark(label=f"{share * 100:.6g}%", value=share, colour="ink")]
    series = []
    for group, (one, label) in enumerate(zip(classes, labels, strict=True)):
        shares = numbers(one.attainment.tolist())
        series.append(
            FigureSeries(
                label=label,
                colour=f"c{group % COLOURS}",
                values=[*shares, *shares[-1:]],
                group=group,
            )
        )
    return Figure(
        name=f"attainment-{number}",
        title="Attainment",
        note="share of the requests scheduled in each "
        f"{format_seconds(float(edges[1] - edges[0]))}; dashed: the objective",
        axis=XAxis.TIME,
        unit=FigureUnit.SHARE,
        x=[value for value in numbers(edges.tolist()) if value is not None],
        series=series,
        marks=marks,
        when_empty=f"No request of {class_label(classes[0].name)} was judged.",
    )


def _format_signed_ms(ms: float) -> str:
    return f"{'−' if ms < 0 else '+'}{format_ms(abs(ms))}"
