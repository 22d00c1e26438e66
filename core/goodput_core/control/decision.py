"""Decisions about one service, and the changes that result from them.

`service_law` runs the token-budget law, then the replica law. It is a pure function, so a decision
can be recomputed from its recorded inputs. Each change has one sentence for the status, Events and
terminals.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from goodput_core.control.observation import ServiceObservation, ServiceParams
from goodput_core.control.replicas import ReplicaDecision, ReplicaReason, ReplicaState, replica_law
from goodput_core.control.slo_window import TargetStatus
from goodput_core.control.token_budget import (
    Bounds,
    TokenBudgetDecision,
    TokenBudgetReason,
    TokenBudgetState,
    token_budget_law,
)
from goodput_core.spec.choices import ControlMode
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Change",
    "Knob",
    "ServiceDecision",
    "ServiceState",
    "decision_summary",
    "json_value",
    "replicas_change",
    "service_law",
    "token_budget_change",
]

_SPEC_CHANGED: Final = "SpecChanged"
"""Reason of a change: the bounds or the mode in the manifest changed."""
_MORE_REPLICAS: Final = "MoreReplicas"
"""Reason of a change: the batch width returns to `maxNumSeqs`, because more replicas share the
requests."""

_BUDGET_CAUSES: Final = {
    TokenBudgetReason.TPOT_MISSED: "TPOT is missed and TTFT has slack",
    TokenBudgetReason.TTFT_MISSED: "TTFT is missed and TPOT has slack",
    TokenBudgetReason.BATCH_TOO_WIDE: "TPOT is missed with the smallest steps and a full batch",
    TokenBudgetReason.BATCH_TOO_NARROW: "TTFT is missed with the largest steps and a full batch",
    TokenBudgetReason.KV_EXHAUSTED: "a target is missed while requests preempt each other",
}
_REPLICA_CAUSES: Final = {
    ReplicaReason.BELOW_FLOOR: "minReplicas is {min_replicas}",
    ReplicaReason.ABOVE_CEILING: "maxReplicas is {max_replicas}",
    ReplicaReason.WOKEN: "requests arrive and there is no replica",
    ReplicaReason.DEMAND: "{arrivals}; {sustained}",
    ReplicaReason.TREND: "{arrivals} and become more, and a replica takes {horizon} s to start; "
    "{sustained}",
    ReplicaReason.MISSED: "{missed} missed, and neither token budget nor batch width can help",
    ReplicaReason.FEWER_SUFFICE: "{arrivals}; {sustained}; {replicas} would have sufficed for "
    "{window} s",
    ReplicaReason.NO_TRAFFIC: "no request has arrived for {window} s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """State of the token-budget law and of the replica law between two intervals."""

    bounds: TokenBudgetState = field(default_factory=TokenBudgetState)
    replicas: ReplicaState = field(default_factory=ReplicaState)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDecision:
    """One decision with its inputs; a line of `decisions.jsonl`, so its field names are a contract.

    Args:
        apply_bounds, apply_replicas: limits and replicas that the driver applies.
        bounds: decision of the token-budget law, applied or not; None in mode Manual.
        replicas: decision of the replica law, applied or not; None in mode Manual.
        observation, params: inputs of the laws.
        at_ns: time of the decision.
    """

    apply_bounds: Bounds
    apply_replicas: int
    bounds: TokenBudgetDecision | None
    replicas: ReplicaDecision | None
    observation: ServiceObservation
    params: ServiceParams
    at_ns: int


def service_law(
    state: ServiceState, observation: ServiceObservation, params: ServiceParams, now_ns: int
) -> tuple[ServiceState, ServiceDecision]:
    """Run both laws for one interval.

    In mode Auto, the decisions are applied; the replica decision is not if a user or another
    autoscaler sets the replicas. In mode Recommend, decisions are computed and not applied. In mode
    Manual, none are computed. In these two modes, the initial token budget applies, and `replicas`
    or, if it is not set, `minReplicas`.

    Args:
        state: state after the last interval; a new one at the start or after a restart.
        observation: observation of this interval.
        params: parameters from the manifest.
        now_ns: end of the interval on a monotonic clock.
    """
    bounds: TokenBudgetDecision | None = None
    replicas: ReplicaDecision | None = None
    apply_bounds, apply_replicas = Bounds.initial(params), params.initial_replicas
    if params.mode is not ControlMode.MANUAL:
        budget_state, bounds = token_budget_law(state.bounds, observation, params, now_ns)
        replica_state, replicas = replica_law(state.replicas, observation, bounds, params, now_ns)
        state = ServiceState(bounds=budget_state, replicas=replica_state)
        if params.mode is ControlMode.AUTO:
            apply_bounds = bounds.bounds
            if params.replicas is None:
                apply_replicas = replicas.replicas
    return state, ServiceDecision(
        apply_bounds=apply_bounds,
        apply_replicas=apply_replicas,
        bounds=bounds,
        replicas=replicas,
        observation=observation,
        params=params,
        at_ns=now_ns,
    )


class Knob(StrEnum):
    """Controlled quantity."""

    TOKEN_BUDGET = "TokenBudget"  # noqa: S105 - tokens of a model
    REPLICAS = "Replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change, made or recommended.

    Args:
        knob: the changed quantity.
        reason: a reason of the law, `SpecChanged` or `MoreReplicas`.
        message: one sentence with the old value, the new value and the cause.
        applied: False if it is only recommended.
    """

    knob: Knob
    reason: str
    message: str
    applied: bool


