"""Kubernetes objects as the operator handles them: plain dictionaries, their kinds and API paths.

Decoding objects into typed models would take thirty times as long. A field that only one module
needs is read in that module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from goodput_core.contract import (
    ANNOTATION_METRICS,
    ANNOTATION_RUNTIME,
    API_VERSION,
    KIND_LLMSERVICE,
    KIND_TRACEREPLAY,
    PLURAL_LLMSERVICE,
    PLURAL_TRACEREPLAY,
)

__all__ = [
    "ADMIN_PORT",
    "CHILDREN",
    "CLAIM",
    "EVENT",
    "JOB",
    "KINDS",
    "LEASE",
    "LLMSERVICE",
    "MANAGER",
    "MAX_EVENT_MESSAGE",
    "NODE",
    "POD",
    "SECRET",
    "SERVING_PORT",
    "TRACEREPLAY",
    "Kind",
    "Object",
    "admin_url",
    "conditions_by_type",
    "controlled_by",
    "format_time",
    "has_ended",
    "is_foreign",
    "is_ready",
    "metrics_url",
]

MANAGER: Final = "goodput-operator"
"""The field manager of server-side apply, and the value of `app.kubernetes.io/managed-by`."""
SERVING_PORT: Final = 8000
ADMIN_PORT: Final = 9000
_PAGE: Final = re.compile(r":[0-9]{1,5}/[^\x00-\x20\x7f?#]*")
"""Value of the annotation with the port and path of a metrics page."""

Object = Mapping[str, Any]
"""An object in the form of the API server, including `apiVersion` and `kind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of object.

    Args:
        api_version: group and version; only the version for the core group.
        name: value of the field `kind`.
        plural: name of the resource in API paths.
    """

    api_version: str
    name: str
    plural: str

    @property
    def group(self) -> str:
        """The API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the API path of a collection, of one object, or of its subresource.

        An empty namespace selects all namespaces, or an object without one, such as a node.
        """
        root = "apis" if self.group else "api"
        within = ("namespaces", namespace) if namespace else ()
        parts = (root, self.api_version, *within, self.plural, name, subresource)
        return "/" + "/".join(part for part in parts if part)


def _kind(api_version: str, name: str, plural: str) -> Kind:
    return Kind(api_version=api_version, name=name, plural=plural)


LLMSERVICE: Final = _kind(API_VERSION, KIND_LLMSERVICE, PLURAL_LLMSERVICE)
TRACEREPLAY: Final = _kind(API_VERSION, KIND_TRACEREPLAY, PLURAL_TRACEREPLAY)
POD: Final = _kind("v1", "Pod", "pods")
JOB: Final = _kind("batch/v1", "Job", "jobs")
CLAIM: Final = _kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
SECRET: Final = _kind("v1", "Secret", "secrets")
EVENT: Final = _kind("v1", "Event", "events")
MAX_EVENT_MESSAGE: Final = 1024
"""Maximum length of an Event's message that the API server accepts."""
NODE: Final = _kind("v1", "Node", "nodes")
LEASE: Final = _kind("coordination.k8s.io/v1", "Lease", "leases")

CHILDREN: Final = (
    _kind("apps/v1", "Deployment", "deployments"),
    _kind("apps/v1", "ControllerRevision", "controllerrevisions"),
    _kind("v1", "Service", "services"),
    _kind("v1", "ConfigMap", "configmaps"),
    _kind("v1", "ServiceAccount", "serviceaccounts"),
    _kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    _kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    _kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
)
"""Kinds of the objects that a service owns and the operator watches. Secrets are not watched."""

KINDS: Final = {
    kind.name: kind
    for kind in (*CHILDREN, LLMSERVICE, TRACEREPLAY, POD, JOB, CLAIM, SECRET, EVENT, LEASE)
}


def controlled_by(body: Object, uid: str) -> bool:
    """True if the object's controller reference names this uid."""
    owners = body["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)


def conditions_by_type(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the conditions in the status of an object by type."""
    return {condition["type"]: condition for condition in status.get("conditions") or ()}


def is_ready(pod: Object) -> bool:
    """True if the pod's condition `Ready` is True and the pod is not terminating."""
    conditions = conditions_by_type(pod.get("status") or {})
    ready = conditions.get("Ready", {}).get("status") == "True"
    return ready and "deletionTimestamp" not in pod["metadata"]


def has_ended(pod: Object) -> bool:
    """True if all containers of the pod have terminated and will not restart."""
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}


def admin_url(pod: Object) -> str | None:
    """Return the URL of a pod's admin port; None if the pod has no address yet."""
    host = _host(pod)
    return None if host is None else f"http://{host}:{ADMIN_PORT}"


def serving_url(pod: Object, port: int) -> str | None:
    """Return the URL of a pod's serving port; None if the pod has no address yet."""
    host = _host(pod)
    return None if host is None else f"http://{host}:{port}"


def replica_set_of(pod: Object) -> str:
    """Return the name of the ReplicaSet that controls a pod; empty if none does."""
    owners = pod["metadata"].get("ownerReferences") or ()
    names = (o["name"] for o in owners if o.get("controller") and o.get("kind") == "ReplicaSet")
    return next(names, "")


def is_foreign(pod: Object) -> bool:
    """True if an engine's pod runs another server, which has no admin port."""
    return ANNOTATION_RUNTIME in (pod["metadata"].get("annotations") or {})


def metrics_url(pod: Object) -> str | None:
    """Return the URL of another server's metrics page, empty if it has none.

    None if the pod has no address yet.
    """
    host = _host(pod)
    page = (pod["metadata"].get("annotations") or {}).get(ANNOTATION_METRICS, "")
    if host is None:
        return None
    return f"http://{host}{page}" if _PAGE.fullmatch(page) else ""


def _host(pod: Object) -> str | None:
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        return None
    return f"[{address}]" if ":" in address else str(address)


def format_time(unix_s: int) -> str:
    """Format seconds since 1970 as the API server does: to the second, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
