"""The replica law: a chain of checks over demand and capacity; the first that applies decides.

It runs after the token-budget law, because replicas cost money and take minutes to start. The
capacity of a replica is predicted. An observed load that a replica served with slack can only raise
the prediction, because an idle replica does not show its capacity. An observed load at which it
missed a target lowers the prediction. Both observations expire. The law must not know about pods,
metrics or clocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from typing import Final

from goodput_core.control.capacity import (
    LONG_NS,
    ArrivalSample,
    Demand,
    estimate_demand,
    estimate_growth,
    recent_lengths,
    replica_capacity,
)
from goodput_core.control.observation import ServiceObservation, ServiceParams, Signal
from goodput_core.control.token_budget import TokenBudgetDecision
from goodput_core.histogram import LengthMix
from goodput_core.quantiles import quantile
from goodput_core.units import NS_PER_S

__all__ = ["ReplicaDecision", "ReplicaReason", "ReplicaState", "replica_law"]

_MIN_STEP_LIMIT: Final = 4
"""One decision at most doubles the replicas, or adds this many."""
_IDLE: Final = 0.5
"""A lower use of the replicas' capacity cannot be the cause of a missed target."""
_PATIENCE: Final = 2
"""Start-up times after which a replica that does not start no longer freezes the number."""
_MIN_PATIENCE_NS: Final = 300 * NS_PER_S
_UNSETTLED_NS: Final = 60 * NS_PER_S
"""Unsettled token budgets freeze the number for at most this long."""
_BUSY: Final = 0.8
"""Share of its time that a replica may be busy on average, so that queues stay short."""
_MARGIN: Final = 0.9
"""Share of their capacity that the remaining replicas may use after scaling down."""
_BELOW_FAILED: Final = 0.95
_REMEMBER_NS: Final = 6 * 3600 * NS_PER_S
_GAP_NS: Final = 60 * NS_PER_S
"""A longer gap in the numbers restarts the stabilisation window."""
_MAX_HORIZON_NS: Final = 1800 * NS_PER_S
_STARTUP_QUANTILE: Final = Fraction(9, 10)


