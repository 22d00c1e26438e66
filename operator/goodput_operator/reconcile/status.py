"""The conditions and the status of a service.

`Ready`, `Reconciling` and `Stalled` have the meaning of kstatus: a service that matches its spec is
ready, not reconciling and not stalled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ROLE_ENGINE, ROLE_ROUTER
from goodput_core.control import ControlStep, Setpoint
from goodput_core.spec.codec import encode
from goodput_core.spec.llmservice import LLMServiceSpec
from goodput_core.spec.status import (
    ConditionStatus,
    DecisionStatus,
    LLMServiceStatus,
    SummaryStatus,
    Truth,
)
from goodput_operator.kube.objects import conditions_by_type
from goodput_operator.reconcile.attainment import AttainmentStatus
from goodput_operator.reconcile.drift import Repairs
from goodput_operator.reconcile.gate_plan import GatePhase, GatePlan
from goodput_operator.reconcile.problems import Problem, ProblemReason
from goodput_operator.reconcile.rollout import Rollout

if TYPE_CHECKING:
    from goodput_operator.reconcile.snapshot import View

__all__ = [
    "READY",
    "RECONCILING",
    "REVISION_PINNED",
    "ROLLOUT_PAUSED",
    "RUNTIME_LIMITED",
    "SCALING_LIMITED",
    "SLO_ATTAINED",
    "STALLED",
    "SUSPENDED",
    "Condition",
    "StatusInput",
    "conditions_of",
    "rejected_conditions",
    "status_of",
]

READY: Final = "Ready"
"""True if clients can reach the service: a router and an engine are ready."""
RECONCILING: Final = "Reconciling"
"""True while the cluster does not yet match the spec or the decision of the control laws."""
STALLED: Final = "Stalled"
"""True while a problem remains that only a person or another system can solve."""
SLO_ATTAINED: Final = "SLOAttained"
"""True if the lower bound of every class reaches its objective in the last minutes."""
SCALING_LIMITED: Final = "ScalingLimited"
"""True if the service needs more replicas than `maxReplicas` or than the cluster can run."""
ROLLOUT_PAUSED: Final = "RolloutPaused"
"""True if the gate of the update revision holds it until a person or another system acts."""
RUNTIME_LIMITED: Final = "RuntimeLimited"
"""True for another server than Goodput's engine; the message names what it lacks. Absent otherwise.
"""
REVISION_PINNED: Final = "RevisionPinned"
"""True if the image of the update revision cannot change. Absent without a gate, unless pods of a
revision run different images."""
SUSPENDED: Final = "Suspended"
"""Reason of conditions that follow from `spec.suspend`."""

_MAX_DECISIONS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition without its times.

    Args:
        type: type of the condition, such as `Ready`.
        status: True, False or Unknown.
        reason: reason in CamelCase.
        message: one sentence, never empty.
    """

    type: str
    status: Truth
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusInput:
    """Results of a reconciliation with a valid spec that the status shows.

    Args:
        spec: spec of the service.
        update: engine revision of the current spec.
        unresolved: True if that revision waits for the digest of its image, and does not exist.
        rollout: distribution of the engines.
        gate: plan of the update revision's gate.
        setpoint: limits and replicas in force.
        problems: problems of the service, the most severe first.
        repairs: differences between the rendered objects and the cluster.
        attainment: attainment after the last measured interval; None before the first since the
            operator's start.
        step: result of the control step; None if no interval ended in this reconciliation.
        learnt: learnt capacity of the replicas; None if nothing was learnt or it cannot be stored.
        unmeasured_engines: ready engines without measurements in the last interval.
    """

    spec: LLMServiceSpec
    update: str
    unresolved: bool
    rollout: Rollout
    gate: GatePlan
    setpoint: Setpoint
    problems: Sequence[Problem]
    repairs: Repairs
    attainment: AttainmentStatus | None
    step: ControlStep | None
    learnt: Mapping[str, Any] | None = None
    unmeasured_engines: int = 0

    @property
    def shown_update(self) -> str:
        """The latest revision that exists, or that can be created."""
        return self.gate.target if self.unresolved else self.update


def conditions_of(view: View, inputs: StatusInput) -> list[Condition]:
    """Return the conditions of a service with a valid spec."""
    return [
        _ready(view, inputs),
        _reconciling(view, inputs),
        _stalled(inputs.problems),
        _slo_attained(view, inputs),
        _scaling_limited(view, inputs),
        *_runtime_limited(inputs),
        _rollout_paused(inputs.gate),
    ]


