"""The Services: where clients find routers, and where routers find engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goodput_core.contract import PORT_NAME_ADMIN, PORT_NAME_SERVING, ROLE_ENGINE, ROLE_ROUTER
from goodput_operator.kube.objects import ADMIN_PORT, SERVING_PORT

if TYPE_CHECKING:
    from goodput_operator.render.metadata import Owner

__all__ = ["engines_service", "serving_service"]


def serving_service(owner: Owner) -> dict[str, Any]:
    """The address of the service: its routers, and nothing that administers."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(owner.names.service, role=ROLE_ROUTER),
        "spec": {
            "type": "ClusterIP",
            "selector": owner.selector(ROLE_ROUTER),
            "ports": [_port(PORT_NAME_SERVING, 80)],
        },
    }


def engines_service(owner: Owner) -> dict[str, Any]:
    """The engines of all revisions, without an address of its own: routers choose."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(owner.names.engines, role=ROLE_ENGINE),
        "spec": {
            "clusterIP": "None",
            "selector": owner.selector(ROLE_ENGINE),
            "ports": [_port(PORT_NAME_SERVING, SERVING_PORT), _port(PORT_NAME_ADMIN, ADMIN_PORT)],
        },
    }


def _port(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
