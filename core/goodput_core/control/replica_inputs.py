"""The inputs of the replica law: what the observations of the last minutes say about a service.

`observe_replicas` adds one interval to the state, and computes the demand, the capacity and the
replicas that are needed. It does not decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain
from typing import Final

from goodput_core.control.capacity import replica_capacity
from goodput_core.control.demand import (
    LONG_NS,
    TREND_NS,
    ArrivalSample,
    Demand,
    estimate_demand,
    estimate_growth,
    recent_lengths,
)
from goodput_core.control.learnt import ArrivalBlocks, Capacities, LearntCapacity, RecentBlocks
from goodput_core.control.observation import ServiceObservation, ServiceParams, Signal
from goodput_core.control.observed import (
    REQUEST_UNITS,
    ObservedCapacities,
    RecentLoad,
    are_lighter,
    fewest_observed,
    recent_load,
)
from goodput_core.control.queueing import TTFTTarget
from goodput_core.control.slo_window import WINDOW_NS, ClassOutcomes, TargetStatus, merge_windows
from goodput_core.control.token_budget import TokenBudgetDecision, TokenBudgetReason
from goodput_core.histogram import LengthMix
from goodput_core.quantiles import quantile
from goodput_core.units import NS_PER_S

__all__ = ["ReplicaInputs", "ReplicaState", "observe_replicas"]

_PATIENCE: Final = 2
"""Start-up times after which a replica that has not started no longer freezes the replica count."""
_MIN_PATIENCE_NS: Final = 300 * NS_PER_S
"""Minimum of that time."""
_UNSETTLED_NS: Final = 60 * NS_PER_S
"""Unsettled token budgets freeze the replica count for at most this long."""
_MARGIN: Final = 0.9
"""Share of their capacity that the remaining replicas may use after scaling down."""
_QUEUE_NS: Final = 60 * NS_PER_S
"""Time within which a queue that already misses its TTFT target should be served."""
_ASSUMED_LATE: Final = 0.05
"""Share of late requests that is planned for if no class has an objective."""
_GAP_NS: Final = 60 * NS_PER_S
"""A longer gap between two known needs restarts the stabilisation window."""
_MAX_STARTUP_NS: Final = 1800 * NS_PER_S
_STARTUP_QUANTILE: Final = Fraction(9, 10)
"""Quantile of the latest start-up times that the law expects of a new replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """State of the replica law between two intervals.

    Args:
        samples: traffic of the last minutes, oldest first.
        mix: latest known lengths of requests.
        needs: (time, sufficient replicas) since all replicas are ready and token budgets settled,
            within the stabilisation window, oldest first.
        needs_since_ns: start of the part of `needs` without a gap.
        learnt: observed loads of one replica, and the burstiness of the arrivals.
        failed_mix: lengths of the requests at the lowest load at which a target was missed; None if
            not known.
        blocks: arrivals from which the burstiness is computed.
        recent: arrivals in which bursts that recur are found.
        outcomes: outcomes of the requests that ended in the last five minutes, with the end of each
            interval.
        raised_ns: time of the last decision to add replicas; None once all were ready.
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
    learnt: LearntCapacity = field(default_factory=LearntCapacity)
    failed_mix: LengthMix | None = None
    blocks: ArrivalBlocks = field(default_factory=ArrivalBlocks)
    recent: RecentBlocks = field(default_factory=RecentBlocks)
    outcomes: tuple[tuple[int, tuple[ClassOutcomes, ...]], ...] = ()
    raised_ns: int | None = None
    desired: int = 0
    incomplete_since_ns: int | None = None
    unsettled_since_ns: int | None = None
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInputs:
    """Inputs of the checks.

    Args:
        observation, budget, params: arguments of the law.
        startup_ns: start-up time of a replica, from its creation until it is routable.
        starting: True if replicas start and have not exceeded the patience.
        unsettled: True if token budgets adapt to a change of their devices, for a limited time.
        raised: True if replicas were added and not all of them have been ready yet.
        missed: True if an objective is missed in the service's window.
        was_waiting, waiting: queued requests an interval ago and now.
        feasible: False if no number of replicas meets the tightest TPOT.
        demand: demanded device seconds per second; None if not known.
        capacities: device seconds per second that one replica sustains.
        needed: replicas that the demand and the bursts that recur need; exceeds `current` only if
            these bursts or even the lower bound of the demand exceed the current capacity. None if
            not known.
        expected: replicas needed once a new replica has started, at least `needed`.
        fewest: replicas that suffice for the latest demand with a margin; None if not known.
        recent: requests that ran and finished in the last minute.
        sufficed: the largest `fewest` within the stabilisation window, at least the replicas that
            suffice for the means of the last five minutes and of the last twenty seconds; None if
            it has not been known for that long.
    """

    observation: ServiceObservation
    budget: TokenBudgetDecision
    params: ServiceParams
    startup_ns: int
    starting: bool
    unsettled: bool
    raised: bool
    missed: bool
    was_waiting: int
    waiting: int
    feasible: bool
    demand: Demand | None
    capacities: Capacities
    needed: int | None
    expected: int
    fewest: int | None
    recent: RecentLoad
    sufficed: int | None

    @property
    def current(self) -> int:
        """Desired replicas of the workload."""
        return self.observation.desired_replicas


def observe_replicas(
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
    state = _add_interval(state, observation, now_ns, max(TREND_NS, 4 * startup_ns, window_ns))
    patience_ns = max(_PATIENCE * startup_ns, _MIN_PATIENCE_NS)
    starting = _lasts(state.incomplete_since_ns, patience_ns, now_ns)
    traffic = observation.traffic
    fresh = traffic.signal is Signal.FRESH
    idle_since_ns = now_ns - max(LONG_NS, window_ns)
    idle = not traffic.in_flight and not any(
        s.requests for s in state.samples if s.at_ns > idle_since_ns
    )
    predicted = None
    observes = params.foreign and observation.device is None
    learnt = state.learnt.in_unit(of_requests=observes).without_expired(now_ns)
    if observes:
        predicted = REQUEST_UNITS
        if are_lighter(state.mix, state.failed_mix):
            # A rate of heavier requests that was too much says nothing about these.
            learnt, state = replace(learnt, failed=0.0), replace(state, failed_mix=None)
    elif observation.device is not None:
        predicted = replica_capacity(
            observation.device,
            state.mix,
            tpot_ns=params.tightest_tpot_ns * budget.bounds.safety_percent // 100,
            max_num_seqs=budget.bounds.max_num_seqs,
            max_tokens=budget.bounds.max_tokens,
        )
    demand, growth = None, 0.0
    if fresh and idle:
        demand = Demand(
            lower=0.0,
            likely=0.0,
            newest=0.0,
            latest=0.0,
            steady=0.0,
            risen=0.0,
            sustained=0.0,
            upper=0.0,
        )
    elif fresh and predicted is not None:
        demand = estimate_demand(state.samples, predicted, now_ns)
        if not learnt.peak_per_s:  # a burst begins like a trend
            growth = estimate_growth(state.samples, predicted, now_ns, startup_ns)
    targets, shared = _ttft_targets(params), params.balanced
    capacities = (
        ObservedCapacities(
            predicted=predicted,
            targets=targets,
            learnt=learnt,
            shared=shared,
            expected_per_s=params.expected_per_s,
        )
        if observes
        else Capacities(predicted=predicted, targets=targets, learnt=learnt, shared=shared)
    )
    ready = len(observation.ready)
    if demand is not None and ready and budget.slack_ns >= LONG_NS:
        # A low load proves nothing, because a replica with little load does not show its capacity.
        sustained = demand.sustained * _good_share(state)
        share = sustained / ready / capacities.predicted_load(ready)
        capacities.learnt = capacities.learnt.with_proven(share, now_ns)
    state = replace(state, learnt=capacities.learnt)
    needed: int | None = None
    fewest: int | None = None
    expected = recent = 0
    if demand is not None:
        needed = capacities.fewest_for(_certain_demand(demand, budget))
        if needed > observation.desired_replicas:
            needed = capacities.fewest_for(demand.risen)  # add enough for the mean
        if not idle:
            needed = max(needed, capacities.fewest_for_peaks())
        needed = max(
            needed,
            capacities.fewest_for_queue(
                demand.likely, observation.waiting, observation.desired_replicas, startup_ns
            ),
        )
        expected = max(needed, capacities.fewest_for(demand.likely + growth) if growth else 0)
        if isinstance(capacities, ObservedCapacities):
            fewest = fewest_observed(capacities, demand, observation, budget, params)
        else:
            # A queue is no demand: replicas that were added for it would be ready after it is
            # served.
            queued = _queue_load(observation, capacities)
            fewest = capacities.fewest_for(demand.latest + growth + queued, usable=_MARGIN)
            # A load that rises in the very seconds of the decision is in no longer mean yet.
            recent = max(
                capacities.fewest_for(demand.steady, usable=_MARGIN),
                capacities.fewest_for(demand.newest),
            )
        fewest = max(expected, fewest, int(not idle))
    if starting or budget.reason is TokenBudgetReason.SETTLING:
        state = replace(state, needs=())  # the replicas do not yet show what they sustain
    elif fewest is not None:
        state = _add_need(state, fewest, now_ns, window_ns)
    return state, ReplicaInputs(
        observation=observation,
        budget=budget,
        params=params,
        startup_ns=startup_ns,
        starting=starting,
        unsettled=_lasts(state.unsettled_since_ns, _UNSETTLED_NS, now_ns),
        raised=_lasts(state.raised_ns, _MAX_STARTUP_NS, now_ns),
        missed=observation.objective_missed or _misses_objective(state, params),
        was_waiting=was_waiting,
        waiting=state.waiting,
        feasible=predicted is None or predicted.feasible,
        demand=demand,
        capacities=capacities,
        needed=needed,
        expected=expected,
        fewest=fewest,
        recent=recent_load(state.samples, now_ns),
        sufficed=_sufficed(state, recent, now_ns, window_ns),
    )


def _ttft_targets(params: ServiceParams) -> list[TTFTTarget]:
    """Return the TTFT targets of the classes with an objective, or of all if none has one."""
    judged = [c for c in params.classes if c.objective is not None]
    return [
        TTFTTarget(
            ttft_s=c.ttft_ms / 1000,
            late=_ASSUMED_LATE if c.objective is None else float(1 - c.objective),
        )
        for c in judged or params.classes
    ]


def _good_share(state: ReplicaState) -> float:
    """Return the share of good requests in the last five minutes; 1 without requests.

    Requests that failed show the load that came, not one that was served.
    """
    counts = [outcome for _, outcomes in state.outcomes for outcome in outcomes]
    total = sum(outcome.total for outcome in counts)
    return sum(outcome.good for outcome in counts) / total if total else 1.0


def _misses_objective(state: ReplicaState, params: ServiceParams) -> bool:
    """True if a class missed its objective in the last five minutes."""
    sums = merge_windows(chain.from_iterable(outcomes for _, outcomes in state.outcomes))
    return any(
        c.objective is not None and c.name in sums and sums[c.name].misses(c.objective)
        for c in params.classes
    )


def _certain_demand(demand: Demand, budget: TokenBudgetDecision) -> float:
    """Return the demand that is certain enough to add replicas.

    The lower bound excludes chance. If TTFT has no slack, requests already wait nearly as long as
    they may; then the mean is as certain.
    """
    waits = budget.ttft in (TargetStatus.KEPT, TargetStatus.MISSED)
    return max(demand.lower, demand.steady) if waits else demand.lower


def _queue_load(observation: ServiceObservation, capacities: Capacities) -> float:
    """Return the load of a queue in which requests already wait longer than their TTFT target."""
    predicted, ready = capacities.predicted, len(observation.fresh)
    if predicted is None or not ready or not capacities.targets:
        return 0.0
    queue_s = observation.waiting * predicted.device_s
    tightest_s = min(target.ttft_s for target in capacities.targets)
    return queue_s * NS_PER_S / _QUEUE_NS if queue_s / ready > tightest_s else 0.0


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
    learnt, blocks, recent = state.learnt, state.blocks, state.recent
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
            in_flight=traffic.in_flight,
            ready=len(observation.ready),
            missed=sum(max(c.ttft.missed, c.tpot.missed) for c in observation.classes),
        )
        samples = (*samples, arrivals)
        blocks, burstiness = blocks.add(
            traffic.arrivals, observation.interval_ns, learnt.burstiness
        )
        learnt = replace(learnt, burstiness=burstiness)
        recent = recent.add(traffic.arrivals, observation.interval_ns, now_ns)
        if recent.is_new:
            learnt = learnt.with_peak(*recent.recurring_peak())
    outcomes = tuple(o for o in state.outcomes if o[0] > now_ns - WINDOW_NS)
    if observation.outcomes:
        outcomes = (*outcomes, (now_ns, observation.outcomes))
    mix = recent_lengths(samples, now_ns)
    return replace(
        state,
        samples=samples,
        mix=mix if mix.bins else state.mix,
        learnt=learnt,
        blocks=blocks,
        recent=recent,
        outcomes=outcomes,
        raised_ns=state.raised_ns if incomplete_since_ns is not None else None,
        desired=desired,
        incomplete_since_ns=incomplete_since_ns,
        unsettled_since_ns=unsettled_since_ns,
        waiting=observation.waiting,
    )


def _add_need(state: ReplicaState, fewest: int, now_ns: int, window_ns: int) -> ReplicaState:
    """Add one interval to the stabilisation window; a long gap restarts it."""
    if not state.needs or now_ns - state.needs[-1][0] > _GAP_NS:
        return replace(state, needs=((now_ns, fewest),), needs_since_ns=now_ns)
    in_window = tuple(n for n in state.needs if n[0] > now_ns - window_ns)
    return replace(state, needs=(*in_window, (now_ns, fewest)))


def _sufficed(state: ReplicaState, recent: int, now_ns: int, window_ns: int) -> int | None:
    """Return the largest need within the window, at least `recent`; None before it is complete."""
    if not state.needs or now_ns - state.needs_since_ns < window_ns:
        return None
    return max(recent, *(n for _, n in state.needs))


def _lasts(begun_ns: int | None, limit_ns: int, now_ns: int) -> bool:
    """Return True if a state has begun, and has not lasted longer than the limit."""
    return begun_ns is not None and now_ns - begun_ns <= limit_ns
