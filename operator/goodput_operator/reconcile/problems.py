"""Problems that prevent a service from matching its spec, with the reported messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import KIND_LLMSERVICE, ROLE_ENGINE, ROLE_ROUTER

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_core.spec.status import GateStatus
    from goodput_operator.reconcile.rollout import Revisions
    from goodput_operator.reconcile.snapshot import ImagePin, PodView, View, Workload

__all__ = [
    "Problem",
    "ProblemReason",
    "describe_unready",
    "has_run",
    "image_not_resolved",
    "name_conflict",
    "problems_of",
    "problems_of_workload",
    "prometheus_not_allowed",
    "rejection_of",
    "rollout_paused",
    "tenants_not_replaced",
]

_MAX_MESSAGE: Final = 1000
_CRASHES: Final = 2
"""Restarts from which a container that is not ready counts as crashing repeatedly."""
_STABLE_S: Final = 600
"""Length of a run after which the kubelet no longer counts the earlier crashes."""


class ProblemReason(StrEnum):
    """Kinds of problems, the most severe first; conditions show the first that applies."""

    INVALID_SPEC = "InvalidSpec"
    """The spec violates a rule."""
    NOT_BUILT = "NotBuilt"
    """The spec requests a feature that this version does not implement."""
    NAME_CONFLICT = "NameConflict"
    """An object has a name that the service needs, but the service does not control it."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """A quota does not allow an object or a pod."""
    REFUSED = "Refused"
    """The API server or an admission webhook rejected an object, or a pod of a Deployment."""
    IMAGE_PULL_FAILED = "ImagePullFailed"
    """A pod cannot pull its image."""
    CONTAINER_CONFIG = "ContainerConfig"
    """A container cannot be created: a Secret or a volume is missing."""
    CRASH_LOOPING = "CrashLooping"
    """A container exits repeatedly."""
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    """A Deployment made no progress within its deadline."""
    IMAGE_NOT_RESOLVED = "ImageNotResolved"
    """The registry has no digest for the tag of a new revision, or denies it."""
    PROMETHEUS_NOT_ALLOWED = "PrometheusNotAllowed"
    """The spec names a Prometheus server that the installation does not allow."""
    TENANTS_NOT_REPLACED = "TenantsNotReplaced"
    """A router cannot use the present Secret of tenants, and keeps the last valid content."""
    ROLLOUT_PAUSED = "RolloutPaused"
    """The gate of the update revision rejected it, or needs a decision."""
    UNSCHEDULABLE = "Unschedulable"
    """No node fits a pod; a node may be added."""
    RETRYING = "Retrying"
    """The API server, or an admission webhook, is temporarily unavailable."""


_CAPACITY: Final = frozenset({ProblemReason.QUOTA_EXCEEDED, ProblemReason.UNSCHEDULABLE})
_SEVERITY: Final = {reason: index for index, reason in enumerate(ProblemReason)}
_WAITING: Final[Mapping[str, ProblemReason]] = {
    "ErrImagePull": ProblemReason.IMAGE_PULL_FAILED,
    "ImagePullBackOff": ProblemReason.IMAGE_PULL_FAILED,
    "InvalidImageName": ProblemReason.IMAGE_PULL_FAILED,
    "ErrImageNeverPull": ProblemReason.IMAGE_PULL_FAILED,
    "CreateContainerConfigError": ProblemReason.CONTAINER_CONFIG,
    "CreateContainerError": ProblemReason.CONTAINER_CONFIG,
    "CrashLoopBackOff": ProblemReason.CRASH_LOOPING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem.

    Args:
        reason: kind of the problem.
        message: the affected object and the reported message.
        limits_scaling: True if the problem keeps pods from being created or scheduled.
    """

    reason: ProblemReason
    message: str
    limits_scaling: bool = False

    @property
    def stalls(self) -> bool:
        """True if only a person or another system can solve the problem."""
        return self.reason not in {ProblemReason.UNSCHEDULABLE, ProblemReason.RETRYING}

    @property
    def is_capacity(self) -> bool:
        """True if a quota or the nodes lack room, and not if a volume is missing."""
        return self.reason in _CAPACITY and "persistentvolumeclaim" not in self.message


