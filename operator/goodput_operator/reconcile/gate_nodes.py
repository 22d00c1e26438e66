"""Comparison of the nodes of a gate's two engines.

A difference between engines on unlike nodes is also one between the nodes, so it says nothing about
the revision, unless the revision itself selects other nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from goodput_core.contract import ANNOTATION_RETRY, ROLE_BASELINE, ROLE_CANDIDATE
from goodput_core.quantities import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from goodput_operator.kube.objects import Object

__all__ = ["NodeComparison", "compare_nodes"]

_LABELS: Final = (
    "node.kubernetes.io/instance-type",
    "kubernetes.io/arch",
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
)
"""Labels whose values differ between kinds of machines and devices."""
_RESOURCES: Final = ("cpu", "memory")
_TOLERANCE: Final = 0.1
"""Relative difference of allocatable resources between nodes of one kind, whose reservations can
differ."""
_PLACEMENT: Final = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "topologySpreadConstraints",
    "runtimeClassName",
    "schedulerName",
    "resourceClaims",
)
"""Fields of a pod that select its node, besides its resources and claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeComparison:
    """Result of a comparison.

    Args:
        note: the nodes and their differences in a sentence; empty if both engines run on one node
            or on alike ones.
        by_chance: True if the nodes differ although both revisions ask for the same ones.
    """

    note: str = ""
    by_chance: bool = False


def compare_nodes(
    names: Mapping[str, str],
    nodes: Iterable[Object],
    templates: Mapping[str, Mapping[str, Any]],
) -> NodeComparison:
    """Compare the nodes of candidate and baseline.

    Args:
        names: name of each engine's node by role.
        nodes: the nodes that could be read.
        templates: pod template of each engine by role.
    """
    if len(set(names.values())) < 2:
        return NodeComparison()
    candidate, baseline = names[ROLE_CANDIDATE], names[ROLE_BASELINE]
    place = f"the candidate ran on node {candidate} and the baseline on node {baseline}"
    found = {node["metadata"]["name"]: node for node in nodes}
    if not {candidate, baseline} <= found.keys():
        return NodeComparison(
            note=f"{place}, which the operator cannot read, so unlike machines are not excluded"
        )
    differences = "; ".join(_differences(found[candidate], found[baseline]))
    if not differences:
        return NodeComparison()
    place = f"{place}, which differ ({differences})"
    if _placement(templates[ROLE_CANDIDATE]) != _placement(templates[ROLE_BASELINE]):
        return NodeComparison(
            note=f"{place}; the revisions ask for different nodes or resources, so the comparison "
            "includes this difference"
        )
    return NodeComparison(
        note=f"{place}, although both revisions ask for the same; let "
        "spec.engine.pod.nodeSelector select alike nodes, or make room for both engines on some, "
        f"and repeat the gate with the annotation {ANNOTATION_RETRY}",
        by_chance=True,
    )


def _differences(candidate: Object, baseline: Object) -> Iterator[str]:
    nodes = (candidate, baseline)
    labels = [node["metadata"].get("labels") or {} for node in nodes]
    for name in _LABELS:
        one, other = (values.get(name, "none") for values in labels)
        if one != other:
            yield f"{name}: {one} and {other}"
    allocatable = [(node.get("status") or {}).get("allocatable") or {} for node in nodes]
    for name in _RESOURCES:
        one, other = (values.get(name, "0") for values in allocatable)
        amounts = [parse_quantity(text) or 0 for text in (one, other)]
        if max(amounts) - min(amounts) > _TOLERANCE * max(amounts):
            yield f"allocatable {name}: {one} and {other}"


def _placement(template: Mapping[str, Any]) -> dict[str, Any]:
    pod = template["spec"]
    claims = [(volume.get("persistentVolumeClaim") or {}) for volume in pod.get("volumes") or ()]
    return {
        **{name: pod.get(name) for name in _PLACEMENT},
        "resources": pod["containers"][0].get("resources") or {},
        "claims": sorted(claim["claimName"] for claim in claims if claim),
    }
