"""Placement of requests on replicas, the same in the HTTP router and in virtual time.

A policy is a function of the replicas' loads; the caller keeps the state between requests. Policies
must not know about HTTP, health checks or clocks.
"""

from __future__ import annotations

from goodput_core.placement.policies import (
    MAX_KEYS,
    PLACEMENTS,
    KnownPrefixes,
    Place,
    Placement,
    PlacementReason,
    PlacementState,
    ReplicaLoad,
    is_saturated,
    most_in_flight,
)

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
    "most_in_flight",
]
