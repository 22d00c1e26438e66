"""Build a run's summary from its records and its `RunInfo`.

`statistics.evidence` and `goodput_core.slo` compute counts, intervals and the verdict. This module
adds the measures, the inputs of the run and the sentences of the summary.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from goodput_core.slo.conformance import describe_deviation
from goodput_core.slo.intervals import DEFAULT_CONFIDENCE
from goodput_core.slo.stalls import Stall, Stalls
from goodput_core.slo.targets import format_objective
from goodput_core.slo.verdict import VerdictKind, decide
from goodput_core.units import NS_PER_S
from goodput_replay.runs.columns import (
    PromptTokenCounts,
    count_prompt_tokens,
    count_retried,
)
from goodput_replay.runs.error_counts import NO_ERRORS, count_errors
from goodput_replay.runs.files import digest_records
from goodput_replay.runs.measures import RunMeasures
from goodput_replay.runs.record_rows import read_records
from goodput_replay.runs.rounding import cut_share, round_up, seconds, to_ms
from goodput_replay.runs.slo import SLOClasses
from goodput_replay.runs.summary import (
    SUMMARY_VERSION,
    ClassSummary,
    ClientSummary,
    DeviationSummary,
    EmulationSummary,
    ErrorSummary,
    IntervalSummary,
    PromptKind,
    PromptTokensSummary,
    RunSummary,
    SLOSummary,
    StallSummary,
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

    from goodput_core.slo.evidence import ValidityEvidence
    from goodput_core.slo.intervals import Interval
    from goodput_core.slo.targets import SLOClass
    from goodput_core.slo.verdict import ClassVerdict, Verdict

__all__ = [
    "RunInfo",
    "build_summary",
    "read_stalls",
    "summarise_interval",
    "summarise_stall",
    "summarise_targets",
]

_PROMPT_TOLERANCE: Final = 0.01
_MAX_ERRORS: Final = 10
_NO_CLIENT: Final = ClientSummary(cpu_s=0.0, cpus=0, peak_in_flight=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Parts of a run's summary that its records do not contain, and the window to judge.

    Args:
        trace: replayed trace.
        target: target server.
        run: command, start time and completeness.
        slo: SLO classes for judging.
        window_start_ns: start of the judged window, nanoseconds since the run's time
            zero.
        window_ns: length of the window.
        rows_planned: number of rows in the window, without warm-up rows; rows without a record
            count as unsent.
        warmup_rows: rows sent before the window, which are not judged.
        confidence: one-sided confidence of each bound of an attainment.
        client: resource usage of the client.
        loop_lag_p99_ns: p99 delay of the client's event loop.
        loop_lag_max_ns: maximum delay of that event loop.
        emulation: emulated fleet and its totals; None in real time.
    """

    trace: TraceSummary
    target: TargetSummary
    run: RunSummary
    slo: SLOClasses
    window_start_ns: int
    window_ns: int
    rows_planned: int
    warmup_rows: int = 0
    confidence: float = DEFAULT_CONFIDENCE
    client: ClientSummary = _NO_CLIENT
    loop_lag_p99_ns: int = 0
    loop_lag_max_ns: int = 0
    emulation: EmulationSummary | None = None

    def incomplete(self, reason: str) -> RunInfo:
        """Return a copy marked incomplete; `reason` completes "the run ended early: "."""
        return replace(self, run=replace(self.run, complete=False, abort_reason=reason))


