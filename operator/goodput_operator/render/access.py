"""What routers may do at the API server: read the EndpointSlices of their namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goodput_core.contract import ROLE_ROUTER

if TYPE_CHECKING:
    from goodput_operator.render.metadata import Owner

__all__ = ["router_account", "router_binding", "router_role"]

_GROUP = "rbac.authorization.k8s.io"


def router_account(owner: Owner) -> dict[str, Any]:
    """The ServiceAccount of the routers."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": owner.metadata(owner.names.router, role=ROLE_ROUTER),
    }


def router_role(owner: Owner) -> dict[str, Any]:
    """Its Role; whoever creates it must hold the same rights."""
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": "Role",
        "metadata": owner.metadata(owner.names.router, role=ROLE_ROUTER),
        "rules": [
            {
                "apiGroups": ["discovery.k8s.io"],
                "resources": ["endpointslices"],
                "verbs": ["list", "watch"],
            }
        ],
    }


def router_binding(owner: Owner) -> dict[str, Any]:
    """Its RoleBinding."""
    name = owner.names.router
    subject = {"kind": "ServiceAccount", "name": name, "namespace": owner.namespace}
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": owner.metadata(name, role=ROLE_ROUTER),
        "roleRef": {"apiGroup": _GROUP, "kind": "Role", "name": name},
        "subjects": [subject],
    }