def rejected_conditions(view: View, problem: Problem) -> list[Condition]:
    """Return the conditions of a service with an invalid spec; its pods stay unchanged."""
    message = "the spec is rejected; existing pods stay unchanged"
    kinds = (SLO_ATTAINED, SCALING_LIMITED, RUNTIME_LIMITED, ROLLOUT_PAUSED, REVISION_PINNED)
    stored = (_stored(view, kind) for kind in kinds)
    names = view.owner.names
    services = [
        name
        for name in (names.service, names.engines)
        if (child := view.children.get(("Service", name))) is not None and not child.ours
    ]
    return [
        _no_route(services) or _serving(view),
        _false(RECONCILING, "Stalled", message),
        _stalled([problem]),
        *(condition for condition in stored if condition is not None),
    ]


def status_of(
    view: View, conditions: Sequence[Condition], inputs: StatusInput | None, *, at: str
) -> dict[str, Any]:
    """Return the status to store; fields without a new value keep their stored value.

    Args:
        view: classified objects of the service.
        conditions: current conditions.
        inputs: results of the reconciliation; None if the spec is invalid.
        at: the current time.
    """
    stored = view.status
    status = encode(
        LLMServiceStatus(
            observed_generation=view.generation,
            replicas=sum(engine.pods for engine in view.workloads(ROLE_ENGINE)),
            ready_replicas=sum(engine.ready for engine in view.workloads(ROLE_ENGINE)),
            selector=",".join(f"{k}={v}" for k, v in view.owner.selector(ROLE_ENGINE).items()),
            conditions=_timestamped(
                conditions, conditions_by_type(stored), generation=view.generation, at=at
            ),
        )
    )
    if inputs is None:
        summary = {**(stored.get("summary") or {}), "phase": _phase(conditions)}
        return {**stored, **status, "summary": summary}
    status |= encode(
        LLMServiceStatus(
            token_budget=_token_budget(inputs, stored),
            current_revision=inputs.rollout.current,
            update_revision=inputs.shown_update,
            failed_revision=_failed_revision(inputs, stored.get("failedRevision")),
            gate=inputs.gate.status,
        )
    )
    step, attainment = inputs.step, inputs.attainment
    if inputs.learnt is not None:
        status["learnt"] = dict(inputs.learnt)
    if step is not None and step.state.recommended is not None:
        status["recommendedReplicas"] = step.state.recommended
    if attainment is not None and attainment.classes:
        status |= encode(LLMServiceStatus(classes=attainment.classes, goodput=attainment.goodput))
    elif not inputs.spec.suspend:
        # A restarted operator keeps the stored figures until its first measurement.
        status |= _pick(stored, "classes", "goodput")
    if step is None and not inputs.spec.suspend:
        status |= _pick(stored, "recommendedReplicas")
    decisions = [*_decisions(inputs, at), *(stored.get("decisions") or ())][:_MAX_DECISIONS]
    if decisions:
        status["decisions"] = decisions
    status["summary"] = _summary(stored, status, conditions, inputs)
    return status


def _timestamped(
    conditions: Sequence[Condition],
    stored: Mapping[str, Mapping[str, Any]],
    *,
    generation: int,
    at: str,
) -> tuple[ConditionStatus, ...]:
    """Add the time of the last change of each condition's status."""
    timestamped = []
    for condition in conditions:
        last = stored.get(condition.type, {})
        same = last.get("status") == condition.status.value
        timestamped.append(
            ConditionStatus(
                type=condition.type,
                status=condition.status,
                reason=condition.reason,
                message=condition.message,
                last_transition_time=last["lastTransitionTime"] if same else at,
                observed_generation=generation,
            )
        )
    return tuple(timestamped)


def _phase(conditions: Sequence[Condition]) -> str:
    """Return the reason of Stalled if True, else of Reconciling if True, else of Ready."""
    by_type = {condition.type: condition for condition in conditions}
    for kind in (STALLED, RECONCILING):
        if by_type[kind].status is Truth.TRUE:
            return by_type[kind].reason
    return by_type[READY].reason


