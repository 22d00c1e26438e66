"""The Events of a reconciliation: changed conditions, revisions, decisions and pods.

`kubectl describe` shows the Events as the history of a service, so each one reports a change.
"""

from __future__ import annotations

from collections import defaultdict
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

from goodput_core.control import Change, Knob
from goodput_core.spec.status import Truth
from goodput_operator.kube.objects import MAX_EVENT_MESSAGE, conditions_by_type
from goodput_operator.reconcile.actions import Emit
from goodput_operator.reconcile.attainment import reason_of_signal
from goodput_operator.reconcile.gate_plan import GatePhase, GateReason
from goodput_operator.reconcile.images import IMAGE_TAG
from goodput_operator.reconcile.problems import ProblemReason
from goodput_operator.reconcile.snapshot import Reported
from goodput_operator.reconcile.status import (
    READY,
    REVISION_PINNED,
    SCALING_LIMITED,
    SLO_ATTAINED,
    STALLED,
    SUSPENDED,
    Condition,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from goodput_core.control import ControlStep, Setpoint
    from goodput_core.spec.status import GateStatus
    from goodput_operator.control.measures import Measures, UnmeasuredPod

__all__ = [
    "of_changes",
    "of_conditions",
    "of_gate",
    "of_rejections",
    "of_revisions",
    "of_unmeasured_pods",
    "update_reported",
]

_HEALTHY: Final[Mapping[str, tuple[Truth, str]]] = {
    READY: (Truth.TRUE, "Ready"),
    STALLED: (Truth.FALSE, "Recovered"),
    SLO_ATTAINED: (Truth.TRUE, "SLOAttained"),
    SCALING_LIMITED: (Truth.FALSE, "ScalingUnlimited"),
    REVISION_PINNED: (Truth.TRUE, "RevisionPinned"),
}
"""Healthy status by condition, and the reason of the Event when it becomes healthy."""
_UNREPORTED: Final = frozenset({ProblemReason.ROLLOUT_PAUSED, IMAGE_TAG})
"""Reasons without an Event: the gate has its own, and a tag of an image is no change."""
_GATE_ENDS: Final[Mapping[GatePhase, str]] = {
    GatePhase.PASSED: "GatePassed",
    GatePhase.FAILED: "GateFailed",
    GatePhase.PAUSED: "GatePaused",
}
_LEAST_SENTENCE: Final = 100
"""Length to which the sentence of a gate may be shortened in an Event."""
_KNOBS: Final = {Knob.TOKEN_BUDGET: "TokenBudget", Knob.REPLICAS: "Scaled"}


def of_conditions(conditions: Sequence[Condition], stored: Mapping[str, Any]) -> Iterator[Emit]:
    """Yield an Event for each condition that became healthy or unhealthy.

    Args:
        conditions: current conditions.
        stored: the stored status.
    """
    stored_by_type = conditions_by_type(stored)
    for new in conditions:
        if new.type not in _HEALTHY or new.status is Truth.UNKNOWN:
            continue
        healthy, recovery = _HEALTHY[new.type]
        old = stored_by_type.get(new.type, {})
        old_status = old.get("status")
        changed = old_status != new.status.value
        if new.status is healthy:
            # A new service becomes ready, but does not recover from a problem.
            if changed and (new.type == READY or old_status not in {None, Truth.UNKNOWN.value}):
                yield Emit(warning=False, reason=recovery, message=new.message)
        elif new.type == READY:
            if old_status == Truth.TRUE.value:
                intended = new.reason == SUSPENDED
                yield Emit(warning=not intended, reason=new.reason, message=new.message)
        elif new.reason in _UNREPORTED:
            continue
        elif changed or old.get("reason") != new.reason:
            yield Emit(warning=True, reason=new.reason, message=new.message)


def of_gate(stored: Mapping[str, Any], new: GateStatus | None) -> Iterator[Emit]:
    """Yield an Event when a gate begins, repeats, lacks capacity or ends.

    Args:
        stored: the gate of the stored status; empty without one.
        new: the present gate; None without one.
    """
    if new is None:
        return
    same = (stored.get("revision"), stored.get("startedAt")) == (new.revision, new.started_at)
    old = stored if same else {}
    if not same and new.phase not in _GATE_ENDS:
        message = f"{new.revision} is compared with {new.baseline} before it serves"
        yield Emit(warning=False, reason="GateStarted", message=message)
    if new.attempt > old.get("attempt", 1):
        message = f"attempt {new.attempt - 1} of {new.revision} gave no verdict: {new.message}"
        yield Emit(warning=True, reason="GateRepeated", message=message)
    capacity = GateReason.INSUFFICIENT_CAPACITY
    if new.reason == capacity and old.get("reason") != capacity and new.phase not in _GATE_ENDS:
        yield Emit(warning=True, reason=capacity, message=str(new.message))
    if new.phase in _GATE_ENDS and old.get("phase") != new.phase:
        passed = new.phase == GatePhase.PASSED
        kept = "" if passed else f"{new.baseline} keeps serving instead of "
        yield Emit(
            warning=not passed,
            reason=_GATE_ENDS[GatePhase(new.phase)],
            message=_end_of_gate(f"{kept}{new.revision}: ", new),
        )


def _end_of_gate(head: str, gate: GateStatus) -> str:
    """Return the message of an ended gate, shortened so that its interval and report remain."""
    report = f"report: {gate.report}" if gate.report else None
    details = "".join(f"; {part}" for part in (gate.interval, report) if part)
    room = max(_LEAST_SENTENCE, MAX_EVENT_MESSAGE - len(head) - len(details))
    sentence = shorten((gate.message or "").removesuffix("."), room, placeholder=" …")
    return head + (sentence + details).removeprefix("; ")


def of_revisions(
    stored: Mapping[str, Any], *, update: str, current: str | None, holds: bool
) -> Iterator[Emit]:
    """Yield an Event when a rollout starts or ends.

    Args:
        stored: the stored status.
        update: engine revision of the current spec.
        current: the engine revision that serves; None before the first serves.
        holds: True if a gate holds the update revision.
    """
    serving = stored.get("currentRevision")
    was_held = (stored.get("gate") or {}).get("phase") not in {None, GatePhase.PASSED}
    begins = not holds and (was_held or stored.get("updateRevision") != update)
    if serving and update != serving and begins:
        yield Emit(warning=False, reason="RollingOut", message=f"{update} replaces {serving}")
    if serving and current == update != serving:
        yield Emit(warning=False, reason="RolledOut", message=f"{update} has replaced {serving}")


def of_changes(changes: Sequence[Change]) -> Iterator[Emit]:
    """Yield an Event for each change that the control laws applied or recommended."""
    for change in changes:
        reason = _KNOBS[change.knob] if change.applied else "Recommended"
        yield Emit(warning=False, reason=reason, message=f"{change.message} ({change.reason})")


def of_unmeasured_pods(
    unmeasured: Iterable[UnmeasuredPod], reported: Collection[tuple[str, str]]
) -> Iterator[Emit]:
    """Yield one Event per role and reason for ready pods that newly lack measurements.

    Args:
        unmeasured: the pods without measurements.
        reported: pod and reason of the pods that an Event has named.
    """
    new: dict[tuple[str, str], list[UnmeasuredPod]] = defaultdict(list)
    for pod in unmeasured:
        reason = reason_of_signal(pod.signal)
        if (pod.name, reason) not in reported:
            new[pod.role, reason].append(pod)
    for (role, reason), pods in new.items():
        message = f"{role} {pods[0].name}: {pods[0].detail}"
        yield Emit(warning=True, reason=reason, message=message + _and_more(pods[1:]))


def of_rejections(
    failures: Mapping[tuple[str, str], str], reported: Collection[str]
) -> Iterator[Emit]:
    """Yield one Event for all engines that newly rejected their limits.

    Args:
        failures: messages of the last reconciliation's rejected actions by kind and name.
        reported: pods that an Event has named.
    """
    new = [key for key in sorted(failures) if key[0] == "Pod" and key[1] not in reported]
    if new:
        message = f"pod {new[0][1]}: {failures[new[0]]}"
        yield Emit(warning=True, reason="LimitsNotTaken", message=message + _and_more(new[1:]))


def update_reported(
    reported: Reported,
    measures: Measures | None,
    step: ControlStep | None,
    failures: Mapping[tuple[str, str], str],
    setpoint: Setpoint,
) -> Reported:
    """Return the states that are reported after a reconciliation.

    Args:
        reported: states reported before it.
        measures: measurements of the ended interval; None if none ended.
        step: result of the control step, which repeats the push to each engine without its limits;
            None if no interval ended.
        failures: messages of the last reconciliation's rejected actions by kind and name.
        setpoint: limits and replicas reported before the reconciliation.
    """
    rejecting = reported.rejecting
    if step is not None:
        # An engine without a repeated push has accepted its limits.
        rejecting = rejecting & {push.name for push in step.pushes}
    unmeasured = reported.unmeasured
    if measures is not None:
        unmeasured = frozenset(
            (pod.name, reason_of_signal(pod.signal)) for pod in measures.unmeasured
        )
    return Reported(
        unmeasured=unmeasured,
        rejecting=rejecting | {name for kind, name in failures if kind == "Pod"},
        setpoint=setpoint if step is None else step.state.setpoint,
    )


def _and_more(others: Sequence[object]) -> str:
    return f"; and {len(others)} more" if others else ""
