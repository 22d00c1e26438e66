"""Compute resources of a container, as Kubernetes writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from goodput_core.spec.fields import QUANTITY, QUANTITY_HINT, spec_field

__all__ = ["ResourcesSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesSpec:
    """Compute resources of a container, as Kubernetes writes them."""

    limits: Mapping[str, str] = spec_field(
        "Upper bounds by resource name.",
        factory=dict,
        max_items=16,
        max_length=32,
        pattern=QUANTITY,
        pattern_hint=QUANTITY_HINT,
        int_or_string=True,
    )
    requests: Mapping[str, str] = spec_field(
        "Reserved amounts by resource name.",
        factory=dict,
        max_items=16,
        max_length=32,
        pattern=QUANTITY,
        pattern_hint=QUANTITY_HINT,
        int_or_string=True,
    )
