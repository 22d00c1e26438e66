"""A sentence for each change that the control laws make, for status, Events and terminals.

Reasons are core's constants; what they mean to a person is said here, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from goodput_core.control import Bounds, ReplicaReason, TokenBudgetReason
from goodput_core.spec.choices import ControlMode
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from goodput_core.control import ReplicaDecision, ServiceDecision

__all__ = ["MORE_REPLICAS", "SPEC_CHANGED", "Change", "Knob", "bounds_change", "replicas_change"]

SPEC_CHANGED: Final = "SpecChanged"
"""The manifest's bounds or its mode have changed, and what is in force follows them."""
MORE_REPLICAS: Final = "MoreReplicas"
"""The batch is as wide as the manifest has it again, since more replicas share the requests."""

_BOUNDS: Final = {
    TokenBudgetReason.TPOT_MISSED: "TPOT is missed and TTFT can bear smaller steps",
    TokenBudgetReason.TTFT_MISSED: "TTFT is missed and TPOT can bear larger steps",
    TokenBudgetReason.BATCH_TOO_WIDE: "TPOT is missed with the smallest steps, by a full batch",
    TokenBudgetReason.BATCH_TOO_NARROW: "TTFT is missed with the largest steps, for want of places",
    TokenBudgetReason.KV_EXHAUSTED: "a promise is missed while requests evict each other",
}
_REPLICAS: Final = {
    ReplicaReason.BELOW_FLOOR: "the floor is {floor}",
    ReplicaReason.ABOVE_CEILING: "the ceiling is {ceiling}",
    ReplicaReason.WOKEN: "requests come and there is no replica",
    ReplicaReason.DEMAND: "{load} device seconds per second are demanded, a replica bears {each}",
    ReplicaReason.TREND: "demand grows ({load} device seconds per second, a replica bears {each}) "
    "and a replica takes {horizon} s to start",
    ReplicaReason.MISSED: "a promise is missed that neither budget nor batch width can keep",
    ReplicaReason.FEWER_SUFFICE: "{load} device seconds per second are demanded, a replica bears "
    "{each}; fewer have sufficed for {window} s",
    ReplicaReason.NO_TRAFFIC: "nothing has come for {window} s",
}


class Knob(StrEnum):
    """What a change turns."""

    TOKEN_BUDGET = "TokenBudget"  # noqa: S105 - tokens of a model
    REPLICAS = "Replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change, made or recommended.

    Args:
        knob: what is turned.
        reason: why, in one word: one of core's reasons, or one of those above.
        message: what and why, in a sentence.
        applied: whether it is put in force.
    """

    knob: Knob
    reason: str
    message: str
    applied: bool


def bounds_change(
    decision: ServiceDecision, *, before: Bounds, advised: Bounds | None
) -> Change | None:
    """What is news of the token budget and what goes with it; None: nothing.

    Args:
        decision: this round's.
        before: what was in force, as far as it was told.
        advised: what the law had come to in the last round; None: nothing yet.
    """
    after, bounds = decision.apply_bounds, decision.bounds
    if after != before:
        return _turned(before, after, *_put_in_force(decision, before), applied=True)
    if bounds is None or decision.params.mode is ControlMode.AUTO:
        return None
    why = _BOUNDS.get(bounds.reason)
    was = Bounds.initial(decision.params) if advised is None else advised
    if why is None or bounds.bounds == was:
        return None
    return _turned(was, bounds.bounds, bounds.reason, why, applied=False)


def replicas_change(decision: ServiceDecision, *, recommended: int | None) -> Change | None:
    """What is news of the number of replicas; None: nothing.

    A number that a person or another autoscaler sets is theirs to tell of.

    Args:
        decision: this round's.
        recommended: what the law came to in the last round; None: nothing.
    """
    replicas, params = decision.replicas, decision.params
    if replicas is None or replicas.replicas == replicas.current:
        return None
    applied = params.mode is ControlMode.AUTO and params.replicas is None
    if not applied and replicas.replicas == recommended:
        return None
    message = (
        f"replicas {replicas.current} → {replicas.replicas}: {_why(decision, replicas)}"
        f"{_limited(replicas)}{_advice(applied=applied)}"
    )
    return Change(knob=Knob.REPLICAS, reason=replicas.reason, message=message, applied=applied)


def _put_in_force(decision: ServiceDecision, before: Bounds) -> tuple[str, str]:
    bounds, params = decision.bounds, decision.params
    if bounds is not None and params.mode is ControlMode.AUTO:
        why = _BOUNDS.get(bounds.reason)
        if why is not None:
            return bounds.reason, why
        wider = replace(before, max_num_seqs=max(before.max_num_seqs, params.max_num_seqs))
        if decision.apply_bounds == wider:
            return MORE_REPLICAS, "more replicas share the requests"
    return SPEC_CHANGED, "the spec has changed"


def _turned(before: Bounds, after: Bounds, reason: str, why: str, *, applied: bool) -> Change:
    message = f"{', '.join(_differences(before, after))}: {why}{_advice(applied=applied)}"
    return Change(knob=Knob.TOKEN_BUDGET, reason=reason, message=message, applied=applied)


def _differences(before: Bounds, after: Bounds) -> Iterator[str]:
    if before.max_tokens != after.max_tokens:
        yield f"token budget {before.max_tokens} → {after.max_tokens}"
    if before.min_tokens != after.min_tokens:
        yield f"its lower bound {before.min_tokens} → {after.min_tokens}"
    if before.safety_percent != after.safety_percent:
        yield f"safety {before.safety_percent} % → {after.safety_percent} %"
    if before.max_num_seqs != after.max_num_seqs:
        yield f"batch width {before.max_num_seqs} → {after.max_num_seqs}"


def _why(decision: ServiceDecision, replicas: ReplicaDecision) -> str:
    params = decision.params
    return _REPLICAS[replicas.reason].format(
        floor=params.min_replicas,
        ceiling=params.max_replicas,
        load="some" if replicas.load is None else f"{replicas.load:.2f}",
        each=f"{replicas.bearable:.2f}",
        horizon=f"{replicas.horizon_ns / NS_PER_S:.0f}",
        window=f"{max(params.stabilization_ns, replicas.horizon_ns) / NS_PER_S:.0f}",
    )


def _limited(replicas: ReplicaDecision) -> str:
    return "; the ceiling allows no more" if replicas.limited else ""


def _advice(*, applied: bool) -> str:
    return "" if applied else " (recommended, not applied)"
