"""The placement policies, and the values they work on.

Only replicas that are ready, not saturated and not draining are candidates. Ties are broken by the
order of names, starting behind the replica that was selected last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Final, TypeAlias

from goodput_core.placement.prefixes import MAX_KEYS, KnownPrefixes
from goodput_core.spec.choices import RouterPolicy

__all__ = [
    "PLACEMENTS",
    "Place",
    "Placement",
    "PlacementReason",
    "PlacementState",
    "ReplicaLoad",
    "is_saturated",
    "most_in_flight",
]

_NAME: Final = attrgetter("name")
_MASK: Final = (1 << 64) - 1
_HALF: Final = 32
_BOUND: Final = Fraction(5, 4)
"""1 + ε: a replica may hold a quarter more requests than the mean."""


class PlacementReason(StrEnum):
    """The reason of a placement or a refusal."""

    NEXT_IN_TURN = "next-in-turn"
    LEAST_LOADED = "least-loaded"
    LESS_LOADED_OF_TWO = "less-loaded-of-two"
    KNOWN_PREFIX = "known-prefix"
    """The candidate that was sent the longest part of this prompt before."""
    BOUNDED_LOAD = "bounded-load"
    """Another replica knows more of this prompt but holds more than its share of requests."""
    ALL_SATURATED = "all-saturated"
    """Replicas are ready and all are saturated: 429 at the router."""
    NONE_READY = "none-ready"
    """No replica is ready, except for draining ones: 503 at the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The load of one replica.

    Args:
        name: unique among the replicas.
        in_flight: its running and waiting requests, as counted by the caller.
        waiting: its waiting requests, as last reported.
        kv_used_blocks, kv_total_blocks: its KV cache, as last reported; 0 of 0 if unknown.
        ready: True if it answers.
        saturated: True if it should get no more requests (`is_saturated`).
        draining: True if it is being stopped.
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
        """Share of its KV blocks in use, in whole tenths; 0 if unknown."""
        return 10 * self.kv_used_blocks // (self.kv_total_blocks or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementState:
    """The state of a policy between two requests; the caller keeps one for each router.

    Frozen except for `prefixes`, which this state shares with its successors.

    Args:
        last: the replica selected last; empty before the first placement.
        drawn: the number of placed requests, from which random choices follow.
        seed: the seed of random choices.
        prefixes: the prompts that were sent to each replica.
    """

    last: str = ""
    drawn: int = 0
    seed: int = 0
    prefixes: KnownPrefixes = field(default_factory=KnownPrefixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One decision.

    Args:
        policy: the policy.
        replica: the name of the selected replica; None if the request is refused.
        reason: the reason.
        considered: the loads on which the decision is based.
        at_ns: the time of the decision.
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

A key stands for its block and every block before it (`goodput_core.placement.blockhash`). Only the
first `MAX_KEYS` are used."""

_Select: TypeAlias = Callable[
    [PlacementState, list[ReplicaLoad], Sequence[int]], tuple[str, PlacementReason]
]
"""Select one of the candidates, of which there is at least one."""


def _place(
    policy: RouterPolicy,
    state: PlacementState,
    replicas: Sequence[ReplicaLoad],
    keys: Sequence[int],
    now_ns: int,
) -> tuple[PlacementState, Placement]:
    candidates = [r for r in replicas if r.ready and not r.saturated and not r.draining]
    name: str | None = None
    if candidates:
        keys = keys[:MAX_KEYS]
        name, reason = _SELECT[policy](state, candidates, keys)
        if policy is RouterPolicy.PREFIX_AFFINITY and keys:
            state.prefixes.add(name, keys, [r.name for r in replicas])
        state = PlacementState(
            last=name, drawn=state.drawn + 1, seed=state.seed, prefixes=state.prefixes
        )
    elif any(r.ready and not r.draining for r in replicas):
        reason = PlacementReason.ALL_SATURATED
    else:
        reason = PlacementReason.NONE_READY
    return state, Placement(
        policy=policy, replica=name, reason=reason, considered=replicas, at_ns=now_ns
    )


def _round_robin(
    state: PlacementState, candidates: list[ReplicaLoad], _keys: Sequence[int]
) -> tuple[str, PlacementReason]:
    """Select each replica in turn."""
    return _next_in_turn(candidates, state.last), PlacementReason.NEXT_IN_TURN


def _least_loaded(
    state: PlacementState, candidates: list[ReplicaLoad], _keys: Sequence[int]
) -> tuple[str, PlacementReason]:
    """Select the replica with the fewest requests in flight; ties by queue, KV in use, turn."""
    return _next_in_turn(_emptiest(candidates), state.last), PlacementReason.LEAST_LOADED


def _power_of_two(
    state: PlacementState, candidates: list[ReplicaLoad], _keys: Sequence[int]
) -> tuple[str, PlacementReason]:
    """Select the emptier of two replicas drawn at random; of equal ones the first drawn.

    Several routers that each see only their own requests, or old reports, then do not all select
    the same emptiest replica. The draw follows from the state's seed and the number of requests
    placed so far, so a run can be repeated.

    Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001.
    """
    drawn = _two_of(candidates, state)
    return _emptiest(drawn)[0].name, PlacementReason.LESS_LOADED_OF_TWO


def _prefix_affinity(
    state: PlacementState, candidates: list[ReplicaLoad], keys: Sequence[int]
) -> tuple[str, PlacementReason]:
    """Select the replica that was sent the longest part of this prompt, within a bounded load.

    Replicas that would hold more than (1 + ε) times the mean are passed over; at least one is not.
    Ties, and prompts that no replica knows, go to the emptiest, then to the next in turn. A hot
    prefix thus spreads over as many replicas as its load needs. If a replica leaves, only its own
    prompts move, and a new replica attracts no prompt that the others have capacity for.

    Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018,
    for the bound; Zheng et al., "SGLang", 2024, for following the longest shared prefix.
    """
    most = most_in_flight(sum(r.in_flight for r in candidates), len(candidates))
    holders: list[ReplicaLoad] = []
    longest = longest_of_all = 0
    for replica in candidates:
        length = state.prefixes.length(replica.name, keys)
        longest_of_all = max(longest_of_all, length)
        if replica.in_flight >= most or length < longest:
            continue
        if length > longest:
            longest = length
            holders.clear()
        holders.append(replica)
    if longest < longest_of_all:
        reason = PlacementReason.BOUNDED_LOAD
    else:
        reason = PlacementReason.KNOWN_PREFIX if longest else PlacementReason.LEAST_LOADED
    return _next_in_turn(_emptiest(holders), state.last), reason


def most_in_flight(in_flight: int, replicas: int) -> int:
    """Return the most requests that one replica may hold: ceil((1 + ε) · mean).

    Args:
        in_flight: requests of all candidates, before the one to place.
        replicas: the number of candidates.
    """
    return -(-_BOUND.numerator * (in_flight + 1) // (_BOUND.denominator * replicas))


def _next_in_turn(replicas: Sequence[ReplicaLoad], last: str) -> str:
    """Return the first name after `last` in the order of names, cyclically."""
    return min((r.name <= last, r.name) for r in replicas)[1]


def _emptiest(replicas: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """Return the replicas with the fewest requests in flight; ties by queue, then tenths of KV.

    Requests in flight come first because the caller counts them itself. The other figures are as
    old as the last report; if they came first, every request between two reports would go to the
    same replica. Small differences in KV are ignored for the same reason: a report that arrived
    with a response still counts the blocks of that response.
    """
    fewest = min((r.in_flight, r.waiting) for r in replicas)
    equal = [r for r in replicas if (r.in_flight, r.waiting) == fewest]
    if len(equal) > 1:
        least_used = min(r.kv_tenths for r in equal)
        equal = [r for r in equal if r.kv_tenths == least_used]
    return equal


def _two_of(replicas: list[ReplicaLoad], state: PlacementState) -> list[ReplicaLoad]:
    """Draw two replicas, or return the only one; the order of the list has no effect."""
    count = len(replicas)
    if count == 1:
        return replicas
    replicas.sort(key=_NAME)
    draw = _mixed(state.seed, state.drawn)
    first = (draw >> _HALF) % count
    second = (first + 1 + (draw & ((1 << _HALF) - 1)) % (count - 1)) % count
    return [replicas[first], replicas[second]]


def _mixed(seed: int, index: int) -> int:
    """Return item `index` of a sequence of uniform 64-bit numbers, without computing the others.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


_SELECT: Final[Mapping[RouterPolicy, _Select]] = MappingProxyType(
    {
        RouterPolicy.ROUND_ROBIN: _round_robin,
        RouterPolicy.LEAST_LOADED: _least_loaded,
        RouterPolicy.POWER_OF_TWO: _power_of_two,
        RouterPolicy.PREFIX_AFFINITY: _prefix_affinity,
    }
)

PLACEMENTS: Final[Mapping[RouterPolicy, Place]] = MappingProxyType(
    {policy: partial(_place, policy) for policy in _SELECT}
)
"""The policies by their names in a manifest."""


def is_saturated(
    *,
    running: int,
    max_num_seqs: int,
    waiting: int,
    max_waiting: int,
    kv_used_blocks: int,
    kv_total_blocks: int,
) -> bool:
    """True if a replica would refuse one more request, or has full memory and half a queue.

    Full memory alone is usual for a busy replica, and a long queue alone may empty with the next
    step. Together they mean that a new request waits for running ones to finish.

    Args:
        running: running requests.
        max_num_seqs: the most running requests.
        waiting: waiting requests.
        max_waiting: the most waiting requests; with 0, a request is accepted only if it can run.
        kv_used_blocks: blocks of the KV cache in use, without reusable ones. Memory is full at
            nineteen twentieths: the rest is for the next tokens of running requests.
        kv_total_blocks: all blocks of the KV cache; 0 if unknown.
    """
    if not max_waiting:
        return running >= max_num_seqs
    if waiting >= max_waiting:
        return True
    full = 0 < 19 * kv_total_blocks <= 20 * kv_used_blocks
    return full and 2 * waiting >= max_waiting