def build_summary(folder: Path, info: RunInfo) -> Summary:
    """Judge the records in `folder` and summarise them.

    Raises:
        InputError: the records cannot be read.
    """
    evidence = gather(
        read_records(folder, gaps=False),
        classes=info.slo.classes,
        window_ns=info.window_ns,
        window_start_ns=info.window_start_ns,
        rows_planned=info.rows_planned,
        incomplete="" if info.run.complete else info.run.abort_reason or "it was stopped",
        outage_s=info.slo.outage_s,
        confidence=info.confidence,
        stalls=read_stalls(info.client),
        closed_loop=info.run.concurrency is not None,
        shard="" if info.run.shard is None else str(info.run.shard),
        exact_lag=False,
    )
    measures = RunMeasures(
        folder,
        [counts.name for counts in evidence.counts],
        window_start_ns=info.window_start_ns,
        window_ns=info.window_ns,
    )
    prompts = count_prompt_tokens(folder)
    validity = replace(evidence.validity, lag_p99_ns=measures.lag_p99_ns)
    if prompts.reported and info.target.prompt is not PromptKind.TOKEN_IDS:
        validity = replace(validity, prompt_ratio=prompts.reported / prompts.planned)
    verdict = decide(evidence.classes, validity)
    by_name = info.slo.by_name()
    verdicts = {v.name: v for v in verdict.classes}
    errors = count_errors(folder)
    listed = errors.errors[:_MAX_ERRORS]
    warmup = count_errors(folder, warmup=True) if info.warmup_rows else NO_ERRORS
    summary = Summary(
        version=SUMMARY_VERSION,
        verdict=VerdictSummary(
            kind=verdict.kind,
            reason=verdict.reason,
            sentence=verdict.sentence,
            skipped=verdict.skipped,
            runs=1,
        ),
        validity=_summarise_validity(verdict, validity, measures, info),
        overall=measures.overall(evidence.overall),
        classes=tuple(
            _summarise_class(
                measures.of_class(counts),
                by_name.get(counts.name),
                measured.interval,
                verdicts.get(counts.name),
            )
            for counts, measured in zip(evidence.counts, evidence.classes, strict=True)
        ),
        window=WindowSummary(
            start_s=seconds(info.window_start_ns),
            length_s=seconds(info.window_ns),
            rows_planned=info.rows_planned,
            rows_sent=measures.rows_sent,
            warmup_rows=info.warmup_rows,
            warmup_failed=warmup.total,
            warmup_error=next((text or outcome for (outcome, _, text), _ in warmup.errors), ""),
        ),
        run=info.run,
        trace=info.trace,
        target=info.target,
        promises=tuple(summarise_targets(c) for c in info.slo.classes),
        default_class=info.slo.default,
        client=info.client,
        outage_s=info.slo.outage_s,
        emulation=info.emulation,
        errors=tuple(
            ErrorSummary(outcome=outcome, status=status, detail=detail, count=count)
            for (outcome, status, detail), count in listed
        ),
        prompt_tokens=_summarise_prompts(prompts, info.target.prompt),
        retried=count_retried(folder) if info.run.retries else 0,
        other_errors=errors.total - sum(count for _, count in listed),
        records_digest=digest_records(folder),
    )
    return _weigh(summary, info.slo)


def _summarise_class(
    measured: ClassSummary,
    slo: SLOClass | None,
    interval: Interval | None,
    verdict: ClassVerdict | None,
) -> ClassSummary:
    """Add the objective, the interval and the verdict of a class."""
    return replace(
        measured,
        interval=None if interval is None else summarise_interval(interval),
        objective=_format_objective(slo),
        verdict=None if verdict is None else verdict.kind,
        reason=None if verdict is None else verdict.reason,
        sentence="" if verdict is None else verdict.sentence,
        proof=None if verdict is None or verdict.proof is None else round_up(verdict.proof),
    )


def _summarise_validity(
    verdict: Verdict, validity: ValidityEvidence, measures: RunMeasures, info: RunInfo
) -> ValiditySummary:
    valid = verdict.kind is not VerdictKind.INVALID
    virtual = info.emulation is not None
    sentence = verdict.sentence
    if valid and virtual:
        sentence = "The run was in virtual time, where every request is sent exactly on schedule."
    elif valid:
        sentence = "The client kept up: the latencies are those of the service."
    deviations = tuple(
        DeviationSummary(kind=kind, count=count, sentence=describe_deviation(kind, count))
        for kind, count in validity.deviations.items()
    )
    if valid and deviations:
        listed = "; ".join(deviation.sentence for deviation in deviations)
        sentence += f" The verdict does not depend on these deviations of the target: {listed}."
    if valid and validity.client_errors:
        rejected = f"{validity.client_errors} of {validity.requests} requests"
        sentence += (
            f" The verdict does not depend on {rejected} that the server rejected as invalid (3xx "
            "or 4xx)."
        )
    tightest_ns = validity.tightest_ttft_ns
    return ValiditySummary(
        valid=valid,
        reason=None if valid else verdict.reason,
        sentence=sentence,
        lag_ms=None if virtual else measures.lag,
        lag_p99_limit_ms=to_ms(validity.lag_limit_ns),
        tightest_ttft_ms=None if tightest_ns is None else to_ms(tightest_ns),
        unsent_rows=validity.unsent,
        client_errors=validity.client_errors,
        deviations=deviations,
        loop_lag_p99_ms=to_ms(info.loop_lag_p99_ns),
        loop_lag_max_ms=to_ms(info.loop_lag_max_ns),
    )


