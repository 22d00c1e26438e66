"""Gather the evidence of a run from its records.

Each record is judged as measured, as if the client had had no lag, and as if its response had
conformed to the API. All judgements are counted in the second of its scheduled arrival. Records are
not retained. `goodput_core.slo` computes intervals and verdicts from the counts.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.quantiles import P99, quantile
from goodput_core.slo.attainment import (
    AttainmentTally,
    ClassCounts,
    SecondCounts,
    goodput_per_s,
)
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.judging import (
    JudgementKind,
    MissReason,
    judge,
    judge_favourably,
    targets_for,
    without_lag,
)
from goodput_core.slo.record import Outcome
from goodput_core.slo.stalls import NO_STALLS, Stalls
from goodput_core.slo.verdict import ClassEvidence, ValidityEvidence, class_evidence
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from fractions import Fraction

    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.targets import SLOClass

__all__ = ["RunEvidence", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """Evidence of one run; `decide(evidence.classes, evidence.validity)` is its verdict.

    Args:
        classes: evidence of each class, those with targets first and in the order of the SLO.
        validity: evidence about the client.
        counts: counts of each class, in the order of `classes`.
        overall: counts of all requests.
        window_ns: length of the window.
    """

    classes: tuple[ClassEvidence, ...]
    validity: ValidityEvidence
    counts: tuple[ClassCounts, ...]
    overall: ClassCounts
    window_ns: int

    @property
    def goodput_per_s(self) -> Fraction:
        """Attained requests per second of the window."""
        return goodput_per_s(self.overall.attainment.good, self.window_ns)


def gather(
    records: Iterable[RequestRecord],
    *,
    classes: Sequence[SLOClass],
    window_ns: int,
    window_start_ns: int = 0,
    rows_planned: int | None = None,
    incomplete: str = "",
    confidence: float = DEFAULT_CONFIDENCE,
    outage_s: int = 0,
    stalls: Stalls = NO_STALLS,
) -> RunEvidence:
    """Judge every record and gather the evidence of the run.

    Args:
        records: requests of the window in any order, without warm-up rows; read once.
        classes: SLO classes with their targets and objectives.
        window_ns: length of the window, above 0; the last second may be partial.
        window_start_ns: start of the window on the records' clock.
        rows_planned: number of rows in the window; rows without a record count as unsent. None to
            count only records.
        incomplete: cause of an early end, which completes "the run ended early: "; empty if the
            run is complete.
        confidence: confidence of each one-sided bound.
        outage_s: the longest outage that the bounds take into account.
        stalls: stalls of the client, on the clock of the records.

    Raises:
        ValueError: a record is scheduled before the window, or the window is empty.
    """
    if window_ns <= 0:
        raise ValueError("a window must be longer than 0")
    length_s = -(-window_ns // NS_PER_S)
    by_name = {c.name: c for c in classes}
    tally = AttainmentTally(by_name)
    measured: defaultdict[str, _ClassSeconds] = defaultdict(lambda: _ClassSeconds(length_s))
    on_time: defaultdict[str, _ClassSeconds] = defaultdict(lambda: _ClassSeconds(length_s))
    conforming: defaultdict[str, _ClassSeconds] = defaultdict(lambda: _ClassSeconds(length_s))
    deviations: Counter[Deviation] = Counter()
    lags_ns = array("q")
    tightest_ttft_ns: int | None = None
    client_errors = 0
    for record in records:
        if record.scheduled_ns < window_start_ns:
            raise ValueError("a record is scheduled before the window's start")
        targets = targets_for(record, by_name)
        judgement = judge(record, targets)
        kind = kind_on_time = kind_conforming = judgement.kind
        tally.add(record, judgement)
        lag_ns = record.lag_ns
        if lag_ns is not None:
            lags_ns.append(max(0, lag_ns))
        if kind is JudgementKind.MISSED:
            client_errors += record.client_error
            kind_on_time = judge(without_lag(record, stalls), targets).kind
        if record.deviations:
            deviations.update(record.deviations)
            kind_conforming = judge_favourably(record, targets).kind
        second = min((record.scheduled_ns - window_start_ns) // NS_PER_S, length_s - 1)
        measured[record.slo_class].add(second, kind)
        on_time[record.slo_class].add(second, kind_on_time)
        conforming[record.slo_class].add(second, kind_conforming)
        if targets.ttft_ns is not None:
            earlier_ns = targets.ttft_ns if tightest_ttft_ns is None else tightest_ttft_ns
            tightest_ttft_ns = min(earlier_ns, targets.ttft_ns)
    counts, overall = tally.by_class(), tally.overall()
    judged_classes = max(1, sum(c.objective is not None for c in classes))

    def evidence(counts: ClassCounts, seconds: SecondCounts) -> ClassEvidence:
        slo = by_name.get(counts.name)
        return class_evidence(
            counts.name,
            None if slo is None else slo.objective,
            seconds,
            confidence=confidence,
            classes=judged_classes,
            outage_s=outage_s,
            unjudged=counts.unjudged,
            short=counts.misses.get(MissReason.SHORT, 0),
        )

    as_measured = tuple(evidence(c, measured[c.name].counts) for c in counts)

    def alternative(seconds: Mapping[str, _ClassSeconds]) -> tuple[ClassEvidence, ...]:
        return tuple(
            measured_evidence
            if seconds[c.name].counts == measured[c.name].counts
            else evidence(c, seconds[c.name].counts)
            for c, measured_evidence in zip(counts, as_measured, strict=True)
        )

    missing = 0 if rows_planned is None else max(0, rows_planned - overall.rows)
    validity = ValidityEvidence(
        lag_p99_ns=quantile(lags_ns, P99) if lags_ns else None,
        tightest_ttft_ns=tightest_ttft_ns,
        unsent=overall.outcomes.get(Outcome.UNSENT, 0) + missing,
        missed=overall.attainment.total - overall.attainment.good,
        client_errors=client_errors,
        incomplete=incomplete,
        without_lag=alternative(on_time),
        if_conforming=alternative(conforming),
        deviations={d: deviations[d] for d in Deviation if deviations[d]},
    )
    return RunEvidence(
        classes=as_measured, validity=validity, counts=counts, overall=overall, window_ns=window_ns
    )


class _ClassSeconds:
    """Judged requests of one class by the second of their scheduled arrival."""

    def __init__(self, length_s: int) -> None:
        self._good = [0] * length_s
        self._total = [0] * length_s

    def add(self, second: int, kind: JudgementKind) -> None:
        """Count one request."""
        if kind in {JudgementKind.ATTAINED, JudgementKind.MISSED}:
            self._good[second] += kind is JudgementKind.ATTAINED
            self._total[second] += 1

    @property
    def counts(self) -> SecondCounts:
        """Counts by second of the window."""
        return SecondCounts(good=self._good, total=self._total)
