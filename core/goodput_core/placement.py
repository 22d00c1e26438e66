"""Which replica a request goes to: one law for the HTTP router and for virtual time.

A policy is a pure function of what is known about the replicas; the caller keeps the state and
the replicas' loads. It must not know about HTTP, health checks or clocks: whoever calls says
which replicas are ready, saturated or draining.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType
from typing import Final, TypeAlias

from goodput_core.spec.llmservice import RouterPolicy

__all__ = [
    "PLACEMENTS",
    "Place",
    "Placement",
    "PlacementReason",
    "PlacementState",
    "ReplicaLoad",
    "least_loaded",
    "round_robin",
]


class PlacementReason(StrEnum):
    """Why a replica was taken, or none."""

    NEXT_IN_TURN = "next-in-turn"
    LEAST_LOADED = "least-loaded"
    ALL_SATURATED = "all-saturated"
    """Replicas are ready and every one refuses more: 429 at the router."""
    NONE_READY = "none-ready"
    """No replica is ready and staying: 503 at the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What is known about one replica.

    Args:
        name: unique among the replicas.
        in_flight: requests it holds, running and waiting, as freshly as the caller knows.
        waiting: requests that wait in its queue, as it last said.
        kv_used_blocks, kv_total_blocks: its KV cache, as it last said; 0 of 0 when unknown.
        ready: whether it answers.
        saturated: whether it refuses more requests.
        draining: whether it is being stopped.
    """

    name: str
    in_flight: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    ready: bool = True
    saturated: bool = False
    draining: bool = False

    @property
    def kv_used(self) -> Fraction:
        """Share of its KV blocks in use; 0 when unknown."""
        return Fraction(self.kv_used_blocks, self.kv_total_blocks or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementState:
    """What a policy remembers between two requests.

    Args:
        last: the replica taken last; turns and ties go on from there, in the order of names,
            whatever replicas came and went meanwhile. Empty before the first placement.
    """

    last: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One decision.

    Args:
        policy: who decided.
        replica: the name; None: refused.
        reason: why.
        considered: the loads it was decided on.
        at_ns: when.
    """

    policy: RouterPolicy
    replica: str | None
    reason: PlacementReason
    considered: Sequence[ReplicaLoad]
    at_ns: int


Place: TypeAlias = Callable[
    [PlacementState, Sequence[ReplicaLoad], Sequence[int], int],
    tuple[PlacementState, Placement],
]
"""`place(state, replicas, keys, now_ns)`; `keys` are the hashes of the prompt's full blocks."""


def round_robin(
    state: PlacementState, replicas: Sequence[ReplicaLoad], keys: Sequence[int], now_ns: int
) -> tuple[PlacementState, Placement]:
    """Each replica that can take a request, in turn."""
    del keys  # a prompt's prefix does not matter here
    open_ = _open(replicas)
    taken = _next_in_turn(open_, state.last) if open_ else None
    placement = Placement(
        policy=RouterPolicy.ROUND_ROBIN,
        replica=taken,
        reason=PlacementReason.NEXT_IN_TURN if taken else _refusal(replicas),
        considered=replicas,
        at_ns=now_ns,
    )
    return _after(state, taken), placement


def least_loaded(
    state: PlacementState, replicas: Sequence[ReplicaLoad], keys: Sequence[int], now_ns: int
) -> tuple[PlacementState, Placement]:
    """The replica with the fewest requests in flight.

    Equal ones are told apart by their queue, then by the share of KV blocks in use, then in
    turn. Requests in flight come first because the caller counts them itself: the others are
    as old as the last poll, and a law that trusted them first would send every request between
    two polls to the same replica.
    """
    del keys  # a prompt's prefix does not matter here
    open_ = _open(replicas)
    taken: str | None = None
    if open_:
        fewest = min((r.in_flight, r.waiting) for r in open_)
        equal = [r for r in open_ if (r.in_flight, r.waiting) == fewest]
        if len(equal) > 1:
            emptiest = min(r.kv_used for r in equal)
            equal = [r for r in equal if r.kv_used == emptiest]
        taken = _next_in_turn(equal, state.last)
    placement = Placement(
        policy=RouterPolicy.LEAST_LOADED,
        replica=taken,
        reason=PlacementReason.LEAST_LOADED if taken else _refusal(replicas),
        considered=replicas,
        at_ns=now_ns,
    )
    return _after(state, taken), placement


def _open(replicas: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """The replicas that can take a request now."""
    return [r for r in replicas if r.ready and not r.saturated and not r.draining]


def _next_in_turn(replicas: Sequence[ReplicaLoad], last: str) -> str:
    """The first name behind `last` in the order of names, round and round."""
    return min((r.name <= last, r.name) for r in replicas)[1]


def _refusal(replicas: Sequence[ReplicaLoad]) -> PlacementReason:
    staying = any(r.ready and not r.draining for r in replicas)
    return PlacementReason.ALL_SATURATED if staying else PlacementReason.NONE_READY


def _after(state: PlacementState, taken: str | None) -> PlacementState:
    return state if taken is None else PlacementState(last=taken)


PLACEMENTS: Final[Mapping[RouterPolicy, Place]] = MappingProxyType(
    {RouterPolicy.ROUND_ROBIN: round_robin, RouterPolicy.LEAST_LOADED: least_loaded}
)
"""The policies that are built, by the name a manifest gives them."""