class ReplicaReason(StrEnum):
    """Reason of a replica decision; a contract that docs/control.md explains."""

    BELOW_FLOOR = "BelowFloor"
    """The workload has fewer desired replicas than `minReplicas`."""
    ABOVE_CEILING = "AboveCeiling"
    """The workload has more desired replicas than `maxReplicas`."""
    METRICS_MISSING = "MetricsMissing"
    """Routers returned no measurements, so the number stays."""
    SCRAPE_FAILED = "ScrapeFailed"
    """A router did not respond, so the number stays."""
    WOKEN = "Woken"
    """Requests arrive and there is no replica."""
    STARTING = "Starting"
    """Some replicas are not routable yet, so the number is frozen."""
    UNSETTLED = "Unsettled"
    """Token budgets still adapt to a change of their devices, so the number is frozen."""
    DEMAND = "Demand"
    """The demanded device time exceeds the capacity of the replicas."""
    TREND = "Trend"
    """The demand will exceed the capacity by the time a new replica has started."""
    MISSED = "Missed"
    """A target is missed that the token-budget law cannot meet, so one replica is added."""
    NOT_LOAD = "NotLoad"
    """A target is missed by replicas with little load, so more of them would not help."""
    QUEUE_DRAINING = "QueueDraining"
    """A target is missed, but the queue is getting shorter."""
    INFEASIBLE = "Infeasible"
    """A single request alone exceeds the TPOT target."""
    FEWER_SUFFICE = "FewerSuffice"
    """Fewer replicas would have sufficed during the complete stabilisation window."""
    STABILIZING = "Stabilizing"
    """Fewer replicas suffice now, but not yet for the complete window."""
    NO_TRAFFIC = "NoTraffic"
    """No request arrived during the complete window."""
    UNKNOWN_CAPACITY = "UnknownCapacity"
    """The device is not known yet, or no request has finished yet."""
    STEADY = "Steady"
    """The number matches the demand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """State of the replica law between two intervals.

    Args:
        samples: traffic of the last minutes, oldest first.
        mix: latest known lengths of requests.
        needs: (time, sufficient replicas) within the stabilisation window, oldest first.
        needs_since_ns: start of the window without a gap.
        proven, proven_ns: the highest load, in device seconds per second, that one replica served
            with slack, and its time; 0 if none was observed.
        failed, failed_ns: the lowest load at which a target was missed, and its time; 0 if none.
        desired: desired replicas at the last interval.
        short_since_ns: time since which fewer replicas than desired are routable; None if all are.
        unsettled_since_ns: time since which token budgets adapt to their devices; None if none
            adapts.
        waiting: queued requests at the last interval.
    """

    samples: tuple[ArrivalSample, ...] = ()
    mix: LengthMix = field(default_factory=LengthMix)
    needs: tuple[tuple[int, int], ...] = ()
    needs_since_ns: int = 0
    proven: float = 0.0
    proven_ns: int = 0
    failed: float = 0.0
    failed_ns: int = 0
    desired: int = 0
    short_since_ns: int | None = None
    unsettled_since_ns: int | None = None
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDecision:
    """One decision of the replica law.

    Args:
        replicas: desired replicas, within `minReplicas` and `maxReplicas`.
        reason: reason of the decision.
        current: desired replicas before the decision.
        limited: True if more replicas than `maxReplicas` are needed.
        load: demanded device seconds per second; None if not known.
        capacity: device seconds per second that one replica sustains.
        needed: replicas that the demand needs now; None if not known.
        held: replicas that sufficed during the complete stabilisation window; None if the need
            has not been known for that long.
        horizon_ns: start-up time of a replica.
        at_ns: time of the decision.
    """

    replicas: int
    reason: ReplicaReason
    current: int
    limited: bool
    load: float | None
    capacity: float
    needed: int | None
    held: int | None
    horizon_ns: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInputs:
    """Inputs of the checks.

    Args:
        observation, budget, params: arguments of the law.
        horizon_ns: start-up time of a replica, from created to routable.
        short_ns, unsettled_ns: duration for which replicas have been starting, or token budgets
            adapting to their devices; None if none does.
        was_waiting, waiting: queued requests an interval ago and now.
        feasible: False if no number of replicas meets the tightest TPOT.
        demand: demanded device seconds per second; None if not known.
        capacity: device seconds per second that one replica sustains.
        needed: replicas that the demand needs, above the current number only if the lower bound
            of the demand exceeds the capacity; None if not known.
        expected: replicas needed once a new replica has started, at least `needed`.
        fewest: replicas that suffice with a margin; None if not known.
        held: the largest `fewest` within the stabilisation window; None if it has not been known
            for that long.
    """

    observation: ServiceObservation
    budget: TokenBudgetDecision
    params: ServiceParams
    horizon_ns: int
    short_ns: int | None
    unsettled_ns: int | None
    was_waiting: int
    waiting: int
    feasible: bool
    demand: Demand | None
    capacity: float
    needed: int | None
    expected: int
    fewest: int | None
    held: int | None

    @property
    def current(self) -> int:
        """Desired replicas of the workload."""
        return self.observation.desired_replicas


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
    state, inputs = _observe(state, observation, budget, params, now_ns)
    found = (outcome for check in _CHECKS if (outcome := check(inputs)) is not None)
    wanted, reason = next(found, (inputs.current, ReplicaReason.STEADY))
    demand, ready = inputs.demand, len(observation.ready)
    if reason is ReplicaReason.MISSED and demand is not None and demand.most and ready:
        state = _record_failure(state, demand.most / ready, now_ns)
    if reason is ReplicaReason.FEWER_SUFFICE:
        state = replace(state, needs=())  # a new stabilisation window
    return state, ReplicaDecision(
        replicas=_clamp(wanted, params),
        reason=reason,
        current=inputs.current,
        limited=max(wanted, inputs.expected) > params.max_replicas,
        load=None if demand is None else demand.likely,
        capacity=inputs.capacity,
        needed=inputs.needed,
        held=inputs.held,
        horizon_ns=inputs.horizon_ns,
        at_ns=now_ns,
    )


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
    patience_ns = max(_PATIENCE * inputs.horizon_ns, _MIN_PATIENCE_NS)
    if inputs.short_ns is not None and inputs.short_ns <= patience_ns:
        return inputs.current, ReplicaReason.STARTING
    if inputs.unsettled_ns is not None and inputs.unsettled_ns <= _UNSETTLED_NS:
        return inputs.current, ReplicaReason.UNSETTLED
    return None


def _demand(inputs: ReplicaInputs) -> _Outcome | None:
    if inputs.needed is not None and inputs.needed > inputs.current:
        return _limit_step(inputs.needed, inputs), ReplicaReason.DEMAND
    if inputs.expected > inputs.current:
        return _limit_step(inputs.expected, inputs), ReplicaReason.TREND
    return None


def _missed(inputs: ReplicaInputs) -> _Outcome | None:
    if not inputs.budget.needs_replicas:
        return None
    if not inputs.feasible:
        return inputs.current, ReplicaReason.INFEASIBLE
    demand, ready = inputs.demand, len(inputs.observation.ready)
    if demand is not None and ready and demand.likely / ready < _IDLE * inputs.capacity:
        return inputs.current, ReplicaReason.NOT_LOAD
    if inputs.waiting < inputs.was_waiting:
        return inputs.current, ReplicaReason.QUEUE_DRAINING
    return inputs.current + 1, ReplicaReason.MISSED


def _fewer(inputs: ReplicaInputs) -> _Outcome | None:
    current, fewest, held = inputs.current, inputs.fewest, inputs.held
    if fewest is None:
        return current, ReplicaReason.UNKNOWN_CAPACITY
    least = inputs.params.min_replicas
    if inputs.budget.missed or max(least, fewest) >= current:
        return None
    if held is None or held >= current:
        return current, ReplicaReason.STABILIZING
    if not held:
        return least, ReplicaReason.NO_TRAFFIC
    # Remove at most half of the replicas. A new window follows, because the predicted capacity of
    # the remaining ones has not been observed.
    return max(held, least, math.ceil(current / 2)), ReplicaReason.FEWER_SUFFICE


_CHECKS: Final = (
    _bounds,
    _without_measurements,
    _without_replicas,
    _frozen,
    _demand,
    _missed,
    _fewer,
)
"""In this order; if none applies, the number stays."""


def _clamp(replicas: int, params: ServiceParams) -> int:
    return min(max(replicas, params.min_replicas), params.max_replicas)


def _limit_step(wanted: int, inputs: ReplicaInputs) -> int:
    return min(wanted, inputs.current + max(inputs.current, _MIN_STEP_LIMIT))


def _observe(
    state: ReplicaState,
    observation: ServiceObservation,
    budget: TokenBudgetDecision,
    params: ServiceParams,
    now_ns: int,
) -> tuple[ReplicaState, ReplicaInputs]:
    """Add one interval to the state, and compute the inputs of the checks."""
    horizon_ns = _horizon_ns(observation, params)
    window_ns = max(params.stabilization_ns, horizon_ns)
    was_waiting = state.waiting
    state = _add_interval(state, observation, now_ns, max(LONG_NS, 2 * horizon_ns, window_ns))
    traffic = observation.traffic
    fresh = traffic.signal is Signal.FRESH
    idle = not traffic.in_flight and not any(s.requests for s in state.samples)
    predicted = None
    if observation.device is not None:
        predicted = replica_capacity(
            observation.device,
            state.mix,
            tpot_ns=params.tightest_tpot_ns * budget.bounds.safety_percent // 100,
            max_num_seqs=budget.bounds.max_num_seqs,
            max_tokens=budget.bounds.max_tokens,
        )
    demand, more = None, 0.0
    if fresh and idle:
        demand = Demand(least=0.0, likely=0.0, sustained=0.0, most=0.0)
    elif fresh and predicted is not None:
        demand = estimate_demand(state.samples, predicted, now_ns)
        more = estimate_growth(state.samples, predicted, now_ns, horizon_ns)
    state = _record_proven(state, observation, budget, demand, now_ns)
    capacity = _capacity(state)
    needed = fewest = None
    expected = 0
    if demand is not None:
        needed = math.ceil(demand.least / capacity)
        if needed > observation.desired_replicas:
            needed = math.ceil(demand.likely / capacity)  # add enough for the mean
        expected = max(needed, math.ceil((demand.least + more) / capacity))
        spare = capacity * _MARGIN
        fewest = max(expected, math.ceil((demand.likely + more) / spare), int(not idle))
        state = _add_need(state, fewest, now_ns, window_ns)
    return state, ReplicaInputs(
        observation=observation,
        budget=budget,
        params=params,
        horizon_ns=horizon_ns,
        short_ns=_since(state.short_since_ns, now_ns),
        unsettled_ns=_since(state.unsettled_since_ns, now_ns),
        was_waiting=was_waiting,
        waiting=state.waiting,
        feasible=predicted is None or predicted.feasible,
        demand=demand,
        capacity=capacity,
        needed=needed,
        expected=expected,
        fewest=fewest,
        held=_held(state, now_ns, window_ns),
    )


def _record_failure(state: ReplicaState, each: float, now_ns: int) -> ReplicaState:
    """Record that a target was missed at this load per replica.

    The load is an upper bound. While the load grows, the miss occurs above its mean.
    """
    failed = min(each, state.failed) if state.failed else each
    proven = min(state.proven, failed * _BELOW_FAILED)
    return replace(state, failed=failed, failed_ns=now_ns, proven=proven)


def _horizon_ns(observation: ServiceObservation, params: ServiceParams) -> int:
    if not observation.startups_ns:
        return params.default_startup_ns
    return min(quantile(observation.startups_ns, _STARTUP_QUANTILE), _MAX_HORIZON_NS)


def _add_interval(
    state: ReplicaState, observation: ServiceObservation, now_ns: int, keep_ns: int
) -> ReplicaState:
    """Add the traffic of one interval, and update since when the number is frozen."""
    desired, traffic = observation.desired_replicas, observation.traffic
    short_since_ns: int | None = None
    unsettled_since_ns: int | None = None
    if len(observation.ready) < desired:
        known = state.short_since_ns is not None and desired <= state.desired
        short_since_ns = state.short_since_ns if known else now_ns
    if any(not r.settled for r in observation.fresh):
        known = state.unsettled_since_ns is not None
        unsettled_since_ns = state.unsettled_since_ns if known else now_ns
    samples = tuple(s for s in state.samples if s.at_ns > now_ns - keep_ns)
    if traffic.signal is Signal.FRESH:
        arrivals = ArrivalSample(
            at_ns=now_ns,
            interval_ns=observation.interval_ns,
            requests=traffic.arrivals,
            finished=traffic.finished,
        )
        samples = (*samples, arrivals)
    mix = recent_lengths(samples, now_ns)
    return replace(
        state,
        samples=samples,
        mix=mix if mix.bins else state.mix,
        desired=desired,
        short_since_ns=short_since_ns,
        unsettled_since_ns=unsettled_since_ns,
        waiting=observation.waiting,
    )


def _record_proven(
    state: ReplicaState,
    observation: ServiceObservation,
    budget: TokenBudgetDecision,
    demand: Demand | None,
    now_ns: int,
) -> ReplicaState:
    """Record the load that a replica serves with slack; drop expired observations."""
    if state.proven and now_ns - state.proven_ns > _REMEMBER_NS:
        state = replace(state, proven=0.0)
    if state.failed and now_ns - state.failed_ns > _REMEMBER_NS:
        state = replace(state, failed=0.0)
    ready = len(observation.ready)
    proven = demand.sustained / ready if demand is not None and ready else 0.0
    if budget.slack_ns >= LONG_NS and proven > state.proven:
        failed = 0.0 if proven >= state.failed else state.failed
        state = replace(state, proven=proven, proven_ns=now_ns, failed=failed)
    return state


def _capacity(state: ReplicaState) -> float:
    capacity = max(_BUSY, state.proven)
    return min(capacity, state.failed * _BELOW_FAILED) if state.failed else capacity


def _add_need(state: ReplicaState, fewest: int, now_ns: int, window_ns: int) -> ReplicaState:
    """Add one interval to the stabilisation window; a long gap restarts it."""
    if not state.needs or now_ns - state.needs[-1][0] > _GAP_NS:
        return replace(state, needs=((now_ns, fewest),), needs_since_ns=now_ns)
    kept = tuple(n for n in state.needs if n[0] > now_ns - window_ns)
    return replace(state, needs=(*kept, (now_ns, fewest)))


def _held(state: ReplicaState, now_ns: int, window_ns: int) -> int | None:
    if not state.needs or now_ns - state.needs_since_ns < window_ns:
        return None
    return max(n for _, n in state.needs)


def _since(begun_ns: int | None, now_ns: int) -> int | None:
    return None if begun_ns is None else now_ns - begun_ns
