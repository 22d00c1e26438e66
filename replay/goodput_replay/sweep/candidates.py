"""Candidates of `goodput policies`, and the evaluation of a candidate in virtual time.

A worker process runs `evaluate`; its arguments and its result are pickled.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from goodput_core.slo.record import Outcome
from goodput_core.slo.verdict import VerdictKind, decide
from goodput_core.spec.choices import ControlMode, Policy, Preemption, RouterPolicy
from goodput_core.units import NS_PER_MS, NS_PER_S, NS_PER_US
from goodput_engine.manifest_file import read_manifest
from goodput_replay.emulation.emulate import emulate
from goodput_replay.emulation.settings import (
    apply_topology,
    fleet_settings,
    read_topology,
)
from goodput_replay.plan import RequestPlan, require_fit, survey
from goodput_replay.sessions import JudgedSpan, open_follow_ups
from goodput_replay.statistics.evidence import gather
from goodput_traces.format.reader import open_trace
from goodput_traces.transforms import TransformPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from goodput_core.slo.evidence import ClassEvidence
    from goodput_core.slo.record import RequestRecord
    from goodput_core.spec.llmservice import LLMServiceSpec

__all__ = ["Candidate", "ClassResult", "Evaluation", "SweepInput", "evaluate", "grid"]


_HOUR_NS: Final = 3600 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Values that replace fields of the manifest.

    Args:
        policy: `spec.engine.policy`.
        token_budget: `spec.engine.tokenBudget.initial`.
        replicas: `spec.replicas`; 0 if the topology sets the number.
        preemption: `spec.engine.preemption`.
        placement: `spec.router.policy`.
        topology: path of a topology file; empty if there is none.
    """

    policy: Policy
    token_budget: int
    replicas: int
    preemption: Preemption
    placement: RouterPolicy
    topology: str = ""

    def apply(self, spec: LLMServiceSpec) -> LLMServiceSpec:
        """Return the spec with these values, and with `control.mode: Manual`.

        In mode Auto, the control laws would change the token budget and the number of replicas.
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
    """Results of one class.

    Args:
        name: class name.
        objective: share of requests that must meet the SLO; None if the class has no objective.
        good, total: requests that met the SLO, and judged requests.
        low, high: bounds of the attainment; None if no request was judged.
        verdict: PASS, FAIL or INCONCLUSIVE; empty if the class has no objective, or if no request
            was judged.
        ttft_p99_ms, tpot_p99_ms, tbt_p99_ms: 99th percentiles of requests with output; None if no
            request has the value.
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
        """Attainment; None if no request was judged."""
        return self.good / self.total if self.total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results of one candidate.

    Args:
        candidate: the candidate.
        classes: results by class, in the manifest's order.
        verdict: verdict of the run.
        reason: stable reason of the verdict.
        requests: number of requests.
        goodput_per_s: requests per second that met their SLO.
        device_hours: lifetimes of all devices of all replicas, including start-up.
        preemptions, recomputed_tokens, swapped_tokens, shed: totals of the run.
        illustrative: True if the device profile is illustrative.
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

    One replica is combined only with the first placement, as placement has no effect on it.

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
    """Trace, manifest and options of all candidates.

    Args:
        trace: path of the trace.
        max_decoded_bytes: largest decoded size of the trace; None for the default.
        manifest: path of the manifest.
        device: device profile in place of the manifest's `model.source`; None to use the
            manifest's.
        transforms: transforms of the trace; `evaluate` sets their `first_ns`.
        timeout_ns: time limit of a request.
        seed: seed of random placement.
        causal: True if a request of a session waits for the one before it.
    """

    trace: Path
    max_decoded_bytes: int | None
    manifest: Path
    device: str | None
    transforms: TransformPlan
    timeout_ns: int
    seed: int
    causal: bool = False


def evaluate(sweep: SweepInput, candidate: Candidate) -> Evaluation:
    """Serve the trace with one candidate and judge the run.

    Raises:
        InputError: the trace, the manifest or the topology cannot be used.
    """
    service = read_manifest(sweep.manifest)
    settings = fleet_settings(
        replace(service, spec=candidate.apply(service.spec)),
        device=sweep.device,
        source=str(sweep.manifest),
        timeout_ns=sweep.timeout_ns,
        seed=sweep.seed,
    )
    if candidate.topology:
        settings = apply_topology(settings, read_topology(Path(candidate.topology)))
    trace = open_trace(sweep.trace, max_decoded_bytes=sweep.max_decoded_bytes)
    plan = RequestPlan(
        trace=trace,
        transforms=replace(sweep.transforms, first_ns=trace.first_ns),
        slo=settings.slo,
    )
    stats = survey(plan)
    require_fit(stats, settings.profile, sweep.trace)
    records: list[RequestRecord] = []
    window_ns = max(1, plan.window_ns(stats))
    with ExitStack() as stack:
        follow_ups = stack.enter_context(open_follow_ups(plan)) if sweep.causal else None
        outcome = emulate(
            plan.requests() if follow_ups is None else follow_ups.starts(),
            settings,
            lambda _, record: records.append(record),
            follow_ups=follow_ups,
        )
    if sweep.causal:
        span = JudgedSpan(starts_at_zero=True)
        for record in records:
            span.add(record)
        _, window_ns = span.span_ns
    evidence = gather(
        records,
        classes=settings.slo.classes,
        window_ns=window_ns,
        outage_s=settings.slo.outage_s,
    )
    verdict = decide(evidence.classes, evidence.validity)
    verdicts = {c.name: c.kind.value for c in verdict.classes}
    return Evaluation(
        candidate=candidate,
        classes=tuple(
            _class_result(c, records, verdicts.get(c.name, "")) for c in evidence.classes
        ),
        verdict=verdict.kind,
        reason=verdict.reason.value,
        requests=outcome.requests,
        goodput_per_s=float(evidence.goodput_per_s),
        device_hours=outcome.replica_ns * settings.profile.devices / _HOUR_NS,
        preemptions=outcome.preemptions,
        recomputed_tokens=outcome.recomputed_tokens,
        swapped_tokens=outcome.swapped_tokens,
        shed=sum(record.outcome is Outcome.SHED for record in records),
        illustrative=settings.profile.illustrative,
    )


def _class_result(
    evidence: ClassEvidence, records: list[RequestRecord], verdict: str
) -> ClassResult:
    with_output = [
        r for r in records if r.slo_class == evidence.name and r.first_token_ns is not None
    ]
    gaps_us = [np.asarray(r.gaps_us) for r in with_output if len(r.gaps_us)]
    interval = evidence.interval
    return ClassResult(
        name=evidence.name,
        objective=None if evidence.objective is None else float(evidence.objective),
        good=evidence.attainment.good,
        total=evidence.attainment.total,
        low=None if interval is None else interval.lower,
        high=None if interval is None else interval.uppers[0],
        verdict=verdict,
        ttft_p99_ms=_p99_ms([r.ttft_ns for r in with_output if r.ttft_ns is not None], NS_PER_MS),
        tpot_p99_ms=_p99_ms([r.tpot_ns for r in with_output if r.tpot_ns is not None], NS_PER_MS),
        tbt_p99_ms=_p99_ms(np.concatenate(gaps_us) if gaps_us else (), NS_PER_MS // NS_PER_US),
    )


def _p99_ms(values: Sequence[float] | NDArray[np.int64], per_ms: int) -> float | None:
    """Return the nearest-rank p99 in milliseconds; None if there are no values.

    Args:
        values: in any unit.
        per_ms: units per millisecond.
    """
    if not len(values):
        return None
    return float(np.percentile(values, 99, method="inverted_cdf")) / per_ms
