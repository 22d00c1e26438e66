"""The kinds of objects that the operator reads or writes, and where the API server serves them.

One table instead of one client method per kind: every call is then made, timed out and judged in
one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from goodput_core.contract import API_VERSION, KIND_LLMSERVICE, PLURAL_LLMSERVICE

__all__ = [
    "CHILDREN",
    "EVENT",
    "KINDS",
    "LEASE",
    "LLMSERVICE",
    "POD",
    "SECRET",
    "Kind",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of namespaced object.

    Args:
        api_version: group and version, or the version of the core group.
        name: as in the field `kind`.
        plural: as in the API server's paths.
    """

    api_version: str
    name: str
    plural: str

    @property
    def group(self) -> str:
        """The API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Where objects are served: of all namespaces (empty), of one, one object, a part of it."""
        root = "apis" if self.group else "api"
        within = ("namespaces", namespace) if namespace else ()
        parts = (root, self.api_version, *within, self.plural, name, subresource)
        return "/" + "/".join(part for part in parts if part)


def _kind(api_version: str, name: str, plural: str) -> Kind:
    return Kind(api_version=api_version, name=name, plural=plural)


LLMSERVICE: Final = _kind(API_VERSION, KIND_LLMSERVICE, PLURAL_LLMSERVICE)
POD: Final = _kind("v1", "Pod", "pods")
SECRET: Final = _kind("v1", "Secret", "secrets")
EVENT: Final = _kind("v1", "Event", "events")
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
"""What a service is made of, and what is watched. Secrets are not: they are only created."""

KINDS: Final = {kind.name: kind for kind in (*CHILDREN, LLMSERVICE, POD, SECRET, EVENT, LEASE)}
