"""What every object of a service carries: whose it is, and the labels to find it by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from goodput_core.contract import (
    API_VERSION,
    KIND_LLMSERVICE,
    OBJECT_LABEL_LLMSERVICE,
    OBJECT_LABEL_REVISION,
    OBJECT_LABEL_ROLE,
)
from goodput_operator.kube.objects import MANAGER
from goodput_operator.render.names import Names

__all__ = ["Owner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The service that objects belong to.

    Args:
        name, namespace, uid: of the LLMService.
    """

    name: str
    namespace: str
    uid: str

    @property
    def names(self) -> Names:
        """What its objects are called."""
        return Names(service=self.name)

    def reference(self) -> dict[str, Any]:
        """The controller reference that objects of the service carry.

        Without `blockOwnerDeletion`: OpenShift lets only those set it who may also update the
        owner's finalizers, and nothing here waits for it.
        """
        return {
            "apiVersion": API_VERSION,
            "kind": KIND_LLMSERVICE,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
        }

    def selector(self, role: str, revision: str | None = None) -> dict[str, str]:
        """The labels by which the pods of a role, or of one revision of it, are told."""
        labels = {OBJECT_LABEL_LLMSERVICE: self.name, OBJECT_LABEL_ROLE: role}
        return labels if revision is None else labels | {OBJECT_LABEL_REVISION: revision}

    def labels(self, role: str | None = None, revision: str | None = None) -> dict[str, str]:
        """All labels of an object, or of a pod."""
        labels = {
            "app.kubernetes.io/name": "goodput",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": MANAGER,
            OBJECT_LABEL_LLMSERVICE: self.name,
        }
        if role is not None:
            labels |= {"app.kubernetes.io/component": role, **self.selector(role, revision)}
        return labels

    def metadata(
        self, name: str, *, role: str | None = None, revision: str | None = None
    ) -> dict[str, Any]:
        """The metadata of an object of the service."""
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(role, revision),
            "ownerReferences": [self.reference()],
        }
