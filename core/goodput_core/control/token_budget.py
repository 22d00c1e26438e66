"""The token-budget law: it adapts the size of a step to the SLO target that is missed.

It runs once per control interval, before the replica law, because a change takes effect within
seconds and costs nothing. It sets the maximum tokens of a step and the safety factor of the
engine's prefill budget. If neither can change, or the other target has no slack, it changes the
batch width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Final

from goodput_core.control.observation import ServiceObservation, ServiceParams, Signal
from goodput_core.control.slo_window import (
    WINDOW_NS,
    ClassWindow,
    TargetStatus,
    merge_windows,
    target_status,
)
from goodput_core.units import NS_PER_S

__all__ = [
    "Bounds",
    "TokenBudgetDecision",
    "TokenBudgetReason",
    "TokenBudgetState",
    "token_budget_law",
]

_SETTLE_NS: Final = 30 * NS_PER_S
"""Requests that end within this time after a change were mostly served before the change."""
_CHURN_DIVISOR: Final = 10
"""A change of the number of routable replicas by a tenth or more discards the evidence."""
_INITIAL_SAFETY_PERCENT: Final = 90
_MIN_SAFETY_PERCENT: Final = 60
_MAX_SAFETY_PERCENT: Final = 95
_SAFETY_STEP: Final = 5
_STEP_TOKENS: Final = 64
_FULL_PERCENT: Final = 95
"""Use at which the batch, or the KV cache, counts as full."""
_MIN_WIDTH_DIVISOR: Final = 8
"""The batch width never falls below an eighth of `maxNumSeqs`."""


class TokenBudgetReason(StrEnum):
    """Reason of a token-budget decision; a contract that docs/control.md explains."""

    METRICS_MISSING = "MetricsMissing"
    """Routers returned no measurements, so nothing changes."""
    SCRAPE_FAILED = "ScrapeFailed"
    """A router did not respond, so nothing changes."""
    NO_TRAFFIC = "NoTraffic"
    """No request arrived and none is in flight, so nothing changes."""
    SETTLING = "Settling"
    """Requests that ended so far were served, or queued, under earlier bounds or replicas."""
    TOO_FEW = "TooFew"
    """Too few requests have ended to decide whether a target is missed."""
    KEPT = "Kept"
    """No target is missed."""
    TPOT_MISSED = "TPOTMissed"
    """TPOT is missed and TTFT has slack, so steps become smaller."""
    TTFT_MISSED = "TTFTMissed"
    """TTFT is missed and TPOT has slack, so steps become larger."""
    BATCH_TOO_WIDE = "BatchTooWide"
    """TPOT is missed with the smallest steps and a full batch, so the batch becomes narrower."""
    BATCH_TOO_NARROW = "BatchTooNarrow"
    """TTFT is missed with the largest steps and a full batch, so the batch becomes wider."""
    KV_EXHAUSTED = "KVExhausted"
    """Requests are preempted for lack of KV memory, so the batch becomes narrower."""
    NEEDS_REPLICAS = "NeedsReplicas"
    """A target is missed that neither token budget nor batch width can meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits that apply to every engine of a service.

    Args:
        min_tokens, max_tokens: bounds of the tokens of one step.
        safety_percent: share of the tightest TPOT that a step is planned to take; a lower value is
            more cautious.
        max_num_seqs: batch width, the number of requests that may run at the same time.
    """

    min_tokens: int
    max_tokens: int
    safety_percent: int
    max_num_seqs: int

    @classmethod
    def initial(cls, params: ServiceParams) -> Bounds:
        """Return the manifest's limits; they apply before any observation and outside mode Auto."""
        return cls(
            min_tokens=params.min_tokens,
            max_tokens=params.initial_tokens,
            safety_percent=_INITIAL_SAFETY_PERCENT,
            max_num_seqs=params.max_num_seqs,
        )

    def within(self, params: ServiceParams) -> Bounds:
        """Return these limits clamped to the manifest's bounds, which may have changed."""
        return Bounds(
            min_tokens=params.min_tokens,
            max_tokens=min(max(self.max_tokens, params.min_tokens), params.max_tokens),
            safety_percent=self.safety_percent,
            max_num_seqs=min(max(self.max_num_seqs, _min_width(params)), params.max_num_seqs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetState:
    """State of the token-budget law between two intervals.

    Args:
        bounds: the limits in force; None before the first decision.
        evidence: counts of the requests that ended in each interval since the last change, with
            the end of the interval.
        quiet_until_ns: requests that end before this time are not counted.
        backlog: the shortest queue since the last change; None once the requests that were queued
            at the change have ended.
        slack_since_ns: time at which every target with enough requests began to have slack; None
            if one of them has none, or if no target has enough requests.
        ready: routable replicas at the last change of their number.
    """

    bounds: Bounds | None = None
    evidence: tuple[tuple[int, tuple[ClassWindow, ...]], ...] = ()
    quiet_until_ns: int = 0
    backlog: int | None = None
    slack_since_ns: int | None = None
    ready: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgetDecision:
    """One decision of the token-budget law.

    Args:
        bounds: new limits.
        reason: reason of the decision.
        ttft, tpot: status of the targets over all classes.
        slack_ns: duration for which every target with enough requests has had slack; 0 if one of
            them has none.
        at_ns: time of the decision.
    """

    bounds: Bounds
    reason: TokenBudgetReason
    ttft: TargetStatus
    tpot: TargetStatus
    slack_ns: int
    at_ns: int

    @property
    def needs_replicas(self) -> bool:
        """True if only more replicas can meet the missed target."""
        return self.reason is TokenBudgetReason.NEEDS_REPLICAS

    @property
    def missed(self) -> bool:
        """True if a target is missed by more than chance explains."""
        return TargetStatus.MISSED in (self.ttft, self.tpot)


def token_budget_law(
    state: TokenBudgetState, observation: ServiceObservation, params: ServiceParams, now_ns: int
) -> tuple[TokenBudgetState, TokenBudgetDecision]:
    """Run the token-budget law for one interval.

    If TPOT is missed and TTFT has slack, the law lowers the token budget. If TTFT is missed and
    TPOT has slack, the law raises the token budget. If the budget is at its bound, or the other
    target has no slack, the law changes the batch width, provided that the batch width or the KV
    memory is the cause. Otherwise it leaves the missed target to the replica law.
    """
    state = _update_evidence(state, observation, params, now_ns)
    old = (Bounds.initial(params) if state.bounds is None else state.bounds).within(params)
    ttft, tpot = _target_statuses(state, params)
    reason = _undecided(state, observation)
    if reason is None:
        reason = _decide(old, observation, params, ttft, tpot)
    new = _apply(reason, old, observation, params)
    since_ns = None
    if {ttft, tpot} - {TargetStatus.UNKNOWN} == {TargetStatus.SLACK}:
        since_ns = now_ns if state.slack_since_ns is None else state.slack_since_ns
    state = replace(state, bounds=new, slack_since_ns=since_ns)
    if new != old:
        state = _restart_evidence(state, observation, now_ns)
    return state, TokenBudgetDecision(
        bounds=new,
        reason=reason,
        ttft=ttft,
        tpot=tpot,
        slack_ns=0 if since_ns is None else now_ns - since_ns,
        at_ns=now_ns,
    )


def _update_evidence(
    state: TokenBudgetState, observation: ServiceObservation, params: ServiceParams, now_ns: int
) -> TokenBudgetState:
    """Add the requests that ended, and drop requests that were served under earlier conditions."""
    ready = len(observation.ready)
    if ready != state.ready and abs(ready - state.ready) * _CHURN_DIVISOR >= state.ready:
        first = not state.ready and not state.evidence
        if ready > state.ready and state.bounds is not None:
            # A batch width that was too large with fewer replicas may be right with more.
            widened = replace(state.bounds, max_num_seqs=params.max_num_seqs)
            state = replace(state, bounds=widened)
        state = replace(state, ready=ready)
        if not first:
            state = _restart_evidence(state, observation, now_ns)
    if state.backlog is not None:
        if observation.waiting < state.backlog:
            state = replace(state, backlog=observation.waiting, quiet_until_ns=now_ns + _SETTLE_NS)
        elif now_ns >= state.quiet_until_ns:
            state = replace(state, backlog=None)
    evidence = tuple(e for e in state.evidence if e[0] > now_ns - WINDOW_NS)
    if observation.classes and state.backlog is None:
        evidence = (*evidence, (now_ns, observation.classes))
    return replace(state, evidence=evidence)


def _restart_evidence(
    state: TokenBudgetState, observation: ServiceObservation, now_ns: int
) -> TokenBudgetState:
    """Discard the evidence, and collect none until the current queue has been served."""
    return replace(
        state,
        evidence=(),
        quiet_until_ns=now_ns + _SETTLE_NS,
        backlog=observation.waiting,
    )


def _target_statuses(
    state: TokenBudgetState, params: ServiceParams
) -> tuple[TargetStatus, TargetStatus]:
    """Return the status of TTFT and of TPOT over the classes with an objective."""
    windows = merge_windows(chain.from_iterable(windows for _, windows in state.evidence))
    ttft: set[TargetStatus] = set()
    tpot: set[TargetStatus] = set()
    for slo_class in params.classes:
        window = windows.get(slo_class.name)
        if window is not None and slo_class.objective is not None:
            ttft.add(target_status(window.ttft, slo_class.objective))
            tpot.add(target_status(window.tpot, slo_class.objective))
    return _worst(ttft), _worst(tpot)


def _worst(statuses: set[TargetStatus]) -> TargetStatus:
    order = (TargetStatus.MISSED, TargetStatus.KEPT, TargetStatus.SLACK)
    return next((status for status in order if status in statuses), TargetStatus.UNKNOWN)


def _undecided(
    state: TokenBudgetState, observation: ServiceObservation
) -> TokenBudgetReason | None:
    """Return the reason why no decision is possible; None if a decision is possible."""
    traffic = observation.traffic
    if traffic.signal is Signal.MISSING:
        return TokenBudgetReason.METRICS_MISSING
    if traffic.signal is Signal.FAILED:
        return TokenBudgetReason.SCRAPE_FAILED
    if state.backlog is not None:
        return TokenBudgetReason.SETTLING
    if not state.evidence and not traffic.arrivals and not traffic.in_flight:
        return TokenBudgetReason.NO_TRAFFIC
    return None


def _decide(
    bounds: Bounds,
    observation: ServiceObservation,
    params: ServiceParams,
    ttft: TargetStatus,
    tpot: TargetStatus,
) -> TokenBudgetReason:
    """Return the first remedy that changes the bounds, or NEEDS_REPLICAS if none does.

    Return KEPT or TOO_FEW if no target is missed.
    """
    slow, late = tpot is TargetStatus.MISSED, ttft is TargetStatus.MISSED
    if not slow and not late:
        unknown = ttft is tpot is TargetStatus.UNKNOWN
        return TokenBudgetReason.TOO_FEW if unknown else TokenBudgetReason.KEPT
    if params.foreign:
        return TokenBudgetReason.NEEDS_REPLICAS  # no limit of such a server can change
    remedies: list[TokenBudgetReason] = []
    # A target without enough requests may have slack.
    if slow and ttft in (TargetStatus.SLACK, TargetStatus.UNKNOWN):
        remedies.append(TokenBudgetReason.TPOT_MISSED)
    if late and tpot in (TargetStatus.SLACK, TargetStatus.UNKNOWN):
        remedies.append(TokenBudgetReason.TTFT_MISSED)
    replicas = observation.fresh
    running = sum(r.running for r in replicas)
    full = 100 * running >= _FULL_PERCENT * bounds.max_num_seqs * max(1, len(replicas))
    kv_used = sum(r.kv_used_blocks for r in replicas)
    kv_total = sum(r.kv_total_blocks for r in replicas)
    if any(r.preemptions for r in replicas):
        remedies.append(TokenBudgetReason.KV_EXHAUSTED)
    elif slow and not late and full:
        remedies.append(TokenBudgetReason.BATCH_TOO_WIDE)
    elif late and not slow and full and 100 * kv_used < _FULL_PERCENT * kv_total:
        remedies.append(TokenBudgetReason.BATCH_TOO_NARROW)
    for remedy in remedies:
        if _apply(remedy, bounds, observation, params) != bounds:
            return remedy
    return TokenBudgetReason.NEEDS_REPLICAS


def _apply(
    reason: TokenBudgetReason,
    bounds: Bounds,
    observation: ServiceObservation,
    params: ServiceParams,
) -> Bounds:
    """Return the bounds changed for a reason, unchanged if the reason changes none."""
    tokens, safety, width = bounds.max_tokens, bounds.safety_percent, bounds.max_num_seqs
    if reason is TokenBudgetReason.TPOT_MISSED:
        tokens -= max(_STEP_TOKENS, tokens // 4)
        safety = max(safety - _SAFETY_STEP, _MIN_SAFETY_PERCENT)
    elif reason is TokenBudgetReason.TTFT_MISSED:
        tokens += max(_STEP_TOKENS, tokens // 4)
        safety = min(safety + _SAFETY_STEP, _MAX_SAFETY_PERCENT)
    elif reason in (TokenBudgetReason.BATCH_TOO_WIDE, TokenBudgetReason.KV_EXHAUSTED):
        # Start from the largest batch, because a width above it has no effect.
        largest = max((r.running for r in observation.fresh), default=0)
        width = max(1, min(width, largest))
        width -= max(1, width // 4)
    elif reason is TokenBudgetReason.BATCH_TOO_NARROW:
        width += max(1, width // 4)
    else:
        return bounds
    changed = replace(bounds, max_tokens=tokens, safety_percent=safety, max_num_seqs=width)
    return changed.within(params)


def _min_width(params: ServiceParams) -> int:
    return max(1, params.max_num_seqs // _MIN_WIDTH_DIVISOR)
