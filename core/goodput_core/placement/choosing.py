"""What the policies share: who can take a request, who is emptiest, and how ties are broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.placement.decision import Placement, PlacementReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_core.placement.decision import PlacementState, ReplicaLoad
    from goodput_core.spec.choices import RouterPolicy

__all__ = ["decided", "emptiest", "next_in_turn", "open_replicas"]


def open_replicas(replicas: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """The replicas that can take a request now."""
    return [r for r in replicas if r.ready and not r.saturated and not r.draining]


def next_in_turn(replicas: Sequence[ReplicaLoad], last: str) -> str:
    """The first name behind `last` in the order of names, round and round."""
    return min((r.name <= last, r.name) for r in replicas)[1]


def emptiest(replicas: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """Those with the fewest requests in flight; equal ones by queue, then by tenths of KV in use.

    Requests in flight come first because the caller counts them itself: the others are as old
    as the last report, and a law that trusted them first would send every request between two
    reports to the same replica. For the same reason a small difference in KV is none: a report
    that came with an answer still counts the blocks of that answer.
    """
    fewest = min((r.in_flight, r.waiting) for r in replicas)
    equal = [r for r in replicas if (r.in_flight, r.waiting) == fewest]
    if len(equal) > 1:
        least_used = min(r.kv_tenths for r in equal)
        equal = [r for r in equal if r.kv_tenths == least_used]
    return equal


def decided(
    policy: RouterPolicy,
    state: PlacementState,
    replicas: Sequence[ReplicaLoad],
    now_ns: int,
    *,
    taken: str | None,
    reason: PlacementReason,
) -> tuple[PlacementState, Placement]:
    """A policy's decision and the state after it.

    Args:
        policy: who decided.
        state: before.
        replicas: all of them, open or not.
        now_ns: when.
        taken: the replica; None: none is open, which leaves the state as it was.
        reason: why it was taken; of no meaning without one.
    """
    if taken is None:
        staying = any(r.ready and not r.draining for r in replicas)
        reason = PlacementReason.ALL_SATURATED if staying else PlacementReason.NONE_READY
    else:
        state = state.after(taken)
    return state, Placement(
        policy=policy, replica=taken, reason=reason, considered=replicas, at_ns=now_ns
    )
