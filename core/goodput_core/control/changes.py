"""Changes that the control laws make, each with a sentence for status, Events and terminals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from goodput_core.control.replicas import ReplicaReason
from goodput_core.control.token_budget import Bounds, TokenBudgetReason
from goodput_core.spec.choices import ControlMode
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_core.control.decision import ServiceDecision
    from goodput_core.control.replicas import ReplicaDecision

__all__ = [
    "MORE_REPLICAS",
    "SPEC_CHANGED",
    "Change",
    "Knob",
    "replicas_change",
    "token_budget_change",
]

SPEC_CHANGED: Final = "SpecChanged"
"""The bounds or the mode in the manifest changed."""
MORE_REPLICAS: Final = "MoreReplicas"
"""The batch width returns to `maxNumSeqs`, because more replicas share the requests."""

_BOUNDS: Final = {
    TokenBudgetReason.TPOT_MISSED: "TPOT is missed and TTFT has slack",
    TokenBudgetReason.TTFT_MISSED: "TTFT is missed and TPOT has slack",
    TokenBudgetReason.BATCH_TOO_WIDE: "TPOT is missed with the smallest steps and a full batch",
    TokenBudgetReason.BATCH_TOO_NARROW: "TTFT is missed with the largest steps and a full batch",
    TokenBudgetReason.KV_EXHAUSTED: "a target is missed while requests preempt each other",
}
_REPLICAS: Final = {
    ReplicaReason.BELOW_FLOOR: "minReplicas is {min_replicas}",
    ReplicaReason.ABOVE_CEILING: "maxReplicas is {max_replicas}",
    ReplicaReason.WOKEN: "requests arrive and there is no replica",
    ReplicaReason.DEMAND: "the demand is {load} device seconds per second, one replica "
    "sustains {each}",
    ReplicaReason.TREND: "the demand grows ({load} device seconds per second, one replica "
    "sustains {each}), and a replica takes {horizon} s to start",
    ReplicaReason.MISSED: "a target is missed that neither token budget nor batch width can meet",
    ReplicaReason.FEWER_SUFFICE: "the demand is {load} device seconds per second, one replica "
    "sustains {each}; fewer have sufficed for {window} s",
    ReplicaReason.NO_TRAFFIC: "no request has arrived for {window} s",
}


class Knob(StrEnum):
    """Controlled quantity."""

    TOKEN_BUDGET = "TokenBudget"  # noqa: S105 - tokens of a model
    REPLICAS = "Replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change, made or recommended.

    Args:
        knob: the changed quantity.
        reason: a reason of the law, `SPEC_CHANGED` or `MORE_REPLICAS`.
        message: one sentence with the old value, the new value and the cause.
        applied: False if it is only recommended.
    """

    knob: Knob
    reason: str
    message: str
    applied: bool


def token_budget_change(
    decision: ServiceDecision, *, before: Bounds, recommended: Bounds | None
) -> Change | None:
    """Return the change of token budget, safety factor or batch width; None if all are unchanged.

    Args:
        decision: decision of this interval.
        before: limits after the last reported change.
        recommended: limits that the law recommended in the last interval; None before its first
            decision.
    """
    after, bounds = decision.apply_bounds, decision.bounds
    if after != before:
        return _budget_change(before, after, *_reason_applied(decision, before), applied=True)
    if bounds is None or decision.params.mode is ControlMode.AUTO:
        return None
    why = _BOUNDS.get(bounds.reason)
    was = Bounds.initial(decision.params) if recommended is None else recommended
    if why is None or bounds.bounds == was:
        return None
    return _budget_change(was, bounds.bounds, bounds.reason, why, applied=False)


def replicas_change(decision: ServiceDecision, *, recommended: int | None) -> Change | None:
    """Return the change of the number of replicas; None if it is unchanged.

    Args:
        decision: decision of this interval.
        recommended: replicas of the last decision; None before the first one.
    """
    replicas, params = decision.replicas, decision.params
    if replicas is None or replicas.replicas == replicas.current:
        return None
    applied = params.mode is ControlMode.AUTO and params.replicas is None
    if not applied and replicas.replicas == recommended:
        return None
    message = (
        f"replicas {replicas.current} → {replicas.replicas}: {_why(decision, replicas)}"
        f"{_limited(replicas)}{_suffix(applied=applied)}"
    )
    return Change(knob=Knob.REPLICAS, reason=replicas.reason, message=message, applied=applied)


def _reason_applied(decision: ServiceDecision, before: Bounds) -> tuple[str, str]:
    bounds, params = decision.bounds, decision.params
    if bounds is not None and params.mode is ControlMode.AUTO:
        why = _BOUNDS.get(bounds.reason)
        if why is not None:
            return bounds.reason, why
        wider = replace(before, max_num_seqs=max(before.max_num_seqs, params.max_num_seqs))
        if decision.apply_bounds == wider:
            return MORE_REPLICAS, "more replicas share the requests"
    return SPEC_CHANGED, "the spec has changed"


def _budget_change(
    before: Bounds, after: Bounds, reason: str, why: str, *, applied: bool
) -> Change:
    message = f"{', '.join(_differences(before, after))}: {why}{_suffix(applied=applied)}"
    return Change(knob=Knob.TOKEN_BUDGET, reason=reason, message=message, applied=applied)


def _differences(before: Bounds, after: Bounds) -> Iterator[str]:
    if before.max_tokens != after.max_tokens:
        yield f"token budget {before.max_tokens} → {after.max_tokens}"
    if before.min_tokens != after.min_tokens:
        yield f"lower bound of the token budget {before.min_tokens} → {after.min_tokens}"
    if before.safety_percent != after.safety_percent:
        yield f"safety {before.safety_percent} % → {after.safety_percent} %"
    if before.max_num_seqs != after.max_num_seqs:
        yield f"batch width {before.max_num_seqs} → {after.max_num_seqs}"


def _why(decision: ServiceDecision, replicas: ReplicaDecision) -> str:
    params = decision.params
    return _REPLICAS[replicas.reason].format(
        min_replicas=params.min_replicas,
        max_replicas=params.max_replicas,
        # Known whenever the sentence contains it.
        load="" if replicas.load is None else f"{replicas.load:.2f}",
        each=f"{replicas.bearable:.2f}",
        horizon=f"{replicas.horizon_ns / NS_PER_S:.0f}",
        window=f"{max(params.stabilization_ns, replicas.horizon_ns) / NS_PER_S:.0f}",
    )


def _limited(replicas: ReplicaDecision) -> str:
    return "; maxReplicas allows no more" if replicas.limited else ""


def _suffix(*, applied: bool) -> str:
    return "" if applied else " (recommended, not applied)"
