"""From a run's records to the evidence that its verdict rests on.

Each record is judged here, once as it was and once without the client's lag, and counted into
the second in which it was scheduled; records are not kept. Intervals and verdicts are computed
from these counts in `goodput_core.slo`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from goodput_core.quantiles import P99, quantile
from goodput_core.slo.attainment import (
    AttainmentTally,
    ClassCounts,
    SecondCounts,
    goodput_per_s,
)
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.judging import JudgementKind, MissReason, judge, targets_for, without_lag
from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import ClassEvidence, ValidityEvidence, class_evidence
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from fractions import Fraction

    from goodput_core.slo.judging import Judgement
    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.targets import SLOClass

__all__ = ["RunEvidence", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """The evidence of one run: `decide(evidence.classes, evidence.validity)` is its verdict.

    Args:
        classes: one for each class, those with targets first and in their order.
        validity: the evidence about the client.
        counts: the counts of each class, in the order of `classes`.
        overall: the counts of all requests.
        window_ns: the length of the window.
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
) -> RunEvidence:
    """Judge every record and gather the evidence of the run.

    Args:
        records: the window's requests in any order, warm-up left out; read once.
        classes: the classes with their targets and objectives.
        window_ns: the window's length, above 0; its last second may be a part of one.
        window_start_ns: its start on the records' clock.
        rows_planned: rows of the window; those without a record count as never sent.
        incomplete: why the run ended early, as the end of a sentence; empty if it did not.
        confidence: of each one-sided bound.
        outage_s: the longest outage that a PASS must exclude.

    Raises:
        ValueError: a record scheduled before the window, or a window without length.
    """
    if window_ns <= 0:
        raise ValueError("a window must be longer than 0")
    by_name = {c.name: c for c in classes}
    tally = AttainmentTally(by_name)
    seconds = max(1, -(-window_ns // NS_PER_S))
    counted = {name: _ClassSeconds(seconds) for name in by_name}
    lags_ns = array("q")
    tightest_ttft_ns: int | None = None
    client_errors = 0
    for record in records:
        if record.scheduled_ns < window_start_ns:
            raise ValueError("a record is scheduled before the window's start")
        targets = targets_for(record, by_name)
        judgement = judge(record, targets)
        tally.add(record, judgement)
        lag_ns = record.lag_ns
        on_time = judgement
        if lag_ns is not None:
            lags_ns.append(max(0, lag_ns))
            if lag_ns > 0 and judgement.kind is JudgementKind.MISSED:
                on_time = judge(without_lag(record), targets)
        if judgement.kind is JudgementKind.MISSED:
            client_errors += record.client_error
        second = min((record.scheduled_ns - window_start_ns) // NS_PER_S, seconds - 1)
        name = record.slo_class
        if name not in counted:
            counted[name] = _ClassSeconds(seconds)
        counted[name].add(second, judgement, on_time)
        if targets.ttft_ns is not None:
            known_ns = targets.ttft_ns if tightest_ttft_ns is None else tightest_ttft_ns
            tightest_ttft_ns = min(known_ns, targets.ttft_ns)
    counts, overall = tally.by_class(), tally.overall()
    sharers = max(1, sum(c.objective is not None for c in classes))

    def evidence(counts: ClassCounts, seconds: SecondCounts) -> ClassEvidence:
        promised = by_name.get(counts.name)
        return class_evidence(
            counts.name,
            None if promised is None else promised.objective,
            seconds,
            confidence=confidence,
            classes=sharers,
            outage_s=outage_s,
            unjudged=counts.unjudged,
            short=counts.misses.get(MissReason.SHORT, 0),
        )

    found = tuple(evidence(c, counted[c.name].as_it_was()) for c in counts)
    on_time_too = tuple(
        evidence(c, counted[c.name].on_time()) if counted[c.name].lag_decided else as_it_was
        for c, as_it_was in zip(counts, found, strict=True)
    )
    missing = 0 if rows_planned is None else max(0, rows_planned - overall.rows)
    validity = ValidityEvidence(
        lag_p99_ns=quantile(lags_ns, P99) if lags_ns else None,
        tightest_ttft_ns=tightest_ttft_ns,
        unsent=overall.outcomes.get(Outcome.UNSENT, 0) + missing,
        missed=overall.attainment.total - overall.attainment.good,
        client_errors=client_errors,
        incomplete=incomplete,
        without_lag=on_time_too,
    )
    return RunEvidence(
        classes=found, validity=validity, counts=counts, overall=overall, window_ns=window_ns
    )


class _ClassSeconds:
    """One class's judged requests by the second in which they were scheduled.

    Args:
        seconds: of the window.
    """

    def __init__(self, seconds: int) -> None:
        self._good = [0] * seconds
        self._total = [0] * seconds
        # Misses that were the client's lag: how many more attain, or are not judged, without it.
        self._late_good: Counter[int] = Counter()
        self._late_excluded: Counter[int] = Counter()

    @property
    def lag_decided(self) -> bool:
        """True if some request was judged otherwise without the client's lag."""
        return bool(self._late_good or self._late_excluded)

    def add(self, second: int, judgement: Judgement, on_time: Judgement) -> None:
        """Count one request, judged as it was and as if it had been sent on time."""
        if judgement.kind is JudgementKind.ATTAINED:
            self._good[second] += 1
        elif judgement.kind is not JudgementKind.MISSED:
            return
        self._total[second] += 1
        if on_time.kind is judgement.kind:
            return
        if on_time.kind is JudgementKind.ATTAINED:
            self._late_good[second] += 1
        else:
            self._late_excluded[second] += 1

    def as_it_was(self) -> SecondCounts:
        """Return the counts of the run."""
        return SecondCounts(good=self._good, total=self._total)

    def on_time(self) -> SecondCounts:
        """Return the counts as if every request had been sent on time."""
        good, total = self._good.copy(), self._total.copy()
        for second, more in self._late_good.items():
            good[second] += more
        for second, fewer in self._late_excluded.items():
            total[second] -= fewer
        return SecondCounts(good=good, total=total)