def token_budget_change(
    decision: ServiceDecision, *, before: Bounds, recommended: Bounds | None
) -> Change | None:
    """Return the change of token budget, safety factor or batch width; None if all are unchanged.

    Args:
        decision: decision of this interval.
        before: limits after the last reported change.
        recommended: limits that the law recommended in the last interval; None before its first
            decision.
    """
    law, params = decision.bounds, decision.params
    applied = decision.apply_bounds != before
    if applied:
        after = decision.apply_bounds
        reason, cause = _applied_reason(decision, before)
    elif law is not None and law.reason in _BUDGET_CAUSES and params.mode is not ControlMode.AUTO:
        before = Bounds.initial(params) if recommended is None else recommended
        after = law.bounds
        reason, cause = law.reason, _BUDGET_CAUSES[law.reason]
    else:
        return None
    differences = ", ".join(_differences(before, after))
    if not differences:
        return None
    return _change(Knob.TOKEN_BUDGET, reason, f"{differences}: {cause}", applied=applied)


def replicas_change(decision: ServiceDecision, *, recommended: int | None) -> Change | None:
    """Return the change of the replica count; None if it is unchanged.

    Args:
        decision: decision of this interval.
        recommended: replicas of the last decision; None before the first one.
    """
    law, params = decision.replicas, decision.params
    if law is None or law.replicas == law.current:
        return None
    applied = params.mode is ControlMode.AUTO and params.replicas is None
    if not applied and law.replicas == recommended:
        return None
    cause = _REPLICA_CAUSES[law.reason].format(
        min_replicas=params.min_replicas,
        max_replicas=params.max_replicas,
        arrivals=_arrivals(law),
        sustained=_sustained(law),
        replicas=law.replicas,
        missed=_missed_targets(decision.bounds),
        horizon=f"{law.horizon_ns / NS_PER_S:.0f}",
        window=f"{max(params.stabilization_ns, law.horizon_ns) / NS_PER_S:.0f}",
    )
    message = f"replicas {law.current} → {law.replicas}: {cause}"
    if law.limited:
        message += "; maxReplicas allows no more"
    elif law.reason is ReplicaReason.DEMAND and law.replicas < (law.needed or 0):
        message += f"; {law.needed} are needed, and {law.replicas - law.current} start at a time"
    elif law.reason is ReplicaReason.FEWER_SUFFICE and law.replicas > max(
        law.held or 0, params.min_replicas
    ):
        message += "; one decision removes at most half"
    return _change(Knob.REPLICAS, law.reason, message, applied=applied)


def _arrivals(law: ReplicaDecision) -> str:
    text = f"{_rate(law.arrivals_per_s)} requests/s arrive"
    if law.peak_per_s is None or law.peak_per_s <= (law.arrivals_per_s or 0.0):
        return text
    return f"{text}, in repeated bursts of {_rate(law.peak_per_s)}"


