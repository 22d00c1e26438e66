"""The picture of a comparison: attainment and goodput of each candidate, and the cost."""

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


def draw(evaluations: Sequence[Evaluation], chosen: Evaluation, path: Path) -> None:
    """Draw attainment and goodput, by candidate above and against GPU-hours below.

    Args:
        evaluations: all evaluations; the best two dozen are listed by name.
        chosen: the recommended one.
        path: path of the picture; its suffix sets the format.

    Raises:
        OSError: the picture cannot be written.
        ValueError: matplotlib does not support the format.
    """
    listed = ranked(evaluations)[:_MAX_LISTED][::-1]
    height = 1.6 + _ROW_INCHES * len(listed)
    figure = Figure(figsize=(11, height + _COST_INCHES), layout="constrained")
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
        found = [one.classes[number] for one in shown]
        drawn = [(p + shift, *b) for p, c in zip(places, found, strict=True) if (b := _bounds(c))]
        (line, *_) = left.errorbar(
            [share for _, share, _, _ in drawn],
            [place for place, _, _, _ in drawn],
            xerr=[[low for _, _, low, _ in drawn], [high for _, _, _, high in drawn]],
            fmt="o",
            markersize=4,
            linewidth=1.2,
            label=name or "all",
        )
        if (objective := found[0].objective) is not None:
            left.axvline(100 * objective, color=line.get_color(), linewidth=0.8, linestyle=":")
    left.set_xlabel("requests that met their SLO, % (dotted: objective)")
    left.set_yticks(list(places), [label(one.candidate) for one in shown])
    figure.legend(loc="outside upper left", ncols=len(names), frameon=False)
    left.grid(axis="x", linewidth=0.4, alpha=0.5)
    right.barh(list(places), [one.goodput_per_s for one in shown], height=0.6, color="#7a8ca5")
    right.set_xlabel("goodput, requests/s")
    right.grid(axis="x", linewidth=0.4, alpha=0.5)


def _draw_costs(figure: Any, evaluations: Sequence[Evaluation], chosen: Evaluation) -> None:
    """Draw every candidate; a line joins candidates that differ only in replicas."""
    left, right = figure.subplots(1, 2)
    palette = mpl.colormaps[_COLOURS]
    # The dark half first, as neighbours in the palette are shades of one colour.
    shades = (palette(number) for number in (*range(0, 20, 2), *range(1, 20, 2)))
    policies = sorted({one.candidate.policy for one in evaluations})
    colours = dict(zip(policies, shades, strict=False))
    for _, same in groupby(sorted(evaluations, key=_key_without_replicas), _key_without_replicas):
        curve = sorted(same, key=lambda one: one.device_hours)
        colour = colours[curve[0].candidate.policy]
        _draw_curve(left, [(one, y) for one in curve if (y := _margin(one)) is not None], colour)
        _draw_curve(right, [(one, one.goodput_per_s) for one in curve], colour)
    ring = {"markersize": 12, "color": "black", "fillstyle": "none"}
    if (margin := _margin(chosen)) is not None:
        left.plot(chosen.device_hours, margin, "o", **ring)
    right.plot(chosen.device_hours, chosen.goodput_per_s, "o", **ring)
    left.axhline(0, color="black", linewidth=0.8, linestyle=":")
    left.set_ylabel("attainment minus objective,\nclass with the smallest margin, points")
    right.set_ylabel("goodput, requests/s")
    for axes in (left, right):
        axes.set_xlabel("GPU-hours")
        axes.set_xlim(0, 1.08 * max(one.device_hours for one in evaluations))
        axes.grid(linewidth=0.4, alpha=0.5)
    right.set_ylim(0, 1.08 * max(one.goodput_per_s for one in evaluations) or 1)
    for policy in policies:
        right.plot([], [], "o", color=colours[policy], label=policy)
    figure.legend(loc="outside upper left", ncols=8, frameon=False)
    figure.supxlabel(
        "filled: every lower bound meets its objective; ring: recommended; diamond: a topology",
        fontsize="small",
    )


def _draw_curve(axes: Any, points: Sequence[tuple[Evaluation, float]], colour: Any) -> None:
    hours = [one.device_hours for one, _ in points]
    axes.plot(hours, [y for _, y in points], color=colour, linewidth=0.8, alpha=0.6)
    for one, y in points:
        marker = "D" if one.candidate.topology else "o"
        face = colour if one.verdict is VerdictKind.PASS else "white"
        axes.plot(one.device_hours, y, marker, markersize=5, color=colour, markerfacecolor=face)


def _bounds(one: ClassResult) -> tuple[float, float, float] | None:
    """Return attainment in percent and the distances to its lower and upper bound."""
    if one.share is None or one.low is None or one.high is None:
        return None
    below, above = max(0.0, one.share - one.low), max(0.0, one.high - one.share)
    return 100 * one.share, 100 * below, 100 * above


def _margin(one: Evaluation) -> float | None:
    """Return the smallest margin of a class over its objective (else over 0), in points."""
    judged = [c for c in one.classes if c.objective is not None] or one.classes
    margins = [100 * (c.share - (c.objective or 0)) for c in judged if c.share is not None]
    return min(margins, default=None)


def _key_without_replicas(one: Evaluation) -> tuple[str, int, str, str, str]:
    it: Candidate = one.candidate
    return it.policy, it.token_budget, it.preemption, it.placement, it.topology
