"""What is said of a service: its conditions and its status, from everything that a round knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ROLE_ENGINE, ROLE_ROUTER
from goodput_core.spec.codec import encode
from goodput_core.spec.status import DecisionStatus, LLMServiceStatus, SummaryStatus, Truth
from goodput_operator.control.decided import Decided
from goodput_operator.control.rounds import ControlRound
from goodput_operator.reconcile.attainment import Attainment
from goodput_operator.reconcile.conditions import (
    READY,
    RECONCILING,
    SCALING_LIMITED,
    SLO_ATTAINED,
    STALLED,
    SUSPENDED,
    Said,
    dated,
    phase_of,
)
from goodput_operator.reconcile.plan import Rollout
from goodput_operator.reconcile.problems import Trouble

if TYPE_CHECKING:
    from goodput_operator.reconcile.view import View

__all__ = ["Known", "conditions_of", "refused_conditions", "status_of"]

_DECISIONS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a round knows of a service that is asked for in order.

    Args:
        suspended: whether it is to run nothing.
        routers: that it is to have.
        update: the revision that is asked for.
        rollout: how engines are spread.
        decided: limits and replicas in force.
        troubles: what stands in the way, the worst first.
        missing: objects that are not there yet.
        attainment: of the window; None: nothing was measured in this round.
        law: what the control laws came to; None: likewise.
    """

    suspended: bool
    routers: int
    update: str
    rollout: Rollout
    decided: Decided
    troubles: Sequence[Trouble]
    missing: int
    attainment: Attainment | None
    law: ControlRound | None


def conditions_of(view: View, known: Known) -> list[Said]:
    """The conditions that hold now."""
    return [
        _ready(view, known),
        _reconciling(view, known),
        _stalled(known.troubles),
        _slo_attained(view, known),
        _scaling_limited(view, known),
    ]


def refused_conditions(view: View, trouble: Trouble) -> list[Said]:
    """Those of a service whose spec cannot be followed: what runs goes on as it is."""
    return [
        _answering(view),
        Said(
            type=RECONCILING,
            status=Truth.FALSE,
            reason="Stalled",
            message="the spec cannot be followed, and what runs stays as it is",
        ),
        _stalled([trouble]),
        *(
            said
            for kind in (SLO_ATTAINED, SCALING_LIMITED)
            if (said := _stored(view, kind)) is not None
        ),
    ]


def status_of(view: View, said: Sequence[Said], known: Known | None, *, at: str) -> dict[str, Any]:
    """The status as it is to be stored; what this round knows nothing new of stays.

    Args:
        view: what there is.
        said: the conditions.
        known: None: the spec cannot be followed.
        at: now.
    """
    stored = view.status
    status = encode(
        LLMServiceStatus(
            observed_generation=view.generation,
            replicas=sum(one.pods for one in view.workloads(ROLE_ENGINE)),
            ready_replicas=sum(one.ready for one in view.workloads(ROLE_ENGINE)),
            selector=",".join(f"{k}={v}" for k, v in view.owner.selector(ROLE_ENGINE).items()),
            conditions=dated(
                said, stored.get("conditions") or (), generation=view.generation, at=at
            ),
        )
    )
    if known is None:
        summary = {**(stored.get("summary") or {}), "phase": phase_of(said)}
        return {**stored, **status, "summary": summary}
    status |= encode(
        LLMServiceStatus(
            token_budget=known.decided.bounds.max_tokens,
            current_revision=known.rollout.current,
            update_revision=known.update,
        )
    )
    law, attainment = known.law, known.attainment
    if law is not None and law.recommended is not None:
        status["recommendedReplicas"] = law.recommended
    if attainment is not None:
        status |= encode(LLMServiceStatus(classes=attainment.classes, goodput=attainment.goodput))
    if law is None and not known.suspended:
        # Between two measurements the last one stands.
        status |= _kept(stored, "recommendedReplicas", "classes", "goodput")
    ring = [*_decisions(known, at), *(stored.get("decisions") or ())][:_DECISIONS]
    if ring:
        status["decisions"] = ring
    status["summary"] = _summary(stored, status, said, known)
    return status


def _summary(
    stored: Mapping[str, Any], status: Mapping[str, Any], said: Sequence[Said], known: Known
) -> dict[str, Any]:
    summary = encode(
        SummaryStatus(
            replicas=f"{status['readyReplicas']}/{known.rollout.replicas}",
            goodput=status.get("goodput"),
            budget=str(known.decided.bounds.max_tokens),
            phase=phase_of(said),
        )
    )
    if known.suspended:
        return summary
    if known.attainment is None:
        return summary | _kept(stored.get("summary") or {}, "attainment")
    nearest = known.attainment.nearest
    return summary if nearest is None else summary | {"attainment": nearest}


