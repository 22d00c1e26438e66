"""What the replicas' checks look at: demand against what a replica can bear, and for how long.

A replica's capacity is predicted. What one was seen to carry with its promises kept only raises
the prediction, since a replica with little to do shows nothing; what one was seen to fail at
lowers it. Both are forgotten in time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Final

from goodput_core.control.bounds import BoundsDecision
from goodput_core.control.capacity import carried
from goodput_core.control.demand import LONG_NS, Arrivals, growth, load, mix_of
from goodput_core.control.observation import ServiceObservation, Signal
from goodput_core.control.params import ServiceParams
from goodput_core.histogram import LengthMix
from goodput_core.quantiles import quantile
from goodput_core.units import NS_PER_S

__all__ = ["ReplicaInput", "ReplicaState", "failed_at", "shrunk", "weigh"]

_BUSY: Final = 0.8
"""Share of its time that a replica may be busy on average, so that queues stay short."""
_MARGIN: Final = 0.9
"""Who is left must be able to carry the load with a tenth to spare before one is taken away."""
_BELOW_FAILED: Final = 0.95
_REMEMBER_NS: Final = 6 * 3600 * NS_PER_S
_GAP_NS: Final = 60 * NS_PER_S
"""A gap in the numbers that is longer breaks the stabilisation window."""
_MOST_HORIZON_NS: Final = 1800 * NS_PER_S
_SLOW_START: Final = Fraction(9, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """What is remembered between two intervals.

    Args:
        samples: traffic of the last minutes, oldest first.
        mix: the latest lengths that are known.
        needs: (when, how many would have done) of the stabilisation window, oldest first.
        needs_since_ns: since when that is known without a gap.
        proven, proven_ns: the most that a replica was seen to carry with its promises kept, in
            device seconds per second, and when; 0: nothing.
        failed, failed_ns: the least at which promises were missed for it; 0: nothing.
        asked: how many replicas were asked for at the last interval.
        short_since_ns: since when fewer are routable than that; None: they are not fewer.
        unsettled_since_ns: since when token budgets follow their devices; None: they do not.
        waiting: requests that waited at the last interval.
    """

    samples: tuple[Arrivals, ...] = ()
    mix: LengthMix = field(default_factory=LengthMix)
    needs: tuple[tuple[int, int], ...] = ()
    needs_since_ns: int = 0
    proven: float = 0.0
    proven_ns: int = 0
    failed: float = 0.0
    failed_ns: int = 0
    asked: int = 0
    short_since_ns: int | None = None
    unsettled_since_ns: int | None = None
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInput:
    """Everything that a check may look at.

    Args:
        observation, bounds, params, now_ns: as given to the law.
        horizon_ns: how long a replica takes from created to routable.
        short_ns, unsettled_ns: for how long replicas have been starting, or token budgets
            following their devices; None: not at all.
        was_waiting, waiting: requests in queues, an interval ago and now.
        feasible: whether the tightest time per token can be kept by any number of replicas.
        load: device seconds demanded per second, as counted; None: not known.
        most: so much at most, conclusively; None: not known.
        bearable: of these, what one replica can bear.
        needed: replicas that the load takes: more than there are only where that is conclusive;
            None: not known.
        expected: the same when a replica asked for now has started; at least `needed`.
        fewest: replicas that would do with something to spare; None: not known.
        held: the largest `fewest` of the whole stabilisation window; None: it was not known for
            so long.
    """

    observation: ServiceObservation
    bounds: BoundsDecision
    params: ServiceParams
    now_ns: int
    horizon_ns: int
    short_ns: int | None
    unsettled_ns: int | None
    was_waiting: int
    waiting: int
    feasible: bool
    load: float | None
    most: float | None
    bearable: float
    needed: int | None
    expected: int
    fewest: int | None
    held: int | None

    @property
    def current(self) -> int:
        """How many replicas are asked for now."""
        return self.observation.replicas_asked

    @property
    def each(self) -> float | None:
        """What each routable replica has to carry; None: not known."""
        return self._shared(self.load)

    @property
    def each_at_most(self) -> float | None:
        """The same, conclusively no more; None: not known."""
        return self._shared(self.most)

    def _shared(self, load: float | None) -> float | None:
        ready = len(self.observation.ready)
        return None if load is None or not ready else load / ready


def weigh(
    state: ReplicaState,
    observation: ServiceObservation,
    bounds: BoundsDecision,
    params: ServiceParams,
    now_ns: int,
) -> tuple[ReplicaState, ReplicaInput]:
    """Take in one interval, and lay out what is to be decided by."""
    horizon_ns = _horizon_ns(observation, params)
    window_ns = max(params.stabilization_ns, horizon_ns)
    was_waiting = state.waiting
    state = _account(state, observation, now_ns, max(LONG_NS, 2 * horizon_ns, window_ns))
    traffic = observation.traffic
    fresh = traffic.signal is Signal.FRESH
    idle = not traffic.in_flight and not any(s.requests for s in state.samples)
    capacity = None
    if observation.device is not None:
        capacity = carried(
            observation.device,
            state.mix,
            tpot_ns=params.tightest_tpot_ns * bounds.bounds.safety_percent // 100,
            max_num_seqs=bounds.bounds.max_num_seqs,
            max_tokens=bounds.bounds.max_tokens,
        )
    likely: float | None = None
    most: float | None = None
    least = sustained = more = 0.0
    if fresh and idle:
        likely = most = 0.0
    elif fresh and capacity is not None:
        demand = load(state.samples, capacity, now_ns)
        likely, least, sustained = demand.likely, demand.least, demand.sustained
        most = demand.most
        more = growth(state.samples, capacity, now_ns, horizon_ns)
    state = _learned(state, observation, bounds, sustained, now_ns)
    bearable = _bearable(state)
    needed = fewest = None
    expected = 0
    if likely is not None:
        needed = math.ceil(least / bearable)
        if needed > observation.replicas_asked:
            needed = math.ceil(likely / bearable)  # certain that it is too few: now enough of them
        expected = max(needed, math.ceil((least + more) / bearable))
        spare = bearable * _MARGIN
        fewest = max(expected, math.ceil((likely + more) / spare), int(not idle))
        state = _needing(state, fewest, now_ns, window_ns)
    return state, ReplicaInput(
        observation=observation,
        bounds=bounds,
        params=params,
        now_ns=now_ns,
        horizon_ns=horizon_ns,
        short_ns=_since(state.short_since_ns, now_ns),
        unsettled_ns=_since(state.unsettled_since_ns, now_ns),
        was_waiting=was_waiting,
        waiting=state.waiting,
        feasible=capacity is None or capacity.feasible,
        load=likely,
        most=most,
        bearable=bearable,
        needed=needed,
        expected=expected,
        fewest=fewest,
        held=_held(state, now_ns, window_ns),
    )


def shrunk(state: ReplicaState) -> ReplicaState:
    """Replicas were taken away: the window in which fewer must do begins anew."""
    return replace(state, needs=())


def failed_at(state: ReplicaState, each: float, now_ns: int) -> ReplicaState:
    """Promises were missed where each replica had so much to carry, at most.

    What a growing load was a minute ago is not what its replicas failed at.
    """
    failed = min(each, state.failed) if state.failed else each
    proven = min(state.proven, failed * _BELOW_FAILED)
    return replace(state, failed=failed, failed_ns=now_ns, proven=proven)


def _horizon_ns(observation: ServiceObservation, params: ServiceParams) -> int:
    if not observation.startups_ns:
        return params.default_startup_ns
    return min(quantile(observation.startups_ns, _SLOW_START), _MOST_HORIZON_NS)


def _account(
    state: ReplicaState, observation: ServiceObservation, now_ns: int, keep_ns: int
) -> ReplicaState:
    asked, traffic = observation.replicas_asked, observation.traffic
    short_since_ns = None
    if len(observation.ready) < asked:
        known = state.short_since_ns is not None and asked <= state.asked
        short_since_ns = state.short_since_ns if known else now_ns
    unsettled_since_ns = None
    if any(not r.settled for r in observation.believed):
        unsettled_since_ns = state.unsettled_since_ns
        unsettled_since_ns = now_ns if unsettled_since_ns is None else unsettled_since_ns
    samples = tuple(s for s in state.samples if s.at_ns > now_ns - keep_ns)
    if traffic.signal is Signal.FRESH:
        arrivals = Arrivals(
            at_ns=now_ns,
            interval_ns=observation.interval_ns,
            requests=traffic.arrivals,
            finished=traffic.finished,
        )
        samples = (*samples, arrivals)
    mix = mix_of(samples, now_ns)
    return replace(
        state,
        samples=samples,
        mix=mix if mix.bins else state.mix,
        asked=asked,
        short_since_ns=short_since_ns,
        unsettled_since_ns=unsettled_since_ns,
        waiting=sum(r.waiting for r in observation.believed),
    )


def _learned(
    state: ReplicaState,
    observation: ServiceObservation,
    bounds: BoundsDecision,
    sustained: float,
    now_ns: int,
) -> ReplicaState:
    """What a replica carries while its promises have slack, it can carry; old news is dropped."""
    if state.proven and now_ns - state.proven_ns > _REMEMBER_NS:
        state = replace(state, proven=0.0)
    if state.failed and now_ns - state.failed_ns > _REMEMBER_NS:
        state = replace(state, failed=0.0)
    ready = len(observation.ready)
    if bounds.slack_ns >= LONG_NS and ready and sustained / ready > state.proven:
        proven = sustained / ready
        failed = 0.0 if proven >= state.failed else state.failed
        state = replace(state, proven=proven, proven_ns=now_ns, failed=failed)
    return state


def _bearable(state: ReplicaState) -> float:
    bearable = max(_BUSY, state.proven)
    return min(bearable, state.failed * _BELOW_FAILED) if state.failed else bearable


def _needing(state: ReplicaState, fewest: int, now_ns: int, window_ns: int) -> ReplicaState:
    """One more interval of the stabilisation window; a long gap begins it anew."""
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
