"""Build the summary of a run until now, in the form of the finished run's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_core.slo.record import Outcome
from goodput_core.slo.targets import format_objective
from goodput_core.slo.verdict import VerdictKind
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.runs.rounding import cut_share, round_up, seconds
from goodput_replay.runs.summary import (
    SUMMARY_VERSION,
    ClassSummary,
    ErrorSummary,
    Quantiles,
    Summary,
    ValiditySummary,
    VerdictSummary,
    WindowSummary,
)
from goodput_replay.runs.summary_builder import summarise_interval, summarise_targets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.histogram import DurationHistogram
    from goodput_core.slo.attainment import ClassCounts
    from goodput_core.slo.evidence import ClassEvidence
    from goodput_replay.live.tally import RunSoFar
    from goodput_replay.runs.summary_builder import RunInfo

__all__ = ["summarise_so_far"]

_EARLY: Final = "Too few requests have ended to judge the client."
_ON_TIME: Final = "The client keeps up: the latencies are those of the service."


def summarise_so_far(so_far: RunSoFar, info: RunInfo) -> Summary:
    """Return the summary of a run until now; rates are of the part of the window that has passed.

    Args:
        so_far: the run until now.
        info: information about the run, known before it starts.
    """
    evidence, verdict = so_far.evidence, so_far.verdict
    verdicts = {one.name: one for one in verdict.classes}
    objectives = {one.name: one.objective for one in info.slo.classes}

    def summarise(counts: ClassCounts, measured: ClassEvidence | None) -> ClassSummary:
        share = counts.attainment.share
        objective = objectives.get(counts.name) if measured is not None else None
        judged = verdicts.get(counts.name) if measured is not None else None
        latency = {
            measure: _summarise(so_far.latencies.get((measure, counts.name)))
            if measured is not None
            else None
            for measure in ("ttft", "ttft_from_send", "tpot", "e2e")
        }
        return ClassSummary(
            name=counts.name,
            requests=counts.rows,
            good=counts.attainment.good,
            total=counts.attainment.total,
            attainment=None if share is None else cut_share(share),
            interval=None
            if measured is None or measured.interval is None
            else summarise_interval(measured.interval),
            objective=None if objective is None else format_objective(objective),
            verdict=None if judged is None else judged.kind,
            reason=None if judged is None else judged.reason,
            sentence="" if judged is None else judged.sentence,
            proof=None if judged is None or judged.proof is None else round_up(judged.proof),
            excluded=counts.excluded,
            unjudged=counts.unjudged,
            outcomes={outcome.value: n for outcome, n in counts.outcomes.items()},
            misses={reason.value: n for reason, n in counts.misses.by_reason.items()},
            misses_without_response=counts.misses.without_response,
            goodput_per_s=per_s(counts.attainment.good),
            offered_per_s=per_s(counts.rows),
            served_per_s=per_s(counts.outcomes.get(Outcome.OK, 0)),
            input_tokens=_count_tokens(so_far.input_tokens, counts.name, measured),
            output_tokens=_count_tokens(so_far.output_tokens, counts.name, measured),
            ttft_ms=latency["ttft"],
            ttft_from_send_ms=latency["ttft_from_send"],
            tpot_ms=latency["tpot"],
            tbt_ms=None,
            e2e_ms=latency["e2e"],
        )

    def per_s(count: int) -> float:
        return round(count * NS_PER_S / evidence.window_ns, 6)

    return Summary(
        version=SUMMARY_VERSION,
        verdict=VerdictSummary(
            kind=verdict.kind,
            reason=verdict.reason,
            sentence=verdict.sentence,
            skipped=verdict.skipped,
            runs=1,
        ),
        validity=_summarise_validity(so_far),
        overall=summarise(evidence.overall, None),
        classes=tuple(
            summarise(counts, measured)
            for counts, measured in zip(evidence.counts, evidence.classes, strict=True)
        ),
        window=WindowSummary(
            start_s=seconds(info.window_start_ns),
            length_s=seconds(info.window_ns),
            rows_planned=info.rows_planned,
            rows_sent=so_far.lag.count,
            warmup_rows=info.warmup_rows,
        ),
        run=info.run,
        trace=info.trace,
        target=info.target,
        promises=tuple(summarise_targets(one) for one in info.slo.classes),
        default_class=info.slo.default,
        client=info.client,
        outage_s=info.slo.outage_s,
        errors=tuple(
            ErrorSummary(outcome=outcome, status=status, detail=detail, count=count)
            for (outcome, status, detail), count in so_far.errors
        ),
        other_errors=so_far.other_errors,
    )


def _summarise_validity(so_far: RunSoFar) -> ValiditySummary:
    verdict, validity = so_far.verdict, so_far.validity
    valid = verdict.kind is not VerdictKind.INVALID
    tightest_ns = validity.tightest_ttft_ns
    return ValiditySummary(
        valid=valid,
        reason=None if valid else verdict.reason,
        sentence=(_EARLY if so_far.early else _ON_TIME) if valid else verdict.sentence,
        lag_ms=_summarise(so_far.lag),
        lag_p99_limit_ms=_to_ms(validity.lag_limit_ns),
        tightest_ttft_ms=None if tightest_ns is None else _to_ms(tightest_ns),
        unsent_rows=validity.unsent,
        client_errors=validity.client_errors,
        loop_lag_p99_ms=_to_ms(so_far.progress.loop_lag_p99_ns),
        loop_lag_max_ms=_to_ms(so_far.progress.loop_lag_max_ns),
    )


def _count_tokens(tokens: Mapping[str, int], name: str, measured: ClassEvidence | None) -> int:
    """Return the tokens of a class, or of all classes without evidence of one."""
    return sum(tokens.values()) if measured is None else tokens.get(name, 0)


def _summarise(histogram: DurationHistogram | None) -> Quantiles | None:
    if histogram is None or not histogram.count:
        return None
    p50, p90, p95, p99 = (_to_ms(histogram.quantile_ns(q)) for q in (0.5, 0.9, 0.95, 0.99))
    return Quantiles(
        count=histogram.count, p50=p50, p90=p90, p95=p95, p99=p99, max=_to_ms(histogram.max_ns)
    )


def _to_ms(ns: int) -> float:
    return round(ns / NS_PER_MS, 3)
