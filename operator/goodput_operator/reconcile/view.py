"""A snapshot taken apart: whose objects these are, and what pods and Deployments say.

How the API server writes Deployments is known here alone; of pods, `troubles` reads why they wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from goodput_core.contract import (
    OBJECT_LABEL_REVISION,
    OBJECT_LABEL_ROLE,
    ROLE_ENGINE,
    ROLE_ROUTER,
)
from goodput_core.control import ReplicaPhase
from goodput_operator.kube.objects import (
    Object,
    conditions_of,
    controlled_by,
    has_ended,
    is_ready,
)
from goodput_operator.render.metadata import Owner

if TYPE_CHECKING:
    from goodput_operator.reconcile.snapshot import Snapshot

__all__ = ["Child", "PodView", "View", "Workload", "view_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One object of the cluster in a place that is ours.

    Args:
        body: it.
        ours: whether it carries our controller reference.
    """

    body: Object
    ours: bool

    @property
    def uid(self) -> str:
        """Its uid."""
        return str(self.body["metadata"]["uid"])

    @property
    def version(self) -> str:
        """Its resourceVersion."""
        return str(self.body["metadata"].get("resourceVersion", ""))

    @property
    def leaving(self) -> bool:
        """Whether it is being deleted."""
        return "deletionTimestamp" in self.body["metadata"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a Deployment says of itself.

    Args:
        name: its name.
        uid: its uid.
        revision: the revision that it stands for; empty for routers.
        wanted: replicas that it is asked for.
        pods: that it has, terminating ones not counted.
        ready: of these.
        available: of these, ready for a moment already.
        current: whether it has taken in what it is asked for and all pods have its template.
        conditions: its conditions, by type.
    """

    name: str
    uid: str
    revision: str
    wanted: int
    pods: int
    ready: int
    available: int
    current: bool
    conditions: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod.

    Args:
        body: it.
        role, revision: from its labels.
        ready: whether it says that it is.
        leaving: whether it terminates.
    """

    body: Object
    role: str
    revision: str
    ready: bool
    leaving: bool

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Its uid."""
        return str(self.body["metadata"]["uid"])

    @property
    def phase(self) -> ReplicaPhase:
        """Where an engine is in its life."""
        if self.leaving:
            return ReplicaPhase.DRAINING
        return ReplicaPhase.READY if self.ready else ReplicaPhase.STARTING


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A snapshot taken apart.

    Args:
        owner: the service.
        generation: of its spec.
        status: as it is stored.
        children: by kind and name.
        engines: pods of engines, those that ended not among them.
        routers: pods of routers, likewise.
    """

    owner: Owner
    generation: int
    status: Mapping[str, Any]
    children: Mapping[tuple[str, str], Child]
    engines: tuple[PodView, ...]
    routers: tuple[PodView, ...]

    def ours(self, kind: str) -> list[Child]:
        """Those of a kind that are ours and stay."""
        return [
            child
            for (one, _), child in self.children.items()
            if one == kind and child.ours and not child.leaving
        ]

    def workloads(self, role: str) -> list[Workload]:
        """Our Deployments of a role."""
        return [
            _workload(child.body)
            for child in self.ours("Deployment")
            if _selected(child.body).get(OBJECT_LABEL_ROLE) == role
        ]


def view_of(snapshot: Snapshot) -> View:
    """Take a snapshot apart."""
    service = snapshot.service
    metadata = service["metadata"]
    owner = Owner(name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])
    pods = [pod for body in snapshot.pods if (pod := _pod(body)) is not None]
    return View(
        owner=owner,
        generation=metadata.get("generation", 0),
        status=service.get("status") or {},
        children={
            (body["kind"], body["metadata"]["name"]): Child(
                body=body, ours=controlled_by(body, owner.uid)
            )
            for body in snapshot.objects
        },
        engines=tuple(pod for pod in pods if pod.role == ROLE_ENGINE),
        routers=tuple(pod for pod in pods if pod.role == ROLE_ROUTER),
    )


def _labels(body: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = body["metadata"].get("labels") or {}
    return labels


def _selected(body: Object) -> Mapping[str, str]:
    """The labels of the pods that a Deployment selects: unlike its own, nobody can change them."""
    labels: Mapping[str, str] = body["spec"]["selector"].get("matchLabels") or {}
    return labels


def _workload(body: Object) -> Workload:
    metadata, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    wanted = spec.get("replicas", 1)
    pods = status.get("replicas", 0)
    seen = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
    return Workload(
        name=metadata["name"],
        uid=metadata["uid"],
        revision=_selected(body).get(OBJECT_LABEL_REVISION, ""),
        wanted=wanted,
        pods=pods,
        ready=status.get("readyReplicas", 0),
        available=status.get("availableReplicas", 0),
        current=seen and pods == wanted == status.get("updatedReplicas", 0),
        conditions=conditions_of(body),
    )


def _pod(body: Object) -> PodView | None:
    if has_ended(body):
        return None
    labels = _labels(body)
    return PodView(
        body=body,
        role=labels.get(OBJECT_LABEL_ROLE, ""),
        revision=labels.get(OBJECT_LABEL_REVISION, ""),
        ready=is_ready(body),
        leaving="deletionTimestamp" in body["metadata"],
    )
