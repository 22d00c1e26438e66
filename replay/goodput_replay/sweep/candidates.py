"""What can be chosen, and what came of one choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import VerdictKind, decide
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.manifest_file import read_manifest
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import apply_topology, fleet_settings, read_topology
from goodput_replay.plan import Plan, survey
from goodput_replay.run.slo import promise_of
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

__all__ = ["Candidate", "ClassResult", "Evaluation", "Question", "evaluate", "grid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A manifest with some of its fields set anew.

    Args:
        policy: `spec.engine.policy`.
        token_budget: `spec.engine.tokenBudget.initial`.
        replicas: `spec.replicas`; 0: the topology says how many.
        preemption: `spec.engine.preemption`.
        placement: `spec.router.policy`.
        topology: a topology file; empty: none.
    """

    policy: Policy
    token_budget: int
    replicas: int
    preemption: Preemption
    placement: RouterPolicy
    topology: str = ""

    def applied(self, spec: LLMServiceSpec) -> LLMServiceSpec:
        """The manifest with these fields.

        The control law would move two of them: it is off, as in a manifest with `Manual`.
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
    """What became of one class.

    Args:
        name: its name.
        objective: as promised, a share; None: none.
        good, total: requests that kept their promise, of those judged.
        low, high: bounds of the share; None: nothing was judged.
        verdict: PASS, FAIL or INCONCLUSIVE; empty: it has no objective, or nothing was judged.
        ttft_p99_ms, tpot_p99_ms, tbt_p99_ms: of its answers; None: it had none.
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
        """Attainment; None: nothing was judged."""
        return self.good / self.total if self.total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One candidate on one trace.

    Args:
        candidate: it.
        classes: in the manifest's order.
        verdict: on all of them.
        reason: its stable reason.
        requests: all of them.
        goodput_per_s: requests per second that kept their promise.
        device_hours: of all devices of all replicas, start-up included.
        preemptions, recomputed_tokens, swapped_tokens, shed: as counted.
        illustrative: the device's figures fit no device one can buy.
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
    """Every combination.

    A router with one replica has nothing to choose: there only the first placement is tried.

    Args:
        policies: values of `Candidate.policy`.
        budgets: of its token budget.
        preemptions: of its preemption.
        replicas: of its replicas.
        placements: of its placement.
        pools: topology files with two pools, which say themselves how many replicas there are.
        migrations: topology files in which the replicas give each other requests.
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
        seed: of placement.
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
    window_ns = max(1, plan.window_ns(survey(plan)))
    evidence = gather(
        records,
        classes=settings.promise.classes,
        window_ns=window_ns,
        confidence=question.confidence,
        outage_s=settings.promise.outage_s,
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
