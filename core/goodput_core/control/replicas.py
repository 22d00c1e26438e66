"""The replica law: a chain of checks over demand and capacity; the first that applies decides.

It runs after the token-budget law, because replicas cost money and take minutes to start. A replica
is assumed to sustain 0.8 device seconds per second. A higher load that was served with slack raises
this capacity, and a load at which a target was missed lowers it. Both observations expire. A low
load proves nothing. The law must not know about pods, metrics or clocks.
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
"""One decision at most doubles the replicas, or adds this many if that is more."""
_LOW_LOAD: Final = 0.5
"""A load below this share of the capacity cannot be the cause of a missed target."""
_PATIENCE: Final = 2
"""Start-up times after which a replica that has not started no longer freezes the replica count."""
_MIN_PATIENCE_NS: Final = 300 * NS_PER_S
"""Minimum of that time."""
_UNSETTLED_NS: Final = 60 * NS_PER_S
"""Unsettled token budgets freeze the replica count for at most this long."""
_BUSY: Final = 0.8
"""Share of its time that a replica may be busy on average, so that queues stay short."""
_MARGIN: Final = 0.9
"""Share of their capacity that the remaining replicas may use after scaling down."""
_BELOW_FAILED: Final = 0.95
"""Capacity as a share of the lowest load at which a target was missed."""
_REMEMBER_NS: Final = 6 * 3600 * NS_PER_S
"""Observed loads expire after this time."""
_GAP_NS: Final = 60 * NS_PER_S
"""A longer gap between two known needs restarts the stabilisation window."""
_MAX_STARTUP_NS: Final = 1800 * NS_PER_S
_STARTUP_QUANTILE: Final = Fraction(9, 10)
"""Quantile of the latest start-up times that the law expects of a new replica."""


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
    """Some replicas are not routable yet, so the replica count is frozen."""
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
    """No engine has reported its device yet, or no request has finished yet."""
    STEADY = "Steady"
    """The replica count matches the demand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """State of the replica law between two intervals.

    Args:
        samples: traffic of the last minutes, oldest first.
        mix: latest known lengths of requests.
        needs: (time, sufficient replicas) within the stabilisation window, oldest first.
        needs_since_ns: start of the part of `needs` without a gap.
        proven_load, proven_ns: the highest load, in device seconds per second, that one replica
            served with slack, and the time of the observation; 0 if none was observed.
        failed_load, failed_ns: the lowest load of one replica at which a target was missed, and
            the time of the observation; 0 if none was observed.
        desired: desired replicas at the last interval.
        incomplete_since_ns: time at which fewer replicas than desired became routable; None if all
            are routable.
        unsettled_since_ns: time at which a token budget began to adapt to a change of its device;
            None if all are settled.
        waiting: queued requests at the last interval.
    """

    samples: tuple[ArrivalSample, ...] = ()
    mix: LengthMix = field(default_factory=LengthMix)
    needs: tuple[tuple[int, int], ...] = ()
    needs_since_ns: int = 0
    proven_load: float = 0.0
    proven_ns: int = 0
    failed_load: float = 0.0
    failed_ns: int = 0
    desired: int = 0
    incomplete_since_ns: int | None = None
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
        horizon_ns: start-up time of a replica, from its creation until it is routable.
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
        startup_ns: start-up time of a replica, from its creation until it is routable.
        incomplete_ns: duration for which fewer replicas than desired have been routable; None if
            all are routable.
        unsettled_ns: duration for which token budgets have been adapting to their devices; None if
            all are settled.
        was_waiting, waiting: queued requests an interval ago and now.
        feasible: False if no number of replicas meets the tightest TPOT.
        demand: demanded device seconds per second; None if not known.
        capacity: device seconds per second that one replica sustains.
        needed: replicas that the demand needs; exceeds `current` only if even the lower bound of
            the demand exceeds the current capacity. None if not known.
        expected: replicas needed once a new replica has started, at least `needed`.
        fewest: replicas that suffice with a margin; None if not known.
        sufficed: the largest `fewest` within the stabilisation window; None if it has not been
            known for that long.
    """

    observation: ServiceObservation
    budget: TokenBudgetDecision
    params: ServiceParams
    startup_ns: int
    incomplete_ns: int | None
    unsettled_ns: int | None
    was_waiting: int
    waiting: int
    feasible: bool
    demand: Demand | None
    capacity: float
    needed: int | None
    expected: int
    fewest: int | None
    sufficed: int | None

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
    outcomes = (outcome for check in _CHECKS if (outcome := check(inputs)) is not None)
    wanted, reason = next(outcomes, (inputs.current, ReplicaReason.STEADY))
    demand, ready = inputs.demand, len(observation.ready)
    if reason is ReplicaReason.MISSED and demand is not None and demand.upper and ready:
        state = _record_failure(state, demand.upper / ready, now_ns)
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
        held=inputs.sufficed,
        horizon_ns=inputs.startup_ns,
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
    patience_ns = max(_PATIENCE * inputs.startup_ns, _MIN_PATIENCE_NS)
    if inputs.incomplete_ns is not None and inputs.incomplete_ns <= patience_ns:
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
    if demand is not None and ready and demand.likely / ready < _LOW_LOAD * inputs.capacity:
        return inputs.current, ReplicaReason.NOT_LOAD
    if inputs.waiting < inputs.was_waiting:
        return inputs.current, ReplicaReason.QUEUE_DRAINING
    return inputs.current + 1, ReplicaReason.MISSED


def _fewer(inputs: ReplicaInputs) -> _Outcome | None:
    current, fewest, sufficed = inputs.current, inputs.fewest, inputs.sufficed
    if fewest is None:
        return current, ReplicaReason.UNKNOWN_CAPACITY
    minimum = inputs.params.min_replicas
    if inputs.budget.missed or max(minimum, fewest) >= current:
        return None
    if sufficed is None or sufficed >= current:
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
    return min(wanted, inputs.current + max(inputs.current, _MIN_STEP_LIMIT))


def _observe(
    state: ReplicaState,
    observation: ServiceObservation,
    budget: TokenBudgetDecision,
    params: ServiceParams,
    now_ns: int,
) -> tuple[ReplicaState, ReplicaInputs]:
    """Add one interval to the state, and compute the inputs of the checks."""
    startup_ns = _startup_ns(observation, params)
    window_ns = max(params.stabilization_ns, startup_ns)
    was_waiting = state.waiting
    state = _add_interval(state, observation, now_ns, max(LONG_NS, 2 * startup_ns, window_ns))
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
    demand, growth = None, 0.0
    if fresh and idle:
        demand = Demand(lower=0.0, likely=0.0, sustained=0.0, upper=0.0)
    elif fresh and predicted is not None:
        demand = estimate_demand(state.samples, predicted, now_ns)
        growth = estimate_growth(state.samples, predicted, now_ns, startup_ns)
    state = _record_proven(state, observation, budget, demand, now_ns)
    capacity = _capacity(state)
    needed = fewest = None
    expected = 0
    if demand is not None:
        needed = math.ceil(demand.lower / capacity)
        if needed > observation.desired_replicas:
            needed = math.ceil(demand.likely / capacity)  # add enough for the mean
        expected = max(needed, math.ceil((demand.lower + growth) / capacity))
        usable = capacity * _MARGIN
        fewest = max(expected, math.ceil((demand.likely + growth) / usable), int(not idle))
        state = _add_need(state, fewest, now_ns, window_ns)
    return state, ReplicaInputs(
        observation=observation,
        budget=budget,
        params=params,
        startup_ns=startup_ns,
        incomplete_ns=_since(state.incomplete_since_ns, now_ns),
        unsettled_ns=_since(state.unsettled_since_ns, now_ns),
        was_waiting=was_waiting,
        waiting=state.waiting,
        feasible=predicted is None or predicted.feasible,
        demand=demand,
        capacity=capacity,
        needed=needed,
        expected=expected,
        fewest=fewest,
        sufficed=_sufficed(state, now_ns, window_ns),
    )


def _record_failure(state: ReplicaState, load: float, now_ns: int) -> ReplicaState:
    """Record that a target was missed at this load of one replica.

    The load must be an upper bound: while the load grows, its mean over a minute is too low.
    """
    failed_load = min(load, state.failed_load) if state.failed_load else load
    proven_load = min(state.proven_load, failed_load * _BELOW_FAILED)
    return replace(state, failed_load=failed_load, failed_ns=now_ns, proven_load=proven_load)


def _startup_ns(observation: ServiceObservation, params: ServiceParams) -> int:
    if not observation.startups_ns:
        return params.default_startup_ns
    return min(quantile(observation.startups_ns, _STARTUP_QUANTILE), _MAX_STARTUP_NS)


def _add_interval(
    state: ReplicaState, observation: ServiceObservation, now_ns: int, keep_ns: int
) -> ReplicaState:
    """Add the traffic of one interval, and update the times at which a freeze began."""
    desired, traffic = observation.desired_replicas, observation.traffic
    incomplete_since_ns: int | None = None
    unsettled_since_ns: int | None = None
    if len(observation.ready) < desired:
        continues = state.incomplete_since_ns is not None and desired <= state.desired
        incomplete_since_ns = state.incomplete_since_ns if continues else now_ns
    if any(not r.settled for r in observation.fresh):
        continues = state.unsettled_since_ns is not None
        unsettled_since_ns = state.unsettled_since_ns if continues else now_ns
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
        incomplete_since_ns=incomplete_since_ns,
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
    if state.proven_load and now_ns - state.proven_ns > _REMEMBER_NS:
        state = replace(state, proven_load=0.0)
    if state.failed_load and now_ns - state.failed_ns > _REMEMBER_NS:
        state = replace(state, failed_load=0.0)
    ready = len(observation.ready)
    load = demand.sustained / ready if demand is not None and ready else 0.0
    if budget.slack_ns >= LONG_NS and load > state.proven_load:
        failed_load = 0.0 if load >= state.failed_load else state.failed_load
        state = replace(state, proven_load=load, proven_ns=now_ns, failed_load=failed_load)
    return state


def _capacity(state: ReplicaState) -> float:
    capacity = max(_BUSY, state.proven_load)
    return min(capacity, state.failed_load * _BELOW_FAILED) if state.failed_load else capacity


def _add_need(state: ReplicaState, fewest: int, now_ns: int, window_ns: int) -> ReplicaState:
    """Add one interval to the stabilisation window; a long gap restarts it."""
    if not state.needs or now_ns - state.needs[-1][0] > _GAP_NS:
        return replace(state, needs=((now_ns, fewest),), needs_since_ns=now_ns)
    in_window = tuple(n for n in state.needs if n[0] > now_ns - window_ns)
    return replace(state, needs=(*in_window, (now_ns, fewest)))


def _sufficed(state: ReplicaState, now_ns: int, window_ns: int) -> int | None:
    if not state.needs or now_ns - state.needs_since_ns < window_ns:
        return None
    return max(n for _, n in state.needs)


def _since(begun_ns: int | None, now_ns: int) -> int | None:
    return None if begun_ns is None else now_ns - begun_ns
