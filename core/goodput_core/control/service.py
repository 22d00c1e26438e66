"""The law of one service: the token budget first, then the replicas.

The operator and the fleet in virtual time call it once per interval with what they have
observed, and apply what it says. It decides the same from the same values, so a decision that
was recorded can be made again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from goodput_core.control.bounds import Bounds, BoundsDecision, BoundsState, bounds_law
from goodput_core.control.observation import ServiceObservation
from goodput_core.control.params import ServiceParams
from goodput_core.control.replicas import ReplicaDecision, replicas_law
from goodput_core.control.weighing import ReplicaState
from goodput_core.spec.choices import ControlMode

__all__ = ["ServiceDecision", "ServiceState", "service_law"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """What is remembered between two intervals; the caller keeps one for each service."""

    bounds: BoundsState = field(default_factory=BoundsState)
    replicas: ReplicaState = field(default_factory=ReplicaState)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDecision:
    """One decision, with what it was made from.

    Args:
        apply_bounds, apply_replicas: what is to be put in force now.
        bounds, replicas: what the laws say, in force or not; None: mode `Manual`, which computes
            nothing.
        observation, params: the inputs.
        at_ns: when.
    """

    apply_bounds: Bounds
    apply_replicas: int
    bounds: BoundsDecision | None
    replicas: ReplicaDecision | None
    observation: ServiceObservation
    params: ServiceParams
    at_ns: int


def service_law(
    state: ServiceState, observation: ServiceObservation, params: ServiceParams, now_ns: int
) -> tuple[ServiceState, ServiceDecision]:
    """One interval: budget before replicas.

    `Auto` applies what it decides; replicas that a human or another autoscaler has set stay, and
    ours are a recommendation. `Recommend` computes and applies nothing, `Manual` computes
    nothing: both keep the initial budget, and `replicas` or `minReplicas`.

    Args:
        state: of the last interval; a fresh one at the start, or after a restart.
        observation: of this interval.
        params: the manifest's.
        now_ns: the interval's end, on a clock that never goes back.
    """
    bounds: BoundsDecision | None = None
    replicas: ReplicaDecision | None = None
    apply_bounds, apply_replicas = Bounds.initial(params), params.initial_replicas
    if params.mode is not ControlMode.MANUAL:
        bounds_state, bounds = bounds_law(state.bounds, observation, params, now_ns)
        replica_state, replicas = replicas_law(state.replicas, observation, bounds, params, now_ns)
        state = ServiceState(bounds=bounds_state, replicas=replica_state)
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
