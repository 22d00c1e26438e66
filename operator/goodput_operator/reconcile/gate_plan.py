"""The record of a gate, which is stored on its candidate's ControllerRevision, and its plan."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from goodput_core.declaration import spec_field
from goodput_core.errors import SpecError
from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.choices import OnInconclusive
from goodput_core.spec.codec import decode, encode
from goodput_core.spec.status import GateStatus
from goodput_operator.kube.objects import format_time
from goodput_operator.reconcile.actions import Create, Delete
from goodput_operator.render.config_map import GateConfig
from goodput_operator.render.gate import report_place

if TYPE_CHECKING:
    from goodput_core.spec.rollout import GateSpec
    from goodput_operator.render.revisions import Revision

__all__ = ["GatePhase", "GatePlan", "GateReason", "GateRecord", "gate_status", "read_record"]


class GatePhase(StrEnum):
    """Phases of a gate."""

    STARTING = "Starting"
    """The engines of candidate and baseline start."""
    REPLAYING = "Replaying"
    """The Job sends the trace to both."""
    WAITING = "Waiting"
    """An attempt gave no verdict, and the next one follows after a pause."""
    PASSED = "Passed"
    """The revision may serve."""
    FAILED = "Failed"
    """The revision was rejected, and the stable one keeps serving."""
    PAUSED = "Paused"
    """The stable revision keeps serving until a person decides."""
    SUSPENDED = "Suspended"
    """The service is suspended, and so is its gate."""


class GateReason(StrEnum):
    """Reasons of an outcome that is not a verdict."""

    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    """A quota or the nodes have no room for candidate and baseline."""
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    """The candidate ran, and was not ready within the progress deadline."""
    CANDIDATE_NOT_STARTED = "CandidateNotStarted"
    """The candidate did not run within the progress deadline: its image or a volume is missing."""
    BASELINE_NOT_READY = "BaselineNotReady"
    """The baseline was not ready within the progress deadline."""
    BASELINE_LOST = "BaselineLost"
    """The ControllerRevision of the stable revision does not exist."""
    NAME_CONFLICT = "NameConflict"
    """An object that the service does not control has a name that the gate needs."""
    REPLAY_NOT_STARTED = "ReplayNotStarted"
    """The pod of the Job did not start within the progress deadline."""
    NO_VERDICT = "GateInvalid"
    """No attempt gave a valid measurement."""
    RECORD_REJECTED = "RecordRejected"
    """The record of the gate cannot be stored, so the gate cannot begin."""
    NOT_STORED = "GateNotStored"
    """The API server no longer stores the gate, because the definition is of another version."""
    UNEQUAL_NODES = "UnequalNodes"
    """Candidate and baseline run on unlike nodes, although both revisions ask for the same."""
    NO_IMAGE = "NoReplayImage"
    """Neither the gate nor the installation names an image for replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRecord:
    """Progress and outcome of a gate, as stored on the ControllerRevision of the candidate."""

    key: str = spec_field(
        "Digest of the compared revisions, the gate's rules and the last handled retry."
    )
    baseline: str = spec_field("The stable revision.")
    started: int = spec_field("Start of the gate, in seconds since 1970.", minimum=0)
    since: int = spec_field("Start of the current wait, in seconds since 1970.", minimum=0)
    generation: int = spec_field(
        "Last known generation of the spec with this gate.", default=0, minimum=0
    )
    retries: tuple[str, ...] = spec_field(
        "Handled values of the annotation goodput.dev/retry, the latest last.", default=()
    )
    after: int = spec_field(
        "Start of the last gate of the revision after which it was rolled out, in seconds since "
        "1970; 0 if there is none.",
        default=0,
        minimum=0,
    )
    promoted: bool = spec_field("True if a rollout followed this gate.", default=False)
    attempt: int = spec_field("Number of the current attempt.", default=1, minimum=1)
    replayed: int = spec_field(
        "Number of the last attempt whose Job existed; 0 before the first one.",
        default=0,
        minimum=0,
    )
    invalid: int = spec_field("Attempts that gave no verdict.", default=0, minimum=0)
    verdict: VerdictKind | None = spec_field("The verdict; absent before it.", default=None)
    ended: GatePhase | None = spec_field(
        "Passed, Failed or Paused; absent while the gate runs.", default=None
    )
    reason: str = spec_field("Reason of the outcome or of the last attempt's end.", default="")
    message: str = spec_field("The reason in a sentence.", default="")
    pairs: str = spec_field("Recorded pairs.", default="")
    interval: str = spec_field("Difference to the baseline.", default="")
    image: str = spec_field(
        "Digest of the image that the candidate ran; absent if its node names none.", default=""
    )

    def phase(self, gate: GateSpec | None) -> GatePhase | None:
        """Return the final phase; None while the gate runs.

        The action after an inconclusive verdict follows from the present spec.
        """
        if self.ended is not GatePhase.PAUSED or self.verdict is not VerdictKind.INCONCLUSIVE:
            return self.ended
        action = OnInconclusive.PAUSE if gate is None else gate.on_inconclusive
        return {
            OnInconclusive.PAUSE: GatePhase.PAUSED,
            OnInconclusive.PROMOTE: GatePhase.PASSED,
            OnInconclusive.ROLLBACK: GatePhase.FAILED,
        }[action]

    def encode(self) -> str:
        """Return the record as an annotation."""
        return json.dumps(encode(self), sort_keys=True, ensure_ascii=False)


