"""The CustomResourceDefinitions of `LLMService` and `TraceReplay`.

`python -m goodput_operator.render.crd` prints the first as YAML, and with the argument
`tracereplays` the second.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import yaml

from goodput_core.contract import (
    CRD_GROUP,
    CRD_VERSION,
    KIND_LLMSERVICE,
    KIND_TRACEREPLAY,
    PLURAL_LLMSERVICE,
    PLURAL_TRACEREPLAY,
)
from goodput_core.declaration import declared_fields
from goodput_core.spec.llmservice import LLMServiceSpec, MetadataSpec
from goodput_core.spec.schema import object_schema, pattern_rule, text_schema
from goodput_core.spec.status import LLMServiceStatus, SummaryStatus
from goodput_core.spec.tracereplay import TraceReplaySpec, TraceReplayStatus

__all__ = ["render_crd", "render_replay_crd"]

_SUMMARY: Final = ("replicas", "attainment", "goodput", "budget", "phase", "gate")
"""Fields of `status.summary` that are columns of `kubectl get`."""
_WIDE: Final = (
    ("Mode", ".spec.control.mode", "Mode of the control laws."),
    ("Model", ".spec.model.source", "The model weights."),
    ("Revision", ".status.currentRevision", "The revision that serves."),
)
"""Name, path and description of the columns of `kubectl get -o wide`."""
_REPLAY_COLUMNS: Final = (
    ("Phase", ".status.phase", 0),
    ("Armed", ".status.armed", 0),
    ("Verdict", ".status.verdict", 0),
    ("Reason", ".status.reason", 0),
    ("Report", ".status.report", 1),
)


def render_crd() -> dict[str, Any]:
    """Render the CustomResourceDefinition of `LLMService`."""
    return _definition(
        kind=KIND_LLMSERVICE,
        plural=PLURAL_LLMSERVICE,
        short="llmsvc",
        categories=["all", "goodput"],
        schema=_root(
            "A language model service and its SLOs.",
            object_schema(LLMServiceSpec, "The desired state of the service."),
            object_schema(LLMServiceStatus, "The observed state of the service."),
        ),
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        columns=_columns(),
    )


def render_replay_crd() -> dict[str, Any]:
    """Render the CustomResourceDefinition of `TraceReplay`."""
    spec = object_schema(TraceReplaySpec, "The requests, their target and the verdict's rule.")
    # A replay is one run: a changed spec would describe another one.
    spec.setdefault("x-kubernetes-validations", []).append(
        {"rule": "self == oldSelf", "message": "cannot be changed; create another TraceReplay"}
    )
    documented = {field.name: field.rule.doc for field in declared_fields(TraceReplayStatus)}
    columns: list[dict[str, Any]] = [
        _column(name, path, documented[path.rpartition(".")[2]], priority=priority)
        for name, path, priority in _REPLAY_COLUMNS
    ]
    columns.insert(4, _age("Age of the replay."))
    return _definition(
        kind=KIND_TRACEREPLAY,
        plural=PLURAL_TRACEREPLAY,
        short="trp",
        categories=["goodput"],
        schema=_root(
            "One replay of a trace against a running service, and its verdict.",
            spec,
            object_schema(TraceReplayStatus, "The observed state of the replay."),
        ),
        subresources={"status": {}},
        columns=columns,
    )


def _definition(
    *,
    kind: str,
    plural: str,
    short: str,
    categories: list[str],
    schema: dict[str, Any],
    subresources: dict[str, Any],
    columns: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{CRD_GROUP}"},
        "spec": {
            "group": CRD_GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": categories,
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": CRD_VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
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
    columns = [_column(*column) for column in summary]
    columns.append(_age("Age of the service."))
    return columns + [_column(*column, priority=1) for column in _WIDE]


def _column(
    name: str, path: str, doc: str, *, kind: str = "string", priority: int = 0
) -> dict[str, Any]:
    return {"name": name, "type": kind, "jsonPath": path, "description": doc, "priority": priority}


def _age(doc: str) -> dict[str, Any]:
    return _column("Age", ".metadata.creationTimestamp", doc, kind="date")


def _root(description: str, spec: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    (name,) = (field for field in declared_fields(MetadataSpec) if field.name == "name")
    named = pattern_rule(name.rule, at="self.metadata.name")
    return {
        "description": description,
        "type": "object",
        "required": ["spec"],
        # The metadata itself cannot have rules.
        "x-kubernetes-validations": [
            {"rule": named.rule, "message": named.message, "fieldPath": ".metadata.name"}
        ],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            # In the metadata, a definition is allowed to restrict only `name` and `generateName`.
            "metadata": {"type": "object", "properties": {"name": text_schema(name.rule)}},
            "spec": spec,
            "status": status,
        },
    }


if __name__ == "__main__":
    definition = render_replay_crd() if sys.argv[1:] == [PLURAL_TRACEREPLAY] else render_crd()
    yaml.safe_dump(definition, sys.stdout, sort_keys=False, width=100, allow_unicode=True)
