"""Placement by two random choices, compared with other policies."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.placement import (
    PLACEMENTS,
    Place,
    PlacementState,
    ReplicaLoad,
)
from goodput_core.spec.choices import RouterPolicy

NAMES = [f"r{i}" for i in range(8)]


def loads(counts: dict[str, int]) -> list[ReplicaLoad]:
    return [ReplicaLoad(name=name, in_flight=count) for name, count in counts.items()]


def placed(seed: int, times: int, counts: dict[str, int]) -> list[str]:
    state, names = PlacementState(seed=seed), []
    for _ in range(times):
        state, placement = PLACEMENTS[RouterPolicy.POWER_OF_TWO](state, loads(counts), (), 0)
        assert placement.replica is not None
        names.append(placement.replica)
    return names


def test_the_draw_depends_only_on_seed_and_count() -> None:
    even = dict.fromkeys(NAMES, 0)
    assert placed(1, 50, even) == placed(1, 50, even)
    assert placed(1, 50, even) != placed(2, 50, even)
    assert placed(1, 50, even)[20:] != placed(1, 30, even), (
        "the sequence continues and does not repeat"
    )


@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_replica_is_drawn_about_equally_often(count: int) -> None:
    times = 1_000 * count
    drawn = Counter(placed(7, times, dict.fromkeys(NAMES[:count], 0)))
    assert min(drawn.values()) > 850
    assert max(drawn.values()) < 1_150


def test_the_emptier_of_two_replicas_is_selected() -> None:
    assert set(placed(3, 40, {"a": 2, "b": 1})) == {"b"}
    assert set(placed(3, 5, {"a": 2})) == {"a"}


@given(
    counts=st.lists(st.integers(0, 20), min_size=2, max_size=8, unique=True),
    seed=st.integers(0, 1 << 64),
)
def test_the_fullest_replica_is_never_selected(counts: list[int], seed: int) -> None:
    named = dict(zip(NAMES, counts, strict=False))
    fullest = max(named, key=named.__getitem__)
    assert fullest not in placed(seed, 20, named)


def mean_stay(place: Place, sizes: list[int], *, gap: int, seen_every: int = 1) -> float:
    """Mean time in the house of requests that come at equal gaps to replicas of one server each.

    Args:
        place: the law.
        sizes: service time of each request.
        gap: between arrivals.
        seen_every: arrivals between two looks at the loads; 1: always fresh.
    """
    free_at = dict.fromkeys(NAMES, 0)
    counts = dict.fromkeys(NAMES, 0)
    ends: list[tuple[int, str]] = []
    state, seen, stays = PlacementState(), loads(counts), []
    for index, size in enumerate(sizes):
        now = index * gap
        while ends and ends[0][0] <= now:
            counts[heappop(ends)[1]] -= 1
        if not index % seen_every:
            seen = loads(counts)
        state, placement = place(state, seen, (), now)
        name = placement.replica
        assert name is not None
        free_at[name] = max(free_at[name], now) + size
        heappush(ends, (free_at[name], name))
        counts[name] += 1
        stays.append(free_at[name] - now)
    return fmean(stays)


def test_power_of_two_balances_better_than_round_robin_if_sizes_differ() -> None:
    random = Random(11)
    sizes = [random.choice([10, 10, 10, 10, 10, 10, 10, 250]) for _ in range(4_000)]
    turns, two = (
        mean_stay(law, sizes, gap=6)
        for law in (PLACEMENTS[RouterPolicy.ROUND_ROBIN], PLACEMENTS[RouterPolicy.POWER_OF_TWO])
    )
    assert two < 0.6 * turns


def test_power_of_two_is_worse_than_round_robin_if_all_requests_are_equal() -> None:
    sizes = [40] * 2_000
    turns, two = (
        mean_stay(law, sizes, gap=6)
        for law in (PLACEMENTS[RouterPolicy.ROUND_ROBIN], PLACEMENTS[RouterPolicy.POWER_OF_TWO])
    )
    assert turns == 40, "no request waits"
    assert two > 1.1 * turns


def test_power_of_two_balances_better_than_least_loaded_if_loads_are_old() -> None:
    # As with several routers, or between two reports: all requests go to the same replica.
    random = Random(12)
    sizes = [random.choice([20, 60]) for _ in range(4_000)]
    herd, two = (
        mean_stay(law, sizes, gap=6, seen_every=24)
        for law in (PLACEMENTS[RouterPolicy.LEAST_LOADED], PLACEMENTS[RouterPolicy.POWER_OF_TWO])
    )
    assert two < 0.8 * herd
    fresh, two = (
        mean_stay(law, sizes, gap=6)
        for law in (PLACEMENTS[RouterPolicy.LEAST_LOADED], PLACEMENTS[RouterPolicy.POWER_OF_TWO])
    )
    assert fresh < two, "with fresh loads the emptiest of all is better"
