"""What stands in a service's way, in the words of whoever said so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import KIND_LLMSERVICE, ROLE_ENGINE, ROLE_ROUTER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from goodput_operator.reconcile.view import PodView, View

__all__ = ["Reason", "Trouble", "troubles"]

_MOST_WORDS: Final = 1000


class Reason(StrEnum):
    """Why a service does not get on; the first of several is the one that is told."""

    INVALID_SPEC = "InvalidSpec"
    """The manifest breaks a rule."""
    NOT_BUILT = "NotBuilt"
    """The manifest asks for what this version does not have."""
    NAME_CONFLICT = "NameConflict"
    """An object of somebody else stands under a name that the service needs."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """A quota denies an object or a pod."""
    REFUSED = "Refused"
    """The API server refused an object, or a controller a pod."""
    IMAGE_PULL_FAILED = "ImagePullFailed"
    """A pod cannot pull its image."""
    CONTAINER_CONFIG = "ContainerConfig"
    """A pod's container cannot be made: a Secret or a volume is missing."""
    CRASH_LOOPING = "CrashLooping"
    """A process ends again and again."""
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    """A workload has not become what it should be within its deadline."""
    PROMETHEUS_NOT_ALLOWED = "PrometheusNotAllowed"
    """The manifest names a Prometheus server that the operator may not ask."""
    UNSCHEDULABLE = "Unschedulable"
    """A pod finds no node; a node may still come."""
    RETRYING = "Retrying"
    """The API server, or a webhook that it asks, is not able to just now."""


_ORDER: Final = tuple(Reason)
_WAITING: Final[Mapping[str, Reason]] = {
    "ErrImagePull": Reason.IMAGE_PULL_FAILED,
    "ImagePullBackOff": Reason.IMAGE_PULL_FAILED,
    "InvalidImageName": Reason.IMAGE_PULL_FAILED,
    "ErrImageNeverPull": Reason.IMAGE_PULL_FAILED,
    "CreateContainerConfigError": Reason.CONTAINER_CONFIG,
    "CreateContainerError": Reason.CONTAINER_CONFIG,
    "CrashLoopBackOff": Reason.CRASH_LOOPING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One thing that stands in the way.

    Args:
        reason: which kind.
        message: what was said, and by or about whom.
        of_room: whether it keeps pods from being.
    """

    reason: Reason
    message: str
    of_room: bool = False

    @property
    def stalls(self) -> bool:
        """Whether it stays unless somebody does something."""
        return self.reason not in {Reason.UNSCHEDULABLE, Reason.RETRYING}


def troubles(
    view: View, failures: Mapping[tuple[str, str], str], delayed: Mapping[tuple[str, str], str]
) -> list[Trouble]:
    """Everything in the way, the worst first.

    Args:
        view: pods and Deployments.
        failures: what the API server answered to the last round, by kind and name.
        delayed: the same of what may pass by itself.
    """
    found = [*_refusals(failures), *_delays(delayed), *_of_workloads(view)]
    for pod in (*view.engines, *view.routers):
        found += _of_pod(pod)
    return sorted(found, key=lambda trouble: _ORDER.index(trouble.reason))


def _refusals(failures: Mapping[tuple[str, str], str]) -> Iterator[Trouble]:
    for (kind, name), words in sorted(failures.items()):
        if kind not in {"Pod", "Event"}:
            yield _refused(f"{kind} {name}", words)


def _delays(delayed: Mapping[tuple[str, str], str]) -> Iterator[Trouble]:
    """Of the service's own objects: who reads a status sees that it was written."""
    for (kind, name), words in sorted(delayed.items()):
        if kind not in {"Event", KIND_LLMSERVICE}:
            yield _trouble(Reason.RETRYING, f"{kind} {name}: {words}")


def _of_workloads(view: View) -> Iterator[Trouble]:
    for workload in (*view.workloads(ROLE_ENGINE), *view.workloads(ROLE_ROUTER)):
        failure = workload.conditions.get("ReplicaFailure", {})
        if failure.get("status") == "True":
            words = failure.get("message", "")
            yield replace(_refused(f"pods of {workload.name}", words), of_room=True)
        progress = workload.conditions.get("Progressing", {})
        if progress.get("reason") == "ProgressDeadlineExceeded" and workload.wanted:
            yield _trouble(Reason.PROGRESS_DEADLINE_EXCEEDED, progress.get("message", ""))


def _of_pod(pod: PodView) -> Iterator[Trouble]:
    if pod.leaving:
        return
    status = pod.body.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            said = condition.get("message", "")
            trouble = _trouble(Reason.UNSCHEDULABLE, f"pod {pod.name}: {said}")
            yield replace(trouble, of_room=True)
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = _WAITING.get(waiting.get("reason", ""))
        if reason is None:
            continue
        said = waiting.get("message", "")
        if reason is Reason.CRASH_LOOPING:
            said = _last_words(container) or said
        yield _trouble(reason, f"pod {pod.name}: {said}")


def _last_words(container: Mapping[str, Any]) -> str:
    ended = (container.get("lastState") or {}).get("terminated") or {}
    lines = str(ended.get("message", "")).strip().splitlines()
    how = f"ended with code {ended.get('exitCode')}"
    if ended.get("reason") == "OOMKilled":
        how = "was killed for want of memory"
    return f"the {container['name']} {how}{f': {lines[-1]}' if lines else ''}" if ended else ""


def _refused(what: str, words: str) -> Trouble:
    quota = "exceeded quota" in words
    return _trouble(Reason.QUOTA_EXCEEDED if quota else Reason.REFUSED, f"{what}: {words}")


def _trouble(reason: Reason, message: str) -> Trouble:
    return Trouble(reason=reason, message=" ".join(message.split())[:_MOST_WORDS])
