"""The gate of a rollout: the state of the cluster decides which revision serves, and what to do.

The stable revision serves until the update revision has passed its gate. Progress and outcome are
stored on the ControllerRevision of the update revision, before anything follows from them. Every
other state is that of Deployments, pods and the Job, so a restarted operator continues where the
earlier one stopped, and a repeated or missed reconciliation changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from goodput_core.contract import ANNOTATION_RETRY, ROLE_ENGINE
from goodput_core.spec.codec import encode
from goodput_core.spec.status import GateStatus
from goodput_core.units import NS_PER_S
from goodput_operator.kube.objects import format_time
from goodput_operator.reconcile.gate_attempt import GateAttempt
from goodput_operator.reconcile.gate_objects import gate_jobs, obsolete_objects
from goodput_operator.reconcile.gate_plan import (
    GatePhase,
    GatePlan,
    GateReason,
    GateRecord,
    gate_status,
    read_record,
)
from goodput_operator.reconcile.problems import name_conflict
from goodput_operator.render.gate import job_name
from goodput_operator.render.metadata import digest_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from goodput_core.control import Setpoint
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_core.spec.rollout import GateSpec
    from goodput_operator.kube.objects import Object
    from goodput_operator.reconcile.snapshot import Snapshot, View
    from goodput_operator.render.pods import Installation
    from goodput_operator.render.revisions import Revision

__all__ = ["plan_gate"]

_KEY_CHARACTERS: Final = 8
_MAX_RETRY: Final = 64
"""Length above which a digest replaces a value of the annotation goodput.dev/retry."""
_MAX_RETRIES: Final = 100
"""Number of handled values of the annotation that a record keeps."""


def plan_gate(
    snapshot: Snapshot,
    view: View,
    spec: LLMServiceSpec,
    installation: Installation,
    *,
    update: Revision,
    stable: str | None,
    known: Mapping[str, Revision],
    stored: bool,
    unresolved: bool = False,
    setpoint: Setpoint,
) -> GatePlan:
    """Decide about the gate of the update revision.

    Args:
        snapshot: the service and its objects.
        view: the classified objects.
        spec: spec of the service.
        installation: images and platform settings.
        update: revision of the spec.
        stable: name of the revision that serves; None before the first one serves.
        known: stored revisions of the service by name, whose records have the handled retries.
        stored: True if the ControllerRevision of the update revision exists.
        unresolved: True if the digest of its image is unknown, so that it cannot be stored yet.
        setpoint: limits and replicas in force.
    """
    if unresolved:
        retry_at_ns = 0 if snapshot.pin is None else snapshot.pin.retry_at_ns
        return GatePlan(
            target=stable if stable is not None and stable in known else update.name,
            deletes=obsolete_objects(view, None, None),
            wake_after_s=max(0, retry_at_ns - snapshot.now_ns) / NS_PER_S,
        )
    gate, record = spec.rollout.gate, read_record(update)
    retries = _handled_retries(snapshot.service, record, known.values())
    if stable is None or stable == update.name:
        return _serve_update(view, gate, record, retries, update=update.name, stable=stable)
    if gate is None:
        plan = None
        if record is not None:
            plan = _hold_without_gate(
                snapshot, view, record, retries, update=update.name, stable=stable
            )
        if plan is not None:
            return plan
        return _serve_update(view, gate, record, retries, update=update.name, stable=stable)
    rolls = any(engine.revision == update.name for engine in view.workloads(ROLE_ENGINE))
    if record is not None and record.phase(gate) is GatePhase.PASSED and rolls:
        # A rollout that has begun is not judged again.
        return GatePlan(
            target=update.name,
            record=None if record.promoted else replace(record, promoted=True),
            deletes=obsolete_objects(view, None, job_name(view.owner, record.key, record.attempt)),
            status=gate_status(update.name, record, gate),
        )
    baseline = known.get(stable)
    if baseline is None:
        return _await_baseline(snapshot, view, update=update.name, stable=stable)
    after = _start_of_promoted(record, gate)
    key = _key_of(
        snapshot.service, spec, gate, retries, update=update.name, stable=stable, after=after
    )
    if record is None or record.key != key:
        record = GateRecord(
            key=key,
            baseline=stable,
            started=snapshot.unix_s,
            since=snapshot.unix_s,
            generation=view.generation,
            retries=retries,
            after=after,
        )
        plan = GatePlan(
            target=stable,
            record=record,
            deletes=obsolete_objects(view, key, None),
            status=gate_status(update.name, record, gate, message="the gate begins"),
            wake_after_s=1.0,
        )
        return _await_storage(snapshot, view, spec, plan)
    current = replace(record, generation=view.generation, retries=retries)
    phase = record.phase(gate)
    job = job_name(view.owner, key, record.attempt)
    if phase is not None:
        return GatePlan(
            target=update.name if phase is GatePhase.PASSED else stable,
            record=current if phase is not GatePhase.PASSED and current != record else None,
            deletes=obsolete_objects(view, None, job),
            status=gate_status(update.name, record, gate),
        )
    attempt = GateAttempt(
        snapshot=snapshot,
        view=view,
        spec=spec,
        gate=gate,
        installation=installation,
        update=update,
        stable=baseline,
        record=_next_attempt(current, exists=any(one.name == job for one in gate_jobs(view))),
        setpoint=setpoint,
    )
    if spec.suspend:
        return attempt.suspend()
    plan = attempt.decide()
    if plan.record is None and attempt.record != record:
        plan = replace(plan, record=attempt.record)
    # The pods of the pair name the ControllerRevision, which owns the Secret with their token.
    return plan if stored else replace(plan, pair=None, create=None)


def _serve_update(
    view: View,
    gate: GateSpec | None,
    record: GateRecord | None,
    retries: tuple[str, ...],
    *,
    update: str,
    stable: str | None,
) -> GatePlan:
    """Return the plan of an update revision that serves, or that needs no gate."""
    passed, kept = record is not None and record.phase(gate) is GatePhase.PASSED, record
    if kept is not None and kept.reason == GateReason.NOT_STORED:
        # A retry ends the hold for good, also if its annotation is removed during the rollout.
        kept = replace(kept, retries=retries)
    if kept is not None and kept.ended is not None and update == stable:
        kept = replace(kept, promoted=True)
    return GatePlan(
        target=update,
        record=None if kept == record else kept,
        deletes=obsolete_objects(view, None, None),
        status=gate_status(update, record, gate) if record is not None and passed else None,
    )


def _await_baseline(snapshot: Snapshot, view: View, *, update: str, stable: str) -> GatePlan:
    """Hold the update revision while the ControllerRevision of the stable one is lost.

    Its Deployment stays unchanged, but no baseline can be started from it. The record of the
    update revision is kept, and found again if the ControllerRevision is restored.
    """
    stored = view.status.get("gate") or {}
    same = (stored.get("revision"), stored.get("baseline")) == (update, stable)
    started_at = str(stored.get("startedAt") or "") if same else ""
    message = (
        f"the ControllerRevision {stable} of the stable revision does not exist, so no baseline "
        "can be started; restore it, or set the spec back to that of the stable revision, which "
        "creates it again, or remove spec.rollout.gate to roll out without a comparison"
    )
    return GatePlan(
        target=stable,
        deletes=obsolete_objects(view, None, None),
        status=GateStatus(
            revision=update,
            baseline=stable,
            phase=GatePhase.PAUSED,
            reason=GateReason.BASELINE_LOST,
            message=message,
            started_at=started_at or format_time(snapshot.unix_s),
        ),
    )


def _start_of_promoted(record: GateRecord | None, gate: GateSpec) -> int:
    """Return the start of the last gate of a revision after which it was rolled out.

    Another revision has served since, so the revision is a new one for the gate.

    Returns:
        Seconds since 1970; 0 if no rollout followed a gate of the revision.
    """
    if record is None:
        return 0
    passed = record.phase(gate) is GatePhase.PASSED
    return record.started if record.promoted and passed else record.after


def _next_attempt(record: GateRecord, *, exists: bool) -> GateRecord:
    """Return the record with another attempt if the Job of the present one was deleted.

    The deleted Job can have written into the folder of its attempt.

    Args:
        record: record of a gate without an outcome.
        exists: True if the Job of its attempt exists.
    """
    if exists:
        return replace(record, replayed=record.attempt)
    if record.replayed == record.attempt:
        return replace(record, attempt=record.attempt + 1)
    return record


def _await_storage(
    snapshot: Snapshot, view: View, spec: LLMServiceSpec, plan: GatePlan
) -> GatePlan:
    """Pause a gate whose record cannot be stored after the deadline.

    Only the status then has the time of the first attempt to store it.

    Args:
        snapshot: the service and its objects.
        view: the classified objects.
        spec: spec of the service.
        plan: plan that stores the record of a new gate.
    """
    assert plan.status is not None, "a new gate has a status"
    place = ("ControllerRevision", plan.status.revision)
    reason = GateReason.RECORD_REJECTED
    message = snapshot.failures.get(place) or snapshot.delayed.get(place)
    if conflict := name_conflict(view.foreign(*place)):
        reason, message = GateReason.NAME_CONFLICT, conflict[0].message
    stored = view.status.get("gate") or {}
    names = (stored.get("revision"), stored.get("baseline"))
    if not message or names != (plan.status.revision, plan.status.baseline):
        return plan
    started_at = str(stored.get("startedAt") or plan.status.started_at)
    waited_s = snapshot.unix_s - int(datetime.fromisoformat(started_at).timestamp())
    late = waited_s >= spec.rollout.progress_deadline_seconds
    status = replace(
        plan.status,
        phase=GatePhase.PAUSED if late else GatePhase.STARTING,
        started_at=started_at,
        reason=reason if late else None,
        message=f"the record of the gate cannot be stored: {message}",
    )
    return replace(plan, status=status, wake_after_s=10.0)


def _hold_without_gate(
    snapshot: Snapshot,
    view: View,
    record: GateRecord,
    retries: tuple[str, ...],
    *,
    update: str,
    stable: str,
) -> GatePlan | None:
    """Keep the stable revision if the gate vanished without a change of the spec.

    An API server with a definition of another version drops fields that it does not know, and
    leaves the generation of the spec unchanged. A person who removes the gate changes it.

    Returns:
        None if the update revision may serve without the gate.
    """
    key = _digest(snapshot.service, retries, update=update, stable=stable, gate=None)
    if record.reason == GateReason.NOT_STORED:
        vanished, held = record.key == key, record
    else:
        vanished = record.phase(None) is not GatePhase.PASSED
        vanished = vanished and record.generation == view.generation
        held = replace(
            record,
            key=key,
            retries=retries,
            verdict=None,
            ended=GatePhase.PAUSED,
            reason=GateReason.NOT_STORED,
            message=(
                "spec.rollout.gate vanished without a change of the spec, because the definition "
                "of LLMService in the cluster is of a version that lacks it; install that of the "
                "operator's version and apply the gate again, or set the annotation "
                f"{ANNOTATION_RETRY} to a new value to roll out without it"
            ),
        )
    if not vanished:
        return None
    return GatePlan(
        target=stable,
        record=None if held is record else held,
        deletes=obsolete_objects(view, None, None),
        status=gate_status(update, held, None),
    )


def _handled_retries(
    service: Object, record: GateRecord | None, known: Iterable[Revision]
) -> tuple[str, ...]:
    """Return the handled values of the annotation goodput.dev/retry, a new one as the last.

    A removed annotation is no new value, and neither is one that any gate of the service handled.

    Args:
        service: the service.
        record: record of the gate; None before its start.
        known: stored revisions of the service.
    """
    records = [found for revision in known if (found := read_record(revision)) is not None]
    handled = tuple(dict.fromkeys(value for one in records for value in one.retries))
    value = str((service["metadata"].get("annotations") or {}).get(ANNOTATION_RETRY) or "")
    if len(value) > _MAX_RETRY:
        value = digest_of({"retry": value}, _MAX_RETRY)
    if value and value not in handled:
        return (*handled, value)[-_MAX_RETRIES:]
    return handled[-_MAX_RETRIES:] if record is None else record.retries


def _key_of(
    service: Object,
    spec: LLMServiceSpec,
    gate: GateSpec,
    retries: tuple[str, ...],
    *,
    update: str,
    stable: str,
    after: int,
) -> str:
    """Return the key of a gate: with another one, the gate begins again."""
    rules = encode(gate)
    # It changes what follows from the verdict, not the verdict.
    rules.pop("onInconclusive", None)
    more = {"after": after} if after else {}
    return _digest(
        service, retries, update=update, stable=stable, gate=rules, slo=encode(spec.slo), **more
    )


def _digest(
    service: Object, retries: tuple[str, ...], *, update: str, stable: str, **rules: object
) -> str:
    parts = {
        "service": service["metadata"]["uid"],
        "candidate": update,
        "baseline": stable,
        "retry": retries[-1] if retries else "",
        **rules,
    }
    return digest_of(parts, _KEY_CHARACTERS)
