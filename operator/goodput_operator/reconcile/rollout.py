"""The revisions of a service, and the distribution of its engines over them during a rollout.

A rollout surges in steps. The engines of both revisions together exceed the service's replicas by a
quarter at most, rounded up. The old revision shrinks by the number of serving engines of the new
revision, so the number of serving engines never falls below the replicas of the service. If the new
revision loses engines, the stable revision (the one that served before) replaces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ROLE_ENGINE, ROLE_ROUTER
from goodput_operator.reconcile.actions import Delete
from goodput_operator.reconcile.gate_plan import GatePhase, read_record
from goodput_operator.reconcile.snapshot import Workload
from goodput_operator.render.base_resources import base_resources
from goodput_operator.render.config_map import config_map
from goodput_operator.render.gate import gate_deployment
from goodput_operator.render.image_names import unpinned
from goodput_operator.render.revisions import (
    Revision,
    engine_deployment,
    engine_revision,
    read_revision,
    router_deployment,
    router_revision,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.control import Setpoint
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.reconcile.snapshot import ImagePin, View
    from goodput_operator.render.config_map import GateConfig
    from goodput_operator.render.pods import Installation

__all__ = [
    "Revisions",
    "Rollout",
    "delete_outdated_revisions",
    "desired_objects",
    "distribute",
    "revisions_of",
    "rollout_of",
    "stable_revision",
]

_UNUSED_REVISIONS: Final = 5
"""Number of unused revisions that are kept, so that a rollback finds its own template."""
_SURGE: Final = 4
"""Besides the service's replicas, one engine may exist for this many of them or a part of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revisions:
    """The revisions of a service.

    Args:
        engines: stored revisions and the update revision, by name.
        update: the engine revision of the current spec.
        routers: the router revision of the current spec.
        uids: uids of the existing ControllerRevisions by name.
        tagged_image: image of the update revision whose tag a digest replaces before the revision
            is stored; empty if the revision is stored or keeps the tag.
        unresolved: True if that digest is unknown. Then `engines` lacks the update revision, so
            that nothing of it is created.
    """

    engines: Mapping[str, Revision]
    update: Revision
    routers: Revision
    uids: Mapping[str, str]
    tagged_image: str = ""
    unresolved: bool = False

    def with_gate(self, record: str) -> Revisions:
        """Return the revisions with another record of the update revision's gate."""
        update = replace(self.update, gate=record)
        return replace(self, engines={**self.engines, update.name: update}, update=update)

    def of_engines(self, names: Iterable[str]) -> list[Revision]:
        """Return the engine revisions with these names, in order; unknown names are skipped."""
        return [self.engines[name] for name in names if name in self.engines]


def revisions_of(
    view: View, spec: LLMServiceSpec, installation: Installation, pin: ImagePin | None = None
) -> Revisions:
    """Return the stored revisions and those of the current spec.

    Args:
        view: classified objects of the service.
        spec: spec of the service.
        installation: settings that new revisions are rendered with.
        pin: digest of the image of a new revision; None if it is unknown.
    """
    children = view.ours("ControllerRevision")
    stored = _stored_revisions(view, ROLE_ENGINE)
    number = 1 + max((child.body.get("revision", 0) for child in children), default=0)
    update = engine_revision(view.owner, spec, installation, number=number, stored=stored)
    routers = router_revision(
        view.owner,
        spec,
        installation,
        number=number,
        stored=_stored_revisions(view, ROLE_ROUTER),
    )
    tagged_image, unresolved = "", False
    if update.name not in stored and unpinned(update.image, installation.pinned_registries):
        tagged_image = update.image
        if pin is not None and pin.image == tagged_image and pin.pinned:
            update = update.with_image(pin.pinned)
        else:
            unresolved = True
    return Revisions(
        engines=stored if unresolved else {**stored, update.name: update},
        update=update,
        routers=routers,
        uids={child.body["metadata"]["name"]: child.uid for child in children},
        tagged_image=tagged_image,
        unresolved=unresolved,
    )


def delete_outdated_revisions(
    view: View, revisions: Revisions, used: Iterable[str]
) -> list[Delete]:
    """Return deletions of all unused revisions except the latest five per role.

    Args:
        view: classified objects of the service.
        revisions: revisions of the service.
        used: names of revisions with engines.
    """
    kept = {*used, revisions.update.name, revisions.routers.name}
    deletions = []
    for role in (ROLE_ENGINE, ROLE_ROUTER):
        stored = _stored_revisions(view, role).values()
        unused = [revision for revision in stored if revision.name not in kept]
        unused.sort(key=lambda revision: revision.number, reverse=True)
        deletions += [
            Delete(kind="ControllerRevision", name=old.name, uid=revisions.uids[old.name])
            for old in unused[_UNUSED_REVISIONS:]
        ]
    return deletions


def _stored_revisions(view: View, role: str) -> dict[str, Revision]:
    revisions = (read_revision(child.body, role) for child in view.ours("ControllerRevision"))
    return {revision.name: revision for revision in revisions if revision is not None}


