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
from goodput_replay.report.latency_figures import MEASURES, latency_figure, run_curves
from goodput_replay.report.page import PageData, render_page
from goodput_replay.report.run_figures import class_label
from goodput_replay.report.timeline import cut_timeline
from goodput_replay.runs.formatting import format_ms, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from goodput_replay.compare.comparison import ComparisonResult
    from goodput_replay.compare.runs import LoadedRun

__all__ = ["render_comparison"]

_DRAWN: Final = ("ttft", "tpot", "e2e")
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
    sections = [
        _ClassSection(name=name, figures=tuple(_figures(number, name, runs, labels)))
        for number, name in enumerate(names)
    ]
    return render_page(
        "compare.html.j2",
        title=" and ".join(labels),
        data=PageData(groups=labels, figures=[f for section in sections for f in section.figures]),
        context={
            "result": result,
            "labels": labels,
            "runs": [run.summary for run in runs],
            "sections": sections,
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
    names = list(dict.fromkeys(name for run in runs for name in run.columns.class_names))
    by_size = sorted(names, key=lambda name: -sum(_rows(run, name) for run in runs))
    return [name for name in names if name in by_size[:_MAX_CLASSES]]


def _rows(run: LoadedRun, name: str) -> int:
    return int(run.columns.of_class(name).sum())


def _figures(
    number: int, name: str, runs: Sequence[LoadedRun], labels: Sequence[str]
) -> Iterator[Figure]:
    """Yield the figures of one class; each run is a line."""
    yield _attainment_figure(number, name, runs, labels)
    promises = {promise.name: promise for promise in runs[0].summary.promises}
    slo_by_run = {labels[0]: promises[name]} if name in promises else {}
    for measure in MEASURES:
        if measure.name not in _DRAWN:
            continue
        plain = replace(
            measure,
            note=measure.note.partition(";")[0],
            dotted_ms=None,
            name=f"{measure.name}-{number}",
        )
        curves = [
            replace(curve, group=group, name=label)
            for group, (run, label) in enumerate(zip(runs, labels, strict=True))
            for curve in run_curves(plain, run.columns, [name])
        ]
        figure = latency_figure(plain, curves, slo_by_run)
        # The target is that of all runs, so it stays when one of them is hidden.
        yield replace(
            figure, marks=[replace(mark, colour="ink", group=None) for mark in figure.marks]
        )


def _attainment_figure(
    number: int, name: str, runs: Sequence[LoadedRun], labels: Sequence[str]
) -> Figure:
    length_s = max(run.summary.window.length_s for run in runs)
    timelines = [
        cut_timeline([run.columns], (name,), start_s=run.summary.window.start_s, length_s=length_s)
        for run in runs
    ]
    objective = runs[0].objective(name)
    marks = []
    if objective is not None:
        share = float(objective)
        marks = [Mark(label=f"{share * 100:.6g}%", value=share, colour="ink")]
    edges = timelines[0].edges_s.tolist()
    series = []
    for group, (timeline, label) in enumerate(zip(timelines, labels, strict=True)):
        shares = numbers(timeline.classes[0].attainment.tolist())
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
        note=f"share of the requests scheduled in each {format_seconds(timelines[0].width_s)}; "
        "dashed: the objective",
        axis=XAxis.TIME,
        unit=FigureUnit.SHARE,
        x=[value for value in numbers(edges) if value is not None],
        series=series,
        marks=marks,
        when_empty=f"No request of {class_label(name)} was judged.",
    )


def _format_signed_ms(ms: float) -> str:
    return f"{'−' if ms < 0 else '+'}{format_ms(abs(ms))}"
