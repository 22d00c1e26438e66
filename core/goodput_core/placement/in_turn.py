"""Placement that looks at no load at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.placement.choosing import decided, next_in_turn, open_replicas
from goodput_core.placement.decision import PlacementReason
from goodput_core.spec.choices import RouterPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.placement.decision import Placement, PlacementState, ReplicaLoad

__all__ = ["round_robin"]


def round_robin(
    state: PlacementState, replicas: Sequence[ReplicaLoad], keys: Sequence[int], now_ns: int
) -> tuple[PlacementState, Placement]:
    """Each replica that can take a request, in turn."""
    del keys  # a prompt's prefix does not matter here
    able = open_replicas(replicas)
    return decided(
        RouterPolicy.ROUND_ROBIN,
        state,
        replicas,
        now_ns,
        taken=next_in_turn(able, state.last) if able else None,
        reason=PlacementReason.NEXT_IN_TURN,
    )
