"""The conditions of a service, and when each came to hold what it holds.

`Ready`, `Reconciling` and `Stalled` mean what kstatus means by them: a service that is as its spec
says is ready, not reconciling and not stalled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.spec.status import ConditionStatus, Truth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "READY",
    "RECONCILING",
    "SCALING_LIMITED",
    "SLO_ATTAINED",
    "STALLED",
    "SUSPENDED",
    "Said",
    "dated",
    "phase_of",
]

READY: Final = "Ready"
"""Whether the service answers: a router and an engine are there."""
RECONCILING: Final = "Reconciling"
"""Whether it is on its way to what the spec, or the control law, asks for."""
STALLED: Final = "Stalled"
"""Whether something is in its way that somebody has to remove."""
SLO_ATTAINED: Final = "SLOAttained"
"""Whether every class with an objective attained it over the last minutes."""
SCALING_LIMITED: Final = "ScalingLimited"
"""Whether more replicas are needed than there may or can be."""
SUSPENDED: Final = "Suspended"
"""The reason of what is not so because `spec.suspend` asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What is said of one condition.

    Args:
        type: which.
        status: whether it holds.
        reason: one word.
        message: one sentence, never empty: the API server would write an empty one its own way.
    """

    type: str
    status: Truth
    reason: str
    message: str


def dated(
    said: Sequence[Said], stored: Sequence[Mapping[str, Any]], *, generation: int, at: str
) -> tuple[ConditionStatus, ...]:
    """Conditions with the time since when their status holds.

    Args:
        said: what holds now.
        stored: the conditions that the status had.
        generation: of the spec.
        at: now.
    """
    known = {one["type"]: one for one in stored}
    conditions = []
    for one in said:
        before = known.get(one.type, {})
        same = before.get("status") == one.status.value
        conditions.append(
            ConditionStatus(
                type=one.type,
                status=one.status,
                reason=one.reason,
                message=one.message,
                last_transition_time=before["lastTransitionTime"] if same else at,
                observed_generation=generation,
            )
        )
    return tuple(conditions)


def phase_of(said: Sequence[Said]) -> str:
    """The one word that `kubectl get` shows: the reason of the condition to look at."""
    known = {one.type: one for one in said}
    for kind in (STALLED, RECONCILING):
        if known[kind].status is Truth.TRUE:
            return known[kind].reason
    return known[READY].reason
