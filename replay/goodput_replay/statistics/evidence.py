"""Gather the evidence of a run from its records.

Each record is judged as measured, as if the client had had no lag, as if its response had conformed
to the API, without the errors of the client, and without all of these. All judgements are counted
in the second of its scheduled arrival. Records are not retained. `goodput_core.slo` computes
intervals and verdicts from the counts.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.histogram import DurationHistogram
from goodput_core.quantiles import P99
from goodput_core.slo.attainment import (
    AttainmentTally,
    ClassCounts,
    SecondCounts,
    goodput_per_s,
)
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.evidence import ClassEvidence, ValidityEvidence, class_evidence
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.judging import (
    Judgement,
    JudgementKind,
    is_cut_by_client,
    judge,
    judge_favourably,
    targets_for,
    without_lag,
)
from goodput_core.slo.record import Outcome
from goodput_core.slo.stalls import NO_STALLS, Stalls
from goodput_core.units import NS_PER_S
from goodput_replay.statistics.ranks import nearest_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from fractions import Fraction

    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.targets import SLOClass

__all__ = ["EvidenceTally", "RunEvidence", "gather"]

_NEVER_STALLED: Final[Mapping[int, Stalls]] = MappingProxyType({})


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
    stalls: Mapping[int, Stalls] = _NEVER_STALLED,
    closed_loop: bool = False,
    shard: str = "",
    exact_lag: bool = True,
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
        stalls: stalls of each sender by its number, on the clock of the records.
        closed_loop: True if clients sent each request when an earlier response had ended.
        shard: the shard that was sent, as in "2 of 4"; empty if all requests were sent.
        exact_lag: as in `EvidenceTally`.

    Raises:
        ValueError: a record is scheduled before the window, or the window is empty.
    """
    tally = EvidenceTally(
        classes=classes,
        window_ns=window_ns,
        window_start_ns=window_start_ns,
        stalls=stalls,
        exact_lag=exact_lag,
    )
    for record in records:
        tally.add(record)
    return tally.evidence(
        rows_planned=rows_planned,
        incomplete=incomplete,
        confidence=confidence,
        outage_s=outage_s,
        closed_loop=closed_loop,
        shard=shard,
    )


