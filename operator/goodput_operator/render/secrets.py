"""The Secret with the token of one revision's admin ports, without the token.

The operator may create Secrets and neither read nor delete them: the token can be derived again
at any time, and the Secret goes with the revision that owns it. So its name must be one that
nobody else's Secret has, a namesake's of before included: what stands under it cannot be looked at.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ENV_CONTROL_TOKEN, ROLE_ENGINE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_operator.render.metadata import Owner

__all__ = ["TOKEN_KEY", "secret_name", "secret_of", "token_secret"]

TOKEN_KEY: Final = "token"  # noqa: S105 - a key's name
"""The key of the Secret with the token of the admin ports of one revision."""
_DIGEST_CHARACTERS: Final = 8


def secret_name(owner: Owner, revision: str) -> str:
    """What the Secret of a new revision is called."""
    digest = hashlib.sha256(owner.uid.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{revision}-{digest}"


def secret_of(template: Mapping[str, Any]) -> str | None:
    """The Secret from which the pods of a kept template take their token; None: from none."""
    for container in template["spec"]["containers"]:
        for variable in container.get("env") or ():
            if variable["name"] == ENV_CONTROL_TOKEN:
                reference = (variable.get("valueFrom") or {}).get("secretKeyRef") or {}
                return reference.get("name")
    return None


def token_secret(owner: Owner, name: str, *, revision: str, revision_uid: str) -> dict[str, Any]:
    """The Secret of a revision; whoever knows the token adds `stringData`.

    Args:
        owner: the service.
        name: of the Secret.
        revision: the revision's name.
        revision_uid: of its ControllerRevision.
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
