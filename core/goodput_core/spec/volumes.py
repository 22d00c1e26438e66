"""Volumes that a manifest adds to a pod: the kinds of the restricted Pod Security Standard.

A path of the node is not among them, and neither is any kind that is not named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from goodput_core.spec.fields import (
    NAME,
    NAME_HINT,
    SUBDOMAIN,
    SUBDOMAIN_HINT,
    Between,
    Cel,
    camel_case,
    spec_field,
)

__all__ = ["ClaimVolumeSpec", "VolumeMountSpec", "VolumeSpec"]

_RESERVED: Final = "goodput-"
_SOURCES: Final = (
    "config_map",
    "csi",
    "empty_dir",
    "ephemeral",
    "persistent_volume_claim",
    "projected",
    "secret",
)
_ONE_SOURCE: Final = f"must have exactly one of {', '.join(map(camel_case, _SOURCES))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimVolumeSpec:
    """A PersistentVolumeClaim in the service's namespace."""

    claim_name: str = spec_field(
        "The claim.", max_length=253, pattern=SUBDOMAIN, pattern_hint=SUBDOMAIN_HINT
    )
    read_only: bool = spec_field("Mount it read-only everywhere.", default=False)


def _reserved(volume: VolumeSpec) -> str | None:
    if not volume.name.startswith(_RESERVED):
        return None
    return f"{volume.name!r} begins with {_RESERVED}, which is the operator's"


def _not_one_source(volume: VolumeSpec) -> str | None:
    named = [name for name in _SOURCES if getattr(volume, name) is not None]
    return None if len(named) == 1 else _ONE_SOURCE


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeSpec:
    """One volume, from exactly one source."""

    BETWEEN: ClassVar[tuple[Between, ...]] = (
        Between(
            field="name",
            cel=Cel(
                rule=f"!self.name.startsWith('{_RESERVED}')",
                message=f"must not begin with {_RESERVED}, which is the operator's",
            ),
            problem=_reserved,
        ),
        Between(
            field="",
            cel=Cel(
                rule="["
                + ", ".join(f"has(self.{camel_case(name)})" for name in _SOURCES)
                + "].exists_one(named, named)",
                message=_ONE_SOURCE,
            ),
            problem=_not_one_source,
        ),
    )

    name: str = spec_field(
        "The volume's name.", max_length=63, pattern=NAME, pattern_hint=NAME_HINT
    )
    config_map: Mapping[str, Any] | None = spec_field(
        "A ConfigMap, as in a pod.", default=None, max_items=8
    )
    csi: Mapping[str, Any] | None = spec_field(
        "A volume of a CSI driver, as in a pod.", default=None, max_items=8
    )
    empty_dir: Mapping[str, Any] | None = spec_field(
        "An empty folder that lives as long as the pod, as in a pod.", default=None, max_items=8
    )
    ephemeral: Mapping[str, Any] | None = spec_field(
        "A claim made for each pod, as in a pod.", default=None, max_items=8
    )
    persistent_volume_claim: ClaimVolumeSpec | None = spec_field("A claim.", default=None)
    projected: Mapping[str, Any] | None = spec_field(
        "Several sources in one folder, as in a pod.", default=None, max_items=8
    )
    secret: Mapping[str, Any] | None = spec_field(
        "A Secret, as in a pod.", default=None, max_items=8
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeMountSpec:
    """Where a container sees a volume."""

    name: str = spec_field(
        "The volume's name.", max_length=63, pattern=NAME, pattern_hint=NAME_HINT
    )
    mount_path: str = spec_field(
        "The folder in the container.",
        max_length=512,
        pattern=r"^/[^:\x00-\x1f\x7f]*$",
        pattern_hint="be an absolute path without ':'",
    )
    sub_path: str | None = spec_field(
        "The folder of the volume that is seen; its root when absent.",
        default=None,
        max_length=512,
        pattern=r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$",
        pattern_hint="be a path without a leading slash",
    )
    read_only: bool = spec_field("Mount it read-only.", default=False)
