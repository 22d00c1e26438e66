"""The decision of one reconciliation of a TraceReplay, without I/O or a clock.

A replay ends with exactly one outcome, and every wait has a deadline. The phases follow from the
objects that exist: no Job (Pending), a Job of shards without a start (Arming), with one (Running),
and a second Job that merges (Merging) or compares the run with a baseline (Comparing).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from goodput_core.contract import OBJECT_LABEL_PRODUCTION
from goodput_core.errors import ExitCode, SpecError
from goodput_core.replay_job import (
    MAX_START_SKEW_NS,
    REASON_UNREACHABLE,
    ABResult,
    ReplayResult,
    decode_message,
)
from goodput_core.slo.verdict import VerdictKind
from goodput_core.spec.codec import decode
from goodput_core.spec.llmservice import SLOSpec
from goodput_core.spec.tracereplay import TraceReplaySpec
from goodput_core.units import NS_PER_S, format_duration
from goodput_operator.kube.jobs import (
    ab_result_of,
    describe_stop,
    describe_unarmed,
    failure_of,
    pods_ended,
    pods_of,
    result_of,
    terminated_of,
    true_condition,
)
from goodput_operator.kube.objects import (
    JOB,
    TRACEREPLAY,
    admin_url,
    controlled_by,
    format_time,
    is_ready,
)
from goodput_operator.reconcile.actions import Create, Delete
from goodput_operator.render.replay_pod import claims_of
from goodput_operator.replays.actions import (
    CreateReplayToken,
    PostStart,
    ReplayAction,
    ReplayDecision,
)
from goodput_operator.replays.jobs import (
    SHARED_MODES,
    ReplayRun,
    merge_job,
    shards_job,
    token_secret,
)
from goodput_operator.replays.status import (
    MAX_MESSAGE,
    ReplayOutcome,
    finish,
    invalid,
    is_finished,
    running_status,
    write_status,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_operator.kube.objects import Object
    from goodput_operator.render.pods import Installation
    from goodput_operator.replays.snapshot import ReplaySnapshot

__all__ = ["decide"]

_LEAD_NS: Final = 5 * NS_PER_S
"""Time from the decision about a start to the start, within which every shard receives it."""
_MISSED_AFTER_NS: Final = 10 * NS_PER_S
"""Time after the start after which a shard that is still armed has missed it."""
_RETRY_S: Final = 2.0
_WAIT_S: Final = 5.0


def decide(snapshot: ReplaySnapshot, installation: Installation) -> ReplayDecision:
    """Return the next actions of a replay.

    Args:
        snapshot: the replay and its objects.
        installation: images and platform settings.
    """
    if is_finished(snapshot.replay):
        return ReplayDecision(actions=tuple(_clean_up(snapshot)))
    try:
        spec = decode(TraceReplaySpec, snapshot.replay.get("spec"), "spec")
    except SpecError as error:
        return finish(snapshot, None, invalid("InvalidSpec", f"{error}"))
    run = ReplayRun.of(snapshot.replay, spec)
    if spec.image is None and installation.replay_image is None:
        text = "spec.image: is required, because the operator was installed without --replay-image"
        return finish(snapshot, spec, invalid("InvalidSpec", text))
    jobs = {job["metadata"]["name"]: job for job in snapshot.jobs}
    for name in (run.shards_job, run.merge_job):
        if name in jobs and not controlled_by(jobs[name], run.uid):
            text = f"Job {name} belongs to another object; delete it, or rename the TraceReplay"
            return finish(snapshot, spec, invalid("NameConflict", text))
    shards, merge = jobs.get(run.shards_job), jobs.get(run.merge_job)
    if merge is not None:
        return _follow_merge(snapshot, spec, run, merge)
    if shards is None:
        return _begin(snapshot, spec, run, installation)
    return _follow_shards(snapshot, spec, run, shards, installation)


# --- Pending --------------------------------------------------------------------------------


def _begin(
    snapshot: ReplaySnapshot, spec: TraceReplaySpec, run: ReplayRun, installation: Installation
) -> ReplayDecision:
    stored = snapshot.replay.get("status") or {}
    if stored.get("startTime"):
        text = f"Job {run.shards_job} was deleted during the run; no request is sent twice"
        return finish(snapshot, spec, invalid("ShardLost", text))
    slo = spec.slo
    if spec.target.service is not None:
        service = snapshot.service
        if service is None:
            text = f"LLMService {spec.target.service} does not exist in this namespace"
            return _wait(snapshot, spec, "TargetNotFound", text)
        if slo is None:
            try:
                slo = decode(SLOSpec, service["spec"].get("slo"), "spec.slo")
            except SpecError as error:
                text = f"LLMService {spec.target.service}: {error}"
                return finish(snapshot, spec, invalid("InvalidSpec", text))
    assert slo is not None, "a rule of the spec requires slo with target.url"
    if refused := _refusal(snapshot, spec):
        return finish(snapshot, spec, refused)
    if snapshot.unread:
        return _wait(snapshot, spec, "ClaimNotRead", snapshot.unread)
    if missing := [name for name, modes in snapshot.claims.items() if modes is None]:
        text = f"PersistentVolumeClaim {missing[0]} does not exist in this namespace"
        return _wait(snapshot, spec, "ClaimNotFound", text)
    remaining_s = _arm_wait_s(snapshot, spec)
    text = f"{spec.shards} shards are starting"
    if snapshot.rejected:
        text = f"Job {run.shards_job} cannot be created: {snapshot.rejected}"
    if remaining_s <= 0:
        return finish(snapshot, spec, invalid("NotArmed", text))
    status = running_status(snapshot, "Arming", text)
    return ReplayDecision(
        actions=(
            # A rejection leaves out the actions after it.
            *write_status(snapshot, {**status, "armed": f"0/{spec.shards}"}),
            CreateReplayToken(body=token_secret(run)),
            Create(body=shards_job(run, spec, slo, installation, snapshot.claims)),
        ),
        wake_after_s=remaining_s,
    )


def _refusal(snapshot: ReplaySnapshot, spec: TraceReplaySpec) -> ReplayOutcome | None:
    """Return the outcome of a replay that must not be started; None if it may be."""
    if not spec.allow_production:
        labels = {} if snapshot.service is None else snapshot.service["metadata"].get("labels")
        if (labels or {}).get(OBJECT_LABEL_PRODUCTION) != "false":
            target = spec.target.service or spec.target.url
            return invalid(
                "ProductionNotAllowed",
                f"{target} may serve clients; set spec.allowProduction to true, or label a test "
                f'LLMService with {OBJECT_LABEL_PRODUCTION}: "false"',
            )
    if spec.shards > 1:
        for name in claims_of(spec.trace, spec.target.tokenizer, spec.records):
            modes = snapshot.claims.get(name)
            written = spec.records.startswith(f"pvc://{name}/") or spec.records == f"pvc://{name}"
            needed = {"ReadWriteMany"} if written else SHARED_MODES
            if modes is not None and not needed.intersection(modes):
                return invalid(
                    "StorageRefused",
                    f"PersistentVolumeClaim {name} is {' and '.join(modes) or 'without a mode'}, "
                    f"and {spec.shards} shards on several nodes need "
                    f"{' or '.join(sorted(needed))}; use another claim, object storage, or "
                    "one shard",
                )
    return None


def _wait(
    snapshot: ReplaySnapshot, spec: TraceReplaySpec, reason: str, message: str
) -> ReplayDecision:
    """Wait for another object, until the arming deadline."""
    remaining_s = _arm_wait_s(snapshot, spec)
    if remaining_s <= 0:
        return finish(snapshot, spec, invalid(reason, message))
    status = running_status(snapshot, "Pending", message, reason=reason)
    return ReplayDecision(
        actions=tuple(write_status(snapshot, status)), wake_after_s=min(_WAIT_S, remaining_s)
    )


# --- Arming and Running ---------------------------------------------------------------------


def _follow_shards(
    snapshot: ReplaySnapshot,
    spec: TraceReplaySpec,
    run: ReplayRun,
    job: Object,
    installation: Installation,
) -> ReplayDecision:
    pods = pods_of(snapshot.pods, run.shards_job)
    compares = spec.gate is not None and spec.gate.compares
    if spec.shards == 1 and (result := result_of(pods)) is not None:
        if compares and result.verdict is not VerdictKind.INVALID:
            return _create_merge(snapshot, spec, run, job, installation)
        return finish(snapshot, spec, _judged(run, result))
    if failed := failure_of(job, pods):
        return finish(snapshot, spec, _shard_failure(snapshot, spec, job, failed))
    if true_condition(job, "Complete"):
        if spec.shards == 1:
            text = f"the pod of Job {run.shards_job} left no result"
            return finish(snapshot, spec, invalid("ResultLost", text))
        return _create_merge(snapshot, spec, run, job, installation)
    if (snapshot.replay.get("status") or {}).get("startTime"):
        return _follow_run(snapshot, spec, pods)
    return _arm(snapshot, spec, pods)


def _arm(snapshot: ReplaySnapshot, spec: TraceReplaySpec, pods: Sequence[Object]) -> ReplayDecision:
    ready = [pod for pod in pods if is_ready(pod)]
    readings = [snapshot.readings.get(pod["metadata"]["name"]) for pod in ready]
    states = [reading for reading in readings if reading is not None and reading.state is not None]
    text = f"{len(states)} of {spec.shards} shards are armed"
    if len(states) < spec.shards:
        remaining_s = _arm_wait_s(snapshot, spec)
        if remaining_s <= 0:
            name = ReplayRun.of(snapshot.replay, spec).shards_job
            details = [reading.detail for reading in readings if reading is not None]
            text += describe_unarmed(name, pods, details, expected=spec.shards)
            return finish(snapshot, spec, invalid("NotArmed", text))
        status = running_status(snapshot, "Arming", text)
        unread = len(ready) > len(states)
        return ReplayDecision(
            actions=tuple(
                write_status(snapshot, {**status, "armed": f"{len(states)}/{spec.shards}"})
            ),
            wake_after_s=min(_RETRY_S, remaining_s) if unread else remaining_s,
        )
    if (skew_ns := _certain_skew_ns(snapshot)) > MAX_START_SKEW_NS:
        return finish(
            snapshot,
            spec,
            invalid(
                "ClockSkew",
                f"the clocks of the shards' nodes differ by at least {format_duration(skew_ns)}, "
                f"and {format_duration(MAX_START_SKEW_NS)} is allowed; run a time service on every "
                "node",
            ),
        )
    walls = [reading.state.wall_ns for reading in states if reading.state is not None]
    # A whole second, so that the start in the status is exactly that of the shards.
    start_s = -(-(max(walls) + _LEAD_NS) // NS_PER_S)
    status = running_status(snapshot, "Running", f"{spec.shards} shards start together")
    status |= {"armed": f"{spec.shards}/{spec.shards}", "startTime": format_time(start_s)}
    starts = _posts(ready, format_time(start_s))
    return ReplayDecision(
        # The start is stored before it is sent, so that a restarted operator sends the same one.
        actions=(*write_status(snapshot, status), *starts),
        wake_after_s=1.0,
    )


def _follow_run(
    snapshot: ReplaySnapshot, spec: TraceReplaySpec, pods: Sequence[Object]
) -> ReplayDecision:
    start_at: str = snapshot.replay["status"]["startTime"]
    since_ns = snapshot.unix_ns - _parse_time_s(start_at) * NS_PER_S
    unstarted = [
        pod
        for pod in pods
        if (reading := snapshot.readings.get(pod["metadata"]["name"])) is not None
        and reading.state is not None
        and reading.state.start_at_ns is None
    ]
    if since_ns < 0:
        return ReplayDecision(actions=tuple(_posts(unstarted, start_at)), wake_after_s=1.0)
    if since_ns < _MISSED_AFTER_NS:
        return ReplayDecision(wake_after_s=(_MISSED_AFTER_NS - since_ns) / NS_PER_S)
    if unstarted:
        names = ", ".join(pod["metadata"]["name"] for pod in unstarted)
        text = f"{names} did not receive the start in time, so the shards did not start together"
        return finish(snapshot, spec, invalid("StartMissed", text))
    return ReplayDecision()


def _posts(pods: Sequence[Object], start_at: str) -> list[PostStart]:
    return [
        PostStart(pod=pod["metadata"]["name"], url=url, start_at=start_at)
        for pod in pods
        if (url := admin_url(pod)) is not None
    ]


def _certain_skew_ns(snapshot: ReplaySnapshot) -> int:
    """Return a lower bound of the largest difference between the clocks of two shards.

    A shard's clock was read between request and response, so its difference from the operator's
    clock is known up to the time in between. A slow network therefore never looks like skew.
    """
    low, high = [], []
    for reading in snapshot.readings.values():
        if reading.state is not None:
            low.append(reading.state.wall_ns - reading.answered_ns)
            high.append(reading.state.wall_ns - reading.asked_ns)
    return max(0, max(low) - min(high)) if low else 0


def _shard_failure(
    snapshot: ReplaySnapshot, spec: TraceReplaySpec, job: Object, failed: Object
) -> ReplayOutcome:
    started = bool((snapshot.replay.get("status") or {}).get("startTime"))
    reason = (true_condition(job, "Failed") or true_condition(job, "FailureTarget") or {}).get(
        "reason"
    )
    if reason == "DeadlineExceeded":
        text = f"the shards did not end within spec.deadlineSeconds, {spec.deadline_seconds} s"
        return invalid("DeadlineExceeded", text)
    if stop := describe_stop(job, failed):
        return invalid("ShardLost", f"a pod of a shard {stop}; its requests are not repeated")
    name, terminated = failed["metadata"]["name"], terminated_of(failed)
    message = str(terminated.get("message") or "")
    result = decode_message(message)
    detail = message.strip() if result is None else result.message
    detail = detail or f"{terminated.get('reason', 'it was lost')}"
    if not started:
        return invalid("ShardFailed", f"pod {name} failed before the start: {detail}")
    code = terminated.get("exitCode")
    ended = f"exit code {code}" if isinstance(code, int) else "without an exit code"
    return invalid("ShardLost", f"pod {name} ended during the run ({ended}): {detail}")


# --- Merging --------------------------------------------------------------------------------


def _create_merge(
    snapshot: ReplaySnapshot,
    spec: TraceReplaySpec,
    run: ReplayRun,
    shards: Object,
    installation: Installation,
) -> ReplayDecision:
    """Create the Job that merges the records, and compares the run if the gate says so.

    A rejected creation is repeated for as long as the shards may take to arm.
    """
    merges = spec.shards > 1
    text = (
        "the records of the shards are merged"
        if merges
        else "the run is compared with its baseline"
    )
    if snapshot.rejected:
        text = f"Job {run.merge_job} cannot be created: {snapshot.rejected}"
        ended = (shards.get("status") or {}).get("completionTime")
        ended_s = snapshot.unix_ns // NS_PER_S if ended is None else _parse_time_s(ended)
        if ended_s + spec.arm_deadline_seconds <= snapshot.unix_ns / NS_PER_S:
            reason = "MergeFailed" if merges else "ComparisonFailed"
            return finish(snapshot, spec, invalid(reason, text))
    status = running_status(snapshot, "Merging" if merges else "Comparing", text)
    create = Create(body=merge_job(run, spec, installation))
    return ReplayDecision(actions=(*write_status(snapshot, status), create))


def _follow_merge(
    snapshot: ReplaySnapshot, spec: TraceReplaySpec, run: ReplayRun, job: Object
) -> ReplayDecision:
    pods = pods_of(snapshot.pods, run.merge_job)
    compares = spec.gate is not None and spec.gate.compares
    # A comparison follows the merge in an init container, or the run of the only shard.
    merged = result_of(pods, initial=True)
    if not compares:
        judged = result_of(pods)
    else:
        compared = ab_result_of(pods)
        if compared is not None and compared.verdict is not None:
            whole = merged or result_of(pods_of(snapshot.pods, run.shards_job))
            return finish(snapshot, spec, _compared(run, compared, whole))
        judged = None if merged is None or merged.valid else merged
    if judged is not None:
        return finish(snapshot, spec, _judged(run, judged))
    ends = [terminated_of(pod) for pod in pods]
    results = [decode_message(str(ended.get("message") or "")) for ended in ends]
    is_permanent = any(
        ended.get("exitCode") == ExitCode.USAGE
        and result is not None
        and result.reason != REASON_UNREACHABLE
        for ended, result in zip(ends, results, strict=True)
    )
    if is_permanent or true_condition(job, "Failed") or true_condition(job, "Complete"):
        messages = [str(ended.get("message") or "") for ended in ends]
        errors = [result.message for result in results if result is not None]
        text = next(iter([*errors, *filter(None, messages)]), "its pods left no message")
        reason = "ComparisonFailed" if compares and (merged or spec.shards == 1) else "MergeFailed"
        return finish(snapshot, spec, invalid(reason, f"Job {run.merge_job}: {text}"))
    return ReplayDecision()


# --- the outcome ----------------------------------------------------------------------------


def _judged(run: ReplayRun, result: ReplayResult) -> ReplayOutcome:
    assert result.verdict is not None, "only results with a verdict are judged"
    return ReplayOutcome(
        verdict=result.verdict,
        reason=result.reason,
        message=result.message[:MAX_MESSAGE],
        requests=result.requests,
        report=run.report,
    )


def _compared(run: ReplayRun, compared: ABResult, whole: ReplayResult | None) -> ReplayOutcome:
    """Return the outcome of a comparison; `whole` is the verdict on the run alone, if known."""
    assert compared.verdict is not None, "only results with a verdict are judged"
    return ReplayOutcome(
        verdict=compared.verdict,
        reason=compared.reason,
        message=compared.message[:MAX_MESSAGE],
        interval=compared.interval,
        requests=None if whole is None else whole.requests,
        report=run.report,
    )


def _clean_up(snapshot: ReplaySnapshot) -> list[ReplayAction]:
    """Delete Jobs that still run, and finished replays beyond the history limit."""
    uid = snapshot.replay["metadata"]["uid"]
    actions: list[ReplayAction] = []
    for job in snapshot.jobs:
        pods = pods_of(snapshot.pods, job["metadata"]["name"])
        ended = true_condition(job, "Failed") or true_condition(job, "Complete")
        if (
            not ended
            and not pods_ended(job, pods)
            and controlled_by(job, uid)
            and "deletionTimestamp" not in job["metadata"]
        ):
            metadata = job["metadata"]
            actions.append(Delete(kind=JOB.name, name=metadata["name"], uid=metadata["uid"]))
    for replay in _superseded(snapshot):
        metadata = replay["metadata"]
        actions.append(Delete(kind=TRACEREPLAY.name, name=metadata["name"], uid=metadata["uid"]))
    return actions


def _superseded(snapshot: ReplaySnapshot) -> list[Object]:
    """Return the finished replays of the same series beyond the limit of the newest one."""
    series = snapshot.replay["metadata"].get("generateName")
    if not series:
        return []
    finished = [
        replay
        for replay in snapshot.siblings
        if replay["metadata"].get("generateName") == series and is_finished(replay)
    ]
    finished.sort(key=_age_key, reverse=True)
    limit = (finished[0].get("spec") or {}).get("historyLimit") if finished else None
    if not isinstance(limit, int):
        return []
    return [replay for replay in finished[limit:] if "deletionTimestamp" not in replay["metadata"]]


def _age_key(replay: Object) -> tuple[str, str]:
    return replay["metadata"]["creationTimestamp"], replay["metadata"]["name"]


# --- times -----------------------------------------------------------------------------------


def _arm_wait_s(snapshot: ReplaySnapshot, spec: TraceReplaySpec) -> float:
    """Return the seconds until the arming deadline, negative after it."""
    created_s = _parse_time_s(snapshot.replay["metadata"]["creationTimestamp"])
    return created_s + spec.arm_deadline_seconds - snapshot.unix_ns / NS_PER_S


def _parse_time_s(text: str) -> int:
    return int(datetime.fromisoformat(text).astimezone(UTC).timestamp())
