"""The objects of a service that depend on its name alone: access, Services, disruption budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import PORT_NAME_ADMIN, PORT_NAME_SERVING, ROLE_ENGINE, ROLE_ROUTER
from goodput_operator.kube.objects import ADMIN_PORT, SERVING_PORT

if TYPE_CHECKING:
    from goodput_operator.render.metadata import Owner

__all__ = ["base_resources"]

_RBAC: Final = "rbac.authorization.k8s.io"


def base_resources(owner: Owner) -> tuple[dict[str, Any], ...]:
    """Render these objects in the order of creation; those that pods need come first."""
    names = owner.names
    return (
        _router_account(owner),
        _router_role(owner),
        _router_binding(owner),
        _engines_service(owner),
        _serving_service(owner),
        _disruption_budget(owner, names.engines, ROLE_ENGINE),
        _disruption_budget(owner, names.router, ROLE_ROUTER),
    )


def _router_account(owner: Owner) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": owner.metadata(owner.names.router, role=ROLE_ROUTER),
    }


def _router_role(owner: Owner) -> dict[str, Any]:
    """Allow routers to read EndpointSlices of their namespace.

    The operator has the same rights, because it can grant only rights that it has.
    """
    return {
        "apiVersion": f"{_RBAC}/v1",
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


def _router_binding(owner: Owner) -> dict[str, Any]:
    name = owner.names.router
    subject = {"kind": "ServiceAccount", "name": name, "namespace": owner.namespace}
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": owner.metadata(name, role=ROLE_ROUTER),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [subject],
    }


def _serving_service(owner: Owner) -> dict[str, Any]:
    """Render the Service that clients use: the routers' serving port, not their admin port."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(owner.names.service, role=ROLE_ROUTER),
        "spec": {
            "type": "ClusterIP",
            "selector": owner.selector(ROLE_ROUTER),
            "ports": [_service_port(PORT_NAME_SERVING, 80)],
        },
    }


def _engines_service(owner: Owner) -> dict[str, Any]:
    """Render the headless Service of all engines, whose EndpointSlices the routers read."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(owner.names.engines, role=ROLE_ENGINE),
        "spec": {
            "clusterIP": "None",
            "selector": owner.selector(ROLE_ENGINE),
            "ports": [
                _service_port(PORT_NAME_SERVING, SERVING_PORT),
                _service_port(PORT_NAME_ADMIN, ADMIN_PORT),
            ],
        },
    }


def _service_port(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}


def _disruption_budget(owner: Owner, name: str, role: str) -> dict[str, Any]:
    """Allow the eviction of one pod of the role at a time.

    `maxUnavailable: 0` would block every node drain for a service with one engine. Engines and
    routers have one budget each. Two budgets that select the same pod would block its eviction.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owner.metadata(name, role=role),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": owner.selector(role)},
            # A pod that is not ready serves no request, so its eviction is always allowed.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
