"""The ranking of candidates, the recommendation of one, and both as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.choices import ControlMode
from goodput_core.units import format_number
from goodput_replay.sweep.candidates import Evaluation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_replay.sweep.candidates import Candidate, ClassResult

__all__ = ["Recommendation", "as_json", "label", "ranked", "recommend", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Recommended candidate.

    Args:
        chosen: the recommended candidate.
        sentence: human-readable explanation, without a full stop.
        lines: manifest fields to set, as YAML; empty if a manifest cannot have them.
    """

    chosen: Evaluation
    sentence: str
    lines: str


def ranked(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return candidates with a PASS first, by cost and goodput; then the others by goodput.

    Costs that agree in two digits count as equal, as replicas end with their last request.
    """

    def key(one: Evaluation) -> tuple[bool, float, float]:
        passed = one.verdict is VerdictKind.PASS
        return (not passed, float(f"{one.device_hours:.2g}") if passed else 0, -one.goodput_per_s)

    return sorted(evaluations, key=key)


def recommend(evaluations: Sequence[Evaluation], spec: LLMServiceSpec) -> Recommendation:
    """Recommend the cheapest candidate with a PASS, or without one the highest goodput.

    Args:
        evaluations: evaluations of all candidates, at least one.
        spec: the manifest's spec.
    """
    best = ranked(evaluations)[0]
    goodput = f"{format_number(best.goodput_per_s)} requests/s"
    passed = sum(one.verdict is VerdictKind.PASS for one in evaluations)
    if passed:
        rank = "the only candidate" if passed == 1 else f"the cheapest of {passed} candidates"
        sentence = (
            f"{_describe(best)} is {rank} whose lower bounds meet every objective: "
            f"{format_number(best.device_hours)} GPU-hours, goodput {goodput}"
        )
    else:
        shares = ", ".join(f"{c.name} {c.share:.2%}" for c in best.classes if c.share is not None)
        estimates_met = all(
            c.share >= c.objective
            for c in best.classes
            if c.share is not None and c.objective is not None
        )
        advice = (
            "its estimates meet every objective, so try a longer window"
            if estimates_met
            else "add replicas, or relax the targets"
        )
        sentence = (
            f"no candidate is shown to meet every objective; {_describe(best)} has the highest "
            f"goodput, {goodput} ({shares}): {advice}"
        )
    if best.candidate.topology:
        sentence += ". A topology exists only in virtual time; a manifest cannot have one yet"
    if spec.control.mode is ControlMode.AUTO:
        sentence += (
            ". Candidates were compared with control.mode Manual in place of the manifest's Auto; "
            "without the lines `control` and `replicas`, the control law changes the token budget "
            "and the replicas"
        )
    return Recommendation(chosen=best, sentence=sentence, lines=_lines(best, spec))


def _describe(one: Evaluation) -> str:
    candidate = one.candidate
    count = candidate.replicas
    where = [f"{count} replica{'s' * (count != 1)}"] if count else []
    if count != 1:
        where.append(str(candidate.placement))
    if candidate.topology:
        where.append(candidate.topology)
    engine = f"{candidate.policy}, budget {candidate.token_budget}, {candidate.preemption}"
    return ", ".join((engine, *where))


def _lines(one: Evaluation, given: LLMServiceSpec) -> str:
    candidate = one.candidate
    if candidate.topology:
        return ""
    spec = candidate.apply(given)
    budget = spec.engine.token_budget
    lines = [
        "spec:",
        "  engine:",
        f"    policy: {spec.engine.policy}",
        f"    preemption: {spec.engine.preemption}",
        f"    tokenBudget: {{min: {budget.min}, max: {budget.max}, initial: {budget.initial}}}",
        f"  replicas: {spec.replicas}",
        f"  router: {{policy: {spec.router.policy}, replicas: {spec.router.replicas}}}",
    ]
    if given.control.mode is ControlMode.AUTO:
        lines.append(f"  control: {{mode: {spec.control.mode}}}")
    return "".join(f"{line}\n" for line in lines)


_TEXT_COLUMNS: Final = frozenset({"policy", "preemption", "placement", "topology", "verdict"})


def label(candidate: Candidate) -> str:
    """Return a short name of a candidate."""
    words = [candidate.policy, str(candidate.token_budget), candidate.preemption]
    if candidate.replicas:
        words.append(f"×{candidate.replicas}")
    if candidate.replicas != 1:
        words.append(candidate.placement)
    return " ".join((*words, candidate.topology)).rstrip()


def table(evaluations: Sequence[Evaluation]) -> Table:
    """Return a table of all candidates, best first, without fields that are equal in all."""
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
    for index, first in enumerate(rows[0].classes):
        cells = [_format_attainment(one.classes[index]) for one in rows]
        columns.append((f"{first.name or 'all'} met\n(bounds), %", cells))
    columns.append(("goodput\n/s", [format_number(one.goodput_per_s) for one in rows]))
    for name, field in (
        ("TTFT\np99 ms", "ttft_p99_ms"),
        ("TPOT\np99 ms", "tpot_p99_ms"),
        ("TBT\np99 ms", "tbt_p99_ms"),
    ):
        columns.append((name, [_format_worst(one, field) for one in rows]))
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
        view.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        view.add_row(*row)
    return view


def _format_attainment(one: ClassResult) -> str:
    if one.share is None or one.low is None or one.high is None:
        return "–"
    return f"{100 * one.share:.1f} ({100 * one.low:.1f}–{100 * one.high:.1f})"


def _format_worst(one: Evaluation, field: str) -> str:
    values = [value for c in one.classes if (value := getattr(c, field)) is not None]
    return f"{max(values):,.0f}" if values else "–"


def as_json(evaluations: Sequence[Evaluation], recommendation: Recommendation) -> dict[str, Any]:
    """Return all candidates, best first, and the recommendation for `--json`."""
    return {
        "candidates": [asdict(one) for one in ranked(evaluations)],
        "recommendation": {
            "candidate": asdict(recommendation.chosen.candidate),
            "sentence": recommendation.sentence,
            "manifest": recommendation.lines,
        },
    }
