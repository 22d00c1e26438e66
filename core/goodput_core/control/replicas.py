"""The replica law: a chain of checks over demand and capacity; the first that applies decides.

It runs after the token-budget law, because replicas cost money and take minutes to start. Demand is
measured in device seconds per second. A replica is assumed to sustain at most 0.8 of them, or less
if requests would then wait longer than their TTFT target. A higher load that was served with slack
raises this capacity, and a load at which a target was missed lowers it. A low load proves nothing.
The law must not know about pods, metrics or clocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from goodput_core.control.observation import ServiceObservation, ServiceParams, Signal
from goodput_core.control.observed import ObservedCapacities
from goodput_core.control.replica_inputs import ReplicaInputs, ReplicaState, observe_replicas

if TYPE_CHECKING:
    from goodput_core.control.token_budget import TokenBudgetDecision

__all__ = ["ReplicaDecision", "ReplicaReason", "ReplicaState", "replica_law"]

_MIN_STEP_LIMIT: Final = 4
"""At most as many replicas as are routable start at the same time, or this many if that is more."""
_LOW_LOAD: Final = 0.5
"""A load below this share of the capacity cannot be the cause of a missed target."""


class ReplicaReason(StrEnum):
    """Reason of a replica decision; a contract that docs/control.md explains."""

    BELOW_FLOOR = "BelowFloor"
    """The workload has fewer desired replicas than `minReplicas`."""
    ABOVE_CEILING = "AboveCeiling"
    """The workload has more desired replicas than `maxReplicas`."""
    METRICS_MISSING = "MetricsMissing"
    """Routers returned no measurements, so the replica count stays."""
    SCRAPE_FAILED = "ScrapeFailed"
    """A router did not respond, so the replica count stays."""
    WOKEN = "Woken"
    """Requests arrive and there is no replica."""
    STARTING = "Starting"
    """Some replicas are not routable yet, so none is removed, or added for a missed target."""
    UNSETTLED = "Unsettled"
    """Token budgets still adapt to a change of their devices, so the replica count is frozen."""
    DEMAND = "Demand"
    """The demanded device time exceeds the capacity of the replicas."""
    TREND = "Trend"
    """The demand will exceed the capacity by the time a new replica has started."""
    MISSED = "Missed"
    """A target is missed that the token-budget law cannot meet, so one replica is added."""
    NOT_LOAD = "NotLoad"
    """A target is missed at a low load, so more replicas would not help."""
    QUEUE_DRAINING = "QueueDraining"
    """A target is missed, but the queue is getting shorter, or the load that caused it has gone."""
    INFEASIBLE = "Infeasible"
    """A single request alone exceeds the TPOT target."""
    FEWER_SUFFICE = "FewerSuffice"
    """Fewer replicas would have sufficed during the complete stabilisation window."""
    STABILIZING = "Stabilizing"
    """Fewer replicas suffice now, but not yet for the complete window."""
    NO_TRAFFIC = "NoTraffic"
    """No request arrived during the complete window."""
    UNKNOWN_CAPACITY = "UnknownCapacity"
    """No engine has reported its device yet, or no request has finished yet."""
    OBJECTIVE_MISSED = "ObjectiveMissed"
    """Fewer replicas would suffice, but an objective is missed in the service's window."""
    STEADY = "Steady"
    """The replica count matches the demand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDecision:
    """One decision of the replica law.

    Args:
        replicas: desired replicas, within `minReplicas` and `maxReplicas`.
        reason: reason of the decision.
        current: desired replicas before the decision.
        limited: True if more replicas than `maxReplicas` are needed.
        load: demanded device seconds per second, or requests per second if no device can be known;
            None if not known.
        capacity: device seconds per second that one replica sustains, one of `current`; None if
            not known.
        arrivals_per_s: demanded requests per second, with the reason `Demand` those after a sudden
            step; None if not known.
        peak_per_s: requests per second of bursts that recur; None if none recur.
        sustained_per_s, fewer_sustained_per_s: requests per second that `replicas`, and one replica
            fewer, serve within the targets; None if not known.
        needed: replicas that the demand needs now; None if not known.
        held: replicas that sufficed during the complete stabilisation window; None if the need
            has not been known for that long.
        horizon_ns: start-up time of a replica, from its creation until it is routable.
        at_ns: time of the decision.
    """

    replicas: int
    reason: ReplicaReason
    current: int
    limited: bool
    load: float | None
    capacity: float | None
    arrivals_per_s: float | None
    peak_per_s: float | None
    sustained_per_s: float | None
    fewer_sustained_per_s: float | None
    needed: int | None
    held: int | None
    horizon_ns: int
    at_ns: int


def replica_law(
    state: ReplicaState,
    observation: ServiceObservation,
    budget: TokenBudgetDecision,
    params: ServiceParams,
    now_ns: int,
) -> tuple[ReplicaState, ReplicaDecision]:
    """Run the replica law for one interval.

    Args:
        state: state after the last interval.
        observation: observation of this interval.
        budget: decision of the token-budget law for this interval.
        params: parameters from the manifest.
        now_ns: end of the interval.
    """
    state, inputs = observe_replicas(state, observation, budget, params, now_ns)
    outcomes = (outcome for check in _CHECKS if (outcome := check(inputs)) is not None)
    wanted, reason = next(outcomes, (inputs.current, ReplicaReason.STEADY))
    replicas = _clamp(wanted, params)
    demand, capacities = inputs.demand, inputs.capacities
    failed = _failed_load(inputs, reason)
    if failed:
        learnt = state.learnt.with_failed(failed, now_ns)
        if learnt.failed != state.learnt.failed:
            state = replace(state, failed_mix=state.mix if state.mix.bins else None)
        state = replace(state, learnt=learnt)
    if replicas > inputs.current:
        state = replace(state, raised_ns=now_ns)
    if replicas != inputs.current:
        state = replace(state, needs=())  # a new stabilisation window
    predicted = capacities.predicted
    load = None if demand is None else demand.likely
    # Replicas are added for the load after a sudden step.
    arriving = demand.risen if demand and reason is ReplicaReason.DEMAND else load
    return state, ReplicaDecision(
        replicas=replicas,
        reason=reason,
        current=inputs.current,
        limited=max(wanted, inputs.expected) > params.max_replicas,
        load=load,
        capacity=capacities.known(inputs.current),
        arrivals_per_s=arriving / predicted.device_s
        if arriving is not None and predicted
        else None,
        peak_per_s=capacities.learnt.peak_per_s or None,
        sustained_per_s=capacities.requests_per_s(replicas),
        fewer_sustained_per_s=capacities.requests_per_s(max(0, replicas - 1)),
        needed=inputs.needed,
        held=inputs.sufficed,
        horizon_ns=inputs.startup_ns,
        at_ns=now_ns,
    )


def _failed_load(inputs: ReplicaInputs, reason: ReplicaReason) -> float | None:
    """Return an upper bound of the load of one replica at which a target was just missed.

    The bound is a share of the predicted load. None if no target was missed for the load.
    """
    demand, ready = inputs.demand, len(inputs.observation.ready)
    if demand is None or not demand.upper or not ready:
        return None
    if not isinstance(inputs.capacities, ObservedCapacities):
        if reason is not ReplicaReason.MISSED:
            return None
        return demand.upper / ready / inputs.capacities.predicted_load(ready)
    recent = inputs.recent
    # An added replica takes minutes to start. In this time, overload shows how much is missing.
    overloaded = reason is ReplicaReason.STARTING and inputs.budget.missed
    if reason is not ReplicaReason.MISSED and not overloaded:
        return None
    if overloaded and recent.is_alone(inputs.budget, replicas=ready):
        return None
    return recent.load_at_miss(demand)


_Outcome = tuple[int, ReplicaReason]
_UNMEASURED: Final = {
    Signal.MISSING: ReplicaReason.METRICS_MISSING,
    Signal.FAILED: ReplicaReason.SCRAPE_FAILED,
}


def _bounds(inputs: ReplicaInputs) -> _Outcome | None:
    """Apply `minReplicas` and `maxReplicas`, even without measurements."""
    clamped = _clamp(inputs.current, inputs.params)
    if clamped > inputs.current:
        return clamped, ReplicaReason.BELOW_FLOOR
    if clamped < inputs.current:
        return clamped, ReplicaReason.ABOVE_CEILING
    return None


def _without_measurements(inputs: ReplicaInputs) -> _Outcome | None:
    reason = _UNMEASURED.get(inputs.observation.traffic.signal)
    return None if reason is None else (inputs.current, reason)


def _without_replicas(inputs: ReplicaInputs) -> _Outcome | None:
    if inputs.current:
        return None
    traffic = inputs.observation.traffic
    if traffic.arrivals or traffic.in_flight:
        return _limit_step(max(1, inputs.expected), inputs), ReplicaReason.WOKEN
    return 0, ReplicaReason.NO_TRAFFIC


def _frozen(inputs: ReplicaInputs) -> _Outcome | None:
    if inputs.starting:
        # The demand is compared with all desired replicas, those that start included. A missed
        # target says nothing about replicas that start.
        more = None if inputs.unsettled else _demand(inputs)
        return more or (inputs.current, ReplicaReason.STARTING)
    if inputs.unsettled:
        return inputs.current, ReplicaReason.UNSETTLED
    return None


def _demand(inputs: ReplicaInputs) -> _Outcome | None:
    for wanted, reason in (
        (inputs.needed or 0, ReplicaReason.DEMAND),
        (inputs.expected, ReplicaReason.TREND),
    ):
        replicas = _limit_step(wanted, inputs)
        if replicas > inputs.current:
            return replicas, reason
    return None


def _missed(inputs: ReplicaInputs) -> _Outcome | None:
    if not inputs.budget.needs_replicas:
        return None
    if not inputs.feasible:
        return inputs.current, ReplicaReason.INFEASIBLE
    demand, ready = inputs.demand, len(inputs.observation.ready)
    if isinstance(inputs.capacities, ObservedCapacities):
        not_load = inputs.recent.is_alone(inputs.budget, replicas=ready)
        if not not_load and (inputs.recent.falls or not inputs.recent.missed):
            return inputs.current, ReplicaReason.QUEUE_DRAINING
    else:
        not_load = (
            demand is not None
            and ready > 0
            and demand.likely / ready < _LOW_LOAD * inputs.capacities.of(ready)
        )
    if not_load:
        return inputs.current, ReplicaReason.NOT_LOAD
    if inputs.waiting < inputs.was_waiting:
        return inputs.current, ReplicaReason.QUEUE_DRAINING
    return inputs.current + 1, ReplicaReason.MISSED


def _fewer(inputs: ReplicaInputs) -> _Outcome | None:
    current, fewest, sufficed = inputs.current, inputs.fewest, inputs.sufficed
    if fewest is None:
        return current, ReplicaReason.UNKNOWN_CAPACITY
    minimum = inputs.params.min_replicas
    if max(minimum, fewest) >= current:
        return None
    if inputs.budget.missed or inputs.missed:
        return current, ReplicaReason.OBJECTIVE_MISSED
    if inputs.raised or sufficed is None or sufficed >= current:
        return current, ReplicaReason.STABILIZING
    if not sufficed:
        return minimum, ReplicaReason.NO_TRAFFIC
    # Remove at most half of the replicas, and begin a new window before more are removed: no
    # observation shows yet that the remaining replicas have the assumed capacity.
    return max(sufficed, minimum, math.ceil(current / 2)), ReplicaReason.FEWER_SUFFICE


_CHECKS: Final = (
    _bounds,
    _without_measurements,
    _without_replicas,
    _frozen,
    _demand,
    _missed,
    _fewer,
)
"""The checks, in this order; if none applies, the replica count stays."""


def _clamp(replicas: int, params: ServiceParams) -> int:
    return min(max(replicas, params.min_replicas), params.max_replicas)


def _limit_step(wanted: int, inputs: ReplicaInputs) -> int:
    """Limit an increase: not all of the demand may last until many replicas have started."""
    routable = (
        min(inputs.current, len(inputs.observation.ready)) if inputs.starting else inputs.current
    )
    return min(wanted, routable + max(routable, _MIN_STEP_LIMIT))
