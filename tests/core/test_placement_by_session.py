"""Placement of sessions on one replica each, within a bounded load."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import pytest

from goodput_core.placement import (
    PLACEMENTS,
    PlacementReason,
    PlacementState,
    ReplicaLoad,
    most_in_flight,
)
from goodput_core.spec.choices import RouterPolicy

NAMES = tuple(f"chat-{i}" for i in range(5))


def place(
    number: int,
    loads: dict[str, int] | None = None,
    *,
    policy: RouterPolicy = RouterPolicy.LEAST_LOADED,
    saturated: str = "",
) -> tuple[str | None, PlacementReason]:
    in_flight = dict.fromkeys(NAMES, 0) if loads is None else loads
    replicas = [
        ReplicaLoad(name=name, in_flight=count, saturated=name == saturated)
        for name, count in in_flight.items()
    ]
    session = blake2b(str(number).encode()).digest()
    _, placement = PLACEMENTS[policy](PlacementState(), replicas, (), 0, session=session)
    return placement.replica, placement.reason


@pytest.mark.parametrize("policy", RouterPolicy)
def test_each_router_places_a_session_on_the_same_replica(policy: RouterPolicy) -> None:
    for number in range(20):
        replica, reason = place(number, policy=policy)
        assert reason is PlacementReason.SESSION
        assert place(number)[0] == replica, "without any state, whatever the policy"


def test_sessions_are_spread_evenly() -> None:
    counts = Counter(place(number)[0] for number in range(2000))
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 1.2 * 2000 / len(NAMES)


def test_only_the_sessions_of_a_removed_replica_move() -> None:
    before = {number: place(number)[0] for number in range(500)}
    left = dict.fromkeys(NAMES[1:], 0)
    for number, replica in before.items():
        after, _ = place(number, left)
        assert after == replica or replica == NAMES[0]
    added = dict.fromkeys((*NAMES, "chat-new"), 0)
    moved = [n for n, replica in before.items() if place(n, added)[0] != replica]
    assert all(place(n, added)[0] == "chat-new" for n in moved)
    assert 0.1 < len(moved) / len(before) < 0.25, "about a sixth"


def test_a_busy_replica_shares_its_sessions_and_gets_them_back() -> None:
    own, _ = place(7)
    assert own is not None
    loads = dict.fromkeys(NAMES, 4)
    loads[own] = most_in_flight(sum(loads.values()), len(NAMES))
    other, reason = place(7, loads)
    assert other != own
    assert reason is PlacementReason.SESSION_BOUNDED
    loads[own] = 4
    assert place(7, loads) == (own, PlacementReason.SESSION)


def test_one_session_alone_cannot_load_a_replica_above_the_bound() -> None:
    loads = dict.fromkeys(NAMES, 0)
    for _ in range(1000):
        replica, _ = place(7, loads)
        assert replica is not None
        loads[replica] += 1
    assert max(loads.values()) <= 1.25 * 1000 / len(NAMES) + 1


def test_a_saturated_replica_gets_no_session() -> None:
    own, _ = place(7)
    assert own is not None
    other, _ = place(7, saturated=own)
    assert other not in {None, own}
