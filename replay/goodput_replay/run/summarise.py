"""From a run's records and facts to its summary: measures here, judgement and verdict elsewhere.

Counts, intervals and the verdict come from `statistics.evidence` and core's rules alone; this
module adds latencies, rates and the inputs, and rounds for print. Attainments and bounds are cut
so that a missed objective never looks met.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.quantiles import P50, P90, P95, P99, quantiles
from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import format_objective
from goodput_core.slo.verdict import VerdictKind, decide
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.run.columns import GapCounts, count_gaps, load_columns
from goodput_replay.run.records import read_records
from goodput_replay.run.summary import (
    SUMMARY_VERSION,
    ClassSummary,
    ClientSummary,
    EmulationSummary,
    IntervalSummary,
    PromiseSummary,
    Quantiles,
    RunSummary,
    Summary,
    TargetSummary,
    TraceSummary,
    ValiditySummary,
    VerdictSummary,
    WindowSummary,
)
from goodput_replay.statistics.evidence import gather

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from goodput_core.slo.attainment import ClassCounts
    from goodput_core.slo.intervals import Interval
    from goodput_core.slo.targets import SLOClass
    from goodput_core.slo.verdict import ClassVerdict, ValidityEvidence, Verdict
    from goodput_replay.run.columns import RunColumns
    from goodput_replay.run.facts import EmulationFacts, RunFacts

__all__ = ["cut_share", "summarise"]

_PRINTED: Final = (P50, P90, P95, P99)
_LARGEST: Final = Fraction(1)
_SHARE_SCALE: Final = 1_000_000


def summarise(folder: Path, facts: RunFacts) -> Summary:
    """Judge the records in `folder` and sum them up.

    Raises:
        InputError: the records cannot be read.
    """
    evidence = gather(
        read_records(folder, gaps=False),
        classes=facts.promise.classes,
        window_ns=facts.window_ns,
        window_start_ns=facts.window_start_ns,
        rows_planned=facts.rows_planned,
        incomplete="" if facts.complete else facts.abort_reason or "it was stopped",
        confidence=facts.confidence,
        outage_s=facts.promise.outage_s,
    )
    verdict = decide(evidence.classes, evidence.validity)
    measures = _Measures(folder, facts)
    promised = facts.promise.by_name()
    verdicts = {v.name: v for v in verdict.classes}
    return Summary(
        version=SUMMARY_VERSION,
        verdict=VerdictSummary(
            kind=verdict.kind,
            reason=verdict.reason,
            sentence=verdict.sentence,
            skipped=verdict.skipped,
            runs=1,
        ),
        validity=_validity(verdict, evidence.validity, measures, facts),
        overall=measures.overall(evidence.overall),
        classes=tuple(
            measures.of_class(
                counts, promised.get(counts.name), found.interval, verdicts.get(counts.name)
            )
            for counts, found in zip(evidence.counts, evidence.classes, strict=True)
        ),
        window=WindowSummary(
            start_s=_seconds(facts.window_start_ns),
            length_s=_seconds(facts.window_ns),
            rows_planned=facts.rows_planned,
            rows_sent=measures.rows_sent,
            warmup_rows=facts.warmup_rows,
        ),
        run=RunSummary(
            started_at=facts.started_at,
            goodput_version=facts.version,
            command=facts.command,
            seed=facts.seed,
            salt=facts.salt,
            complete=facts.complete,
            abort_reason=facts.abort_reason,
        ),
        trace=TraceSummary(
            name=facts.trace.name,
            digest=facts.trace.digest,
            source=facts.trace.source,
            licence=facts.trace.licence,
            clock=facts.trace.clock,
            synthetic=facts.trace.synthetic,
            transforms=facts.trace.transforms,
        ),
        target=TargetSummary(
            url=facts.target.url,
            endpoint=facts.target.endpoint,
            model=facts.target.model,
            service=facts.target.service,
            pinning=facts.target.pinning,
            header_names=facts.target.header_names,
            streaming=facts.target.streaming,
        ),
        promises=tuple(_promise(c) for c in facts.promise.classes),
        default_class=facts.promise.default,
        client=ClientSummary(
            cpu_s=_seconds(facts.client.cpu_ns),
            cpus=facts.client.cpus,
            peak_in_flight=facts.client.peak_in_flight,
        ),
        emulation=None if facts.emulation is None else _emulation(facts.emulation),
    )


class _Measures:
    """Latencies, tokens and rates of one run, by class."""

    def __init__(self, folder: Path, facts: RunFacts) -> None:
        self._columns = load_columns(folder)
        self._gaps = count_gaps(folder)
        self._facts = facts
        self.lag = _quantiles(self._columns.lag_ns)

    @property
    def rows_sent(self) -> int:
        return int(np.isfinite(self._columns.sent_ns).sum())

    def overall(self, counts: ClassCounts) -> ClassSummary:
        """The figures of all requests together: nothing was promised to them as one."""
        everyone = np.ones(len(self._columns.row), dtype=np.bool_)
        return self._of(counts, everyone, GapCounts.merged(self._gaps.values()))

    def of_class(
        self,
        counts: ClassCounts,
        promise: SLOClass | None,
        interval: Interval | None,
        verdict: ClassVerdict | None,
    ) -> ClassSummary:
        """The figures of one class."""
        plain = self._of(counts, self._columns.of_class(counts.name), self._gaps.get(counts.name))
        return replace(
            plain,
            interval=None if interval is None else _interval(interval),
            objective=_objective(promise),
            verdict=None if verdict is None else verdict.kind,
            reason=None if verdict is None else verdict.reason,
            sentence="" if verdict is None else verdict.sentence,
        )

    def _of(
        self, counts: ClassCounts, mine: NDArray[np.bool_], gaps: GapCounts | None
    ) -> ClassSummary:
        columns = self._columns
        good, share = counts.attainment.good, counts.attainment.share
        return ClassSummary(
            name=counts.name,
            requests=counts.rows,
            good=good,
            total=counts.attainment.total,
            attainment=None if share is None else cut_share(share),
            excluded=counts.excluded,
            unjudged=counts.unjudged,
            outcomes={o.value: n for o, n in counts.outcomes.items()},
            misses={r.value: n for r, n in counts.misses.items()},
            goodput_per_s=self._per_s(good),
            offered_per_s=self._per_s(counts.rows),
            served_per_s=self._per_s(int(_served(columns, mine, self._facts))),
            input_tokens=int(columns.input_tokens[mine & np.isfinite(columns.sent_ns)].sum()),
            output_tokens=int(columns.output_tokens[mine].sum()),
            ttft_ms=_quantiles(columns.ttft_ns[mine]),
            ttft_from_send_ms=_quantiles(columns.ttft_from_send_ns[mine]),
            tpot_ms=_quantiles(columns.tpot_ns[mine]),
            tbt_ms=_gap_quantiles(gaps),
            e2e_ms=_quantiles(columns.e2e_ns[mine]),
        )

    def _per_s(self, count: int) -> float:
        return round(count * NS_PER_S / self._facts.window_ns, 6)


def _served(columns: RunColumns, mine: NDArray[np.bool_], facts: RunFacts) -> np.int64:
    """Complete answers that ended within the window."""
    end_ns = facts.window_start_ns + facts.window_ns
    served: np.int64 = (mine & columns.of_outcome(Outcome.OK) & (columns.end_ns <= end_ns)).sum()
    return served


def _validity(
    verdict: Verdict, validity: ValidityEvidence, measures: _Measures, facts: RunFacts
) -> ValiditySummary:
    valid = verdict.kind is not VerdictKind.INVALID
    sentence = (
        "The client kept up: what was measured is the service." if valid else verdict.sentence
    )
    return ValiditySummary(
        valid=valid,
        reason=None if valid else verdict.reason,
        sentence=sentence,
        lag_ms=measures.lag,
        lag_p99_limit_ms=_ms(validity.lag_limit_ns),
        tightest_ttft_ms=None
        if validity.tightest_ttft_ns is None
        else _ms(validity.tightest_ttft_ns),
        unsent_rows=validity.unsent,
        loop_lag_p99_ms=_ms(facts.client.loop_lag_p99_ns),
        loop_lag_max_ms=_ms(facts.client.loop_lag_max_ns),
    )


def _emulation(facts: EmulationFacts) -> EmulationSummary:
    return EmulationSummary(
        device=facts.device,
        device_note=facts.device_note,
        illustrative=facts.illustrative,
        replicas=facts.replicas,
        topology=facts.topology,
        policy=facts.policy,
        oracle=facts.oracle,
        preemption=facts.preemption,
        placement=facts.placement,
        token_budget=facts.token_budget,
        max_num_seqs=facts.max_num_seqs,
        virtual_s=_seconds(facts.end_ns),
        device_s=_seconds(facts.device_ns),
        peak_replicas=facts.peak_replicas,
        final_replicas=facts.final_replicas,
        steps=facts.steps,
        preemptions=facts.preemptions,
        recomputed_tokens=facts.recomputed_tokens,
        swapped_tokens=facts.swapped_tokens,
        migrations=facts.migrations,
        migrations_aborted=facts.migrations_aborted,
        migrated_blocks=facts.migrated_blocks,
    )


def _promise(promise: SLOClass) -> PromiseSummary:
    return PromiseSummary(
        name=promise.name,
        ttft_ms=promise.ttft_ms,
        tpot_ms=promise.tpot_ms,
        tbt_p99_ms=promise.tbt_p99_ms,
        e2e_ms=promise.e2e_ms,
        objective=_objective(promise),
    )


def _objective(promise: SLOClass | None) -> str | None:
    if promise is None or promise.objective is None:
        return None
    return format_objective(promise.objective)


def _interval(interval: Interval) -> IntervalSummary:
    return IntervalSummary(
        lower=cut_share(interval.lower),
        upper=math.ceil(Fraction(interval.upper) * _SHARE_SCALE) / _SHARE_SCALE,
        confidence=interval.confidence,
        effective_requests=round(interval.effective, 1),
        method=interval.method,
    )


def _quantiles(values_ns: NDArray[np.float64]) -> Quantiles | None:
    """Quantiles of the values that are there; None without any."""
    measured = values_ns[np.isfinite(values_ns)]
    if not len(measured):
        return None
    # Whole nanoseconds, so that core's exact quantiles apply.
    p50, p90, p95, p99, largest = quantiles(
        np.rint(measured).astype(int).tolist(), (*_PRINTED, _LARGEST)
    )
    return Quantiles(
        count=len(measured),
        p50=_ms(p50),
        p90=_ms(p90),
        p95=_ms(p95),
        p99=_ms(p99),
        max=_ms(largest),
    )


def _gap_quantiles(gaps: GapCounts | None) -> Quantiles | None:
    if gaps is None or not gaps.total:
        return None
    p50, p90, p95, p99 = (gaps.quantile_us(q) / 1000 for q in _PRINTED)
    return Quantiles(
        count=gaps.total, p50=p50, p90=p90, p95=p95, p99=p99, max=gaps.largest_us / 1000
    )


def _ms(ns: int) -> float:
    return round(ns / NS_PER_MS, 3)


def _seconds(ns: int) -> float:
    return round(ns / NS_PER_S, 6)


def cut_share(share: Fraction | float) -> float:
    """Six decimals, cut off: never more than the share itself."""
    return math.floor(Fraction(share) * _SHARE_SCALE) / _SHARE_SCALE
