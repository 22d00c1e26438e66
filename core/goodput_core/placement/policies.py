"""The placement policies, and their inputs and results.

Only replicas that are ready, not saturated and not draining are candidates. Ties are broken by the
order of names, starting after the replica that was selected last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

from goodput_core.slo.importance import Importance
from goodput_core.spec.choices import RouterPolicy

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

MAX_KEYS: Final = 512
"""Maximum keys of one prompt that are used; this limits the cost of a placement."""

_MAX_OF_ONE: Final = 32_768
"""Maximum keys of one replica, about 130 bytes each."""
_MAX_OF_ALL: Final = 524_288
"""Maximum keys of all replicas together."""

_NAME: Final = attrgetter("name")
_MASK: Final = (1 << 64) - 1
_HALF: Final = 32
_BOUND: Final = Fraction(5, 4)
"""1 + ε: a replica may have a quarter more requests than the mean."""


class PlacementReason(StrEnum):
    """Reason of a placement or a rejection."""

    NEXT_IN_TURN = "next-in-turn"
    LEAST_LOADED = "least-loaded"
    LESS_LOADED_OF_TWO = "less-loaded-of-two"
    KNOWN_PREFIX = "known-prefix"
    """The candidate was sent the longest known prefix of this prompt before."""
    BOUNDED_LOAD = "bounded-load"
    """Another candidate was sent a longer prefix, but has more than its share of requests."""
    SESSION = "session"
    """The replica of the request's session."""
    SESSION_BOUNDED = "session-bounded-load"
    """The replica of the request's session has more than its share of requests."""
    DISPLACES = "displaces"
    """All ready replicas are saturated, and the request is more important than the least important
    one that waits on the replica, which the replica rejects if its queue is full."""
    ALL_SATURATED = "all-saturated"
    """All ready replicas are saturated, and no less important request waits; the router responds
    with 429."""
    NONE_READY = "none-ready"
    """No replica is ready, except for draining ones; the router responds with 503."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The load of one replica.

    Args:
        name: unique among the replicas.
        in_flight: running and waiting requests, counted by the caller.
        waiting: waiting requests, as last reported.
        kv_used_blocks, kv_total_blocks: used blocks and all blocks of the KV cache, as last
            reported; both 0 if unknown.
        ready: True if the replica responds.
        saturated: True if the replica should get no more requests (`is_saturated`).
        draining: True if the replica is being stopped.
        displaceable: importance of the waiting request that a saturated replica rejects first; None
            if there is none.
    """

    name: str
    in_flight: int = 0
    waiting: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0
    ready: bool = True
    saturated: bool = False
    draining: bool = False
    displaceable: Importance | None = None

    @property
    def kv_tenths(self) -> int:
        """Share of the KV blocks in use, in whole tenths; 0 if unknown."""
        return 10 * self.kv_used_blocks // (self.kv_total_blocks or 1)