def _decisions(known: Known, at: str) -> list[dict[str, Any]]:
    """This round's, newest first: replicas come after the budget."""
    changes = () if known.law is None else known.law.changes
    return [
        encode(
            DecisionStatus(
                at=at,
                knob=one.knob.value,
                reason=one.reason,
                message=one.message,
                applied=one.applied,
            )
        )
        for one in reversed(changes)
    ]


def _kept(stored: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: stored[key] for key in keys if key in stored}


def _stored(view: View, kind: str) -> Said | None:
    for one in view.status.get("conditions") or ():
        if one["type"] == kind:
            status, message = Truth(one["status"]), one.get("message", "")
            return Said(type=kind, status=status, reason=one["reason"], message=message)
    return None


def _answering(view: View) -> Said:
    engines = sum(pod.ready for pod in view.engines)
    routers = sum(pod.ready for pod in view.routers)
    words = f"{engines} of {len(view.engines)} engines and {routers} of {len(view.routers)} routers"
    if not routers:
        reason = "NoRouter"
    elif not engines:
        reason = "NoEngine"
    else:
        return Said(type=READY, status=Truth.TRUE, reason="Serving", message=f"{words} are ready")
    return Said(type=READY, status=Truth.FALSE, reason=reason, message=f"{words} are ready")


def _ready(view: View, known: Known) -> Said:
    if known.suspended:
        message = "spec.suspend is set: no pods run"
        return Said(type=READY, status=Truth.FALSE, reason=SUSPENDED, message=message)
    said = _answering(view)
    if said.reason == "NoEngine" and not known.rollout.replicas:
        message = "no engine is asked for"
        return Said(type=READY, status=Truth.TRUE, reason="ScaledToZero", message=message)
    return said


def _reconciling(view: View, known: Known) -> Said:
    def on_the_way(reason: str, message: str) -> Said:
        return Said(type=RECONCILING, status=Truth.TRUE, reason=reason, message=message)

    engines = view.workloads(ROLE_ENGINE)
    new = next((one for one in engines if one.revision == known.update), None)
    passing = next((one for one in known.troubles if not one.stalls), None)
    if known.missing:
        words = f"; {passing.message}" if passing is not None else ""
        return on_the_way("Creating", f"{known.missing} objects are not there yet{words}")
    if passing is not None:
        return on_the_way(passing.reason, passing.message)
    if any(one.revision != known.update and (one.pods or one.wanted) for one in engines):
        spread = ", ".join(f"{one.available} of {one.revision}" for one in engines)
        return on_the_way("RollingOut", f"serving: {spread}; wanted: {known.update}")
    wanted = known.rollout.replicas
    if new is None or new.wanted != wanted or not new.current or new.available != wanted:
        available = 0 if new is None else new.available
        return on_the_way("Scaling", f"{available} of {wanted} engines serve")
    for routers in view.workloads(ROLE_ROUTER):
        if not routers.current or routers.available != known.routers:
            return on_the_way("Scaling", f"{routers.available} of {known.routers} routers serve")
    message = "everything is as it is asked for"
    return Said(type=RECONCILING, status=Truth.FALSE, reason="Settled", message=message)


def _stalled(troubles: Sequence[Trouble]) -> Said:
    for trouble in troubles:
        if trouble.stalls:
            return Said(
                type=STALLED, status=Truth.TRUE, reason=trouble.reason, message=trouble.message
            )
    message = "nothing is in the way"
    return Said(type=STALLED, status=Truth.FALSE, reason="Unhindered", message=message)


def _slo_attained(view: View, known: Known) -> Said:
    if known.suspended:
        message = "spec.suspend is set: nothing is served"
        return Said(type=SLO_ATTAINED, status=Truth.UNKNOWN, reason=SUSPENDED, message=message)
    found = known.attainment
    if found is not None:
        return Said(
            type=SLO_ATTAINED, status=found.status, reason=found.reason, message=found.message
        )
    stored = _stored(view, SLO_ATTAINED)
    if stored is not None and stored.reason != SUSPENDED:
        return stored
    return Said(
        type=SLO_ATTAINED,
        status=Truth.UNKNOWN,
        reason="MetricsMissing",
        message="nothing has been counted yet",
    )


def _scaling_limited(view: View, known: Known) -> Said:
    for trouble in known.troubles:
        if trouble.of_room:
            return Said(
                type=SCALING_LIMITED,
                status=Truth.TRUE,
                reason=trouble.reason,
                message=trouble.message,
            )
    law = known.law
    if law is None:
        stored = _stored(view, SCALING_LIMITED)
        if stored is not None and stored.reason == "MaxReplicas":
            return stored
    elif law.decision.replicas is not None and law.decision.replicas.limited:
        message = f"more than maxReplicas, {law.decision.params.max_replicas}, are needed"
        return Said(type=SCALING_LIMITED, status=Truth.TRUE, reason="MaxReplicas", message=message)
    message = "as many replicas as are needed may and can be"
    return Said(type=SCALING_LIMITED, status=Truth.FALSE, reason="NotLimited", message=message)
