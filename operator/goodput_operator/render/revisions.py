"""Revisions and their Deployments: a pod template is rendered once, stored, and never changed.

The template of an existing revision is read from its ControllerRevision and not rendered again, so
that an upgrade of the operator replaces no pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import (
    ANNOTATION_GATE,
    OBJECT_LABEL_REVISION,
    OBJECT_LABEL_ROLE,
    ROLE_ENGINE,
    ROLE_ROUTER,
)
from goodput_core.spec.codec import encode
from goodput_core.spec.workloads import RouterSpec, TokenBudgetSpec
from goodput_operator.render.metadata import digest_of
from goodput_operator.render.pods import engine_pod, router_pod

if TYPE_CHECKING:
    from goodput_core.spec.llmservice import LLMServiceSpec
    from goodput_operator.render.metadata import Owner
    from goodput_operator.render.pods import Installation

__all__ = [
    "Revision",
    "engine_deployment",
    "engine_revision",
    "read_revision",
    "router_deployment",
    "router_revision",
]

_DIGEST_CHARACTERS: Final = 8
_SOURCE_KEYS: Final = ("source", "asked")
"""Keys of a stored revision's source: that of new revisions, and that of earlier versions."""
_DEFAULT_ROUTER_REPLICAS: Final = RouterSpec().replicas
_REPLICASET_HISTORY: Final = 2
_STRATEGY: Final = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One revision of the engines or routers of a service.

    Args:
        name: name of its ControllerRevision and, for engines, of its Deployment.
        role: engine or router.
        number: number that increases with each revision of a service.
        source: the part of the spec that the template was rendered from, without defaults.
        template: its pod template.
        source_key: key of `source` in the ControllerRevision, whose data cannot be changed.
        gate: record of its gate; empty without one.
    """

    name: str
    role: str
    number: int
    source: Mapping[str, Any]
    template: Mapping[str, Any]
    source_key: str = _SOURCE_KEYS[0]
    gate: str = ""

    @property
    def image(self) -> str:
        """Name of the image of its engines or routers."""
        image: str = self.template["spec"]["containers"][0]["image"]
        return image

    def with_image(self, image: str) -> Revision:
        """Return the revision with another name of its image."""
        pod = self.template["spec"]
        containers = [{**pod["containers"][0], "image": image}, *pod["containers"][1:]]
        template = {**self.template, "spec": {**pod, "containers": containers}}
        return replace(self, template=template)

    def render(self, owner: Owner) -> dict[str, Any]:
        """Render the ControllerRevision that stores it."""
        metadata = owner.metadata(self.name, role=self.role, revision=self.name)
        if self.gate:
            metadata["annotations"] = {ANNOTATION_GATE: self.gate}
        return {
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "metadata": metadata,
            "revision": self.number,
            "data": {self.source_key: self.source, "template": self.template},
        }


def read_revision(stored: Mapping[str, Any], role: str) -> Revision | None:
    """Read a ControllerRevision; None if it stores no revision of this role."""
    metadata, data = stored["metadata"], stored.get("data") or {}
    labels = metadata.get("labels") or {}
    name = metadata["name"]
    if labels.get(OBJECT_LABEL_ROLE) != role or labels.get(OBJECT_LABEL_REVISION) != name:
        return None
    source_key = next((key for key in _SOURCE_KEYS if key in data), None)
    if source_key is None or "template" not in data:
        return None
    return Revision(
        name=name,
        role=role,
        number=stored["revision"],
        source=data[source_key],
        template=data["template"],
        source_key=source_key,
        gate=str((metadata.get("annotations") or {}).get(ANNOTATION_GATE) or ""),
    )


def engine_revision(
    owner: Owner,
    spec: LLMServiceSpec,
    installation: Installation,
    *,
    number: int,
    stored: Mapping[str, Revision] = MappingProxyType({}),
) -> Revision:
    """Return the revision of the spec's `model` and `engine`, without the token budget.

    The initial token budget of another server is an argument of its process, which nothing can
    change at run time, so it is part of the revision.

    Args:
        owner: the service.
        spec: spec of the service.
        installation: settings that a new revision is rendered with.
        number: number of a new revision.
        stored: existing revisions by name; a match is returned unchanged.
    """
    engine = replace(spec.engine, token_budget=TokenBudgetSpec())
    source = {"model": encode(spec.model), "engine": encode(engine)}
    if spec.engine.runtime.has_preset:
        source["engine"]["tokenBudget"] = {"initial": spec.engine.token_budget.initial}
    name = owner.names.engine_revision(digest_of(source, _DIGEST_CHARACTERS))
    return stored.get(name) or Revision(
        name=name,
        role=ROLE_ENGINE,
        number=number,
        source=source,
        template=engine_pod(owner, spec, installation, name),
    )


def router_revision(
    owner: Owner,
    spec: LLMServiceSpec,
    installation: Installation,
    *,
    number: int,
    stored: Mapping[str, Revision] = MappingProxyType({}),
) -> Revision:
    """Return the revision of the fields that a router reads when it starts.

    The arguments are those of `engine_revision`.
    """
    source: dict[str, Any] = {
        "router": encode(replace(spec.router, replicas=_DEFAULT_ROUTER_REPLICAS)),
        "slo": encode(spec.slo),
    }
    if spec.engine.runtime.health_path is not None:
        source["healthPath"] = spec.engine.runtime.health_path
    name = owner.names.router_revision(digest_of(source, _DIGEST_CHARACTERS))
    return stored.get(name) or Revision(
        name=name,
        role=ROLE_ROUTER,
        number=number,
        source=source,
        template=router_pod(owner, spec, installation, name),
    )


def engine_deployment(
    owner: Owner, revision: Revision, *, replicas: int, progress_deadline_s: int
) -> dict[str, Any]:
    """Render the Deployment of one engine revision.

    Args:
        owner: the service.
        revision: the revision, whose template is used.
        replicas: number of engines of this revision.
        progress_deadline_s: time without progress after which Kubernetes reports a failure.
    """
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(revision.name, role=ROLE_ENGINE, revision=revision.name),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": _REPLICASET_HISTORY,
            "progressDeadlineSeconds": progress_deadline_s,
            "strategy": _STRATEGY,
            "selector": {"matchLabels": owner.selector(ROLE_ENGINE, revision.name)},
            "template": revision.template,
        },
    }


def router_deployment(owner: Owner, revision: Revision, *, replicas: int) -> dict[str, Any]:
    """Render the Deployment of the routers, which performs rollouts of router revisions itself."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": owner.metadata(owner.names.router, role=ROLE_ROUTER, revision=revision.name),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": _REPLICASET_HISTORY,
            "strategy": _STRATEGY,
            "selector": {"matchLabels": owner.selector(ROLE_ROUTER)},
            "template": revision.template,
        },
    }