def name_conflict(foreign: Iterable[tuple[str, str]]) -> list[Problem]:
    """Return one problem that names all objects in conflict, or no problem if there are none."""
    names = [f"{kind} {name}" for kind, name in foreign]
    if not names:
        return []
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    message = (
        f"{', '.join(names)} {verb} not controlled by this LLMService, which needs the "
        f"{'name' if len(names) == 1 else 'names'}; rename or delete {them}"
    )
    return [Problem(reason=ProblemReason.NAME_CONFLICT, message=message)]


def rollout_paused(gate: GateStatus | None) -> list[Problem]:
    """Return the problem of a gate that holds its revision for good; no problem otherwise."""
    if gate is None or gate.phase not in {"Failed", "Paused"}:
        return []
    message = f"{gate.baseline} keeps serving, because the gate of {gate.revision} has "
    verdict = "no verdict" if gate.verdict is None else f"the verdict {gate.verdict.value}"
    message += f"{verdict} ({gate.reason}): {gate.message}"
    return [_problem(ProblemReason.ROLLOUT_PAUSED, message)]


def prometheus_not_allowed(spec: LLMServiceSpec, allowed: Container[str]) -> list[Problem]:
    """Return the problem of a Prometheus server that is not allowed; no problem otherwise."""
    server = spec.control.prometheus
    if server is None or server.url in allowed:
        return []
    message = (
        "spec.control.prometheus.url: this operator is not allowed to query the server; remove the "
        "field, or add the URL to the chart's prometheus.allowedUrls"
    )
    return [Problem(reason=ProblemReason.PROMETHEUS_NOT_ALLOWED, message=message)]


def image_not_resolved(revisions: Revisions, pin: ImagePin | None) -> list[Problem]:
    """Return the problem of a new revision whose image has no digest yet; no problem otherwise.

    Args:
        revisions: revisions of the service.
        pin: the answer of the registry; None before it.
    """
    if not revisions.unresolved:
        return []
    message = f"{revisions.update.name} waits for the digest of {revisions.tagged_image}"
    if pin is None or not pin.problem:
        return [_problem(ProblemReason.RETRYING, message)]
    reason = ProblemReason.RETRYING if pin.temporary else ProblemReason.IMAGE_NOT_RESOLVED
    return [_problem(reason, f"{message}: {pin.problem}")]


def tenants_not_replaced(spec: LLMServiceSpec, problem: str) -> list[Problem]:
    """Return the problem of a Secret of tenants that a router cannot use; no problem otherwise.

    Args:
        spec: spec of the service.
        problem: a router and its problem with the Secret; empty if there is none.
    """
    secret = spec.router.tenants_secret
    if secret is None or spec.suspend or not problem:
        return []
    message = f"Secret {secret.name}, key {secret.key}: the last valid tenants stay in use, because"
    return [_problem(ProblemReason.TENANTS_NOT_REPLACED, f"{message} {problem}")]


def problems_of(
    view: View, failures: Mapping[tuple[str, str], str], delayed: Mapping[tuple[str, str], str]
) -> list[Problem]:
    """Return all problems of actions, Deployments and pods, the most severe first.

    Args:
        view: classified objects of the service.
        failures: messages of rejected actions by kind and name.
        delayed: messages of temporarily failed actions by kind and name.
    """
    workloads = (*view.workloads(ROLE_ENGINE), *view.workloads(ROLE_ROUTER))
    problems = [*_action_problems(failures, delayed), *_workload_problems(workloads)]
    for pod in (*view.engines, *view.routers):
        problems += _pod_problems(pod)
    return sorted(problems, key=lambda problem: _SEVERITY[problem.reason])


def _action_problems(
    failures: Mapping[tuple[str, str], str], delayed: Mapping[tuple[str, str], str]
) -> Iterator[Problem]:
    for (kind, name), message in sorted(failures.items()):
        if kind not in {"Pod", "Event"}:
            yield rejection_of(f"{kind} {name}", message)
    for (kind, name), message in sorted(delayed.items()):
        # Only a status write that succeeds could report that a status write was delayed.
        if kind not in {"Event", KIND_LLMSERVICE}:
            yield _problem(ProblemReason.RETRYING, f"{kind} {name}: {message}")


def problems_of_workload(workload: Workload, pods: Iterable[PodView]) -> list[Problem]:
    """Return the problems of one Deployment and its pods, the most severe first."""
    problems = [*_workload_problems([workload])]
    for pod in pods:
        problems += _pod_problems(pod)
    return sorted(problems, key=lambda problem: _SEVERITY[problem.reason])


