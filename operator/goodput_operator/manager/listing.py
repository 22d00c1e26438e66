"""The services of the operator with the addresses of their pods, for the live page.

`replay watch --services` reads this list, and then the admin ports of routers and engines. The page
thus needs no rights in the cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import OBJECT_LABEL_ROLE, ROLE_ENGINE, ROLE_ROUTER
from goodput_operator.kube.objects import admin_url, is_ready

if TYPE_CHECKING:
    from goodput_operator.kube.cache import Cache, Key

__all__ = ["list_services"]

_SHOWN: Final = ("phase", "replicas", "attainment", "goodput")


def list_services(cache: Cache) -> dict[str, Any]:
    """Return the services in order of their names, as JSON for `GET /services`."""
    return {
        "services": [
            found for key in sorted(cache.services()) if (found := _service(cache, key)) is not None
        ]
    }


def _service(cache: Cache, key: Key) -> dict[str, Any] | None:
    body = cache.service(key)
    if body is None:
        return None
    spec, status = body.get("spec") or {}, body.get("status") or {}
    summary = status.get("summary") or {}
    addresses: dict[str, dict[str, str]] = {ROLE_ROUTER: {}, ROLE_ENGINE: {}}
    for pod in cache.pods(key):
        metadata = pod["metadata"]
        role = (metadata.get("labels") or {}).get(OBJECT_LABEL_ROLE)
        url = admin_url(pod)
        if role in addresses and url is not None and is_ready(pod):
            addresses[role][metadata["name"]] = url
    return {
        "namespace": key[0],
        "name": key[1],
        "uid": body["metadata"]["uid"],
        "slo": spec.get("slo"),
        "summary": {name: summary[name] for name in _SHOWN if name in summary},
        "decisions": status.get("decisions") or [],
        "routers": addresses[ROLE_ROUTER],
        "engines": addresses[ROLE_ENGINE],
    }