def _summarise_prompts(
    counts: PromptTokenCounts, prompt: PromptKind | None
) -> PromptTokensSummary | None:
    if not counts.requests:
        return None
    sentence, difference = "", counts.reported - counts.planned
    if abs(difference) > _PROMPT_TOLERANCE * counts.planned:
        sentence = (
            f"the target counted {counts.reported / counts.planned:.2f} times the input tokens of "
            f"the requests: {counts.reported} in place of {counts.planned} in {counts.requests} "
            f"responses, a difference of up to {counts.max_difference} tokens in one"
        )
        if prompt is PromptKind.INVENTED_WORDS:
            sentence += "; give the tokenizer of its model with --tokenizer"
    return PromptTokensSummary(
        responses=counts.requests,
        planned=counts.planned,
        reported=counts.reported,
        mean_difference=round(difference / counts.requests, 3),
        max_difference=counts.max_difference,
        sentence=sentence,
    )


def summarise_targets(slo: SLOClass) -> SLOSummary:
    """Return the targets of a class as in `summary.json`."""
    return SLOSummary(
        name=slo.name,
        ttft_ms=slo.ttft_ms,
        tpot_ms=slo.tpot_ms,
        tbt_p99_ms=slo.tbt_p99_ms,
        e2e_ms=slo.e2e_ms,
        objective=_format_objective(slo),
        priority=slo.priority,
        weight=slo.weight,
    )


def _weigh(summary: Summary, slo: SLOClasses) -> Summary:
    """Add the weighted goodput if the weights of the classes differ."""
    weights = {c.name: c.weight for c in slo.classes}
    if len(set(weights.values())) < 2:
        return summary
    rates = {row.name: row.goodput_per_s * weights.get(row.name, 1) for row in summary.classes}
    return replace(
        summary,
        overall=replace(summary.overall, weighted_goodput_per_s=round(sum(rates.values()), 6)),
        classes=tuple(
            replace(row, weighted_goodput_per_s=round(rates[row.name], 6))
            for row in summary.classes
        ),
    )


def _format_objective(slo: SLOClass | None) -> str | None:
    if slo is None or slo.objective is None:
        return None
    return format_objective(slo.objective)


def summarise_interval(interval: Interval) -> IntervalSummary:
    """Return an interval as in `summary.json`, with bounds rounded to the safe side."""
    return IntervalSummary(
        lower=cut_share(interval.lower),
        upper=round_up(interval.upper),
        confidence=interval.confidence,
        effective_requests=round(interval.effective, 1),
        method=interval.method,
    )


def summarise_stall(stall: Stall, zero_ns: int, sender: int = 0) -> StallSummary:
    """Return a stall for the summary.

    Args:
        stall: a stall on the monotonic clock.
        zero_ns: time zero of the run on that clock.
        sender: number of the sender that stalled.
    """
    return StallSummary(
        start_s=seconds(stall.start_ns - zero_ns),
        end_s=seconds(stall.end_ns - zero_ns),
        stalled_s=seconds(stall.stalled_ns),
        sender=sender,
    )


def read_stalls(client: ClientSummary) -> dict[int, Stalls]:
    """Return the stalls of each sender by its number, on the clock of the run's records."""
    by_sender: defaultdict[int, list[Stall]] = defaultdict(list)
    for stall in client.stalls:
        stalls = by_sender[stall.sender]
        start_ns, end_ns = round(stall.start_s * NS_PER_S), round(stall.end_s * NS_PER_S)
        # The times were rounded to a microsecond.
        stalled_ns = min(round(stall.stalled_s * NS_PER_S), end_ns - start_ns)
        if stalled_ns > 0 and (not stalls or start_ns >= stalls[-1].end_ns):
            stalls.append(Stall(start_ns=start_ns, end_ns=end_ns, stalled_ns=stalled_ns))
    return {sender: Stalls(stalls) for sender, stalls in by_sender.items()}