def _token_budget(inputs: StatusInput, stored: Mapping[str, Any]) -> int | None:
    """Return the token budget in force; None if a server has none that is known.

    That of another server than Goodput's engine is an argument of the serving revision.
    """
    engine = inputs.spec.engine
    if not engine.runtime.foreign:
        return inputs.setpoint.bounds.max_tokens
    if not engine.runtime.has_preset:
        return None
    initial = engine.token_budget.initial
    return (
        initial if inputs.rollout.current == inputs.update else stored.get("tokenBudget", initial)
    )


def _failed_revision(inputs: StatusInput, stored: str | None) -> str | None:
    """Return the last revision that its gate rejected, unless it may serve since; None if none."""
    if inputs.gate.phase is GatePhase.FAILED:
        return inputs.update
    return None if stored == inputs.update and not inputs.gate.holds else stored


def _summary(
    stored: Mapping[str, Any],
    status: Mapping[str, Any],
    conditions: Sequence[Condition],
    inputs: StatusInput,
) -> dict[str, Any]:
    summary = encode(
        SummaryStatus(
            replicas=f"{status['readyReplicas']}/{inputs.rollout.replicas}",
            goodput=status.get("goodput"),
            budget=None if (budget := _token_budget(inputs, stored)) is None else str(budget),
            phase=_phase(conditions),
            gate=inputs.gate.column,
        )
    )
    if inputs.spec.suspend:
        return summary
    if inputs.attainment is None or not inputs.attainment.classes:
        return summary | _pick(stored.get("summary") or {}, "attainment")
    nearest = inputs.attainment.nearest
    return summary if nearest is None else summary | {"attainment": nearest}


def _decisions(inputs: StatusInput, at: str) -> list[dict[str, Any]]:
    """Return this reconciliation's decisions, the latest first."""
    changes = () if inputs.step is None else inputs.step.changes
    return [
        encode(
            DecisionStatus(
                at=at,
                knob=change.knob.value,
                reason=change.reason,
                message=change.message,
                applied=change.applied,
            )
        )
        for change in reversed(changes)
    ]


def _pick(stored: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: stored[key] for key in keys if key in stored}


def _true(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status=Truth.TRUE, reason=reason, message=message)


def _false(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status=Truth.FALSE, reason=reason, message=message)


def _unknown(kind: str, reason: str, message: str) -> Condition:
    return Condition(type=kind, status=Truth.UNKNOWN, reason=reason, message=message)


def _stored(view: View, kind: str) -> Condition | None:
    """Return the stored condition of a type; None if the status has none."""
    stored = conditions_by_type(view.status).get(kind)
    if stored is None:
        return None
    status, message = Truth(stored["status"]), stored.get("message", "")
    return Condition(type=kind, status=status, reason=stored["reason"], message=message)


def _serving(view: View) -> Condition:
    engines = sum(pod.ready for pod in view.engines)
    routers = sum(pod.ready for pod in view.routers)
    message = (
        f"{engines} of {len(view.engines)} engines and {routers} of {len(view.routers)} routers "
        "are ready"
    )
    if routers and engines:
        return _true(READY, "Serving", message)
    return _false(READY, "NoEngine" if routers else "NoRouter", message)


def _no_route(services: Sequence[str]) -> Condition | None:
    """Return Ready=False if the service does not control these Services; None if there are none."""
    if not services:
        return None
    message = (
        f"requests cannot be routed: Service {' and '.join(services)} is not "
        "controlled by this LLMService; rename or delete it"
    )
    return _false(READY, ProblemReason.NAME_CONFLICT, message)


def _ready(view: View, inputs: StatusInput) -> Condition:
    if inputs.spec.suspend:
        return _false(READY, SUSPENDED, "spec.suspend is set, so no pods run")
    services = [name for kind, name in inputs.repairs.foreign if kind == "Service"]
    condition = _no_route(services) or _serving(view)
    if condition.reason == "NoEngine" and not inputs.rollout.replicas:
        return _true(READY, "ScaledToZero", "the service is scaled to zero engines")
    return condition