def read_record(revision: Revision) -> GateRecord | None:
    """Return the record of a revision; None without a valid one."""
    if not revision.gate:
        return None
    try:
        return decode(GateRecord, json.loads(revision.gate), "")
    except (ValueError, RecursionError, SpecError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePlan:
    """The decision about the gate of one reconciliation.

    Args:
        target: the revision that should serve.
        record: record to store on the update revision; None to keep the stored one.
        pair: inputs of the engines of candidate and baseline; None if they should not exist.
        create: creation of the Job; None if it exists or is not due.
        deletes: deletions of objects of this and earlier gates.
        foreign: kind and name of objects that have a name of the gate, but that the service does
            not control.
        status: the status's section; None without a gate.
        wake_after_s: time after which to decide again; None to wait for a change.
    """

    target: str
    record: GateRecord | None = None
    pair: GateConfig | None = None
    create: Create | None = None
    deletes: tuple[Delete, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()
    status: GateStatus | None = None
    wake_after_s: float | None = None

    @property
    def phase(self) -> GatePhase | None:
        """Phase of the gate; None without a gate."""
        return None if self.status is None else GatePhase(self.status.phase)

    @property
    def message(self) -> str:
        """Progress or outcome in a sentence; empty without a gate."""
        return "" if self.status is None or self.status.message is None else self.status.message

    @property
    def column(self) -> str | None:
        """Phase, pairs and verdict for `kubectl get`; None without a gate."""
        status = self.status
        if status is None:
            return None
        verdict = None if status.verdict is None else status.verdict.value
        return " ".join(part for part in (status.phase, status.pairs, verdict) if part)

    @property
    def pause(self) -> tuple[str, str] | None:
        """Reason and message of a paused rollout; None if the rollout is not paused."""
        status = self.status
        if status is None:
            return None
        message = f"{status.baseline} keeps serving: {status.message}"
        if self.phase not in {GatePhase.FAILED, GatePhase.PAUSED}:
            waits = status.reason == GateReason.INSUFFICIENT_CAPACITY
            return (GateReason.INSUFFICIENT_CAPACITY, message) if waits else None
        reasons = {VerdictKind.FAIL: "GateFailed", VerdictKind.INCONCLUSIVE: "GateInconclusive"}
        reason = status.reason or GateReason.NO_VERDICT
        if status.verdict is not None:
            reason = reasons.get(status.verdict, reason)
        return reason, message

    @property
    def holds(self) -> bool:
        """True if the update revision must not serve."""
        return self.phase not in {None, GatePhase.PASSED}


def gate_status(
    revision: str,
    record: GateRecord,
    gate: GateSpec | None,
    *,
    phase: GatePhase | None = None,
    message: str | None = None,
    pairs: str | None = None,
) -> GateStatus:
    """Return the status's section of a gate; it names a report only if pairs are recorded.

    Args:
        revision: name of the candidate.
        record: record of the gate.
        gate: the gate of the spec; None if the spec has none.
        phase: phase that the record does not show; None for that of the record.
        message: a sentence other than that of the record.
        pairs: recorded pairs other than those of the record.
    """
    shown = record.pairs if pairs is None else pairs
    report = None
    if gate is not None and shown and not shown.startswith("0/"):
        report = report_place(gate, revision, record.key, record.attempt)
    return GateStatus(
        revision=revision,
        baseline=record.baseline,
        phase=phase or record.phase(gate) or GatePhase.STARTING,
        pairs=shown or None,
        attempt=record.attempt,
        verdict=record.verdict,
        reason=record.reason or None,
        message=(record.message if message is None else message) or None,
        interval=record.interval or None,
        report=report,
        started_at=format_time(record.started),
    )
