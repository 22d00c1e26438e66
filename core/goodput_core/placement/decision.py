"""What a placement is decided on, what is remembered in between, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from goodput_core.placement.prefixes import KnownPrefixes
from goodput_core.spec.choices import RouterPolicy

__all__ = ["Place", "Placement", "PlacementReason", "PlacementState", "ReplicaLoad"]


class PlacementReason(StrEnum):
    """Why a replica was taken, or none."""

    NEXT_IN_TURN = "next-in-turn"
    LEAST_LOADED = "least-loaded"
    LESS_LOADED_OF_TWO = "less-loaded-of-two"
    KNOWN_PREFIX = "known-prefix"
    """It was given the longest part of this prompt before, of all that are open."""
    BOUNDED_LOAD = "bounded-load"
    """Another knows more of this prompt but has more than its share of requests."""
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
        saturated: whether it should get no more requests (`is_saturated`).
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
    def kv_tenths(self) -> int:
        """Share of its KV blocks in use, in whole tenths; 0 when unknown."""
        return 10 * self.kv_used_blocks // (self.kv_total_blocks or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementState:
    """What a policy remembers between two requests; the caller keeps one for each router.

    Frozen but for `prefixes`, which belongs to this state and its successors: a placement by
    prefix writes there what it decided.

    Args:
        last: the replica taken last; turns and ties go on from there, in the order of names,
            whatever replicas came and went meanwhile. Empty before the first placement.
        drawn: how many requests were placed; what is drawn at random follows from it alone.
        seed: of what is drawn at random.
        prefixes: which prompts went where.
    """

    last: str = ""
    drawn: int = 0
    seed: int = 0
    prefixes: KnownPrefixes = field(default_factory=KnownPrefixes)

    def after(self, taken: str) -> PlacementState:
        """The state when a request went to that replica."""
        return PlacementState(
            last=taken, drawn=self.drawn + 1, seed=self.seed, prefixes=self.prefixes
        )


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
"""`place(state, replicas, keys, now_ns)`; `keys` are the hashes of the prompt's full blocks.

A key stands for its block and every block before it (`goodput_core.placement.blockhash`); only
the first `MAX_KEYS` are looked at."""
