"""Placement: round robin, least loaded, and the rules of all policies."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.placement import (
    PLACEMENTS,
    Place,
    PlacementReason,
    PlacementState,
    ReplicaLoad,
)
from goodput_core.spec.choices import RouterPolicy

if TYPE_CHECKING:
    from random import Random

LOADS = st.lists(
    st.builds(
        ReplicaLoad,
        name=st.sampled_from("abcdefgh"),
        in_flight=st.integers(0, 5),
        waiting=st.integers(0, 3),
        kv_used_blocks=st.integers(0, 4),
        kv_total_blocks=st.just(4),
        ready=st.booleans(),
        saturated=st.booleans(),
        draining=st.booleans(),
    ),
    unique_by=lambda load: load.name,
    max_size=8,
)
STATES = st.builds(
    PlacementState,
    last=st.sampled_from(["", *"abcdefgh", "zz"]),
    drawn=st.integers(0, 99),
    seed=st.integers(0, 1 << 64),
)
EACH = pytest.mark.parametrize("place", PLACEMENTS.values(), ids=PLACEMENTS.keys())


def load(
    name: str,
    in_flight: int = 0,
    *,
    waiting: int = 0,
    kv_used_blocks: int = 0,
    kv_total_blocks: int = 0,
) -> ReplicaLoad:
    return ReplicaLoad(
        name=name,
        in_flight=in_flight,
        waiting=waiting,
        kv_used_blocks=kv_used_blocks,
        kv_total_blocks=kv_total_blocks,
    )


def placed(place: Place, replicas: list[ReplicaLoad], times: int) -> list[str | None]:
    state, names = PlacementState(), []
    for now_ns in range(times):
        state, placement = place(state, replicas, (), now_ns)
        names.append(placement.replica)
    return names


def test_every_router_policy_of_a_manifest_has_a_placement() -> None:
    assert set(PLACEMENTS) == set(RouterPolicy)
    for policy, place in PLACEMENTS.items():
        assert place(PlacementState(), [load("a")], (), 0)[1].policy is policy


def test_round_robin_selects_replicas_in_cyclic_order() -> None:
    replicas = [load("b", 9), load("a"), load("c", 3)]
    assert placed(PLACEMENTS[RouterPolicy.ROUND_ROBIN], replicas, 7) == [
        "a",
        "b",
        "c",
        "a",
        "b",
        "c",
        "a",
    ]


def test_round_robin_continues_after_a_removed_replica() -> None:
    state, _ = PLACEMENTS[RouterPolicy.ROUND_ROBIN](
        PlacementState(last="a"), [load("a"), load("b"), load("c")], (), 0
    )
    assert state.last == "b"
    assert (
        PLACEMENTS[RouterPolicy.ROUND_ROBIN](state, [load("a"), load("c")], (), 0)[1].replica == "c"
    )


@pytest.mark.parametrize(
    ("replicas", "taken"),
    [
        pytest.param([load("a", 2), load("b", 1)], "b", id="fewest in flight"),
        pytest.param([load("a", 1, waiting=2), load("b", 1, waiting=1)], "b", id="shortest queue"),
        pytest.param(
            [
                load("a", 1, kv_used_blocks=50, kv_total_blocks=100),
                load("b", 1, kv_used_blocks=9, kv_total_blocks=20),
            ],
            "b",
            id="largest free share of the cache",
        ),
        pytest.param(
            [
                load("a", 1, kv_used_blocks=9, kv_total_blocks=100),
                load("b", 1, kv_used_blocks=1, kv_total_blocks=100),
            ],
            "a",
            id="next in order if the cache differs by less than a tenth",
        ),
        pytest.param([load("a", 1, waiting=9), load("b", 2)], "a", id="in flight before queue"),
    ],
)
def test_least_loaded_selects_the_emptiest(replicas: list[ReplicaLoad], taken: str) -> None:
    assert (
        PLACEMENTS[RouterPolicy.LEAST_LOADED](PlacementState(), replicas, (), 0)[1].replica == taken
    )
    assert (
        PLACEMENTS[RouterPolicy.LEAST_LOADED](PlacementState(), replicas[::-1], (), 0)[1].replica
        == taken
    )


def test_idle_replicas_get_equal_shares() -> None:
    names = placed(PLACEMENTS[RouterPolicy.LEAST_LOADED], [load(name) for name in "abc"], 9)
    assert set(Counter(names).values()) == {3}


@EACH
@given(state=STATES, replicas=LOADS)
def test_only_candidates_are_selected(
    place: Place, state: PlacementState, replicas: list[ReplicaLoad]
) -> None:
    after, placement = place(state, replicas, (), 7)
    able = [r for r in replicas if r.ready and not r.saturated and not r.draining]
    assert placement.considered == replicas
    assert placement.at_ns == 7
    if able:
        assert placement.replica in {r.name for r in able}
        assert after.last == placement.replica
    else:
        assert placement.replica is None
        assert after == state
        full = any(r.ready and not r.draining for r in replicas)
        expected = PlacementReason.ALL_SATURATED if full else PlacementReason.NONE_READY
        assert placement.reason is expected


@EACH
@given(state=STATES, replicas=LOADS, random=st.randoms(use_true_random=False))
def test_the_order_of_the_list_has_no_effect(
    place: Place, state: PlacementState, replicas: list[ReplicaLoad], random: Random
) -> None:
    shuffled = random.sample(replicas, len(replicas))
    assert place(state, replicas, (), 0)[1].replica == place(state, shuffled, (), 0)[1].replica


@given(replicas=LOADS, requests=st.integers(1, 60))
def test_least_loaded_keeps_counts_even(replicas: list[ReplicaLoad], requests: int) -> None:
    counts = {
        r.name: r.in_flight for r in replicas if r.ready and not r.saturated and not r.draining
    }
    if not counts:
        return
    state = PlacementState()
    for _ in range(requests):
        loads = [load(name, count) for name, count in counts.items()]
        state, placement = PLACEMENTS[RouterPolicy.LEAST_LOADED](state, loads, (), 0)
        assert placement.replica is not None
        assert counts[placement.replica] == min(counts.values())
        counts[placement.replica] += 1
