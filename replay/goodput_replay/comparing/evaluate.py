"""One candidate, served in virtual time and judged in memory: what a worker process does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from goodput_core.errors import InputError
from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import decide
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.manifest_file import read_manifest
from goodput_replay.comparing.candidate import Candidate, ClassResult, Evaluation
from goodput_replay.emulation.emulating import emulate
from goodput_replay.emulation.settings import fleet_settings
from goodput_replay.emulation.topology import apply_topology, read_topology
from goodput_replay.plan import Plan, survey
from goodput_replay.promises import promise_of
from goodput_replay.statistics.evidence import gather
from goodput_traces.format.reader import open_trace
from goodput_traces.transforms import TransformPlan

if TYPE_CHECKING:
    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.verdict import Verdict
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest
    from goodput_replay.statistics.evidence import RunEvidence

__all__ = ["Question", "evaluate"]

_HOUR_NS = 3600 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What every candidate is asked.

    Args:
        trace: the file.
        manifest: an LLMService.
        device: device profile in place of the manifest's model source; None: as it says.
        transforms: window, rate, classes, limit; its `first_ns` is found anew.
        timeout_ns: how long a request may take.
        confidence: one-sided, of each bound.
        seed: of placement and resampling.
    """

    trace: Path
    manifest: Path
    device: str | None
    transforms: TransformPlan
    timeout_ns: int
    confidence: float
    seed: int


def evaluate(question: Question, candidate: Candidate) -> Evaluation:
    """Serve the trace with one candidate.

    Raises:
        InputError: the trace, the manifest or the topology cannot be used.
    """
    service = read_manifest(question.manifest)
    promise = promise_of(service.spec.slo)
    trace = open_trace(question.trace)
    plan = Plan(
        trace=trace,
        transforms=replace(question.transforms, first_ns=trace.first_ns),
        promise=promise,
    )
    settings = fleet_settings(
        replace(service, spec=candidate.applied(service.spec)),
        device=question.device,
        source=str(question.manifest),
        promise=promise,
        timeout_ns=question.timeout_ns,
        seed=question.seed,
    )
    if candidate.topology:
        settings = apply_topology(settings, read_topology(Path(candidate.topology)))
    return _served(question, candidate, plan, settings)


def _served(
    question: Question, candidate: Candidate, plan: Plan, settings: FleetSettings
) -> Evaluation:
    records: list[RequestRecord] = []

    def on_record(planned: PlannedRequest, record: RequestRecord) -> None:  # noqa: ARG001
        records.append(record)

    outcome = emulate(plan.requests(), settings, on_record)
    if not records:
        raise InputError(f"{question.trace}: the window holds no request; widen it")
    window_ns = max(1, plan.window_ns(survey(plan)))
    evidence = gather(
        records,
        classes=settings.promise.classes,
        window_ns=window_ns,
        confidence=question.confidence,
        seed=question.seed,
    )
    verdict = decide(evidence.classes, evidence.validity)
    device_ns = outcome.replica_ns * settings.profile.devices
    return Evaluation(
        candidate=candidate,
        classes=_classes(records, evidence, verdict),
        verdict=verdict.kind,
        reason=verdict.reason.value,
        requests=outcome.requests,
        goodput_per_s=float(evidence.goodput_per_s),
        device_hours=device_ns / _HOUR_NS,
        preemptions=outcome.preemptions,
        recomputed_tokens=outcome.recomputed_tokens,
        swapped_tokens=outcome.swapped_tokens,
        shed=sum(record.outcome is Outcome.SHED for record in records),
        illustrative=settings.profile.illustrative,
    )


def _classes(
    records: list[RequestRecord], evidence: RunEvidence, verdict: Verdict
) -> tuple[ClassResult, ...]:
    verdicts = {one.name: one.kind.value for one in verdict.classes}
    results: list[ClassResult] = []
    for found in evidence.classes:
        own = [r for r in records if r.slo_class == found.name and r.first_token_ns is not None]
        firsts = [(r.first_token_ns or 0) - r.scheduled_ns for r in own]
        paces = [
            ((r.last_token_ns or 0) - (r.first_token_ns or 0)) / (r.output_tokens - 1)
            for r in own
            if r.output_tokens > 1
        ]
        gaps = [np.asarray(r.gaps_us) for r in own if len(r.gaps_us)]
        results.append(
            ClassResult(
                name=found.name,
                objective=None if found.objective is None else float(found.objective),
                good=found.attainment.good,
                total=found.attainment.total,
                low=None if found.interval is None else found.interval.lower,
                high=None if found.interval is None else found.interval.uppers[0],
                verdict=verdicts.get(found.name, ""),
                ttft_p99_ms=_p99(np.asarray(firsts), NS_PER_MS),
                tpot_p99_ms=_p99(np.asarray(paces), NS_PER_MS),
                tbt_p99_ms=_p99(np.concatenate(gaps) if gaps else np.empty(0), 1000),
            )
        )
    return tuple(results)


def _p99(values: np.ndarray, unit: float) -> float | None:
    return float(np.percentile(values, 99, method="inverted_cdf")) / unit if len(values) else None
