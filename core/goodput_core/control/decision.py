"""The law of one service: the token budget first, then the replicas.

`service_law` is a pure function, so a decision can be recomputed from its recorded inputs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from goodput_core.control.observation import ServiceObservation, ServiceParams
from goodput_core.control.replicas import ReplicaDecision, ReplicaState, replica_law
from goodput_core.control.token_budget import (
    Bounds,
    TokenBudgetDecision,
    TokenBudgetState,
    token_budget_law,
)
from goodput_core.spec.choices import ControlMode
from goodput_core.units import NS_PER_S

__all__ = ["ServiceDecision", "ServiceState", "decision_summary", "json_value", "service_law"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """State of both laws between two intervals."""

    bounds: TokenBudgetState = field(default_factory=TokenBudgetState)
    replicas: ReplicaState = field(default_factory=ReplicaState)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDecision:
    """One decision with its inputs; a line of `decisions.jsonl`, so its field names are a contract.

    Args:
        apply_bounds, apply_replicas: limits and replicas that the driver applies.
        bounds, replicas: decisions of the laws, applied or not; None in mode Manual.
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

    Mode Auto applies the decisions, unless a user or another autoscaler sets the replicas. Mode
    Recommend computes decisions and applies none. Mode Manual computes none. Both modes use the
    initial token budget, and `replicas` or `minReplicas`.

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
        assert bounds is not None
        assert replicas is not None
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


def json_value(value: object) -> str:
    """Encode a value of a decision for which JSON has no type; only exact fractions occur.

    Raises:
        NotImplementedError: the value has another type.
    """
    if isinstance(value, Fraction):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in a decision")


def decision_summary(decision: ServiceDecision) -> dict[str, Any]:
    """Return inputs and results of a decision in JSON types for logs, summed over replicas."""
    seen, params = decision.observation, decision.params
    return {
        "interval_seconds": seen.interval_ns / NS_PER_S,
        "signal": seen.traffic.signal.value,
        "arrivals": seen.traffic.arrivals,
        "in_flight": seen.traffic.in_flight,
        "classes": [asdict(window) for window in seen.classes],
        "replicas": dict(Counter(replica.phase.value for replica in seen.replicas)),
        "replicas_wanted": seen.replicas_asked,
        "running": sum(replica.running for replica in seen.replicas),
        "waiting": sum(replica.waiting for replica in seen.replicas),
        "kv_used_blocks": sum(replica.kv_used_blocks for replica in seen.replicas),
        "kv_total_blocks": sum(replica.kv_total_blocks for replica in seen.replicas),
        "preemptions": sum(replica.preemptions for replica in seen.replicas),
        "min_replicas": params.min_replicas,
        "max_replicas": params.max_replicas,
        "budget_law": None if decision.bounds is None else asdict(decision.bounds),
        "replica_law": None if decision.replicas is None else asdict(decision.replicas),
    }
