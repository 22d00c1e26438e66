"""What a comparison found, for a person and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from goodput_core.units import format_number
from goodput_replay.comparing.recommend import ranked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_replay.comparing.candidate import Candidate, ClassResult, Evaluation
    from goodput_replay.comparing.recommend import Recommendation

__all__ = ["as_json", "label", "table"]

_WORDS: Final = frozenset({"policy", "preemption", "placement", "topology", "verdict"})


def label(candidate: Candidate) -> str:
    """A candidate in a few words."""
    words = [candidate.policy, str(candidate.token_budget), candidate.preemption]
    if candidate.replicas:
        words.append(f"×{candidate.replicas}")
    if candidate.replicas != 1:
        words.append(candidate.placement)
    return " ".join((*words, candidate.topology)).rstrip()


def table(evaluations: Sequence[Evaluation]) -> Table:
    """Every candidate, the best first; a choice in which all are alike is left out."""
    rows = ranked(evaluations)
    columns = [("policy", [str(one.candidate.policy) for one in rows])]
    choices = {
        "budget": [str(one.candidate.token_budget) for one in rows],
        "preemption": [str(one.candidate.preemption) for one in rows],
        "replicas": [str(one.candidate.replicas or "–") for one in rows],
        "placement": [str(one.candidate.placement) for one in rows],
        "topology": [one.candidate.topology or "–" for one in rows],
    }
    columns += [(name, cells) for name, cells in choices.items() if len(set(cells)) > 1]
    for place, promised in enumerate(rows[0].classes):
        cells = [_kept(one.classes[place]) for one in rows]
        columns.append((f"{promised.name or 'all'} kept\n(bounds), %", cells))
    columns.append(("goodput\n/s", [format_number(one.goodput_per_s) for one in rows]))
    for name, field in (
        ("TTFT\np99 ms", "ttft_p99_ms"),
        ("TPOT\np99 ms", "tpot_p99_ms"),
        ("TBT\np99 ms", "tbt_p99_ms"),
    ):
        columns.append((name, [_worst(one, field) for one in rows]))
    columns.append(("GPU-h", [format_number(one.device_hours) for one in rows]))
    counted = {
        "preemp-\ntions": [one.preemptions for one in rows],
        "recomputed\ntokens": [one.recomputed_tokens for one in rows],
        "swapped\ntokens": [one.swapped_tokens for one in rows],
        "shed": [one.shed for one in rows],
    }
    columns += [(name, [f"{count:,}" for count in counts]) for name, counts in counted.items()]
    columns.append(("verdict", [one.verdict.value for one in rows]))
    view = Table(box=None, pad_edge=False)
    for name, _ in columns:
        view.add_column(name, justify="left" if name in _WORDS else "right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        view.add_row(*row)
    return view


def _kept(one: ClassResult) -> str:
    if one.share is None or one.low is None or one.high is None:
        return "–"
    return f"{100 * one.share:.1f} ({100 * one.low:.1f}–{100 * one.high:.1f})"


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
