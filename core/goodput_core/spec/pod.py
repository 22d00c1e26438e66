"""`pod` of an engine or a router: the allow-list of what is passed through to their pods.

Names and shapes are Kubernetes' own. What is opaque here is bounded in size and judged by the API
server when it gets the pod's template; what could widen a pod's rights (host paths, privileges,
another service account) has no field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from goodput_core.spec.choices import TaintEffect, TolerationOperator
from goodput_core.spec.environment import EnvVarSpec
from goodput_core.spec.fields import (
    NAME,
    NAME_HINT,
    SUBDOMAIN,
    SUBDOMAIN_HINT,
    Between,
    Cel,
    spec_field,
)
from goodput_core.spec.volumes import VolumeMountSpec, VolumeSpec

__all__ = ["ImagePullSecretSpec", "PodSpec", "ResourceClaimSpec", "TolerationSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TolerationSpec:
    """A taint of a node that the pod accepts."""

    key: str | None = spec_field(
        "The taint's key; every key when absent, with operator Exists.",
        default=None,
        max_length=317,
    )
    operator: TolerationOperator = spec_field(
        "Equal compares the value, Exists takes any.", default=TolerationOperator.EQUAL
    )
    value: str | None = spec_field("The taint's value.", default=None, max_length=63)
    effect: TaintEffect | None = spec_field(
        "The taint's effect; every effect when absent.", default=None
    )
    toleration_seconds: int | None = spec_field(
        "How long a taint NoExecute is accepted; for ever when absent.",
        default=None,
        minimum=0,
        maximum=31_536_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePullSecretSpec:
    """A Secret with a registry's credentials."""

    name: str = spec_field(
        "The Secret, in the service's namespace.",
        max_length=253,
        pattern=SUBDOMAIN,
        pattern_hint=SUBDOMAIN_HINT,
    )


def _not_one_claim(claim: ResourceClaimSpec) -> str | None:
    if (claim.resource_claim_name is None) != (claim.resource_claim_template_name is None):
        return None
    return "must have either resourceClaimName or resourceClaimTemplateName"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceClaimSpec:
    """Devices by dynamic resource allocation; the pod's main container uses every claim."""

    BETWEEN: ClassVar[tuple[Between, ...]] = (
        Between(
            field="",
            cel=Cel(
                rule="has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
                message="must have either resourceClaimName or resourceClaimTemplateName",
            ),
            problem=_not_one_claim,
        ),
    )

    name: str = spec_field(
        "The claim's name within the pod.", max_length=63, pattern=NAME, pattern_hint=NAME_HINT
    )
    resource_claim_name: str | None = spec_field(
        "A ResourceClaim that all pods share.",
        default=None,
        max_length=253,
        pattern=SUBDOMAIN,
        pattern_hint=SUBDOMAIN_HINT,
    )
    resource_claim_template_name: str | None = spec_field(
        "A ResourceClaimTemplate from which each pod gets a claim of its own.",
        default=None,
        max_length=253,
        pattern=SUBDOMAIN,
        pattern_hint=SUBDOMAIN_HINT,
    )


def _mount_without_volume(pod: PodSpec) -> str | None:
    known = {volume.name for volume in pod.volumes}
    lost = [mount.name for mount in pod.volume_mounts if mount.name not in known]
    return f"{lost[0]!r} is not one of volumes" if lost else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    """Fields of a pod that are passed through as they are."""

    BETWEEN: ClassVar[tuple[Between, ...]] = (
        Between(
            field="volumeMounts",
            cel=Cel(
                rule="!has(self.volumeMounts) || self.volumeMounts.all(m, has(self.volumes) && "
                "self.volumes.exists(v, v.name == m.name))",
                message="must name volumes that stand under volumes",
            ),
            problem=_mount_without_volume,
        ),
    )

    node_selector: Mapping[str, str] = spec_field(
        "Labels that a node must carry.", factory=dict, max_items=32, max_length=63
    )
    affinity: Mapping[str, Any] | None = spec_field(
        "Which nodes and neighbours are wanted, as in a pod.", default=None, max_items=3
    )
    tolerations: tuple[TolerationSpec, ...] = spec_field(
        "Taints that the pod accepts.", default=(), max_items=32
    )
    topology_spread_constraints: tuple[Mapping[str, Any], ...] = spec_field(
        "How pods spread over zones and nodes, as in a pod.", default=(), max_items=8
    )
    image_pull_secrets: tuple[ImagePullSecretSpec, ...] = spec_field(
        "Secrets with which images are pulled.", default=(), max_items=16, key="name"
    )
    priority_class_name: str | None = spec_field(
        "The PriorityClass.",
        default=None,
        max_length=253,
        pattern=SUBDOMAIN,
        pattern_hint=SUBDOMAIN_HINT,
    )
    runtime_class_name: str | None = spec_field(
        "The RuntimeClass.",
        default=None,
        max_length=253,
        pattern=SUBDOMAIN,
        pattern_hint=SUBDOMAIN_HINT,
    )
    scheduler_name: str | None = spec_field(
        "The scheduler; the cluster's default when absent.",
        default=None,
        max_length=253,
        pattern=SUBDOMAIN,
        pattern_hint=SUBDOMAIN_HINT,
    )
    resource_claims: tuple[ResourceClaimSpec, ...] = spec_field(
        "Devices by dynamic resource allocation.", default=(), max_items=8, key="name"
    )
    env: tuple[EnvVarSpec, ...] = spec_field(
        "Environment variables of the main container.", default=(), max_items=64, key="name"
    )
    volumes: tuple[VolumeSpec, ...] = spec_field(
        "Volumes; never a path of the node.", default=(), max_items=32, key="name"
    )
    volume_mounts: tuple[VolumeMountSpec, ...] = spec_field(
        "Where the main container sees the volumes.", default=(), max_items=32, key="mount_path"
    )