class KnownPrefixes:
    """The prompts that were sent to each replica: an estimate of its prefix cache.

    The estimate needs no report from the replica. For each replica, a table contains the keys of
    the prompts that were sent to the replica. Like the replica's own cache, the table evicts the
    least recently used key first. A key stands for its block and all blocks before it. The keys of
    a prompt are added from the last to the first, so each key is more recent than its successors.
    Therefore the keys of a prompt that are in the table are always its first ones, and binary
    search finds their number.

    Args:
        most_of_one: maximum keys of one replica.
        most_of_all: maximum keys of all replicas. Each replica has an equal share of them, at least
            `MAX_KEYS`.
    """

    __slots__ = ("_most_of_all", "_most_of_one", "_tables")

    def __init__(self, *, most_of_one: int = _MAX_OF_ONE, most_of_all: int = _MAX_OF_ALL) -> None:
        self._most_of_one = most_of_one
        self._most_of_all = most_of_all
        self._tables: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """Number of keys of all replicas."""
        return sum(map(len, self._tables.values()))

    def length(self, replica: str, keys: Sequence[int]) -> int:
        """Return the number of a prompt's first keys that are in the replica's table."""
        table = self._tables.get(replica)
        if table is None or not keys or keys[0] not in table:
            return 0
        return bisect_left(keys, True, lo=1, key=lambda key: key not in table)

    def add(self, replica: str, keys: Sequence[int], present: Collection[str]) -> None:
        """Record that a prompt is sent to the replica.

        Args:
            replica: name of the replica.
            keys: the prompt's first keys, at most `MAX_KEYS`.
            present: names of all replicas. If there are too many tables, those of other replicas
                are dropped.
        """
        table = self._tables.get(replica)
        if table is None:
            if len(self._tables) >= 2 * len(present):
                names = set(present)
                self._tables = {n: t for n, t in self._tables.items() if n in names}
            table = self._tables[replica] = OrderedDict()
        for key in reversed(keys):
            table[key] = None
            table.move_to_end(key)
        share = max(MAX_KEYS, self._most_of_all // len(present))
        for _ in range(len(table) - min(self._most_of_one, share)):
            table.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementState:
    """State of a policy between two requests; the caller keeps one for each router.

    A state is immutable except for `prefixes`, which it shares with its successors.

    Args:
        last: replica selected last; empty before the first placement.
        drawn: number of placed requests; together with the seed it determines random choices.
        seed: seed of random choices.
        prefixes: prompts that were sent to each replica.
    """

    last: str = ""
    drawn: int = 0
    seed: int = 0
    prefixes: KnownPrefixes = field(default_factory=KnownPrefixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One decision of a placement policy.

    Args:
        policy: the policy.
        replica: name of the selected replica; None if the request is rejected.
        reason: reason of the decision.
        considered: loads of all replicas, on which the decision is based.
        at_ns: time of the decision.
    """

    policy: RouterPolicy
    replica: str | None
    reason: PlacementReason
    considered: Sequence[ReplicaLoad]
    at_ns: int


class Place(Protocol):
    """A placement policy."""

    def __call__(
        self,
        state: PlacementState,
        replicas: Sequence[ReplicaLoad],
        keys: Sequence[int],
        now_ns: int,
        *,
        importance: Importance | None = None,
        session: bytes | None = None,
    ) -> tuple[PlacementState, Placement]:
        """Return the new state and the placement of a request.

        Args:
            state: state after the previous placement.
            replicas: loads of all replicas.
            keys: hashes of the prompt's full blocks. A key stands for its block and every block
                before it (`goodput_core.placement.blockhash`). Only the first `MAX_KEYS` are used.
            now_ns: time of the placement.
            importance: importance of the request; None if it displaces no other.
            session: at most 64 bytes that identify the request's session. The session's replica is
                selected, whatever the policy. None if it has none.
        """
        ...


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
    *,
    importance: Importance | None = None,
    session: bytes | None = None,
) -> tuple[PlacementState, Placement]:
    routable = [r for r in replicas if r.ready and not r.draining]
    candidates = [r for r in routable if not r.saturated]
    keys = keys[:MAX_KEYS]
    name: str | None = None
    if candidates and session is not None:
        name, reason = _select_by_session(session, candidates)
    elif candidates:
        name, reason = _SELECT[policy](state, candidates, keys)
    elif displaceable := _find_displaceable(routable, importance):
        name = _select_next(_find_emptiest(displaceable), state.last)
        reason = PlacementReason.DISPLACES
    else:
        reason = PlacementReason.ALL_SATURATED if routable else PlacementReason.NONE_READY
    if name is not None:
        if policy is RouterPolicy.PREFIX_AFFINITY and keys:
            state.prefixes.add(name, keys, [r.name for r in replicas])
        state = PlacementState(
            last=name, drawn=state.drawn + 1, seed=state.seed, prefixes=state.prefixes
        )
    return state, Placement(
        policy=policy, replica=name, reason=reason, considered=replicas, at_ns=now_ns
    )


def _find_displaceable(
    routable: Sequence[ReplicaLoad], importance: Importance | None
) -> list[ReplicaLoad]:
    """Return the replicas on which the least important request of all replicas waits.

    The list is empty if the new request is not more important, or displaces no other.
    """
    least = min((r.displaceable for r in routable if r.displaceable is not None), default=None)
    if least is None or importance is None or importance <= least:
        return []
    return [r for r in routable if r.displaceable == least]


def _round_robin(
    state: PlacementState, candidates: list[ReplicaLoad], _keys: Sequence[int]
) -> tuple[str, PlacementReason]:
    """Select the replicas in cyclic order."""
    return _select_next(candidates, state.last), PlacementReason.NEXT_IN_TURN


def _least_loaded(
    state: PlacementState, candidates: list[ReplicaLoad], _keys: Sequence[int]
) -> tuple[str, PlacementReason]:
    """Select the least loaded replica by requests in flight, then by queue and KV in use."""
    return _select_next(_find_emptiest(candidates), state.last), PlacementReason.LEAST_LOADED


def _power_of_two(
    state: PlacementState, candidates: list[ReplicaLoad], _keys: Sequence[int]
) -> tuple[str, PlacementReason]:
    """Select the less loaded of two replicas drawn at random; the first drawn if they are equal.

    Several routers, each of which counts only its own requests or has old reports, would otherwise
    all select the same replica. The draw is determined by the state's seed and the number of placed
    requests, so a run can be repeated.

    Source: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001.
    """
    drawn = _draw_two(candidates, state)
    return _find_emptiest(drawn)[0].name, PlacementReason.LESS_LOADED_OF_TWO


def _prefix_affinity(
    state: PlacementState, candidates: list[ReplicaLoad], keys: Sequence[int]
) -> tuple[str, PlacementReason]:
    """Select the replica that was sent the longest prefix of the prompt, within a bounded load.

    Replicas that would have more than (1 + ε) times the mean load are skipped; at least one
    candidate always remains. Of replicas with prefixes of equal length, the least loaded is
    selected, then the next in the order of names. A prompt whose prefix is unknown is placed in the
    same way on any candidate. A frequent prefix therefore spreads over as many replicas as its load
    requires. If a replica is removed, only its own prompts move. A known prefix moves to a new
    replica only if the replicas that have it are at the bound.

    Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018,
    for the bound; Zheng et al., "SGLang", 2024, for the longest shared prefix.
    """
    bound = most_in_flight(sum(r.in_flight for r in candidates), len(candidates))
    holders: list[ReplicaLoad] = []
    longest = longest_of_all = 0
    for replica in candidates:
        length = state.prefixes.length(replica.name, keys)
        longest_of_all = max(longest_of_all, length)
        if replica.in_flight >= bound or length < longest:
            continue
        if length > longest:
            longest = length
            holders.clear()
        holders.append(replica)
    if longest < longest_of_all:
        reason = PlacementReason.BOUNDED_LOAD
    else:
        reason = PlacementReason.KNOWN_PREFIX if longest else PlacementReason.LEAST_LOADED
    return _select_next(_find_emptiest(holders), state.last), reason


def _select_by_session(
    session: bytes, candidates: list[ReplicaLoad]
) -> tuple[str, PlacementReason]:
    """Select the replica with the highest hash of session and name, within a bounded load.

    Nothing is stored, so all routers select the same replica, also after a restart. If a replica is
    added or removed, only the sessions that move to it or were on it change their replica. A
    session whose replica is at the bound goes to its next one, and returns later.

    Source: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998, for the
    hash; Mirrokni, Thorup and Zadimoghaddam (see `_prefix_affinity`) for the bound.
    """

    def weight(replica: ReplicaLoad) -> bytes:
        return blake2b(replica.name.encode(), key=session, digest_size=8).digest()

    bound = most_in_flight(sum(r.in_flight for r in candidates), len(candidates))
    ordered = sorted(candidates, key=weight, reverse=True)
    selected = next(r for r in ordered if r.in_flight < bound)
    own = selected is ordered[0]
    return selected.name, PlacementReason.SESSION if own else PlacementReason.SESSION_BOUNDED


def most_in_flight(in_flight: int, replicas: int) -> int:
    """Return the maximum requests of one replica: ceil((1 + ε) · mean).

    Args:
        in_flight: requests of all candidates, without the one to place.
        replicas: number of candidates.
    """
    return -(-_BOUND.numerator * (in_flight + 1) // (_BOUND.denominator * replicas))


def _select_next(replicas: Sequence[ReplicaLoad], last: str) -> str:
    """Return the first name after `last` in the order of names, cyclically."""
    return min((r.name <= last, r.name) for r in replicas)[1]


def _find_emptiest(replicas: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """Return the replicas with the fewest requests in flight; ties by queue, then tenths of KV.

    Requests in flight come first because the caller counts them itself. The other values are as
    old as the last report. If those came first, every request between two reports would go to the
    same replica. Small differences in KV are ignored because reports are inexact: a report that
    arrived with a response still counts the blocks of that response.
    """
    fewest = min((r.in_flight, r.waiting) for r in replicas)
    equal = [r for r in replicas if (r.in_flight, r.waiting) == fewest]
    if len(equal) > 1:
        least_used = min(r.kv_tenths for r in equal)
        equal = [r for r in equal if r.kv_tenths == least_used]
    return equal


def _draw_two(replicas: list[ReplicaLoad], state: PlacementState) -> list[ReplicaLoad]:
    """Draw two replicas, or return the only one; the order of the list has no effect."""
    count = len(replicas)
    if count == 1:
        return replicas
    replicas.sort(key=_NAME)
    draw = _random_number(state.seed, state.drawn)
    first = (draw >> _HALF) % count
    second = (first + 1 + (draw & ((1 << _HALF) - 1)) % (count - 1)) % count
    return [replicas[first], replicas[second]]


def _random_number(seed: int, index: int) -> int:
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
    """True if a replica would reject one more request, or has full KV memory and half a queue.

    Neither full memory nor a long queue alone means saturation: a busy replica usually has full
    memory, and the next step may admit a long queue. Together they mean that a new request waits
    until running requests finish.

    Args:
        running: running requests.
        max_num_seqs: maximum running requests.
        waiting: waiting requests.
        max_waiting: maximum waiting requests; with 0, a request is accepted only if it can run.
        kv_used_blocks: used blocks of the KV cache, without reusable ones. Memory counts as full
            at 95 %; the rest is for the next tokens of running requests.
        kv_total_blocks: all blocks of the KV cache; 0 if unknown.
    """
    if not max_waiting:
        return running >= max_num_seqs
    if waiting >= max_waiting:
        return True
    full = 0 < 19 * kv_total_blocks <= 20 * kv_used_blocks
    return full and 2 * waiting >= max_waiting
