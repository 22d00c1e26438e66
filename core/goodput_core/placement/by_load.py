"""Placement by load: the emptiest of all, or of two drawn at random."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

from goodput_core.placement.choosing import decided, emptiest, next_in_turn, open_replicas
from goodput_core.placement.decision import PlacementReason
from goodput_core.spec.choices import RouterPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.placement.decision import Placement, PlacementState, ReplicaLoad

__all__ = ["least_loaded", "power_of_two"]

_NAME: Final = attrgetter("name")
_MASK: Final = (1 << 64) - 1
_HALF: Final = 32


def least_loaded(
    state: PlacementState, replicas: Sequence[ReplicaLoad], keys: Sequence[int], now_ns: int
) -> tuple[PlacementState, Placement]:
    """The replica with the fewest requests in flight; equal ones by queue, KV in use, turn."""
    del keys  # a prompt's prefix does not matter here
    able = open_replicas(replicas)
    return decided(
        RouterPolicy.LEAST_LOADED,
        state,
        replicas,
        now_ns,
        taken=next_in_turn(emptiest(able), state.last) if able else None,
        reason=PlacementReason.LEAST_LOADED,
    )


def power_of_two(
    state: PlacementState, replicas: Sequence[ReplicaLoad], keys: Sequence[int], now_ns: int
) -> tuple[PlacementState, Placement]:
    """The emptier of two different replicas drawn at random; of equal ones the first drawn.

    Several routers that each see only their own requests, or old reports, do not all run to the
    same emptiest replica. The draw follows from the state's seed and the number of requests
    placed so far, so a run can be repeated.

    Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001.
    """
    del keys  # a prompt's prefix does not matter here
    able = open_replicas(replicas)
    return decided(
        RouterPolicy.POWER_OF_TWO,
        state,
        replicas,
        now_ns,
        taken=emptiest(_two_of(able, state))[0].name if able else None,
        reason=PlacementReason.LESS_LOADED_OF_TWO,
    )


def _two_of(replicas: list[ReplicaLoad], state: PlacementState) -> list[ReplicaLoad]:
    """Two of them, or the one there is; the order in which they are listed does not matter."""
    count = len(replicas)
    if count == 1:
        return replicas
    replicas.sort(key=_NAME)
    draw = _mixed(state.seed, state.drawn)
    first = (draw >> _HALF) % count
    second = (first + 1 + (draw & ((1 << _HALF) - 1)) % (count - 1)) % count
    return [replicas[first], replicas[second]]


def _mixed(seed: int, index: int) -> int:
    """The `index`-th of a sequence of evenly spread 64-bit numbers, without the ones before it.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
