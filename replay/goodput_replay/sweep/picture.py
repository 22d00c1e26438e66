"""The picture of a comparison: attainment, goodput and cost of each candidate."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from goodput_core.slo.verdict import VerdictKind
from goodput_replay.sweep.recommendation import label, ranked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from goodput_replay.sweep.candidates import Candidate, ClassResult, Evaluation

__all__ = ["draw"]

_MAX_LISTED: Final = 24
_ROW_INCHES: Final = 0.34
_COST_INCHES: Final = 4.2
_COLOURS: Final = "tab20"


def draw(
    evaluations: Sequence[Evaluation], chosen: Evaluation, path: Path, *, title: str = ""
) -> None:
    """Draw attainment and goodput: by candidate in the upper half, against GPU-hours in the lower.

    Args:
        evaluations: all evaluations; the best 24 are listed by name in the upper half.
        chosen: the evaluation of the recommended candidate.
        path: path of the picture; its suffix sets the format.
        title: title of the picture; empty for none.

    Raises:
        OSError: the picture cannot be written.
        ValueError: matplotlib does not support the format.
    """
    listed = ranked(evaluations)[:_MAX_LISTED][::-1]
    height = 1.6 + _ROW_INCHES * len(listed)
    figure = Figure(figsize=(11, height + _COST_INCHES), layout="constrained")
    if title:
        figure.suptitle(title)
    parts = figure.subfigures(2, 1, squeeze=False, height_ratios=(height, _COST_INCHES))
    _draw_candidates(parts[0, 0], listed)
    _draw_costs(parts[1, 0], evaluations, chosen)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _draw_candidates(figure: Any, shown: Sequence[Evaluation]) -> None:
    names = [c.name for c in shown[0].classes]
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    places = range(len(shown))
    for number, name in enumerate(names):
        shift = (number - (len(names) - 1) / 2) * 0.22
        results = [evaluation.classes[number] for evaluation in shown]
        drawn = [(p + shift, *b) for p, c in zip(places, results, strict=True) if (b := _bounds(c))]
        (line, *_) = left.errorbar(
            [share for _, share, _, _ in drawn],
            [place for place, _, _, _ in drawn],
            xerr=[[low for _, _, low, _ in drawn], [high for _, _, _, high in drawn]],
            fmt="o",
            markersize=4,
            linewidth=1.2,
            label=name or "all",
        )
        if (objective := results[0].objective) is not None:
            left.axvline(100 * objective, color=line.get_color(), linewidth=0.8, linestyle=":")
    left.set_xlabel("requests that met their SLO, % (dotted: objective)")
    left.set_yticks(list(places), [label(evaluation.candidate) for evaluation in shown])
    figure.legend(loc="outside upper left", ncols=len(names), frameon=False)
    left.grid(axis="x", linewidth=0.4, alpha=0.5)
    rates = [evaluation.goodput_per_s for evaluation in shown]
    right.barh(list(places), rates, height=0.6, color="#7a8ca5")
    right.set_xlabel("goodput, requests/s")
    right.grid(axis="x", linewidth=0.4, alpha=0.5)


def _draw_costs(figure: Any, evaluations: Sequence[Evaluation], chosen: Evaluation) -> None:
    """Draw every candidate; a line joins candidates that differ only in the number of replicas."""
    left, right = figure.subplots(1, 2)
    palette = mpl.colormaps[_COLOURS]
    # Use all dark shades first: neighbours in the palette are a dark and a light shade of a colour.
    shades = (palette(number) for number in (*range(0, 20, 2), *range(1, 20, 2)))
    policies = sorted({evaluation.candidate.policy for evaluation in evaluations})
    colours = dict(zip(policies, shades, strict=False))
    for _, same in groupby(sorted(evaluations, key=_key_without_replicas), _key_without_replicas):
        curve = sorted(same, key=lambda evaluation: evaluation.device_hours)
        colour = colours[curve[0].candidate.policy]
        _draw_curve(left, [(e, y) for e in curve if (y := _margin(e)) is not None], colour)
        _draw_curve(right, [(e, e.goodput_per_s) for e in curve], colour)
    ring = {"markersize": 12, "color": "black", "fillstyle": "none"}
    if (margin := _margin(chosen)) is not None:
        left.plot(chosen.device_hours, margin, "o", **ring)
    right.plot(chosen.device_hours, chosen.goodput_per_s, "o", **ring)
    left.axhline(0, color="black", linewidth=0.8, linestyle=":")
    left.set_ylabel("attainment minus objective,\nclass with the smallest margin, points")
    right.set_ylabel("goodput, requests/s")
    for axes in (left, right):
        axes.set_xlabel("GPU-hours")
        axes.set_xlim(0, 1.08 * max(e.device_hours for e in evaluations))
        axes.grid(linewidth=0.4, alpha=0.5)
    right.set_ylim(0, 1.08 * max(e.goodput_per_s for e in evaluations) or 1)
    for policy in policies:
        right.plot([], [], "o", color=colours[policy], label=policy)
    figure.legend(loc="outside upper left", ncols=8, frameon=False)
    figure.supxlabel(
        "filled: every lower bound meets its objective; ring: recommended; diamond: a topology",
        fontsize="small",
    )


def _draw_curve(axes: Any, points: Sequence[tuple[Evaluation, float]], colour: Any) -> None:
    x = [evaluation.device_hours for evaluation, _ in points]
    axes.plot(x, [y for _, y in points], color=colour, linewidth=0.8, alpha=0.6)
    for evaluation, y in points:
        marker = "D" if evaluation.candidate.topology else "o"
        face = colour if evaluation.verdict is VerdictKind.PASS else "white"
        hours = evaluation.device_hours
        axes.plot(hours, y, marker, markersize=5, color=colour, markerfacecolor=face)


def _bounds(result: ClassResult) -> tuple[float, float, float] | None:
    """Return attainment in percent and the distances to its lower and upper bound.

    None without a judged request.
    """
    if result.share is None or result.low is None or result.high is None:
        return None
    below, above = max(0.0, result.share - result.low), max(0.0, result.high - result.share)
    return 100 * result.share, 100 * below, 100 * above


def _margin(evaluation: Evaluation) -> float | None:
    """Return the smallest margin of any class over its objective, in percentage points.

    If no class has an objective, return the lowest attainment.
    """
    judged = [c for c in evaluation.classes if c.objective is not None] or evaluation.classes
    margins = [100 * (c.share - (c.objective or 0)) for c in judged if c.share is not None]
    return min(margins, default=None)


def _key_without_replicas(evaluation: Evaluation) -> tuple[str, int, str, str, str]:
    c: Candidate = evaluation.candidate
    return c.policy, c.token_budget, c.preemption, c.placement, c.topology
