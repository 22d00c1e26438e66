"""What an object that the API server keeps says of itself: whose it is, whether a pod is ready.

Objects are the plain dictionaries that the API server sent; whoever reads more of one kind than
this does it where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = [
    "ADMIN_PORT",
    "MANAGER",
    "SERVING_PORT",
    "Object",
    "admin_url",
    "conditions_of",
    "controlled_by",
    "has_ended",
    "is_ready",
]

MANAGER: Final = "goodput-operator"
"""The field manager, and the value of `app.kubernetes.io/managed-by`."""
SERVING_PORT: Final = 8000
ADMIN_PORT: Final = 9000

Object = Mapping[str, Any]
"""An object of the cluster as the API server sends it, apiVersion and kind included."""


def controlled_by(body: Object, uid: str) -> bool:
    """Whether an object's controller is the service of this uid."""
    owners = body["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)


def conditions_of(body: Object) -> dict[str, Mapping[str, Any]]:
    """The conditions of an object, by type."""
    return {one["type"]: one for one in (body.get("status") or {}).get("conditions") or ()}


def is_ready(pod: Object) -> bool:
    """Whether a pod says that it is ready, and stays."""
    ready = conditions_of(pod).get("Ready", {}).get("status") == "True"
    return ready and "deletionTimestamp" not in pod["metadata"]


def has_ended(pod: Object) -> bool:
    """Whether all containers of a pod have ended for good."""
    return (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}


def admin_url(pod: Object) -> str | None:
    """Where an engine or a router is asked and told; None: its pod has no address yet."""
    address = (pod.get("status") or {}).get("podIP")
    if not address:
        return None
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{ADMIN_PORT}"
