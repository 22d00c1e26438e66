"""`resources` and `pod` of an engine or a router: an allow-list of pod fields.

Names and shapes are those of Kubernetes. For objects that are copied unread, only the size is
bounded here; the API server validates them as part of the pod template. The list excludes fields
that could extend a pod's rights (host paths, privileges, another service account) and volumes that
the restricted Pod Security Standard does not allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from goodput_core.declaration import (
    Cel,
    CrossFieldRule,
    data_key_field,
    exactly_one_of,
    label_name_field,
    object_name_field,
    quantities_field,
    reserved_prefix,
    spec_field,
    sub_path_field,
)
from goodput_core.quantities import parse_quantity
from goodput_core.spec.choices import TaintEffect, TolerationOperator

if TYPE_CHECKING:
    from fractions import Fraction

__all__ = [
    "ClaimVolumeSpec",
    "EnvVarSourceSpec",
    "EnvVarSpec",
    "ImagePullSecretSpec",
    "KeyRefSpec",
    "PodSpec",
    "ResourceClaimSpec",
    "ResourcesSpec",
    "TolerationSpec",
    "VolumeMountSpec",
    "VolumeSpec",
]


def _pod_object_field(doc: str, *, max_items: int = 8) -> Any:
    return spec_field(f"{doc}, as in a pod.", default=None, max_items=max_items)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    """Compute resources of a container, as Kubernetes writes them."""

    limits: Mapping[str, str] = quantities_field("Upper bounds by resource name.")
    requests: Mapping[str, str] = quantities_field("Reserved amounts by resource name.")

    @property
    def cpus(self) -> Fraction | None:
        """CPUs of the limit, or else of the request; None without either."""
        for quantities in (self.limits, self.requests):
            if "cpu" in quantities:
                return parse_quantity(quantities["cpu"])
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TolerationSpec:
    """A node taint that the pod tolerates."""

    key: str | None = spec_field(
        "The taint's key. If absent, the operator must be Exists, and every key is tolerated.",
        default=None,
        max_length=317,
    )
    operator: TolerationOperator = spec_field(
        "Equal compares the value, Exists accepts any value.", default=TolerationOperator.EQUAL
    )
    value: str | None = spec_field("The taint's value.", default=None, max_length=63)
    effect: TaintEffect | None = spec_field(
        "The taint's effect; every effect if absent.", default=None
    )
    toleration_seconds: int | None = spec_field(
        "Seconds for which a NoExecute taint is tolerated; no limit if absent.",
        default=None,
        minimum=0,
        maximum=31_536_000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePullSecretSpec:
    """A Secret with the credentials of a registry."""

    name: str = object_name_field("The Secret, in the service's namespace.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceClaimSpec:
    """Devices by dynamic resource allocation; the pod's main container uses all claims."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        exactly_one_of("resource_claim_name", "resource_claim_template_name"),
    )

    name: str = label_name_field("The claim's name within the pod.")
    resource_claim_name: str | None = object_name_field(
        "A ResourceClaim that all pods share.", default=None
    )
    resource_claim_template_name: str | None = object_name_field(
        "A ResourceClaimTemplate; each pod gets its own claim.", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRefSpec:
    """One key of a Secret or ConfigMap in the service's namespace."""

    name: str = object_name_field("The Secret or ConfigMap.")
    key: str = data_key_field("The key of its data.")
    optional: bool = spec_field("Start the container even if the key is missing.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVarSourceSpec:
    """The source of a variable's value."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        exactly_one_of("secret_key_ref", "config_map_key_ref"),
    )

    secret_key_ref: KeyRefSpec | None = spec_field("A key of a Secret.", default=None)
    config_map_key_ref: KeyRefSpec | None = spec_field("A key of a ConfigMap.", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVarSpec:
    """One environment variable: a value, or a reference to one."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        reserved_prefix("GOODPUT_"),
        exactly_one_of("value", "value_from"),
    )

    name: str = spec_field(
        "The variable's name.",
        max_length=128,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        pattern_hint="hold letters, digits and '_' only, and begin with no digit",
    )
    value: str | None = spec_field("The value.", default=None, max_length=4096)
    value_from: EnvVarSourceSpec | None = spec_field("The source of the value.", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimVolumeSpec:
    """A PersistentVolumeClaim in the service's namespace."""

    claim_name: str = object_name_field("The PersistentVolumeClaim.")
    read_only: bool = spec_field("Mount the volume read-only in all containers.", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeSpec:
    """One volume, from exactly one source."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        reserved_prefix("goodput-"),
        exactly_one_of(
            "config_map",
            "csi",
            "empty_dir",
            "ephemeral",
            "persistent_volume_claim",
            "projected",
            "secret",
        ),
    )

    name: str = label_name_field("The volume's name.")
    config_map: Mapping[str, Any] | None = _pod_object_field("A ConfigMap")
    csi: Mapping[str, Any] | None = _pod_object_field("A volume of a CSI driver")
    empty_dir: Mapping[str, Any] | None = _pod_object_field(
        "An empty folder with the lifetime of the pod"
    )
    ephemeral: Mapping[str, Any] | None = _pod_object_field("A claim made for each pod")
    persistent_volume_claim: ClaimVolumeSpec | None = spec_field(
        "A PersistentVolumeClaim.", default=None
    )
    projected: Mapping[str, Any] | None = _pod_object_field("Several sources in one folder")
    secret: Mapping[str, Any] | None = _pod_object_field("A Secret")


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeMountSpec:
    """The mount of a volume in the main container."""

    name: str = label_name_field("The volume's name.")
    mount_path: str = spec_field(
        "The folder in the container.",
        max_length=512,
        pattern=r"^/[^:\x00-\x1f\x7f]*$",
        pattern_hint="be an absolute path without ':'",
    )
    sub_path: str | None = sub_path_field("The folder of the volume to mount; default: its root.")
    read_only: bool = spec_field("Mount the volume read-only.", default=False)


def _check_mounts(pod: PodSpec) -> str | None:
    volumes = {volume.name for volume in pod.volumes}
    missing = [mount.name for mount in pod.volume_mounts if mount.name not in volumes]
    return f"{missing[0]!r} is not one of volumes" if missing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSpec:
    """Pod fields that are copied into the pods."""

    RULES: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            field="volumeMounts",
            cel=Cel(
                rule="!has(self.volumeMounts) || self.volumeMounts.all(m, has(self.volumes) && "
                "self.volumes.exists(v, v.name == m.name))",
                message="must name volumes that are listed under volumes",
            ),
            problem=_check_mounts,
        ),
    )

    node_selector: Mapping[str, str] = spec_field(
        "Labels that a node must have.", factory=dict, max_items=32, max_length=63
    )
    affinity: Mapping[str, Any] | None = _pod_object_field("Node and pod affinity", max_items=3)
    tolerations: tuple[TolerationSpec, ...] = spec_field(
        "Node taints that the pod tolerates.", default=(), max_items=32
    )
    topology_spread_constraints: tuple[Mapping[str, Any], ...] = spec_field(
        "Spreading of pods over zones and nodes, as in a pod.", default=(), max_items=8
    )
    image_pull_secrets: tuple[ImagePullSecretSpec, ...] = spec_field(
        "Secrets for pulling images.", default=(), max_items=16, key="name"
    )
    priority_class_name: str | None = object_name_field("The PriorityClass.", default=None)
    runtime_class_name: str | None = object_name_field("The RuntimeClass.", default=None)
    scheduler_name: str | None = object_name_field(
        "The scheduler; default: the cluster's.", default=None
    )
    resource_claims: tuple[ResourceClaimSpec, ...] = spec_field(
        "Devices by dynamic resource allocation.", default=(), max_items=8, key="name"
    )
    env: tuple[EnvVarSpec, ...] = spec_field(
        "Environment variables of the main container.", default=(), max_items=64, key="name"
    )
    volumes: tuple[VolumeSpec, ...] = spec_field(
        "Volumes; hostPath is not supported.", default=(), max_items=32, key="name"
    )
    volume_mounts: tuple[VolumeMountSpec, ...] = spec_field(
        "Mounts of the volumes in the main container.",
        default=(),
        max_items=32,
        key="mount_path",
    )
