"""The admin token of an engine revision and the Secret that contains it; the mounted tenants.

The operator is allowed to create Secrets, but neither to read nor to delete them. The token is an
HMAC with the operator's key, so it can be derived again at any time. The Secret is deleted with the
ControllerRevision that owns it. The Secret's name contains a digest of the service's uid, so that a
later service of the same name uses another Secret.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ENV_CONTROL_TOKEN, ROLE_ENGINE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_core.spec.workloads import TenantsSecretSpec
    from goodput_operator.render.metadata import Owner

__all__ = [
    "TENANTS_FILE",
    "TOKEN_KEY",
    "control_token",
    "secret_name",
    "secret_of",
    "tenants_volume",
    "token_secret",
]

TOKEN_KEY: Final = "token"  # noqa: S105 - a key's name
"""Key of the Secret under which the token is stored."""
_TENANTS_FOLDER: Final = "/etc/goodput-tenants"
_TENANTS_NAME: Final = "tenants"
TENANTS_FILE: Final = f"{_TENANTS_FOLDER}/{_TENANTS_NAME}"
"""Path of the file of tenants in routers' pods."""
_DIGEST_CHARACTERS: Final = 8
_PURPOSE: Final = b"goodput control token"


def control_token(key: bytes, *, service_uid: str, revision: str) -> str:
    """Derive the token that the engines of a revision accept on their admin port.

    Args:
        key: the operator's key.
        service_uid: uid of the LLMService, so that a later service of the same name gets another
            token.
        revision: name of the revision.
    """
    # Neither a uid nor a name contains a zero byte, so no two pairs give the same message.
    message = b"\0".join((_PURPOSE, service_uid.encode(), revision.encode()))
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def secret_name(owner: Owner, revision: str) -> str:
    """Return the name of the Secret of a new revision."""
    digest = hashlib.sha256(owner.uid.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{revision}-{digest}"


def secret_of(template: Mapping[str, Any]) -> str | None:
    """Return the name of the Secret with a pod template's token; None if it refers to no token."""
    for container in template["spec"]["containers"]:
        for variable in container.get("env") or ():
            if variable["name"] == ENV_CONTROL_TOKEN:
                reference = (variable.get("valueFrom") or {}).get("secretKeyRef") or {}
                return reference.get("name")
    return None


def token_secret(owner: Owner, name: str, *, revision: str, revision_uid: str) -> dict[str, Any]:
    """Render the Secret of a revision without its token; the caller adds it to `stringData`.

    Args:
        owner: the service.
        name: name of the Secret.
        revision: name of the revision.
        revision_uid: uid of its ControllerRevision.
    """
    metadata = owner.metadata(name, role=ROLE_ENGINE, revision=revision)
    metadata["ownerReferences"] = [
        {
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "name": revision,
            "uid": revision_uid,
            "controller": True,
        }
    ]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": metadata,
        "immutable": True,
    }


def tenants_volume(secret: TenantsSecretSpec, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a volume of a Secret with tenants, which only the pod reads, and its mount.

    The mount is a folder, because a file mounted by `subPath` would keep its content. The Secret is
    optional for the kubelet only: without it, the router's error names it, whereas a pod that waits
    for a volume reports nothing.
    """
    items = [{"key": secret.key, "path": _TENANTS_NAME}]
    volume = {"name": name, "secret": {"secretName": secret.name, "items": items, "optional": True}}
    return volume, {"name": name, "mountPath": _TENANTS_FOLDER, "readOnly": True}
