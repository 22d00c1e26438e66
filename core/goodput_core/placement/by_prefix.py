"""Placement by what a replica was given before, without letting a favourite drown."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Final

from goodput_core.placement.choosing import decided, emptiest, next_in_turn, open_replicas
from goodput_core.placement.decision import PlacementReason
from goodput_core.placement.prefixes import MAX_KEYS
from goodput_core.spec.choices import RouterPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.placement.decision import Placement, PlacementState, ReplicaLoad

__all__ = ["most_in_flight", "prefix_affinity"]

_BOUND: Final = Fraction(5, 4)
"""1 + ε: a replica may hold a quarter more requests than the mean."""


def most_in_flight(in_flight: int, replicas: int) -> int:
    """Requests that one replica may hold when one more is placed: ceil((1 + ε) · mean).

    Args:
        in_flight: requests that the open replicas hold together, before this one.
        replicas: how many they are.
    """
    return -(-_BOUND.numerator * (in_flight + 1) // (_BOUND.denominator * replicas))


def prefix_affinity(
    state: PlacementState, replicas: Sequence[ReplicaLoad], keys: Sequence[int], now_ns: int
) -> tuple[PlacementState, Placement]:
    """The replica that was given the longest part of this prompt, if it is within the bound.

    A replica that would hold more than (1 + ε) times the mean of the open ones is passed over;
    at least one never is. Of equal ones, and for a prompt that nobody knows, the emptiest is
    taken, then the next in turn. So a hot prefix spreads over as many replicas as its load
    needs, a replica that leaves moves only its own prompts, and one that comes moves none that
    the others have room for.

    Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018,
    for the bound; Zheng et al., "SGLang", 2024, for following the longest shared prefix.
    """
    able = open_replicas(replicas)
    if not able:
        return decided(
            RouterPolicy.PREFIX_AFFINITY, state, replicas, now_ns, taken=None,
            reason=PlacementReason.NONE_READY,
        )  # fmt: skip
    keys = keys[:MAX_KEYS]
    known = state.prefixes
    most = most_in_flight(sum(r.in_flight for r in able), len(able))
    holders: list[ReplicaLoad] = []
    longest = longest_of_all = 0
    for replica in able:
        length = known.length(replica.name, keys)
        longest_of_all = max(longest_of_all, length)
        if replica.in_flight >= most or length < longest:
            continue
        if length > longest:
            longest = length
            holders.clear()
        holders.append(replica)
    taken = next_in_turn(emptiest(holders), state.last)
    if keys:
        known.add(taken, keys, [r.name for r in replicas])
    if longest < longest_of_all:
        reason = PlacementReason.BOUNDED_LOAD
    else:
        reason = PlacementReason.KNOWN_PREFIX if longest else PlacementReason.LEAST_LOADED
    return decided(
        RouterPolicy.PREFIX_AFFINITY, state, replicas, now_ns, taken=taken, reason=reason
    )
