"""The Secret with the token of one revision's admin ports, without the token.

The operator may create Secrets and neither read nor delete them: the token can be derived again
at any time, and the Secret goes with the revision that owns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from goodput_core.contract import ROLE_ENGINE

if TYPE_CHECKING:
    from goodput_operator.resources.metadata import Owner

__all__ = ["token_secret"]


def token_secret(owner: Owner, *, revision: str, revision_uid: str) -> dict[str, Any]:
    """The Secret of a revision; whoever knows the token adds `stringData`.

    Args:
        owner: the service.
        revision: the revision's name, and the Secret's.
        revision_uid: of its ControllerRevision.
    """
    metadata = owner.metadata(revision, role=ROLE_ENGINE, revision=revision)
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
