"""Which replica a request goes to: one law for the HTTP router and for virtual time.

A policy is a function of what is known about the replicas; the caller keeps the state and the
replicas' loads. It must not know about HTTP, health checks or clocks: whoever calls says which
replicas are ready, saturated or draining.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from goodput_core.placement.by_load import least_loaded, power_of_two
from goodput_core.placement.by_prefix import most_in_flight, prefix_affinity
from goodput_core.placement.decision import (
    Place,
    Placement,
    PlacementReason,
    PlacementState,
    ReplicaLoad,
)
from goodput_core.placement.in_turn import round_robin
from goodput_core.placement.prefixes import MAX_KEYS, KnownPrefixes
from goodput_core.placement.saturation import is_saturated
from goodput_core.spec.choices import RouterPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_KEYS",
    "PLACEMENTS",
    "KnownPrefixes",
    "Place",
    "Placement",
    "PlacementReason",
    "PlacementState",
    "ReplicaLoad",
    "is_saturated",
    "least_loaded",
    "most_in_flight",
    "power_of_two",
    "prefix_affinity",
    "round_robin",
]

PLACEMENTS: Final[Mapping[RouterPolicy, Place]] = MappingProxyType(
    {
        RouterPolicy.ROUND_ROBIN: round_robin,
        RouterPolicy.LEAST_LOADED: least_loaded,
        RouterPolicy.POWER_OF_TWO: power_of_two,
        RouterPolicy.PREFIX_AFFINITY: prefix_affinity,
    }
)
"""The policies by the name a manifest gives them."""