class EvidenceTally:
    """Counts the evidence of a run record by record, so that it can be read during the run.

    Memory grows with the number of classes times the seconds of the window.

    Args:
        classes: SLO classes with their targets and objectives.
        window_ns: length of the window, above 0; the last second may be partial. None if it is not
            known yet.
        window_start_ns: start of the window on the records' clock.
        stalls: stalls of each sender by its number, on the same clock; during a run they are not
            known yet.
        tightest_ttft_ns: smallest TTFT target of the plan, if it is known before the run.
        exact_lag: if False, keep a histogram of the send lag, whose quantiles are within 1 %,
            instead of eight bytes per request.

    Attributes:
        tally: counts by class.
        tightest_ttft_ns: smallest TTFT target of any request; None without TTFT targets.
        lag: send lag of the sent requests; empty if `exact_lag` is True.

    Raises:
        ValueError: the window is empty.
    """

    def __init__(
        self,
        *,
        classes: Sequence[SLOClass],
        window_ns: int | None,
        window_start_ns: int = 0,
        stalls: Mapping[int, Stalls] = _NEVER_STALLED,
        tightest_ttft_ns: int | None = None,
        exact_lag: bool = True,
    ) -> None:
        if window_ns is not None and window_ns <= 0:
            raise ValueError("a window must be longer than 0")
        self._by_name = {c.name: c for c in classes}
        self._window_ns = window_ns
        self._window_start_ns = window_start_ns
        self._stalls = stalls
        self._measured: dict[str, _ClassSeconds] = {}
        self._on_time: dict[str, _ClassSeconds] = {}
        self._conforming: dict[str, _ClassSeconds] = {}
        self._accepted: dict[str, _ClassSeconds] = {}
        self._undisturbed: dict[str, _ClassSeconds] = {}
        self._deviations: Counter[Deviation] = Counter()
        self._lags_ns = array("q") if exact_lag else None
        self._client_errors = 0
        self._unconnected = 0
        self._connected = False
        self.tally = AttainmentTally(self._by_name)
        self.tightest_ttft_ns = tightest_ttft_ns
        self.lag = DurationHistogram()

    def add(self, record: RequestRecord, *, known_valid: bool = False) -> Judgement:
        """Judge and count one request of the window.

        Args:
            record: the record.
            known_valid: True if the request is valid, so that a rejection is no error of the
                client.

        Raises:
            ValueError: the record is scheduled before the window.
        """
        if record.scheduled_ns < self._window_start_ns:
            raise ValueError("a record is scheduled before the window's start")
        targets = targets_for(record, self._by_name)
        judgement = judge(record, targets)
        kind = kind_on_time = kind_conforming = kind_accepted = judgement.kind
        self.tally.add(record, judgement)
        lag_ns = record.lag_ns
        if lag_ns is not None:
            self._add_lag(max(0, lag_ns))
        self._connected |= record.sent_ns is not None
        self._unconnected += record.never_connected
        kind_undisturbed = kind
        deviations = record.deviations
        if is_cut_by_client(record, targets):
            deviations = (*deviations, Deviation.CUT_BY_CLIENT)
        if kind is JudgementKind.MISSED or deviations:
            on_time = without_lag(record, self._stalls.get(record.sender, NO_STALLS))
            if kind is JudgementKind.MISSED:
                kind_on_time = judge(on_time, targets).kind
            kind_undisturbed = judge_favourably(on_time, targets).kind
        if deviations:
            self._deviations.update(deviations)
            kind_conforming = judge_favourably(record, targets).kind
        if record.client_error and not known_valid:
            self._client_errors += 1
            kind_accepted = kind_undisturbed = JudgementKind.EXCLUDED
        second = (record.scheduled_ns - self._window_start_ns) // NS_PER_S
        if self._window_ns is not None:
            second = min(second, (self._window_ns - 1) // NS_PER_S)
        for seconds, counted in (
            (self._measured, kind),
            (self._on_time, kind_on_time),
            (self._conforming, kind_conforming),
            (self._accepted, kind_accepted),
            (self._undisturbed, kind_undisturbed),
        ):
            self._seconds(seconds, record.slo_class).add(second, counted)
        if targets.ttft_ns is not None:
            known_ns = self.tightest_ttft_ns
            self.tightest_ttft_ns = (
                targets.ttft_ns if known_ns is None else min(known_ns, targets.ttft_ns)
            )
        return judgement

    def seconds(self, name: str, length_s: int) -> SecondCounts:
        """Return the judged requests of a class in the first seconds of the window."""
        return self._seconds(self._measured, name).until(length_s)

    def evidence(
        self,
        *,
        rows_planned: int | None = None,
        incomplete: str = "",
        confidence: float = DEFAULT_CONFIDENCE,
        outage_s: int = 0,
        closed_loop: bool = False,
        shard: str = "",
        until_ns: int | None = None,
    ) -> RunEvidence:
        """Return the evidence of the counted records.

        Args:
            rows_planned: as in `gather`.
            incomplete: as in `gather`.
            confidence: as in `gather`.
            outage_s: as in `gather`.
            closed_loop: as in `gather`.
            shard: as in `gather`.
            until_ns: length of the part of the window to judge, above 0; None for the window, whose
                length is then known.
        """
        lengths_ns = [ns for ns in (self._window_ns, until_ns) if ns is not None]
        window_ns = min(lengths_ns)
        length_s = -(-window_ns // NS_PER_S)
        counts, overall = self.tally.by_class(), self.tally.overall()
        judged_classes = max(1, sum(c.objective is not None for c in self._by_name.values()))

        def evidence(counts: ClassCounts, seconds: SecondCounts) -> ClassEvidence:
            slo = self._by_name.get(counts.name)
            return class_evidence(
                counts.name,
                None if slo is None else slo.objective,
                seconds,
                confidence=confidence,
                classes=judged_classes,
                outage_s=outage_s,
                unjudged=counts.unjudged,
                misses=counts.misses,
                rows=counts.rows,
            )

        measured = {c.name: self._seconds(self._measured, c.name).until(length_s) for c in counts}
        as_measured = tuple(evidence(c, measured[c.name]) for c in counts)

        def alternative(seconds: dict[str, _ClassSeconds]) -> tuple[ClassEvidence, ...]:
            others = (self._seconds(seconds, c.name).until(length_s) for c in counts)
            return tuple(
                measured_evidence if other == measured[c.name] else evidence(c, other)
                for c, other, measured_evidence in zip(counts, others, as_measured, strict=True)
            )

        missing = 0 if rows_planned is None else max(0, rows_planned - overall.rows)
        validity = ValidityEvidence(
            lag_p99_ns=self._lag_p99_ns(),
            tightest_ttft_ns=self.tightest_ttft_ns,
            unsent=overall.outcomes.get(Outcome.UNSENT, 0) + missing,
            requests=overall.rows,
            client_errors=self._client_errors,
            never_connected=0 if self._connected else self._unconnected,
            incomplete=incomplete,
            without_lag=alternative(self._on_time),
            without_client_errors=alternative(self._accepted),
            if_conforming=alternative(self._conforming),
            undisturbed=alternative(self._undisturbed),
            deviations={d: self._deviations[d] for d in Deviation if self._deviations[d]},
            closed_loop=closed_loop,
            shard=shard,
        )
        return RunEvidence(
            classes=as_measured,
            validity=validity,
            counts=counts,
            overall=overall,
            window_ns=window_ns,
        )

    def _add_lag(self, lag_ns: int) -> None:
        if self._lags_ns is None:
            self.lag.add(lag_ns)
        else:
            self._lags_ns.append(lag_ns)

    def _lag_p99_ns(self) -> int | None:
        """Return the p99 of the send lag; None if no request was sent."""
        if self._lags_ns is None:
            return self.lag.quantile_ns(0.99) if self.lag.count else None
        if not self._lags_ns:
            return None
        return nearest_ranks(np.frombuffer(self._lags_ns, dtype=np.int64), (P99,))[0]

    def _seconds(self, of: dict[str, _ClassSeconds], name: str) -> _ClassSeconds:
        if name not in of:
            of[name] = _ClassSeconds()
        return of[name]


class _ClassSeconds:
    """Judged requests of one class by the second of their scheduled arrival."""

    def __init__(self) -> None:
        self._good: list[int] = []
        self._total: list[int] = []

    def add(self, second: int, kind: JudgementKind) -> None:
        """Count one request."""
        if kind in {JudgementKind.ATTAINED, JudgementKind.MISSED}:
            if (added := second + 1 - len(self._total)) > 0:
                self._good += [0] * added
                self._total += [0] * added
            self._good[second] += kind is JudgementKind.ATTAINED
            self._total[second] += 1

    def until(self, length_s: int) -> SecondCounts:
        """Return the counts of the first seconds; later requests count in the last of them."""
        after = [0] * (length_s - len(self._total))
        good, total = self._good[:length_s] + after, self._total[:length_s] + after
        good[-1] += sum(self._good[length_s:])
        total[-1] += sum(self._total[length_s:])
        return SecondCounts(good=good, total=total)
