"""The outer loop of the token budget: which promise is missed decides which way its bounds go.

Seconds and for free: it acts before replicas do. It sets the most tokens of a step, the safety
factor of the engine's own law, and at their bounds the batch width; what none of them can mend
it hands on. It must not know how many replicas there are, only whether that number has changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from goodput_core.control.observation import Signal
from goodput_core.control.promises import WINDOW_NS, ClassWindow, Standing, merged, standing
from goodput_core.control.reasons import BoundsReason
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from goodput_core.control.observation import ServiceObservation
    from goodput_core.control.params import ServiceParams

__all__ = ["Bounds", "BoundsDecision", "BoundsState", "bounds_law"]

_SETTLE_NS: Final = 30 * NS_PER_S
"""What ends sooner after a change was mostly served before it."""
_CHURN: Final = 10
"""A change of the routable replicas by a tenth is a change."""
_FIRST_SAFETY: Final = 90
_LEAST_SAFETY: Final = 60
_MOST_SAFETY: Final = 95
_SAFETY_STEP: Final = 5
_QUANTUM: Final = 64
_FULL: Final = 95
"""Per cent of the batch width, or of the KV cache, from which on it is full."""
_NARROWEST: Final = 8
"""The batch width never falls below this part of the manifest's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What every engine of the service is told.

    Args:
        min_tokens, max_tokens: within which an engine's own law chooses the tokens of a step.
        safety_percent: share of the tightest TPOT that a step is planned to take.
        max_num_seqs: requests that may run at once.
    """

    min_tokens: int
    max_tokens: int
    safety_percent: int
    max_num_seqs: int

    @classmethod
    def initial(cls, params: ServiceParams) -> Bounds:
        """Before anything was seen, and where the law does not act."""
        return cls(
            min_tokens=params.min_tokens,
            max_tokens=params.initial_tokens,
            safety_percent=_FIRST_SAFETY,
            max_num_seqs=params.max_num_seqs,
        )

    def within(self, params: ServiceParams) -> Bounds:
        """The same within the manifest's bounds, which may have changed."""
        widest = params.max_num_seqs
        return Bounds(
            min_tokens=params.min_tokens,
            max_tokens=min(max(self.max_tokens, params.min_tokens), params.max_tokens),
            safety_percent=self.safety_percent,
            max_num_seqs=min(max(self.max_num_seqs, _narrowest(params)), widest),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundsState:
    """What is remembered between two intervals.

    Args:
        bounds: in force; None: the initial ones.
        evidence: (when, what ended until then) since the last change.
        quiet_until_ns: what ends before then is no evidence.
        backlog: the shortest queue since the last change; None: what waited then is done.
        slack_since_ns: since when every promise of which enough is known has slack; None: not so.
        ready: routable replicas at the last change of their number.
    """

    bounds: Bounds | None = None
    evidence: tuple[tuple[int, tuple[ClassWindow, ...]], ...] = ()
    quiet_until_ns: int = 0
    backlog: int | None = None
    slack_since_ns: int | None = None
    ready: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundsDecision:
    """One decision.

    Args:
        bounds: from now on.
        reason: why.
        ttft, tpot: how the promises stand, all classes together.
        slack_ns: for how long every promise of which enough is known has had slack, 0 or more.
        at_ns: when.
    """

    bounds: Bounds
    reason: BoundsReason
    ttft: Standing
    tpot: Standing
    slack_ns: int
    at_ns: int

    @property
    def needs_replicas(self) -> bool:
        """Whether only more replicas could mend what is missed."""
        return self.reason is BoundsReason.NEEDS_REPLICAS

    @property
    def missed(self) -> bool:
        """Whether a promise is missed, conclusively."""
        return Standing.MISSED in (self.ttft, self.tpot)


def bounds_law(
    state: BoundsState, observation: ServiceObservation, params: ServiceParams, now_ns: int
) -> tuple[BoundsState, BoundsDecision]:
    """One interval of the outer budget loop.

    TPOT missed and TTFT with slack: lower. TTFT missed and TPOT with slack: raise. Missed at a
    bound, or both pressed: batch width if width or KV is the cause, else replicas.
    """
    state = _account(state, observation, params, now_ns)
    old = (Bounds.initial(params) if state.bounds is None else state.bounds).within(params)
    ttft, tpot = _standings(state, params)
    reason = _silence(state, observation)
    if reason is None:
        reason = _reason(old, observation, params, ttft, tpot)
    new = _moved(old, reason, params, _busiest(observation))
    state = replace(state, bounds=new)
    since_ns = None
    if {ttft, tpot} - {Standing.UNKNOWN} == {Standing.SLACK}:
        since_ns = now_ns if state.slack_since_ns is None else state.slack_since_ns
    state = replace(state, slack_since_ns=since_ns)
    if new != old:
        state = _changed(state, observation, now_ns)
    return state, BoundsDecision(
        bounds=new,
        reason=reason,
        ttft=ttft,
        tpot=tpot,
        slack_ns=0 if since_ns is None else now_ns - since_ns,
        at_ns=now_ns,
    )


def _account(
    state: BoundsState, observation: ServiceObservation, params: ServiceParams, now_ns: int
) -> BoundsState:
    """Take in what ended, and drop what says nothing about the service as it is now."""
    ready = len(observation.ready)
    if ready != state.ready and abs(ready - state.ready) * _CHURN >= state.ready:
        first = not state.ready and not state.evidence
        if ready > state.ready and state.bounds is not None:
            # A batch that was too wide for fewer replicas need not be for more of them.
            widest = replace(state.bounds, max_num_seqs=params.max_num_seqs)
            state = replace(state, bounds=widest)
        state = replace(state, ready=ready)
        if not first:
            state = _changed(state, observation, now_ns)
    if state.backlog is not None:
        waiting = _waiting(observation)
        if waiting < state.backlog:
            state = replace(state, backlog=waiting, quiet_until_ns=now_ns + _SETTLE_NS)
        elif now_ns >= state.quiet_until_ns:
            state = replace(state, backlog=None)
    evidence = tuple(e for e in state.evidence if e[0] > now_ns - WINDOW_NS)
    if observation.classes and state.backlog is None:
        evidence = (*evidence, (now_ns, observation.classes))
    return replace(state, evidence=evidence)


def _changed(state: BoundsState, observation: ServiceObservation, now_ns: int) -> BoundsState:
    """What ended so far is no evidence, nor is what ends soon, or while a queue gets shorter."""
    return replace(
        state,
        evidence=(),
        quiet_until_ns=now_ns + _SETTLE_NS,
        backlog=_waiting(observation),
    )


def _waiting(observation: ServiceObservation) -> int:
    return sum(r.waiting for r in observation.believed)


def _standings(state: BoundsState, params: ServiceParams) -> tuple[Standing, Standing]:
    """TTFT's and TPOT's, over the classes that have an objective."""
    windows = merged(chain.from_iterable(windows for _, windows in state.evidence))
    ttft: set[Standing] = set()
    tpot: set[Standing] = set()
    for slo_class in params.classes:
        window = windows.get(slo_class.name)
        if window is not None and slo_class.objective is not None:
            ttft.add(standing(window.ttft, slo_class.objective))
            tpot.add(standing(window.tpot, slo_class.objective))
    return _worst(ttft), _worst(tpot)


def _worst(standings: set[Standing]) -> Standing:
    order = (Standing.MISSED, Standing.KEPT, Standing.SLACK)
    return next((one for one in order if one in standings), Standing.UNKNOWN)


def _silence(state: BoundsState, observation: ServiceObservation) -> BoundsReason | None:
    """Why nothing can be decided; None: something can."""
    traffic = observation.traffic
    if traffic.signal is Signal.MISSING:
        return BoundsReason.METRICS_MISSING
    if traffic.signal is Signal.FAILED:
        return BoundsReason.SCRAPE_FAILED
    if state.backlog is not None:
        return BoundsReason.SETTLING
    if not state.evidence and not traffic.arrivals and not traffic.in_flight:
        return BoundsReason.NO_TRAFFIC
    return None


def _reason(
    bounds: Bounds,
    observation: ServiceObservation,
    params: ServiceParams,
    ttft: Standing,
    tpot: Standing,
) -> BoundsReason:
    slow, late = tpot is Standing.MISSED, ttft is Standing.MISSED
    if not slow and not late:
        return BoundsReason.TOO_FEW if ttft is tpot is Standing.UNKNOWN else BoundsReason.KEPT
    remedies: list[BoundsReason | None] = []
    if slow and _has_slack(ttft):
        remedies.append(BoundsReason.TPOT_MISSED)
    if late and _has_slack(tpot):
        remedies.append(BoundsReason.TTFT_MISSED)
    remedies.append(_width_or_kv(bounds, observation, slow=slow, late=late))
    busiest = _busiest(observation)
    for remedy in remedies:
        if remedy is not None and _moved(bounds, remedy, params, busiest) != bounds:
            return remedy
    return BoundsReason.NEEDS_REPLICAS


def _has_slack(other: Standing) -> bool:
    """Whether the other promise could bear it; nothing shows that one nobody tests could not."""
    return other in (Standing.SLACK, Standing.UNKNOWN)


def _width_or_kv(
    bounds: Bounds, observation: ServiceObservation, *, slow: bool, late: bool
) -> BoundsReason | None:
    """Whether batch width or memory is what a promise is missed by."""
    believed = observation.believed
    running = sum(r.running for r in believed)
    full = 100 * running >= _FULL * bounds.max_num_seqs * max(1, len(believed))
    if sum(r.preemptions for r in believed):
        return BoundsReason.KV_EXHAUSTED
    if slow and not late and full:
        return BoundsReason.BATCH_TOO_WIDE
    used, total = (
        sum(r.kv_used_blocks for r in believed),
        sum(r.kv_total_blocks for r in believed),
    )
    if late and not slow and full and 100 * used < _FULL * total:
        return BoundsReason.BATCH_TOO_NARROW
    return None


def _busiest(observation: ServiceObservation) -> int:
    """The most requests that any replica runs."""
    return max((r.running for r in observation.believed), default=0)


def _moved(bounds: Bounds, reason: BoundsReason, params: ServiceParams, busiest: int) -> Bounds:
    """The bounds that follow from a reason; the same where it moves nothing, or no further."""
    tokens, safety, width = bounds.max_tokens, bounds.safety_percent, bounds.max_num_seqs
    if reason is BoundsReason.TPOT_MISSED:
        tokens -= max(_QUANTUM, tokens // 4)
        safety = max(safety - _SAFETY_STEP, _LEAST_SAFETY)
    elif reason is BoundsReason.TTFT_MISSED:
        tokens += max(_QUANTUM, tokens // 4)
        safety = min(safety + _SAFETY_STEP, _MOST_SAFETY)
    elif reason in (BoundsReason.BATCH_TOO_WIDE, BoundsReason.KV_EXHAUSTED):
        width = max(1, min(width, busiest))  # to narrow what nobody fills changes nothing
        width -= max(1, width // 4)
    elif reason is BoundsReason.BATCH_TOO_NARROW:
        width += max(1, width // 4)
    else:
        return bounds
    moved = replace(bounds, max_tokens=tokens, safety_percent=safety, max_num_seqs=width)
    return moved.within(params)


def _narrowest(params: ServiceParams) -> int:
    return max(1, params.max_num_seqs // _NARROWEST)
