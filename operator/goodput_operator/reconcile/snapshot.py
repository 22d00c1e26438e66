"""The input of a decision: the state of one service in the cluster at one time.

`observe` takes a `Snapshot`, and `decide` reads nothing else. Objects of the cluster are the
dictionaries that the API server sent, and are never changed. Only this module reads the fields of
Deployments; `problems` also reads why the containers of pods wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from goodput_core.contract import (
    OBJECT_LABEL_REVISION,
    OBJECT_LABEL_ROLE,
    ROLE_BASELINE,
    ROLE_CANDIDATE,
    ROLE_ENGINE,
    ROLE_ROUTER,
)
from goodput_core.control import ReplicaPhase, ServiceState, Setpoint
from goodput_core.replay_job import ABState
from goodput_core.spec.llmservice import LLMServiceSpec
from goodput_operator.control.measures import Measures
from goodput_operator.kube.managed_fields import ManagedField, fields_of_others
from goodput_operator.kube.objects import (
    MANAGER,
    Object,
    conditions_by_type,
    controlled_by,
    has_ended,
    is_ready,
)
from goodput_operator.reconcile.attainment import AttainmentStatus
from goodput_operator.render.metadata import Owner

__all__ = [
    "ApplyAttempt",
    "Child",
    "ImagePin",
    "Memory",
    "PodView",
    "Reported",
    "Settled",
    "Snapshot",
    "View",
    "Workload",
    "view_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyAttempt:
    """An apply to an existing object, and the object's version before it.

    If the same apply is due again at the same version, the API server accepted the earlier one
    without changing the object. The difference then cannot be repaired, so the apply is not
    repeated.

    Args:
        kind, name: kind and name of the object.
        digest: digest of the applied body.
        version: the object's resourceVersion before the apply.
    """

    kind: str
    name: str
    digest: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePin:
    """The answer of a registry to the question which digest a tag has.

    Args:
        image: name of the image with the tag.
        pinned: name of the image with the digest; empty without one.
        problem: why there is no digest; empty if there is one.
        temporary: True if the problem can pass without a change by a person.
        retry_at_ns: time at which the registry is asked again without a digest.
    """

    image: str
    pinned: str = ""
    problem: str = ""
    temporary: bool = True
    retry_at_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A state with nothing to apply; the objects are rendered again only after it changes.

    Args:
        inputs: all inputs of the rendering.
        versions: kind, name and resourceVersion of each object.
    """

    inputs: tuple[object, ...]
    versions: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """States that an Event has reported. They are reported again only after they have changed.

    Args:
        unmeasured: pod and reason of each ready pod without measurements.
        rejecting: pods that rejected their limits.
        setpoint: limits and replicas after the last measured interval; None before the first. If
            the spec changes between two intervals, the change is reported after the second
            interval.
    """

    unmeasured: frozenset[tuple[str, str]] = frozenset()
    rejecting: frozenset[str] = frozenset()
    setpoint: Setpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """State kept from one reconciliation of a service to the next.

    A restarted operator begins with an empty memory. State that must survive is stored in the
    service's status and ConfigMap.

    Args:
        law: state of the control laws.
        setpoint: limits and replicas in force; None selects those of the ConfigMap.
        first_seen_ns: time of the first observation of each engine pod by uid; None once the pod
            was ready, and for pods that existed before the operator started.
        startups_ns: times from the first observation to readiness, of the latest pods.
        measured_ns: end of the last measured interval; None before the first.
        attainment: attainment after the last measured interval; None before the first, and while
            suspended.
        tokens: uids of the ControllerRevisions whose Secret was created.
        reported: states that an Event has reported.
        spec: generation and validated spec; None if the spec was not validated or is invalid.
        settled: state with nothing to apply; None if an object was to be applied.
        attempts: applies to existing objects that the last reconciliation decided.
        status_written_ns: time of the last write of the status; None before this operator's first.
        tenants_problem: the first router that does not use its present file of tenants, and why;
            empty if there is none.
    """

    law: ServiceState = field(default_factory=ServiceState)
    setpoint: Setpoint | None = None
    first_seen_ns: tuple[tuple[str, int | None], ...] = ()
    startups_ns: tuple[int, ...] = ()
    measured_ns: int | None = None
    attainment: AttainmentStatus | None = None
    tokens: tuple[str, ...] = ()
    reported: Reported = field(default_factory=Reported)
    spec: tuple[int, LLMServiceSpec] | None = None
    settled: Settled | None = None
    attempts: tuple[ApplyAttempt, ...] = ()
    status_written_ns: int | None = None
    tenants_problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One service and its objects.

    Args:
        now_ns: monotonic time, for intervals.
        unix_s: seconds since 1970, for timestamps in conditions.
        service: the stored LLMService.
        objects: objects of the namespace that carry the service's label or one of its names,
            whether the service controls them or not. Secrets are not included, because the operator
            is not allowed to read them.
        pods: pods of the service: its engines, its routers and those of a gate.
        measures: measurements of the control interval that just ended, in every control mode; None
            if none ended or the service is suspended.
        memory: memory of the last reconciliation.
        failures: messages of the last reconciliation's rejected actions by kind and name; the kind
            is "Secret" for a `CreateToken` and "Pod" for a `Push`.
        delayed: messages of the last reconciliation's temporarily failed actions, by kind and name.
        undeclared: optional fields of the status that the definition in the cluster lacks, because
            it is of another version: `learnt`, `gate` or `summary.gate`.
        gate_state: progress that the pod of a gate's Job reported; None if none was read.
        nodes: nodes of a gate's engines, if they run on several that could be read.
        pin: digest of the image that the last decision asked for; None if it asked for none.
    """

    now_ns: int
    unix_s: int
    service: Object
    objects: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    measures: Measures | None = None
    memory: Memory = field(default_factory=Memory)
    failures: Mapping[tuple[str, str], str] = field(default_factory=dict)
    delayed: Mapping[tuple[str, str], str] = field(default_factory=dict)
    undeclared: frozenset[str] = frozenset()
    gate_state: ABState | None = None
    nodes: tuple[Object, ...] = ()
    pin: ImagePin | None = None


@dataclass(frozen=True, kw_only=True)
class Child:
    """An object of the cluster under a kind and name that the service uses.

    Args:
        body: the object.
        ours: True if it carries our controller reference.
    """

    body: Object
    ours: bool

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Its uid."""
        return str(self.body["metadata"]["uid"])

    @property
    def version(self) -> str:
        """Its resourceVersion."""
        return str(self.body["metadata"].get("resourceVersion", ""))

    @property
    def deleting(self) -> bool:
        """True if it is being deleted."""
        return "deletionTimestamp" in self.body["metadata"]

    @cached_property
    def foreign_fields(self) -> tuple[ManagedField, ...]:
        """Fields that other managers own, except fields of the status."""
        return fields_of_others(self.body, MANAGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """State of a Deployment.

    Args:
        name, uid: name and uid of the Deployment.
        revision: its engine revision; empty for routers.
        desired: its `spec.replicas`.
        pods: number of pods, except terminating ones.
        ready: number of ready pods.
        available: number of pods that have been ready for `minReadySeconds`.
        current: True if its controller has observed the spec and all pods have the template.
        conditions: its conditions by type.
    """

    name: str
    uid: str
    revision: str
    desired: int
    pods: int
    ready: int
    available: int
    current: bool
    conditions: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod of an engine or router.

    Args:
        body: the object.
        role, revision: role and revision from its labels.
        ready: True if its condition `Ready` is True.
        terminating: True if it is being deleted.
    """

    body: Object
    role: str
    revision: str
    ready: bool
    terminating: bool

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.body["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Its uid."""
        return str(self.body["metadata"]["uid"])

    @property
    def node(self) -> str:
        """Name of its node; empty before it is scheduled."""
        return str((self.body.get("spec") or {}).get("nodeName") or "")

    @property
    def phase(self) -> ReplicaPhase:
        """Its phase as a replica."""
        if self.terminating:
            return ReplicaPhase.DRAINING
        return ReplicaPhase.READY if self.ready else ReplicaPhase.STARTING


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The objects of a snapshot, classified.

    Args:
        owner: the service.
        generation: generation of its spec.
        status: its stored status.
        children: objects with the service's label or one of its names, by kind and name.
        engines: pods of engines, except ended ones.
        routers: pods of routers, except ended ones.
        trials: pods of the candidates and baselines of gates, except ended ones.
    """

    owner: Owner
    generation: int
    status: Mapping[str, Any]
    children: Mapping[tuple[str, str], Child]
    engines: tuple[PodView, ...]
    routers: tuple[PodView, ...]
    trials: tuple[PodView, ...]

    def foreign(self, kind: str, *names: str) -> tuple[tuple[str, str], ...]:
        """Return kind and name of the existing objects of these names that it does not control."""
        keys = [(kind, name) for name in names]
        return tuple(key for key in keys if key in self.children and not self.children[key].ours)

    def ours(self, kind: str) -> list[Child]:
        """Return the objects of a kind that the service controls and that are not being deleted."""
        return [
            child
            for (child_kind, _), child in self.children.items()
            if child_kind == kind and child.ours and not child.deleting
        ]

    def workloads(self, role: str) -> list[Workload]:
        """Return the service's Deployments of a role."""
        return [
            _workload(child.body)
            for child in self.ours("Deployment")
            if _pod_selector(child.body).get(OBJECT_LABEL_ROLE) == role
        ]


def view_of(snapshot: Snapshot) -> View:
    """Classify the objects of a snapshot."""
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
        trials=tuple(pod for pod in pods if pod.role in {ROLE_BASELINE, ROLE_CANDIDATE}),
    )