def _workload_problems(workloads: Iterable[Workload]) -> Iterator[Problem]:
    for workload in workloads:
        failure = workload.conditions.get("ReplicaFailure", {})
        if failure.get("status") == "True":
            name, message = f"pods of {workload.name}", failure.get("message", "")
            yield rejection_of(name, message, limits_scaling=True)
        progress = workload.conditions.get("Progressing", {})
        if progress.get("reason") == "ProgressDeadlineExceeded" and workload.desired:
            yield _problem(ProblemReason.PROGRESS_DEADLINE_EXCEEDED, progress.get("message", ""))


def _pod_problems(pod: PodView) -> Iterator[Problem]:
    if pod.terminating:
        return
    status = pod.body.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            message = f"pod {pod.name}: {condition.get('message', '')}"
            yield _problem(ProblemReason.UNSCHEDULABLE, message, limits_scaling=True)
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = _WAITING.get(waiting.get("reason", ""))
        if reason is None and _crashes_repeatedly(container, status):
            reason = ProblemReason.CRASH_LOOPING
        if reason is None:
            continue
        message = waiting.get("message", "")
        if reason is ProblemReason.CRASH_LOOPING:
            message = _describe_exit(container) or message
        yield _problem(reason, f"pod {pod.name}: {message}")


def _crashes_repeatedly(container: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """True if a container that crashed repeatedly runs again, and was not ready since then.

    The kubelet reports a crash loop only while it waits with the next start.

    Args:
        container: status of the container.
        status: status of its pod.
    """
    state = container.get("state") or {}
    run = state.get("running") or state.get("terminated") or {}
    last = (container.get("lastState") or {}).get("terminated") or {}
    if not run or not last or container.get("ready") or container.get("restartCount", 0) < _CRASHES:
        return False
    times = [last.get("startedAt"), last.get("finishedAt")]
    if all(times):
        began, ended = (datetime.fromisoformat(str(time)) for time in times)
        if (ended - began).total_seconds() >= _STABLE_S:
            return False
    changed = [
        condition.get("lastTransitionTime") or ""
        for condition in status.get("conditions") or ()
        if condition["type"] == "Ready"
    ]
    # Readiness that was lost after the start of this run was reached in this run.
    return not any(time > (run.get("startedAt") or time) for time in changed)


def has_run(pod: PodView) -> bool:
    """True if a container of the pod runs or has ended, so that its image and volumes are there."""
    return any(
        container.get("restartCount")
        or (container.get("state") or {}).keys() & {"running", "terminated"}
        for container in (pod.body.get("status") or {}).get("containerStatuses") or ()
    )


def describe_unready(problems: Sequence[Problem], pods: Iterable[PodView]) -> str:
    """Return the likeliest cause that pods are not ready; empty if none is known.

    A container that was just restarted is no problem, but says more than an exceeded deadline.

    Args:
        problems: problems of the pods and their Deployments, the most severe first.
        pods: the pods.
    """
    late = ProblemReason.PROGRESS_DEADLINE_EXCEEDED
    known = [problem.message for problem in problems if problem.reason is not late]
    known += [f"pod {pod.name}: {text}" for pod in pods if (text := _last_exit(pod))]
    known += [problem.message for problem in problems if problem.reason is late]
    return next(iter(known), "")


def _last_exit(pod: PodView) -> str:
    containers = (pod.body.get("status") or {}).get("containerStatuses") or ()
    return next(filter(None, map(_describe_exit, containers)), "")


def _describe_exit(container: Mapping[str, Any]) -> str:
    ended = (container.get("lastState") or {}).get("terminated") or {}
    if not ended:
        return ""
    lines = str(ended.get("message", "")).strip().splitlines()
    cause = f"exited with code {ended.get('exitCode')}"
    if ended.get("reason") == "OOMKilled":
        cause = "was killed because it ran out of memory"
    return f"the {container['name']} {cause}{f': {lines[-1]}' if lines else ''}"


def rejection_of(name: str, message: str, *, limits_scaling: bool = False) -> Problem:
    """Return the problem of an object that the API server rejected."""
    quota = "exceeded quota" in message
    reason = ProblemReason.QUOTA_EXCEEDED if quota else ProblemReason.REFUSED
    return _problem(reason, f"{name}: {message}", limits_scaling=limits_scaling)


def _problem(reason: ProblemReason, message: str, *, limits_scaling: bool = False) -> Problem:
    text = " ".join(message.split())[:_MAX_MESSAGE]
    return Problem(reason=reason, message=text, limits_scaling=limits_scaling)
