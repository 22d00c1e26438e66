"""The max-min fair shares of tenants in each resource."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.tenants.fair_share import FairShare, Resource, fair_level
from goodput_core.units import NS_PER_S

INF = math.inf
demands = st.tuples(st.integers(0, 10**6) | st.just(INF), st.integers(1, 1000))


def shares_by_filling(capacity: int, demands: list[tuple[float, int]]) -> list[Fraction]:
    """Return the max-min fair shares by raising a common level until nothing is left."""
    shares = [Fraction(0)] * len(demands)
    growing = {i for i, (demand, _) in enumerate(demands) if demand}
    left = Fraction(capacity)
    while growing and left:
        step = min(
            [left / sum(demands[i][1] for i in growing)]
            + [
                (Fraction(demands[i][0]) - shares[i]) / demands[i][1]
                for i in growing
                if demands[i][0] != INF
            ]
        )
        for i in growing:
            shares[i] += step * demands[i][1]
            left -= step * demands[i][1]
        growing -= {i for i in growing if shares[i] == demands[i][0]}
    return shares


@given(st.integers(0, 10**6), st.lists(demands, max_size=8))
def test_the_level_is_that_of_progressive_filling(
    capacity: int, demands: list[tuple[float, int]]
) -> None:
    level = fair_level(capacity, demands)
    for share, (demand, weight) in zip(shares_by_filling(capacity, demands), demands, strict=True):
        assert min(demand, weight * level) == pytest.approx(float(share), abs=1e-6, rel=1e-9)


class ShareBench:
    """A share with one limited resource, and the requests that use it."""

    def __init__(self, resource: Resource, capacity: float, **weights: int) -> None:
        self.share = FairShare(weights)
        self.resource = resource
        self.capacity = capacity
        self.now_ns = 0

    def send(self, tenant: str, amount: float = 1) -> bool:
        """Send a request, and return whether it was admitted."""
        needs, capacities = [0.0] * len(Resource), [INF] * len(Resource)
        needs[self.resource], capacities[self.resource] = amount, self.capacity
        if not self.share.admits(tenant, needs, capacities, self.now_ns):
            return False
        self.share.begin(tenant)
        self.share.add(tenant, self.resource, amount, self.now_ns)
        return True

    def end(self, tenant: str, amount: float = 1) -> None:
        self.share.add(tenant, self.resource, -amount, self.now_ns)
        self.share.end(tenant)

    def flood(self, tenant: str, amount: float = 1) -> int:
        """Return how many requests are admitted before one is rejected."""
        return next(n for n in range(10_000) if not self.send(tenant, amount))


def test_a_sole_tenant_is_never_rejected() -> None:
    bench = ShareBench(Resource.PLACES, 10, a=1, b=1)
    assert all(bench.send("a") for _ in range(100))
    assert bench.send("b")
    assert not bench.send("a")


def test_a_tenant_is_alone_again_a_minute_after_the_last_request_of_the_others() -> None:
    bench = ShareBench(Resource.PLACES, 10, a=1, flood=1)
    bench.send("a")
    bench.end("a")
    bench.flood("flood")
    bench.now_ns = 59 * NS_PER_S
    assert not bench.send("flood")
    bench.now_ns = 61 * NS_PER_S
    assert bench.send("flood")


def test_a_flood_leaves_the_places_that_others_used_lately() -> None:
    bench = ShareBench(Resource.PLACES, 100, a=1, flood=1)
    for _ in range(30):
        bench.send("a")
    for _ in range(30):
        bench.end("a")
    assert bench.flood("flood") == 100  # the first rejection shows that it is a flood
    for _ in range(40):
        bench.end("flood")
    assert bench.flood("flood") == 10
    assert all(bench.send("a") for _ in range(30))


def test_free_places_are_used_by_any_tenant() -> None:
    bench = ShareBench(Resource.PLACES, 100, a=1, big=1)
    bench.send("a")
    assert all(bench.send("big") for _ in range(90))


@pytest.mark.parametrize("resource", [Resource.PLACES, Resource.MEMORY])
def test_two_floods_divide_a_resource_by_their_weights(resource: Resource) -> None:
    bench = ShareBench(resource, 100, a=3, b=1)
    have = dict.fromkeys(("a", "b"), 1)
    for tenant in have:
        assert bench.send(tenant)
    for _ in range(400):
        bench.now_ns += NS_PER_S // 10
        for tenant, count in have.items():
            bench.end(tenant)
            have[tenant] = count - 1 + bench.flood(tenant)
            if not have[tenant]:
                assert bench.send(tenant)
                have[tenant] = 1
    assert have["a"] == pytest.approx(75, abs=3)
    assert have["b"] == pytest.approx(25, abs=3)


def test_a_tenant_that_uses_nothing_is_admitted_whatever_its_request_needs() -> None:
    bench = ShareBench(Resource.QUEUE, 100, a=1, b=1)
    for _ in range(50):
        bench.send("b", 10)
    assert bench.send("a", 10_000)


def test_only_the_cause_of_a_long_queue_is_rejected() -> None:
    bench = ShareBench(Resource.QUEUE, 100, a=1, b=1, flood=1)
    bench.send("a", 20)
    bench.send("b", 10)
    assert 40 < bench.flood("flood", 10) < 60  # bursts may fill the queue five times
    assert bench.send("a", 20)
    assert bench.send("b", 10)
    assert not bench.send("flood", 10)


def test_a_flood_without_a_waiting_prompt_is_rejected_while_it_has_most_of_the_work() -> None:
    bench = ShareBench(Resource.QUEUE, 100, a=1, flood=1)
    bench.send("a", 1)
    bench.share.add("a", Resource.SERVICE, 1000, 0)
    assert bench.send("flood", 1)  # a stream that keeps running
    assert bench.send("flood", 5000)
    assert not bench.send("flood", 5000)
    bench.share.add("flood", Resource.QUEUE, -5001, 0)
    bench.share.add("flood", Resource.SERVICE, 10_001, 0)
    assert not bench.send("flood", 5000)
    bench.share.add("flood", Resource.SERVICE, -9000, 0)
    assert bench.send("flood", 5000)


def test_a_large_tenant_with_recent_service_is_admitted_while_others_do_not_wait() -> None:
    bench = ShareBench(Resource.QUEUE, 100, a=1, big=1)
    bench.send("a", 1)
    bench.share.add("big", Resource.SERVICE, 1000, 0)
    assert all(bench.send("big", 200) for _ in range(4))


def test_the_long_prompt_of_another_tenant_gives_a_flood_no_room_in_the_queue() -> None:
    bench = ShareBench(Resource.QUEUE, 100, a=1, flood=1)
    bench.send("a")
    bench.flood("flood")
    for _ in range(200):
        bench.end("flood")
    bench.share.add("a", Resource.SERVICE, 10_000, 0)
    assert bench.send("a", 5_000)
    admitted = bench.flood("flood")
    waiting = bench.share._tenants["flood"].uses[Resource.QUEUE]
    assert admitted == 0
    assert waiting > 50


def test_tenants_that_used_the_service_in_turn_do_not_reduce_the_part_of_a_constant_one() -> None:
    visitors = {f"v{number}": 1 for number in range(9)}
    bench = ShareBench(Resource.QUEUE, 100, a=1, flood=1, **visitors)
    for visitor in visitors:
        assert bench.send(visitor)
        bench.end(visitor)
    bench.now_ns = 10 * NS_PER_S
    assert bench.send("a", 400)
    assert bench.send("flood", 400)
    assert bench.send("a", 100), "it has about half of the queue, and half of the busy tenants"
    bench.flood("flood", 100)
    assert bench.send("a", 100)


def test_an_idle_tenant_keeps_half_of_the_queue_from_a_flood() -> None:
    bench = ShareBench(Resource.QUEUE, 100, a=1, flood=1)
    bench.send("a")
    bench.end("a")
    bench.now_ns = 10 * NS_PER_S
    assert bench.flood("flood", 10) <= 50


def test_a_flood_that_ended_is_forgotten_within_seconds() -> None:
    bench = ShareBench(Resource.QUEUE, 100, a=1, flood=1)
    bench.send("a", 20)
    for _ in range(bench.flood("flood", 10)):
        bench.end("flood", 10)
    bench.now_ns += 5 * NS_PER_S
    assert all(bench.send("flood", 10) for _ in range(8))


def test_a_thousand_tenants_cost_little_time_for_each_request() -> None:
    names = [f"t{number}" for number in range(1000)]
    bench = ShareBench(Resource.PLACES, 500, **dict.fromkeys(names, 1))
    computed = 0
    level = bench.share._level

    def counted(resource: Resource, capacity: float, now_ns: int) -> float:
        nonlocal computed
        before = bench.share._levels[resource].at_ns, bench.share._levels[resource].total
        result = level(resource, capacity, now_ns)
        after = bench.share._levels[resource].at_ns, bench.share._levels[resource].total
        computed += before != after
        return result

    bench.share._level = counted  # type: ignore[method-assign]
    for number in range(5000):
        bench.now_ns += NS_PER_S // 5000
        bench.send(names[number % 1000])
    assert computed < 100


def test_tenants_can_be_replaced_while_requests_run() -> None:
    bench = ShareBench(Resource.PLACES, 10, a=1, b=1)
    bench.send("a")
    bench.share.set_weights({"b": 2, "c": 1})
    bench.end("a")
    bench.share.set_weights({"b": 2, "c": 1})
    with pytest.raises(KeyError):
        bench.send("a")
    assert bench.send("c")