def distribute(
    replicas: int, *, update: str, stable: str | None, current: Sequence[Workload]
) -> Mapping[str, int]:
    """Return the number of engines that each revision should have now.

    Args:
        replicas: replicas of the service.
        update: the revision of the current spec.
        stable: the revision that served before; None if there is none.
        current: the engines' Deployments.
    """
    new = next((workload for workload in current if workload.revision == update), None)
    others = [workload for workload in current if workload.revision != update]
    # Pods beyond `desired` are about to terminate, so they do not count as serving.
    serving = 0 if new is None else min(new.available, new.desired)
    missing = max(0, replicas - serving)
    kept = dict.fromkeys((workload.revision for workload in others), 0)
    # Keep serving engines, first those of the stable revision.
    for old in sorted(others, key=lambda workload: workload.revision != stable):
        kept[old.revision] = min(missing, old.desired, old.available)
        missing -= kept[old.revision]
    if stable in kept:
        kept[stable] += missing
    existing = sum(max(old.pods, kept[old.revision]) for old in others)
    limit = replicas + max(1, -(-replicas // _SURGE)) if existing else replicas
    desired = 0 if new is None else new.desired
    return {update: min(replicas, max(desired, limit - existing)), **kept}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Distribution of the engines over the revisions.

    Args:
        replicas: replicas of the service.
        counts: number of engines by revision, that of the target included.
        current: the serving revision; None before the first revision serves.
        finished: True if the target alone serves all replicas.
        obsolete: Deployments of other revisions, which are deleted.
    """

    replicas: int
    counts: Mapping[str, int]
    current: str | None
    finished: bool
    obsolete: tuple[Workload, ...]


def stable_revision(view: View, revisions: Revisions) -> str | None:
    """Return the name of the revision that serves; None before the first one does.

    Its Deployment or its ControllerRevision can have been deleted. Without a stored status, it is
    the baseline of the update revision's gate, unless the update revision has engines. Otherwise,
    it is the revision with the most available engines.
    """
    stable: str | None = view.status.get("currentRevision")
    if stable:
        return stable
    workloads = {workload.revision: workload for workload in view.workloads(ROLE_ENGINE)}
    update = revisions.update.name
    record = read_record(revisions.update)
    if (
        record is not None
        and update not in workloads
        and (record.ended is not GatePhase.PASSED or record.baseline in workloads)
    ):
        return record.baseline
    serving = [
        old
        for name, old in workloads.items()
        if name in revisions.engines and name != update and old.available
    ]
    return max(serving, key=lambda old: old.available).revision if serving else None


def rollout_of(view: View, revisions: Revisions, replicas: int, *, target: str) -> Rollout:
    """Distribute the engines over the existing revisions.

    A Deployment whose ControllerRevision was deleted can be neither scaled nor repaired. Such a
    Deployment is not counted. It stays unchanged until the rollout is finished or the service
    has no replicas, and is then deleted.

    Args:
        view: classified objects of the service.
        revisions: revisions of the service.
        replicas: replicas of the service.
        target: the revision that should serve: that of the spec unless its gate holds it.
    """
    update = target
    workloads = {workload.revision: workload for workload in view.workloads(ROLE_ENGINE)}
    existing = [workloads[name] for name in workloads if name in revisions.engines]
    stable = stable_revision(view, revisions)
    counts = distribute(replicas, update=update, stable=stable, current=existing)
    new = workloads.get(update)
    served = new is not None and replicas > 0 and min(new.available, new.desired) >= replicas
    others = [workload for workload in existing if workload.revision != update]
    finished = served and all(not old.desired and not old.pods for old in others)
    return Rollout(
        replicas=replicas,
        counts=counts,
        current=update if finished else stable,
        finished=finished,
        obsolete=tuple(
            workload
            for name, workload in workloads.items()
            if name != update and (finished or (not replicas and name not in revisions.engines))
        ),
    )


def desired_objects(
    view: View,
    spec: LLMServiceSpec,
    revisions: Revisions,
    rollout: Rollout,
    setpoint: Setpoint,
    *,
    pair: GateConfig | None = None,
) -> list[dict[str, Any]]:
    """Render all objects of the service in the order of creation; those that pods need come first.

    The Deployment of an engine revision is rendered once its ControllerRevision is stored.

    Args:
        view: classified objects of the service.
        spec: spec of the service.
        revisions: revisions of the service.
        rollout: distribution of the engines.
        setpoint: limits and replicas in force.
        pair: engines of a gate; None without these engines.
    """
    used = revisions.of_engines(rollout.counts)
    stored = revisions.of_engines({**rollout.counts, revisions.update.name: 0})
    obsolete = {workload.revision for workload in rollout.obsolete}
    deadline_s = spec.rollout.progress_deadline_seconds
    return [
        *base_resources(view.owner),
        *(revision.render(view.owner) for revision in (*stored, revisions.routers)),
        config_map(view.owner, spec, used, setpoint, pair),
        *(
            engine_deployment(
                view.owner,
                revision,
                replicas=rollout.counts[revision.name],
                progress_deadline_s=deadline_s,
            )
            for revision in used
            if revision.name in revisions.uids and revision.name not in obsolete
        ),
        *_gate_deployments(view, pair, deadline_s),
        router_deployment(
            view.owner, revisions.routers, replicas=0 if spec.suspend else spec.router.replicas
        ),
    ]


def _gate_deployments(
    view: View, pair: GateConfig | None, progress_deadline_s: int
) -> list[dict[str, Any]]:
    if pair is None:
        return []
    return [
        gate_deployment(
            view.owner,
            revision,
            role=role,
            key=pair.key,
            progress_deadline_s=progress_deadline_s,
        )
        for role, revision in pair.engines.items()
    ]
