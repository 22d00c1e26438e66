"""Candidates of a sweep, and the evaluation of one in virtual time: what a worker process runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import VerdictKind, decide
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.manifest_file import read_manifest
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import apply_topology, fleet_settings, read_topology
from goodput_replay.plan import RequestPlan, survey
from goodput_replay.run.slo import slo_classes
from goodput_replay.statistics.evidence import gather
from goodput_traces.format.reader import open_trace
from goodput_traces.transforms import TransformPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.slo.record import RequestRecord
    from goodput_core.slo.verdict import Verdict
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_replay.emulation.settings import FleetSettings
    from goodput_replay.plan import PlannedRequest
    from goodput_replay.statistics.evidence import RunEvidence

__all__ = ["Candidate", "ClassResult", "Evaluation", "SweepInput", "evaluate", "grid"]


_HOUR_NS: Final = 3600 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A manifest with some of its fields replaced.

    Args:
        policy: `spec.engine.policy`.
        token_budget: `spec.engine.tokenBudget.initial`.
        replicas: `spec.replicas`; 0 if the topology sets the number.
        preemption: `spec.engine.preemption`.
        placement: `spec.router.policy`.
        topology: a topology file; empty for none.
    """

    policy: Policy
    token_budget: int
    replicas: int
    preemption: Preemption
    placement: RouterPolicy
    topology: str = ""

    def applied(self, spec: LLMServiceSpec) -> LLMServiceSpec:
        """Return the manifest with these fields.

        The control law would change two of them, so it is off, as with `Manual`.
        """
        budget = spec.engine.token_budget
        engine = replace(
            spec.engine,
            policy=self.policy,
            preemption=self.preemption,
            token_budget=replace(
                budget,
                initial=self.token_budget,
                min=min(budget.min, self.token_budget),
                max=max(budget.max, self.token_budget),
            ),
        )
        return replace(
            spec,
            engine=engine,
            replicas=self.replicas or 1,
            router=replace(spec.router, policy=self.placement),
            control=replace(spec.control, mode=ControlMode.MANUAL),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """The result of one class.

    Args:
        name: its name.
        objective: share that must meet its SLO; None without an objective.
        good, total: requests that met their SLO, of those judged.
        low, high: bounds of the share; None if nothing was judged.
        verdict: PASS, FAIL or INCONCLUSIVE; empty without an objective or a judged request.
        ttft_p99_ms, tpot_p99_ms, tbt_p99_ms: of its answers; None without an answer.
    """

    name: str
    objective: float | None
    good: int
    total: int
    low: float | None
    high: float | None
    verdict: str
    ttft_p99_ms: float | None
    tpot_p99_ms: float | None
    tbt_p99_ms: float | None

    @property
    def share(self) -> float | None:
        """Attainment; None if nothing was judged."""
        return self.good / self.total if self.total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One candidate on one trace.

    Args:
        candidate: the candidate.
        classes: in the manifest's order.
        verdict: on the whole run.
        reason: of the verdict; stable.
        requests: all requests.
        goodput_per_s: requests per second that met their SLO.
        device_hours: of all devices of all replicas, start-up included.
        preemptions, recomputed_tokens, swapped_tokens, shed: totals of the run.
        illustrative: True if the profile's figures fit no device on the market.
    """

    candidate: Candidate
    classes: tuple[ClassResult, ...]
    verdict: VerdictKind
    reason: str
    requests: int
    goodput_per_s: float
    device_hours: float
    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int
    shed: int
    illustrative: bool


def grid(
    *,
    policies: Sequence[Policy],
    budgets: Sequence[int],
    preemptions: Sequence[Preemption],
    replicas: Sequence[int],
    placements: Sequence[RouterPolicy],
    pools: Sequence[str] = (),
    migrations: Sequence[str] = (),
) -> tuple[Candidate, ...]:
    """Return every combination.

    With one replica all placements are equal, so only the first one is tried.

    Args:
        policies: values of `Candidate.policy`.
        budgets: values of `Candidate.token_budget`.
        preemptions: values of `Candidate.preemption`.
        replicas: values of `Candidate.replicas`.
        placements: values of `Candidate.placement`.
        pools: topology files with two pools, which set the number of replicas.
        migrations: topology files with migration.
    """
    fleets = [
        (count, placement, topology)
        for topology in ("", *migrations)
        for count in replicas
        for placement in (placements if count > 1 else placements[:1])
    ]
    fleets += [(0, placement, topology) for topology in pools for placement in placements]
    return tuple(
        Candidate(
            policy=policy,
            token_budget=budget,
            preemption=preemption,
            replicas=count,
            placement=placement,
            topology=topology,
        )
        for policy, budget, preemption, (count, placement, topology) in product(
            policies, budgets, preemptions, fleets
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepInput:
    """The trace, the manifest and the options that all candidates share.

    Args:
        trace: the file.
        max_decoded_bytes: decoded size at which reading the trace stops; None for the default.
        manifest: an LLMService.
        device: device profile in place of the manifest's model source; None keeps the manifest's.
        transforms: window, rate, classes, limit; `first_ns` is replaced by the trace's.
        timeout_ns: how long a request may take.
        confidence: one-sided, of each bound.
        seed: of placement.
    """

    trace: Path
    max_decoded_bytes: int | None
    manifest: Path
    device: str | None
    transforms: TransformPlan
    timeout_ns: int
    confidence: float
    seed: int


def evaluate(sweep: SweepInput, candidate: Candidate) -> Evaluation:
    """Serve the trace with one candidate.

    Raises:
        InputError: the trace, the manifest or the topology cannot be used.
    """
    service = read_manifest(sweep.manifest)
    slo = slo_classes(service.spec.slo)
    trace = open_trace(sweep.trace, max_decoded_bytes=sweep.max_decoded_bytes)
    plan = RequestPlan(
        trace=trace,
        transforms=replace(sweep.transforms, first_ns=trace.first_ns),
        slo=slo,
    )
    settings = fleet_settings(
        replace(service, spec=candidate.applied(service.spec)),
        device=sweep.device,
        source=str(sweep.manifest),
        timeout_ns=sweep.timeout_ns,
        seed=sweep.seed,
    )
    if candidate.topology:
        settings = apply_topology(settings, read_topology(Path(candidate.topology)))
    return _served(sweep, candidate, plan, settings)


def _served(
    sweep: SweepInput, candidate: Candidate, plan: RequestPlan, settings: FleetSettings
) -> Evaluation:
    records: list[RequestRecord] = []

    def on_record(planned: PlannedRequest, record: RequestRecord) -> None:  # noqa: ARG001
        records.append(record)

    outcome = emulate(plan.requests(), settings, on_record)
    window_ns = max(1, plan.window_ns(survey(plan)))
    evidence = gather(
        records,
        classes=settings.slo.classes,
        window_ns=window_ns,
        confidence=sweep.confidence,
        outage_s=settings.slo.outage_s,
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
