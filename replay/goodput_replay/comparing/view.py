"""What a comparison found, for a person, for programs, and as a picture."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from goodput_replay.comparing.recommend import ranked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from goodput_replay.comparing.candidate import Candidate, ClassResult, Evaluation
    from goodput_replay.comparing.recommend import Recommendation

__all__ = ["as_json", "label", "plot", "table"]

_MOST_PLOTTED: Final = 24
_WORDS: Final = frozenset({"policy", "preemption", "verdict"})


def label(candidate: Candidate) -> str:
    """A candidate in a few words."""
    where = candidate.topology or f"×{candidate.replicas}"
    return f"{candidate.policy} {candidate.token_budget} {candidate.preemption} {where}"


def table(evaluations: Sequence[Evaluation]) -> Table:
    """Every candidate, the best first; a column in which all are alike is left out."""
    rows = ranked(evaluations)
    columns = [("policy", [str(one.candidate.policy) for one in rows])]
    choices = {
        "budget": [str(one.candidate.token_budget) for one in rows],
        "preemption": [str(one.candidate.preemption) for one in rows],
        "replicas": [one.candidate.topology or str(one.candidate.replicas) for one in rows],
    }
    columns += [(name, cells) for name, cells in choices.items() if len(set(cells)) > 1]
    for place, promised in enumerate(rows[0].classes):
        cells = [_kept(one.classes[place]) for one in rows]
        columns.append((f"{promised.name or 'all'} kept\n(at least)", cells))
    columns.append(("goodput\n/s", [f"{one.goodput_per_s:.3g}" for one in rows]))
    for name, field in (
        ("TTFT\np99 ms", "ttft_p99_ms"),
        ("TPOT\np99 ms", "tpot_p99_ms"),
        ("TBT\np99 ms", "tbt_p99_ms"),
    ):
        columns.append((name, [_worst(one, field) for one in rows]))
    columns.append(("GPU-h", [f"{one.device_hours:.3g}" for one in rows]))
    counted = {
        "preempted": [one.preemptions for one in rows],
        "recomputed\ntokens": [one.recomputed_tokens for one in rows],
        "swapped\ntokens": [one.swapped_tokens for one in rows],
        "shed": [one.shed for one in rows],
    }
    columns += [
        (name, [f"{count:,}" for count in counts])
        for name, counts in counted.items()
        if any(counts)
    ]
    columns.append(("verdict", [one.verdict.value for one in rows]))
    view = Table(box=None, pad_edge=False)
    for name, _ in columns:
        view.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        view.add_row(*row)
    return view


def _kept(one: ClassResult) -> str:
    return "–" if one.share is None or one.low is None else f"{one.share:.1%} ({one.low:.1%})"


def _worst(one: Evaluation, field: str) -> str:
    values = [value for c in one.classes if (value := getattr(c, field)) is not None]
    return f"{max(values):,.0f}" if values else "–"


def as_json(evaluations: Sequence[Evaluation], recommendation: Recommendation) -> dict[str, Any]:
    """Every candidate, the best first, and the recommendation."""
    return {
        "candidates": [asdict(one) for one in ranked(evaluations)],
        "recommendation": {
            "candidate": asdict(recommendation.chosen.candidate),
            "sentence": recommendation.sentence,
            "manifest": recommendation.lines,
        },
    }


def plot(evaluations: Sequence[Evaluation], path: Path) -> None:
    """Attainment of each class with its bounds, and goodput, by candidate.

    Args:
        evaluations: all; the best two dozen are drawn.
        path: the picture; its suffix is the format.

    Raises:
        OSError: it could not be written.
        ValueError: a format that matplotlib does not know.
    """
    # matplotlib takes half a second to load.
    from matplotlib.figure import Figure  # noqa: PLC0415

    shown = ranked(evaluations)[:_MOST_PLOTTED][::-1]
    names = [c.name for c in shown[0].classes]
    figure = Figure(figsize=(10, 1.6 + 0.34 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    places = range(len(shown))
    for number, name in enumerate(names):
        shift = (number - (len(names) - 1) / 2) * 0.22
        found = [next((c for c in one.classes if c.name == name), None) for one in shown]
        drawn = [
            (place + shift, c.share, c.low, c.high)
            for place, c in zip(places, found, strict=True)
            if c is not None and c.share is not None and c.low is not None and c.high is not None
        ]
        ys, shares = [d[0] for d in drawn], [100 * d[1] for d in drawn]
        errors = [
            [100 * max(0.0, d[1] - d[2]) for d in drawn],
            [100 * max(0.0, d[3] - d[1]) for d in drawn],
        ]
        (line, *_) = left.errorbar(
            shares, ys, xerr=errors, fmt="o", markersize=4, linewidth=1.2, label=name or "all"
        )
        objective = next((c.objective for c in found if c is not None), None)
        if objective is not None:
            left.axvline(100 * objective, color=line.get_color(), linewidth=0.8, linestyle=":")
    left.set_xlabel("requests that kept their promise, % (dotted: objective)")
    left.set_yticks(list(places), [label(one.candidate) for one in shown])
    figure.legend(loc="outside upper left", ncols=len(names), frameon=False)
    left.grid(axis="x", linewidth=0.4, alpha=0.5)
    right.barh(list(places), [one.goodput_per_s for one in shown], height=0.6, color="#7a8ca5")
    right.set_xlabel("goodput, requests/s")
    right.grid(axis="x", linewidth=0.4, alpha=0.5)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