def _reconciling(view: View, inputs: StatusInput) -> Condition:
    engines, target = view.workloads(ROLE_ENGINE), inputs.gate.target
    new = next((engine for engine in engines if engine.revision == target), None)
    temporary = next((problem for problem in inputs.problems if not problem.stalls), None)
    if missing := inputs.repairs.missing:
        suffix = f"; {temporary.message}" if temporary is not None else ""
        return _true(RECONCILING, "Creating", f"{missing} objects do not exist yet{suffix}")
    if temporary is not None:
        return _true(RECONCILING, temporary.reason, temporary.message)
    if inputs.gate.phase in {GatePhase.STARTING, GatePhase.REPLAYING, GatePhase.WAITING}:
        return _true(RECONCILING, "Gating", f"gate of {inputs.update}: {inputs.gate.message}")
    old = [engine for engine in engines if engine.revision != target]
    if any(engine.pods or engine.desired for engine in old):
        serving = ", ".join(f"{engine.available} of {engine.revision}" for engine in engines)
        message = f"rolling out {target}; available: {serving}"
        return _true(RECONCILING, "RollingOut", message)
    desired = inputs.rollout.replicas
    if new is None or new.desired != desired or not new.current or new.available != desired:
        available = 0 if new is None else new.available
        return _true(RECONCILING, "Scaling", f"{available} of {desired} engines are available")
    desired = 0 if inputs.spec.suspend else inputs.spec.router.replicas
    for routers in view.workloads(ROLE_ROUTER):
        if not routers.current or routers.available != desired:
            message = f"{routers.available} of {desired} routers are available"
            return _true(RECONCILING, "Scaling", message)
    if inputs.unresolved:
        message = f"{target} serves until the image of {inputs.update} has a digest"
        return _false(RECONCILING, ProblemReason.IMAGE_NOT_RESOLVED, message)
    if inputs.gate.holds:
        message = f"{target} serves, and the rollout of {inputs.update} is paused"
        return _false(RECONCILING, "RolloutPaused", message)
    return _false(RECONCILING, "Settled", "all resources match the spec")


def _rollout_paused(gate: GatePlan) -> Condition:
    if gate.pause is None:
        return _false(ROLLOUT_PAUSED, "NotPaused", "no rollout is paused")
    return _true(ROLLOUT_PAUSED, *gate.pause)


def _stalled(problems: Sequence[Problem]) -> Condition:
    for problem in problems:
        if problem.stalls:
            return _true(STALLED, problem.reason, problem.message)
    return _false(STALLED, "Unhindered", "no problem requires an intervention")


def _slo_attained(view: View, inputs: StatusInput) -> Condition:
    if inputs.spec.suspend:
        return _unknown(SLO_ATTAINED, SUSPENDED, "spec.suspend is set, so no requests are served")
    current = inputs.attainment
    if current is not None:
        return Condition(
            type=SLO_ATTAINED,
            status=current.status,
            reason=current.reason,
            message=current.message,
        )
    stored = _stored(view, SLO_ATTAINED)
    if stored is not None and stored.reason != SUSPENDED:
        return stored
    return _unknown(SLO_ATTAINED, "MetricsMissing", "no requests have been measured yet")


def _scaling_limited(view: View, inputs: StatusInput) -> Condition:
    for problem in inputs.problems:
        if problem.limits_scaling:
            return _true(SCALING_LIMITED, problem.reason, problem.message)
    step = inputs.step
    if step is None:
        stored = _stored(view, SCALING_LIMITED)
        if stored is not None and stored.reason == "MaxReplicas":
            return stored
    elif step.decision.replicas is not None and step.decision.replicas.limited:
        max_replicas = step.decision.params.max_replicas
        message = f"the service needs more replicas than maxReplicas, {max_replicas}"
        return _true(SCALING_LIMITED, "MaxReplicas", message)
    return _false(SCALING_LIMITED, "NotLimited", "scaling is not limited")


def _runtime_limited(inputs: StatusInput) -> list[Condition]:
    """Return the condition of another server than Goodput's engine; none for Goodput's."""
    engine = inputs.spec.engine
    runtime = engine.runtime
    if not runtime.foreign:
        return []
    lacks = "no token budget or batch width that changes at run time"
    if runtime.has_preset:
        lacks += " (a change is a new revision)"
    reason = "NoLimits"
    if runtime.scraped_path is None:
        reason = "NoReadings"
        lacks += ", and no readings of running and queued requests, as metricsPath is not set"
    elif inputs.unmeasured_engines:
        reason = "NoReadings"
        count = inputs.unmeasured_engines
        replicas = "1 replica has" if count == 1 else f"{count} replicas have"
        lacks += f", and {replicas} no readings of running and queued requests at present"
    message = f"{runtime.kind.value} has {lacks}; it does not read the X-SLO headers of requests"
    return [_true(RUNTIME_LIMITED, reason, message)]
