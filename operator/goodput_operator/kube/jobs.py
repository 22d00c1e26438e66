"""Conditions, results and failures of the Jobs that replay, and of their pods."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Final

from goodput_core.errors import ExitCode
from goodput_core.replay_job import ABResult, ReplayResult, decode_ab_result, decode_message
from goodput_operator.kube.objects import JOB, conditions_by_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from goodput_operator.kube.objects import Object

__all__ = [
    "ab_result_of",
    "describe_failure",
    "describe_stop",
    "describe_unarmed",
    "failure_of",
    "has_started",
    "pods_ended",
    "pods_of",
    "result_of",
    "terminated_of",
    "true_condition",
]

_SIGNAL: Final = 128
"""A process that a signal ended has the exit code 128 plus its number."""
_STOPPED_BY_SIGTERM: Final = (ExitCode.INTERRUPTED, _SIGNAL + signal.SIGTERM)
_OUT_OF_MEMORY: Final = "OOMKilled"


def pods_of(pods: Iterable[Object], job: str) -> list[Object]:
    """Return the pods of a Job, in the order of their names."""
    found = (
        pod
        for pod in pods
        if any(
            owner.get("kind") == JOB.name and owner.get("name") == job
            for owner in pod["metadata"].get("ownerReferences") or ()
        )
    )
    return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))


def true_condition(job: Object, kind: str) -> Mapping[str, Any] | None:
    """Return a condition of a Job if it is True, else None."""
    found = conditions_by_type(job.get("status") or {}).get(kind)
    return found if found is not None and found.get("status") == "True" else None


def terminated_of(pod: Object) -> Mapping[str, Any]:
    """Return the end of the pod's container, or of an init container that failed; else empty."""
    if ended := _ended(pod, "containerStatuses"):
        return ended
    failed = _ended(pod, "initContainerStatuses")
    return failed if failed.get("exitCode") else {}


def _ended(pod: Object, field: str) -> Mapping[str, Any]:
    for container in (pod.get("status") or {}).get(field) or ():
        if ended := (container.get("state") or {}).get("terminated"):
            return dict(ended)
    return {}


def _stopped_then_ended_at(pod: Object) -> tuple[bool, str, str]:
    # Times have a resolution of one second, so pods that were stopped come last.
    metadata, ended = pod["metadata"], terminated_of(pod).get("finishedAt") or "9999"
    return "deletionTimestamp" in metadata, str(ended), str(metadata["name"])


def result_of(pods: Sequence[Object], *, initial: bool = False) -> ReplayResult | None:
    """Return the verdict in a pod's termination message; None if there is none.

    Args:
        pods: pods of a Job.
        initial: True for the message of the init container.
    """
    for pod in pods:
        ended = _ended(pod, "initContainerStatuses") if initial else terminated_of(pod)
        result = decode_message(str(ended.get("message") or ""))
        if result is not None and result.verdict is not None:
            return result
    return None


def ab_result_of(pods: Sequence[Object]) -> ABResult | None:
    """Return the result or the error of a comparison in a pod's message; None without one."""
    for pod in pods:
        result = decode_ab_result(str(terminated_of(pod).get("message") or ""))
        if result is not None:
            return result
    return None


def describe_unarmed(
    job: str, pods: Sequence[Object], details: Sequence[str] = (), *, expected: int = 1
) -> str:
    """Return what the pods of a Job wait for, as a clause; empty if it is not known.

    Args:
        job: name of the Job.
        pods: its pods.
        details: failures of requests to the pods.
        expected: number of pods that the Job creates.
    """
    for pod in pods:
        status, name = pod.get("status") or {}, pod["metadata"]["name"]
        scheduled = conditions_by_type(status).get("PodScheduled", {})
        if scheduled.get("status") == "False":
            return f"; pod {name} is not scheduled: {scheduled.get('message', '')}"
        for container in status.get("containerStatuses") or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting:
                reason, message = waiting.get("reason", ""), waiting.get("message", "")
                return f"; pod {name} waits: {reason} {message}".rstrip()
    if len(pods) < expected:
        # Only an Event has the cause, such as a quota.
        return f"; {len(pods)} of {expected} pods exist; `kubectl describe job {job}` shows why"
    return next((f"; {detail}" for detail in details if detail), "")


def failure_of(job: Object, pods: Sequence[Object]) -> Object | None:
    """Return a failed pod, or the Job if a pod of it failed and is gone; None without a failure."""
    failed = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Failed"]
    if failed:
        # Of several pods, the first to end: the others are then stopped because of it.
        return min(failed, key=_stopped_then_ended_at)
    if true_condition(job, "Failed") or true_condition(job, "FailureTarget"):
        return job
    return None


def pods_ended(job: Object, pods: Sequence[Object]) -> bool:
    """True if all pods of a Job ended and no other follows, so that it ends with their logs.

    The containers show it some seconds before the phase of the pod does.
    """
    spec = job.get("spec") or {}
    last = spec.get("backoffLimit") == 0
    final = {0}
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or ():
        if rule["action"] == "FailJob":
            final.update((rule.get("onExitCodes") or {}).get("values") or ())
    ends = [terminated_of(pod) for pod in pods]
    return bool(ends) and all(end and (last or end.get("exitCode") in final) for end in ends)


def has_started(pod: Object) -> bool:
    """True if a container of the pod runs."""
    statuses: Sequence[Any] = (pod.get("status") or {}).get("containerStatuses") or ()
    return any("running" in (one.get("state") or {}) for one in statuses)


def describe_stop(job: Object, failed: Object) -> str:
    """Return how the pods of a failed Job were stopped from outside, as a predicate.

    A deleted pod has ended with the error of its signal or is already gone. Both read alike.

    Args:
        job: the Job.
        failed: the failed pod, or the Job if that pod is gone.

    Returns:
        An empty string if the pod ended by itself.
    """
    if failed is job:
        return "was deleted"
    status, ended = failed.get("status") or {}, terminated_of(failed)
    code = ended.get("exitCode")
    deleted = "deletionTimestamp" in failed["metadata"]
    disruption = conditions_by_type(status).get("DisruptionTarget") or {}
    if not deleted and not disruption and not status.get("reason"):
        return "was stopped by SIGTERM" if code in _STOPPED_BY_SIGTERM else ""
    killed = code == _SIGNAL + signal.SIGKILL and ended.get("reason") != _OUT_OF_MEMORY
    if not killed and code is not None and code not in _STOPPED_BY_SIGTERM:
        return ""
    cause = str(disruption.get("message") or status.get("message") or status.get("reason") or "")
    return f"was {'deleted' if deleted else 'stopped'}{f': {cause}' if cause else ''}"


def describe_failure(job: Object, failed: Object) -> str:
    """Return the reason of a Job that failed without a result.

    Args:
        job: the Job.
        failed: the failed pod, or the Job if that pod is gone.
    """
    name = job["metadata"]["name"]
    condition = true_condition(job, "Failed") or true_condition(job, "FailureTarget") or {}
    stop = describe_stop(job, failed)
    if stop and condition.get("reason") == "DeadlineExceeded":
        return f"Job {name} did not end within its deadline"
    if stop:
        return f"the pod of Job {name} {stop}"
    ended = terminated_of(failed)
    detail = str(ended.get("message") or "").strip() or str(ended.get("reason") or "it was lost")
    return f"pod {failed['metadata']['name']} of the comparison ended without a verdict: {detail}"
