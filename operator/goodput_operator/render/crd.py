"""The CustomResourceDefinition of `LLMService`.

`python -m goodput_operator.render.crd` prints it as YAML.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import yaml

from goodput_core.contract import CRD_GROUP, CRD_VERSION, KIND_LLMSERVICE, PLURAL_LLMSERVICE
from goodput_core.declaration import declared_fields
from goodput_core.spec.llmservice import LLMServiceSpec, MetadataSpec
from goodput_core.spec.schema import object_schema, text_schema
from goodput_core.spec.status import LLMServiceStatus, SummaryStatus

__all__ = ["render_crd"]

_SUMMARY: Final = ("replicas", "attainment", "goodput", "budget", "phase")
"""Fields of `status.summary` that are columns of `kubectl get`."""
_WIDE: Final = (
    ("Mode", ".spec.control.mode", "Mode of the control laws."),
    ("Model", ".spec.model.source", "The model weights."),
    ("Revision", ".status.currentRevision", "The revision that serves."),
)
"""Name, path and description of the columns of `kubectl get -o wide`."""


def render_crd() -> dict[str, Any]:
    """Render the CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL_LLMSERVICE}.{CRD_GROUP}"},
        "spec": {
            "group": CRD_GROUP,
            "names": {
                "kind": KIND_LLMSERVICE,
                "listKind": f"{KIND_LLMSERVICE}List",
                "plural": PLURAL_LLMSERVICE,
                "singular": KIND_LLMSERVICE.lower(),
                "shortNames": ["llmsvc"],
                "categories": ["all", "goodput"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": CRD_VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": _columns(),
                }
            ],
        },
    }


def _columns() -> list[dict[str, Any]]:
    """Return the columns of `kubectl get`."""
    documented = {field.name: field.rule.doc for field in declared_fields(SummaryStatus)}
    summary = [
        (name.capitalize(), f".status.summary.{name}", documented[name]) for name in _SUMMARY
    ]
    age = ("Age", ".metadata.creationTimestamp", "Age of the service.")
    columns = [*((*column, "string", 0) for column in summary), (*age, "date", 0)]
    columns += [(*column, "string", 1) for column in _WIDE]
    return [
        {"name": name, "type": kind, "jsonPath": path, "description": doc, "priority": priority}
        for name, path, doc, kind, priority in columns
    ]


def _root() -> dict[str, Any]:
    (name,) = (field for field in declared_fields(MetadataSpec) if field.name == "name")
    return {
        "description": "A language model service and its SLOs.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # In the metadata, a definition is allowed to restrict only `name` and `generateName`.
            "metadata": {"type": "object", "properties": {"name": text_schema(name.rule)}},
            "spec": object_schema(LLMServiceSpec, "The desired state of the service."),
            "status": object_schema(LLMServiceStatus, "The observed state of the service."),
        },
    }


if __name__ == "__main__":
    yaml.safe_dump(render_crd(), sys.stdout, sort_keys=False, width=100, allow_unicode=True)