def _pod_selector(body: Object) -> Mapping[str, str]:
    """Return a Deployment's pod selector, which is immutable, unlike its own labels."""
    labels: Mapping[str, str] = body["spec"]["selector"].get("matchLabels") or {}
    return labels


def _workload(body: Object) -> Workload:
    metadata, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    desired = spec.get("replicas", 1)
    pods = status.get("replicas", 0)
    observed = status.get("observedGeneration", 0) >= metadata.get("generation", 0)
    return Workload(
        name=metadata["name"],
        uid=metadata["uid"],
        revision=_pod_selector(body).get(OBJECT_LABEL_REVISION, ""),
        desired=desired,
        pods=pods,
        ready=status.get("readyReplicas", 0),
        available=status.get("availableReplicas", 0),
        current=observed and pods == desired == status.get("updatedReplicas", 0),
        conditions=conditions_by_type(status),
    )


def _pod(body: Object) -> PodView | None:
    if has_ended(body):
        return None
    labels = body["metadata"].get("labels") or {}
    return PodView(
        body=body,
        role=labels.get(OBJECT_LABEL_ROLE, ""),
        revision=labels.get(OBJECT_LABEL_REVISION, ""),
        ready=is_ready(body),
        terminating="deletionTimestamp" in body["metadata"],
    )
