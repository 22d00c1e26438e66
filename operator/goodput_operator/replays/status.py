"""The status of a TraceReplay while it runs, and with its outcome."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.status import Truth
from goodput_core.units import NS_PER_S
from goodput_operator.kube.objects import conditions_by_type, format_time
from goodput_operator.reconcile.actions import Emit, WriteStatus
from goodput_operator.render.replay_pod import with_places
from goodput_operator.replays.actions import ReplayDecision

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.spec.tracereplay import TraceReplaySpec
    from goodput_operator.kube.objects import Object
    from goodput_operator.replays.snapshot import ReplaySnapshot

__all__ = [
    "FINISHED",
    "MAX_MESSAGE",
    "PASSED",
    "ReplayOutcome",
    "finish",
    "invalid",
    "is_finished",
    "running_status",
    "write_status",
]

FINISHED: Final = "Finished"
"""True once the replay has its outcome; it always becomes True."""
PASSED: Final = "Passed"
"""True if every objective was met, False if one was not, else Unknown."""
MAX_MESSAGE: Final = 2000
_PHASES: Final = ("Pending", "Arming", "Running", "Merging", "Comparing", "Finished")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutcome:
    """The end of a replay.

    Args:
        verdict: the verdict.
        reason: reason code of the verdict, or of the failure.
        message: the reason in a sentence.
        interval: difference to the baseline with its bounds; None without a comparison.
        requests: requests of the window; None if nothing was judged.
        report: place of the judged run; None if there is none.
    """

    verdict: VerdictKind
    reason: str
    message: str
    interval: str | None = None
    requests: int | None = None
    report: str | None = None


def is_finished(replay: Object) -> bool:
    """True if the stored status has the condition `Finished`."""
    stored = replay.get("status") or {}
    return conditions_by_type(stored).get(FINISHED, {}).get("status") == Truth.TRUE.value


def invalid(reason: str, message: str) -> ReplayOutcome:
    """Return the outcome of a replay that shows nothing about its target."""
    return ReplayOutcome(verdict=VerdictKind.INVALID, reason=reason, message=message[:MAX_MESSAGE])


def finish(
    snapshot: ReplaySnapshot, spec: TraceReplaySpec | None, outcome: ReplayOutcome
) -> ReplayDecision:
    """Write the outcome; Jobs that still run are deleted once it is stored."""
    outcome = replace(outcome, message=with_places(outcome.message))
    gated = spec is not None and spec.gate is not None
    passed = {VerdictKind.PASS: Truth.TRUE, VerdictKind.FAIL: Truth.FALSE}.get(
        outcome.verdict, Truth.UNKNOWN
    )
    passed_reason, passed_message = outcome.reason, outcome.message
    if not gated and outcome.verdict is not VerdictKind.INVALID:
        passed, passed_reason = Truth.UNKNOWN, "NotGated"
        passed_message = f"the replay has no spec.gate; it would have been {outcome.verdict}"
    stored = snapshot.replay.get("status") or {}
    status: dict[str, Any] = {
        **_kept(stored, "armed", "startTime"),
        "observedGeneration": snapshot.replay["metadata"]["generation"],
        "phase": "Finished",
        "completionTime": format_time(snapshot.unix_ns // NS_PER_S),
        "verdict": outcome.verdict.value,
        "reason": outcome.reason,
        "message": outcome.message,
        "conditions": [
            _condition_status(snapshot, FINISHED, Truth.TRUE, outcome.reason, outcome.message),
            _condition_status(snapshot, PASSED, passed, passed_reason, passed_message),
        ],
    }
    if outcome.interval is not None:
        status["interval"] = outcome.interval
    if outcome.requests is not None:
        status["requests"] = outcome.requests
    if outcome.report is not None:
        status["report"] = outcome.report
    emit = Emit(
        warning=outcome.verdict in {VerdictKind.FAIL, VerdictKind.INVALID},
        reason=outcome.verdict.value.capitalize(),
        message=f"{outcome.reason}: {outcome.message}",
    )
    # The next reconciliation deletes what is no longer needed.
    return ReplayDecision(actions=(WriteStatus(status=status), emit), wake_after_s=1.0)


def running_status(
    snapshot: ReplaySnapshot, phase: str, message: str, *, reason: str = ""
) -> dict[str, Any]:
    """Return the status of a replay that has no outcome yet."""
    assert phase in _PHASES, phase
    stored = snapshot.replay.get("status") or {}
    conditions = [
        _condition_status(snapshot, FINISHED, Truth.FALSE, reason or phase, message),
        _condition_status(snapshot, PASSED, Truth.UNKNOWN, reason or phase, message),
    ]
    return {
        **_kept(stored, "armed", "startTime"),
        "observedGeneration": snapshot.replay["metadata"]["generation"],
        "phase": phase,
        "conditions": conditions,
    }


def _condition_status(
    snapshot: ReplaySnapshot, kind: str, status: Truth, reason: str, message: str
) -> dict[str, Any]:
    old = conditions_by_type(snapshot.replay.get("status") or {}).get(kind, {})
    now = format_time(snapshot.unix_ns // NS_PER_S)
    changed = old.get("status") != status.value
    return {
        "type": kind,
        "status": status.value,
        "reason": reason,
        "message": message,
        "lastTransitionTime": now if changed else old["lastTransitionTime"],
        "observedGeneration": snapshot.replay["metadata"]["generation"],
    }


def write_status(snapshot: ReplaySnapshot, status: Mapping[str, Any]) -> list[WriteStatus]:
    """Return the write of a status; empty if it is stored already."""
    stored = snapshot.replay.get("status") or {}
    return [] if dict(status) == dict(stored) else [WriteStatus(status=status)]


def _kept(stored: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: stored[name] for name in names if name in stored}
