"""Tables and a plot of the results of `benchmarks.control`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from goodput_replay.plan import PlannedRequest

HOUR_S: Final = 3600
COLOURS: Final = {
    "fixed-peak": "#777777",
    "fixed-mean": "#b5b5b5",
    "hpa": "#c77b0a",
    "dynamo": "#3a8f3a",
    "llm-d": "#a03a8f",
    "ours": "#1f5fa8",
}
"""Colour of every law, in the order of the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAttainment:
    """Attainment of one class over the day.

    Args:
        good, total: requests that met their targets, and requests judged.
        lower, upper: bounds of the attainment, 95 % each.
        objective: the share that must meet its targets.
        below_h: hours of the day in windows of five minutes below the objective.
    """

    good: int
    total: int
    lower: float
    upper: float
    objective: float
    below_h: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LawResult:
    """Results of one law.

    Args:
        law: name of the law.
        target: value of the law's target; None if it has none.
        device_h: device hours.
        peak, mean, final: replicas.
        ups, downs: decisions that raised or lowered the replicas.
        below_h: hours of the day in windows of five minutes in which any objective was missed.
        classes: attainment by class name.
        outcomes: requests by outcome.
        changes: (second, replicas) of each change, including the start.
    """

    law: str
    target: float | None
    device_h: float
    peak: int
    mean: float
    final: int
    ups: int
    downs: int
    below_h: float
    classes: dict[str, ClassAttainment]
    outcomes: dict[str, int]
    changes: list[tuple[float, int]]


def gpu_hours_at(points: Sequence[tuple[float, float]], below_h: float) -> float | None:
    """Return the GPU-hours on a law's curve at these hours below an objective.

    Args:
        points: hours below an objective and GPU-hours of each run of the law.
        below_h: hours below an objective.

    Returns:
        The value on the line between the neighbouring points of the curve, which are those that no
        other point beats in both. Beyond the curve's last point, the value of that point. None if
        no run of the law was as little below an objective.
    """
    curve = [
        (x, y)
        for x, y in sorted(set(points))
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]
    left = [point for point in curve if point[0] <= below_h]
    right = [point for point in curve if point[0] > below_h]
    if not left:
        return None
    (x0, y0), (x1, y1) = left[-1], right[0] if right else (math.inf, left[-1][1])
    return y0 + (y1 - y0) * (below_h - x0) / (x1 - x0)


def table(results: Sequence[LawResult]) -> None:
    """Print the results of a day."""
    for name in results[0].classes:
        one = results[0].classes[name]
        print(f"{name}: {one.total:,} requests, objective {one.objective:.0%}")
    print("\nlaw        target  GPU-h  peak  mean  up/down  below objective", end="")
    for name in results[0].classes:
        print(f"  {name + ' met (95 %)':>27}", end="")
    print()
    for r in results:
        target = "" if r.target is None else f"{r.target:g}"
        print(
            f"{r.law:<11}{target:>6}{r.device_h:>7.1f}{r.peak:>6}{r.mean:>6.2f}"
            f"{f'{r.ups}/{r.downs}':>9}{60 * r.below_h:>13.0f} min",
            end="",
        )
        for c in r.classes.values():
            met = f"{c.good / c.total:.2%} ({c.lower:.2%}–{c.upper:.2%})"
            print(f"  {met:>27}", end="")
        print()


def constant_table(constants: Sequence[dict[str, float]]) -> None:
    """Print the changes of our law under constant load."""
    print("\nours under constant load, from minute 20 on")
    print("requests/s  replicas  decisions  changes of replicas  of bounds")
    for level in constants:
        print(
            f"{level['rate']:>10.2f}{level['replicas']:>10}{level['decisions']:>11}"
            f"{level['changes_of_replicas']:>21}{level['changes_of_bounds']:>11}"
        )


def draw(requests: Sequence[PlannedRequest], results: Sequence[LawResult], path: Path) -> None:
    """Draw the offered rate, and below it the replicas of each law."""
    from matplotlib.figure import Figure

    hours = np.array([r.scheduled_ns for r in requests]) / NS_PER_S / HOUR_S
    figure = Figure(figsize=(9, 1.6 + 1.15 * len(results)), layout="constrained")
    axes = figure.subplots(len(results) + 1, 1, sharex=True, squeeze=False)[:, 0]
    counts, edges = np.histogram(hours, bins=math.ceil(hours[-1] * 12))
    axes[0].plot(edges[:-1], counts / (edges[1] - edges[0]) / HOUR_S, color="#444444")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("requests/s")
    most = max(r.peak for r in results)
    for axis, r in zip(axes[1:], results, strict=True):
        times = [at_s / HOUR_S for at_s, _ in r.changes] + [hours[-1]]
        replicas = [count for _, count in r.changes]
        axis.step(times, [*replicas, replicas[-1]], where="post", color=COLOURS[r.law])
        axis.fill_between(
            times, [*replicas, replicas[-1]], step="post", color=COLOURS[r.law], alpha=0.2
        )
        axis.set_ylim(0, most + 1)
        axis.set_yticks(range(0, most + 1, 2))
        axis.set_ylabel("replicas")
        axis.set_title(
            f"{r.law}: {r.device_h:.0f} GPU-hours, {60 * r.below_h:.0f} min below an objective",
            loc="left",
            fontsize="medium",
        )
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("hours")
    axes[-1].set_xlim(0, hours[-1])
    figure.savefig(path, dpi=110)