def _sustained(law: ReplicaDecision) -> str:
    """Say why the law decided this number, and not one fewer."""
    noun = "replica keeps" if law.replicas == 1 else "replicas keep"
    text = f"{law.replicas} {noun} the targets at up to {_rate(law.sustained_per_s)}"
    if law.replicas > 1:
        text += f", {law.replicas - 1} only at up to {_rate(law.fewer_sustained_per_s)}"
    return text


def _rate(per_s: float | None) -> str:
    """Format requests per second; a rate is unknown if no engine has reported its device."""
    return "?" if per_s is None else f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2f}"


def _missed_targets(budget: TokenBudgetDecision | None) -> str:
    statuses = () if budget is None else (("TTFT", budget.ttft), ("TPOT", budget.tpot))
    names = [name for name, status in statuses if status is TargetStatus.MISSED]
    return f"{' and '.join(names) or 'a target'} {'are' if len(names) > 1 else 'is'}"


def _change(knob: Knob, reason: str, message: str, *, applied: bool) -> Change:
    if not applied:
        message += " (recommended, not applied)"
    return Change(knob=knob, reason=reason, message=message, applied=applied)


def _applied_reason(decision: ServiceDecision, before: Bounds) -> tuple[str, str]:
    """Return the reason and the cause of a change of the applied limits."""
    law, params = decision.bounds, decision.params
    if law is not None and params.mode is ControlMode.AUTO:
        cause = _BUDGET_CAUSES.get(law.reason)
        if cause is not None:
            return law.reason, cause
        widened = replace(before, max_num_seqs=max(before.max_num_seqs, params.max_num_seqs))
        if decision.apply_bounds == widened:
            return _MORE_REPLICAS, "more replicas share the requests"
    return _SPEC_CHANGED, "the spec has changed"


def _differences(before: Bounds, after: Bounds) -> Iterator[str]:
    if before.max_tokens != after.max_tokens:
        yield f"token budget {before.max_tokens} → {after.max_tokens}"
    if before.min_tokens != after.min_tokens:
        yield f"lower bound of the token budget {before.min_tokens} → {after.min_tokens}"
    if before.safety_percent != after.safety_percent:
        yield f"safety {before.safety_percent} % → {after.safety_percent} %"
    if before.max_num_seqs != after.max_num_seqs:
        yield f"batch width {before.max_num_seqs} → {after.max_num_seqs}"


def json_value(value: object) -> str:
    """Encode a value of a decision that has no JSON type; only exact fractions occur.

    Raises:
        NotImplementedError: the value has another type.
    """
    if isinstance(value, Fraction):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in a decision")


def decision_summary(decision: ServiceDecision) -> dict[str, Any]:
    """Return the inputs (summed over replicas) and the results of a decision, for logs."""
    observed, params = decision.observation, decision.params
    return {
        "interval_seconds": observed.interval_ns / NS_PER_S,
        "signal": observed.traffic.signal.value,
        "arrivals": observed.traffic.arrivals,
        "in_flight": observed.traffic.in_flight,
        "classes": [asdict(window) for window in observed.classes],
        "replicas": dict(Counter(replica.phase.value for replica in observed.replicas)),
        "replicas_wanted": observed.desired_replicas,
        "running": sum(replica.running for replica in observed.replicas),
        "waiting": sum(replica.waiting for replica in observed.replicas),
        "kv_used_blocks": sum(replica.kv_used_blocks for replica in observed.replicas),
        "kv_total_blocks": sum(replica.kv_total_blocks for replica in observed.replicas),
        "preemptions": sum(known) if (known := _known_preemptions(observed)) else None,
        "measured_replicas": len(observed.fresh),
        "min_replicas": params.min_replicas,
        "max_replicas": params.max_replicas,
        "budget_law": None if decision.bounds is None else asdict(decision.bounds),
        "replica_law": None if decision.replicas is None else asdict(decision.replicas),
    }


def _known_preemptions(observed: ServiceObservation) -> list[int]:
    return [r.preemptions for r in observed.replicas if r.preemptions is not None]
