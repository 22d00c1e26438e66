"""How many replicas: small checks, chained in order; the first that has something to say decides.

Minutes and for money: this comes after the token budget. It must not know about pods, metrics
or clocks; what it looks at is weighed elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from goodput_core.control.observation import Signal
from goodput_core.control.reasons import ReplicaReason
from goodput_core.control.weighing import failed_at, shrunk, weigh
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_core.control.bounds import BoundsDecision
    from goodput_core.control.observation import ServiceObservation
    from goodput_core.control.params import ServiceParams
    from goodput_core.control.weighing import ReplicaInput, ReplicaState

__all__ = ["ReplicaDecision", "replicas_law"]

_LEAST_STEP: Final = 4
"""One decision at most doubles the replicas, or adds this many."""
_IDLE: Final = 0.5
"""Replicas used to less than this share of what they bear are not why a promise is missed."""
_PATIENCE: Final = 2
"""After twice the start-up time a replica that does not start freezes nothing any more."""
_LEAST_PATIENCE_NS: Final = 300 * NS_PER_S
_UNSETTLED_NS: Final = 60 * NS_PER_S
"""So long may token budgets that follow their devices freeze the number of replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDecision:
    """One decision.

    Args:
        replicas: how many there should be, within floor and ceiling.
        reason: why.
        current: how many were asked for before.
        limited: whether the ceiling is below what is needed.
        load: device seconds demanded per second; None: not known.
        bearable: of these, what one replica can bear.
        needed: replicas that the load takes now, conclusively; None: not known.
        held: replicas that would have done during the whole stabilisation window; None: not
            known for so long.
        horizon_ns: how long a replica takes to start.
        at_ns: when.
    """

    replicas: int
    reason: ReplicaReason
    current: int
    limited: bool
    load: float | None
    bearable: float
    needed: int | None
    held: int | None
    horizon_ns: int
    at_ns: int


def replicas_law(
    state: ReplicaState,
    observation: ServiceObservation,
    bounds: BoundsDecision,
    params: ServiceParams,
    now_ns: int,
) -> tuple[ReplicaState, ReplicaDecision]:
    """One interval of the replicas' loop.

    Args:
        state: of the last interval.
        observation: of this one.
        bounds: what the token budget's loop has just decided: it comes first.
        params: the manifest's.
        now_ns: the end of the interval.
    """
    state, given = weigh(state, observation, bounds, params, now_ns)
    wanted, reason = next(v for check in _CHECKS if (v := check(given)) is not None)
    if reason is ReplicaReason.MISSED and given.each_at_most:
        state = failed_at(state, given.each_at_most, now_ns)
    if reason is ReplicaReason.FEWER_SUFFICE:
        state = shrunk(state)
    return state, ReplicaDecision(
        replicas=_clamped(wanted, params),
        reason=reason,
        current=given.current,
        limited=max(wanted, given.expected) > params.max_replicas,
        load=given.load,
        bearable=given.bearable,
        needed=given.needed,
        held=given.held,
        horizon_ns=given.horizon_ns,
        at_ns=now_ns,
    )


_Verdict = tuple[int, ReplicaReason]


def _limits(given: ReplicaInput) -> _Verdict | None:
    """Floor and ceiling come before everything else, whatever is known."""
    clamped = _clamped(given.current, given.params)
    if clamped > given.current:
        return clamped, ReplicaReason.BELOW_FLOOR
    if clamped < given.current:
        return clamped, ReplicaReason.ABOVE_CEILING
    return None


def _silence(given: ReplicaInput) -> _Verdict | None:
    signal = given.observation.traffic.signal
    if signal is Signal.MISSING:
        return given.current, ReplicaReason.METRICS_MISSING
    if signal is Signal.FAILED:
        return given.current, ReplicaReason.SCRAPE_FAILED
    return None


def _asleep(given: ReplicaInput) -> _Verdict | None:
    if given.current:
        return None
    traffic = given.observation.traffic
    if traffic.arrivals or traffic.in_flight:
        return _capped(max(1, given.expected), given), ReplicaReason.WOKEN
    return 0, ReplicaReason.NO_TRAFFIC


def _starting(given: ReplicaInput) -> _Verdict | None:
    patience_ns = max(_PATIENCE * given.horizon_ns, _LEAST_PATIENCE_NS)
    if given.short_ns is None or given.short_ns > patience_ns:
        return None
    return given.current, ReplicaReason.STARTING


def _unsettled(given: ReplicaInput) -> _Verdict | None:
    if given.unsettled_ns is None or given.unsettled_ns > _UNSETTLED_NS:
        return None
    return given.current, ReplicaReason.UNSETTLED


def _demand(given: ReplicaInput) -> _Verdict | None:
    if given.needed is not None and given.needed > given.current:
        return _capped(given.needed, given), ReplicaReason.DEMAND
    if given.expected > given.current:
        return _capped(given.expected, given), ReplicaReason.TREND
    return None


def _missed(given: ReplicaInput) -> _Verdict | None:
    if not given.bounds.needs_replicas:
        return None
    if not given.feasible:
        return given.current, ReplicaReason.INFEASIBLE
    if given.each is not None and given.each < _IDLE * given.bearable:
        return given.current, ReplicaReason.NOT_LOAD
    if given.waiting < given.was_waiting:
        return given.current, ReplicaReason.QUEUE_DRAINING
    return given.current + 1, ReplicaReason.MISSED


def _fewer(given: ReplicaInput) -> _Verdict | None:
    current, fewest, held = given.current, given.fewest, given.held
    if fewest is None:
        return current, ReplicaReason.UNKNOWN_CAPACITY
    least = given.params.min_replicas
    if given.bounds.missed or max(least, fewest) >= current:
        return None
    if held is None or held >= current:
        return current, ReplicaReason.STABILIZING
    if not held:
        return least, ReplicaReason.NO_TRAFFIC
    # Half of them at most, then a window of evidence with those who are left: what they are
    # predicted to carry was never seen.
    return max(held, least, math.ceil(current / 2)), ReplicaReason.FEWER_SUFFICE


def _steady(given: ReplicaInput) -> _Verdict:
    return given.current, ReplicaReason.STEADY


_CHECKS: Final[tuple[Callable[[ReplicaInput], _Verdict | None], ...]] = (
    _limits,
    _silence,
    _asleep,
    _starting,
    _unsettled,
    _demand,
    _missed,
    _fewer,
    _steady,
)


def _clamped(replicas: int, params: ServiceParams) -> int:
    return min(max(replicas, params.min_replicas), params.max_replicas)


def _capped(wanted: int, given: ReplicaInput) -> int:
    return min(wanted, given.current + max(given.current, _LEAST_STEP))
