"""Rank the candidates, recommend one, and format both results as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.choices import ControlMode
from goodput_core.text import printable
from goodput_core.units import format_number
from goodput_replay.sweep.candidates import Evaluation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import JustifyMethod

    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_replay.sweep.candidates import Candidate, ClassResult

__all__ = ["Recommendation", "as_json", "label", "ranked", "recommend", "tables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Recommended candidate.

    Args:
        chosen: the recommended candidate.
        sentence: human-readable explanation, without a full stop.
        lines: manifest fields to set, as YAML; empty if a manifest cannot express the candidate.
    """

    chosen: Evaluation
    sentence: str
    lines: str


def ranked(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return candidates with a PASS first, by cost and then goodput; the others by goodput.

    Costs that agree in two digits count as equal: a run ends with its last request, so equal fleets
    have slightly different costs.
    """

    def key(evaluation: Evaluation) -> tuple[bool, float, float]:
        passed = evaluation.verdict is VerdictKind.PASS
        cost = float(f"{evaluation.device_hours:.2g}") if passed else 0
        return (not passed, cost, -evaluation.goodput_per_s)

    return sorted(evaluations, key=key)


def recommend(evaluations: Sequence[Evaluation], spec: LLMServiceSpec) -> Recommendation:
    """Recommend the cheapest candidate with a PASS; if there is none, the highest goodput.

    Args:
        evaluations: evaluations of all candidates, at least one.
        spec: the manifest's spec.
    """
    best = ranked(evaluations)[0]
    goodput = f"{format_number(best.goodput_per_s)} requests/s"
    passed = sum(evaluation.verdict is VerdictKind.PASS for evaluation in evaluations)
    if passed:
        rank = "the only candidate" if passed == 1 else f"the best of {passed} candidates"
        criteria = "" if passed == 1 else " (lowest cost, then highest goodput)"
        sentence = (
            f"{_describe(best)} is {rank} whose lower bounds meet every objective{criteria}: "
            f"{format_number(best.device_hours)} GPU-hours, goodput {goodput}"
        )
    else:
        shares = ", ".join(f"{c.name} {c.share:.2%}" for c in best.classes if c.share is not None)
        objectives_met = all(
            c.share >= c.objective
            for c in best.classes
            if c.share is not None and c.objective is not None
        )
        advice = (
            "its attainment meets every objective, but not every lower bound does, so try a "
            "longer window"
            if objectives_met
            else "add replicas, or relax the targets"
        )
        sentence = (
            f"no candidate is shown to meet every objective; {_describe(best)} has the highest "
            f"goodput, {goodput} ({shares}): {advice}"
        )
    if best.candidate.topology:
        sentence += ". A topology exists only in virtual time; a manifest cannot express one yet"
    if spec.control.mode is ControlMode.AUTO:
        sentence += (
            ". Candidates were compared with control.mode Manual in place of the manifest's Auto; "
            "without the lines `control` and `replicas`, the control laws change the token budget "
            "and the number of replicas"
        )
    return Recommendation(chosen=best, sentence=sentence, lines=_lines(best, spec))


def _describe(evaluation: Evaluation) -> str:
    candidate = evaluation.candidate
    count = candidate.replicas
    fleet = [f"{count} replica{'s' * (count != 1)}"] if count else []
    if count != 1:
        fleet.append(str(candidate.placement))
    if candidate.topology:
        fleet.append(candidate.topology)
    engine = f"{candidate.policy}, budget {candidate.token_budget}, {candidate.preemption}"
    return ", ".join((engine, *fleet))


def _lines(evaluation: Evaluation, manifest_spec: LLMServiceSpec) -> str:
    candidate = evaluation.candidate
    if candidate.topology:
        return ""
    spec = candidate.apply(manifest_spec)
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
    if manifest_spec.control.mode is ControlMode.AUTO:
        lines.append(f"  control: {{mode: {spec.control.mode}}}")
    return "".join(f"{line}\n" for line in lines)


_Column = tuple[str, list[str]]
"""The header of a column, and its cells."""

_CANDIDATE: Final = "candidate"
_CLASSES: Final = "met (bounds), %"
_NAME_WIDTH: Final = 24
"""Width of the column of all classes, if a class has a long name; longer names are folded."""
_BOUNDS_WIDTH: Final = len("100.0 (100.0–100.0)")
_PREFIXES: Final = {"budget": "budget ", "replicas": "×"}
_TEXT_COLUMNS: Final = frozenset(
    {"policy", "preemption", "placement", "topology", "verdict", _CANDIDATE, _CLASSES}
)


def label(candidate: Candidate) -> str:
    """Return a short name of a candidate."""
    words = [candidate.policy, str(candidate.token_budget), candidate.preemption]
    if candidate.replicas:
        words.append(f"×{candidate.replicas}")
    if candidate.replicas != 1:
        words.append(candidate.placement)
    return " ".join((*words, candidate.topology)).rstrip()


def tables(evaluations: Sequence[Evaluation]) -> Iterator[Table]:
    """Yield tables of all candidates, best first, without fields that are the same in all.

    The first table has every column. The following ones have fewer. The last one has one column for
    the candidate and its verdict, and one for all classes. Both wrap, so no name is cut off.
    """
    rows = ranked(evaluations)
    candidate = _candidate_columns(rows)
    classes = [
        (
            f"{printable(first.name) or 'all'} met\n(bounds), %",
            [_format_attainment(row.classes[index]) for row in rows],
        )
        for index, first in enumerate(rows[0].classes)
    ]
    cost: list[_Column] = [("GPU-h", [format_number(row.device_hours) for row in rows])]
    goodput: list[_Column] = [("goodput\n/s", [format_number(row.goodput_per_s) for row in rows])]
    verdict: list[_Column] = [("verdict", [row.verdict.value for row in rows])]
    latencies, counts = _latency_columns(rows), _count_columns(rows)
    for columns, least_important in ((counts, 0), (latencies, -1)):
        while columns:
            yield _build([*candidate, *classes, *goodput, *latencies, *cost, *counts, *verdict])
            del columns[least_important]
    yield _build([*candidate, *classes, *goodput, *cost, *verdict])
    one: list[_Column] = [(_CLASSES, [_list_attainments(row) for row in rows])]
    yield _build([*candidate, *one, *goodput, *cost, *verdict])
    width = max(
        _BOUNDS_WIDTH,
        *(min(_NAME_WIDTH, cell_len(printable(result.name))) for result in rows[0].classes),
    )
    yield _build([*candidate, *one, *goodput, *cost, *verdict], classes_width=width)
    words = ([f"{_PREFIXES.get(name, '')}{cell}" for cell in cells] for name, cells in candidate)
    names = [" ".join(row) for row in zip(*words, strict=True)]
    judged = [f"{name}\n{row.verdict.value}" for name, row in zip(names, rows, strict=True)]
    yield _build([(_CANDIDATE, judged), *one, *goodput, *cost], classes_width=width)


def _candidate_columns(rows: Sequence[Evaluation]) -> list[_Column]:
    choices = {
        "budget": [str(row.candidate.token_budget) for row in rows],
        "preemption": [str(row.candidate.preemption) for row in rows],
        "replicas": [str(row.candidate.replicas or "–") for row in rows],
        "placement": [str(row.candidate.placement) for row in rows],
        "topology": [printable(row.candidate.topology) or "–" for row in rows],
    }
    varied = [(name, cells) for name, cells in choices.items() if len(set(cells)) > 1]
    return [("policy", [str(row.candidate.policy) for row in rows]), *varied]


def _latency_columns(rows: Sequence[Evaluation]) -> list[_Column]:
    fields = {"TTFT": "ttft_p99_ms", "TPOT": "tpot_p99_ms", "TBT": "tbt_p99_ms"}
    return [
        (f"{name}\np99 ms", [_format_highest(row, field) for row in rows])
        for name, field in fields.items()
    ]


def _count_columns(rows: Sequence[Evaluation]) -> list[_Column]:
    counts = {
        "preemp-\ntions": [row.preemptions for row in rows],
        "recomputed\ntokens": [row.recomputed_tokens for row in rows],
        "swapped\ntokens": [row.swapped_tokens for row in rows],
        "shed": [row.shed for row in rows],
    }
    return [(name, [f"{count:,}" for count in values]) for name, values in counts.items()]


def _build(columns: Sequence[_Column], *, classes_width: int | None = None) -> Table:
    view = Table(box=None, pad_edge=False)
    for name, _ in columns:
        justify: JustifyMethod = "left" if name in _TEXT_COLUMNS else "right"
        wraps = name in {_CANDIDATE, _CLASSES}
        width = classes_width if name == _CLASSES else None
        view.add_column(
            Text(name), justify=justify, no_wrap=not wraps, overflow="fold", width=width
        )
    for row in zip(*(cells for _, cells in columns), strict=True):
        view.add_row(*map(Text, row))
    return view


def _list_attainments(evaluation: Evaluation) -> str:
    """Return one line per class: the attainment with its bounds, and the name."""
    return "\n".join(
        f"{_format_attainment(result)} {printable(result.name)}".rstrip()
        for result in evaluation.classes
    )


def _format_attainment(result: ClassResult) -> str:
    if result.share is None or result.low is None or result.high is None:
        return "–"
    return f"{100 * result.share:.1f} ({100 * result.low:.1f}–{100 * result.high:.1f})"


def _format_highest(evaluation: Evaluation, field: str) -> str:
    """Return the highest value of a latency in any class."""
    values = [value for c in evaluation.classes if (value := getattr(c, field)) is not None]
    return f"{max(values):,.0f}" if values else "–"


def as_json(evaluations: Sequence[Evaluation], recommendation: Recommendation) -> dict[str, Any]:
    """Return all candidates, best first, and the recommendation, for `--json`."""
    return {
        "candidates": [asdict(evaluation) for evaluation in ranked(evaluations)],
        "recommendation": {
            "candidate": asdict(recommendation.chosen.candidate),
            "sentence": recommendation.sentence,
            "manifest": recommendation.lines,
        },
    }
