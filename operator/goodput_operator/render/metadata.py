"""Names, labels, owner references and digests of the objects of one LLMService."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from goodput_core.contract import (
    ANNOTATION_SERVICE_UID,
    API_VERSION,
    KIND_LLMSERVICE,
    OBJECT_LABEL_LLMSERVICE,
    OBJECT_LABEL_REVISION,
    OBJECT_LABEL_ROLE,
)
from goodput_operator.kube.objects import MANAGER

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Names", "Owner", "digest_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of one service's objects, at most 63 characters each.

    Args:
        service: name of the LLMService, at most 40 characters, which is also the name of the
            Service that clients connect to.
    """

    service: str

    @property
    def router(self) -> str:
        """Name of the routers' Deployment, PodDisruptionBudget, ServiceAccount and Role."""
        return f"{self.service}-router"

    @property
    def engines(self) -> str:
        """Name of the engines' headless Service and of their PodDisruptionBudget."""
        return f"{self.service}-engines"

    @property
    def config(self) -> str:
        """Name of the ConfigMap with manifests and limits."""
        return f"{self.service}-config"

    def engine_revision(self, digest: str) -> str:
        """Return the name of the ControllerRevision and Deployment of an engine revision."""
        return f"{self.service}-{digest}"

    def gate(self, key: str, part: str) -> str:
        """Return the name of an object of the gate with a key of eight characters."""
        return f"{self.service}-{key}-{part}"

    def router_revision(self, digest: str) -> str:
        """Return the name of the ControllerRevision of a router revision."""
        return f"{self.service}-router-{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The LLMService that controls the rendered objects.

    Args:
        name, namespace, uid: metadata of the LLMService.
    """

    name: str
    namespace: str
    uid: str

    @property
    def names(self) -> Names:
        """Names of the service's objects."""
        return Names(service=self.name)

    def reference(self) -> dict[str, Any]:
        """Return the controller reference of every object of the service.

        The reference does not set `blockOwnerDeletion`. OpenShift allows this field only to clients
        that are allowed to update the owner's finalizers.
        """
        return {
            "apiVersion": API_VERSION,
            "kind": KIND_LLMSERVICE,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
        }

    def selector(self, role: str, revision: str | None = None) -> dict[str, str]:
        """Return the labels that select the pods of a role, or of one of its revisions."""
        labels = {OBJECT_LABEL_LLMSERVICE: self.name, OBJECT_LABEL_ROLE: role}
        return labels if revision is None else labels | {OBJECT_LABEL_REVISION: revision}

    def labels(self, role: str | None = None, revision: str | None = None) -> dict[str, str]:
        """Return all labels of an object or a pod."""
        labels = {
            "app.kubernetes.io/name": "goodput",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": MANAGER,
            OBJECT_LABEL_LLMSERVICE: self.name,
        }
        if role is not None:
            labels |= {"app.kubernetes.io/component": role, **self.selector(role, revision)}
        return labels

    def pod_metadata(self, role: str, revision: str | None = None) -> dict[str, Any]:
        """Return the metadata of a pod template."""
        annotations = {ANNOTATION_SERVICE_UID: self.uid}
        return {"labels": self.labels(role, revision), "annotations": annotations}

    def metadata(
        self, name: str, *, role: str | None = None, revision: str | None = None
    ) -> dict[str, Any]:
        """Return the metadata of an object of the service."""
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels(role, revision),
            "ownerReferences": [self.reference()],
        }


def digest_of(body: Mapping[str, Any], characters: int) -> str:
    """Return the first hexadecimal characters of a value's SHA-256.

    The digest is part of revisions' names, so a change of this function would replace every pod.
    """
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:characters]
