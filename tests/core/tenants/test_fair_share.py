"""The max-min fair share of tenants, and the decisions about their requests."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goodput_core.tenants.fair_share import FairShare, TenantWork, fair_tokens
from goodput_core.units import NS_PER_MS, NS_PER_S

works = st.builds(
    TenantWork, tokens=st.integers(0, 10**6), weight=st.integers(1, 1000), limited=st.booleans()
)


def maxmin(capacity: int, works: list[TenantWork]) -> list[Fraction]:
    """Return the max-min fair shares by raising a common level until nothing is left."""
    shares = [Fraction(0)] * len(works)
    open_ones = set(range(len(works)))
    left = Fraction(capacity)
    while open_ones and left:
        step = min(
            [left / sum(works[i].weight for i in open_ones)]
            + [
                (Fraction(works[i].tokens) - shares[i]) / works[i].weight
                for i in open_ones
                if not works[i].limited
            ]
        )
        for i in open_ones:
            shares[i] += step * works[i].weight
            left -= step * works[i].weight
        open_ones -= {i for i in open_ones if not works[i].limited and shares[i] == works[i].tokens}
    return shares


@given(works, st.lists(works, max_size=8))
def test_the_share_is_that_of_progressive_filling(
    own: TenantWork, others: list[TenantWork]
) -> None:
    demanding = TenantWork(tokens=own.tokens, weight=own.weight, limited=True)
    total = sum(int(work.tokens) for work in (own, *others))
    expected = maxmin(total, [demanding, *others])[0]
    assert fair_tokens(own, others) == pytest.approx(float(expected), abs=1e-6)


@given(works, st.lists(works, max_size=8))
def test_a_tenant_has_at_least_its_part_by_weight(
    own: TenantWork, others: list[TenantWork]
) -> None:
    total = sum(work.tokens for work in (own, *others))
    weights = sum(work.weight for work in (own, *others))
    assert fair_tokens(own, others) >= total * own.weight / weights - 1e-6


class ShareBench:
    """Tenants with requests of 1,000 tokens, at a pressure that the test sets."""

    def __init__(self, **weights: int) -> None:
        self.share = FairShare(weights)
        self.now_ns = 0
        self.running: dict[str, list[int]] = {name: [] for name in weights}

    def send(self, tenant: str, pressure: float, *, tokens: int = 1000) -> bool:
        admitted = self.share.admits(tenant, pressure, self.now_ns)
        if admitted:
            self.running[tenant].append(self.share.begin(tenant, tokens, 1))
        return admitted

    def end(self, tenant: str, *, served: bool = True) -> None:
        tokens = self.running[tenant].pop(0)
        self.share.end(
            tenant,
            tokens,
            prompt_tokens=tokens - 1 if served else 0,
            output_tokens=1 if served else 0,
            now_ns=self.now_ns,
        )


def test_everything_is_admitted_while_the_wait_is_short() -> None:
    bench = ShareBench(a=1, flood=1)
    bench.send("a", 0)
    assert all(bench.send("flood", 0.24) for _ in range(100))


@pytest.mark.parametrize("pressure", [0.5, 1.0, 10.0])
def test_the_only_active_tenant_is_never_rejected(pressure: float) -> None:
    bench = ShareBench(a=1, b=1)
    assert all(bench.send("a", pressure) for _ in range(100))


def test_an_idle_tenant_keeps_others_from_filling_the_replicas_for_a_minute() -> None:
    bench = ShareBench(a=1, flood=1)
    bench.send("a", 0)
    bench.end("a")
    for _ in range(10):
        bench.send("flood", 0)
    bench.now_ns = 59 * NS_PER_S
    assert not bench.send("flood", 1)
    bench.now_ns = 60 * NS_PER_S
    assert bench.send("flood", 1)


@pytest.mark.parametrize("pressure", [0.3, 0.6, 1.0, 5.0])
def test_a_flood_is_rejected_and_the_others_are_not(pressure: float) -> None:
    bench = ShareBench(a=1, b=1, flood=1)
    for tenant, count in (("a", 8), ("b", 5), ("flood", 20)):
        assert [bench.send(tenant, 0) for _ in range(count)] == [True] * count
    assert not bench.send("flood", max(pressure, 0.5))  # the begin of the flood is found
    assert not bench.send("flood", pressure)
    assert bench.send("a", pressure)
    assert bench.send("b", pressure)


def test_a_limited_tenant_is_admitted_again_below_its_share() -> None:
    bench = ShareBench(a=1, flood=1)
    for tenant, count in (("a", 10), ("flood", 20)):
        for _ in range(count):
            bench.send(tenant, 0)
    assert not bench.send("flood", 1)
    for _ in range(15):
        bench.end("flood", served=False)
    assert bench.send("flood", 0.3)


def test_long_prompts_that_leave_quickly_count_by_their_served_tokens() -> None:
    bench = ShareBench(a=1, flood=1)
    for _ in range(10):
        bench.send("a", 0)
        bench.send("flood", 0, tokens=4000)
    assert not bench.send("flood", 1)
    for _ in range(9):
        bench.end("flood")
    assert not bench.send("flood", 0.3)  # although it has less in flight than the other
    assert bench.send("a", 0.3)


def test_a_rejected_burst_is_forgiven_after_two_seconds() -> None:
    bench = ShareBench(a=1, b=1)
    for tenant, count in (("a", 20), ("b", 10)):
        for _ in range(count):
            bench.send(tenant, 0)
    assert not bench.send("a", 0.6)
    assert not bench.send("a", 0.3)
    bench.now_ns += 2 * NS_PER_S
    assert bench.send("a", 0.3)


def test_tenants_can_be_replaced_while_requests_run() -> None:
    bench = ShareBench(a=1, b=1)
    bench.send("a", 0)
    bench.share.set_weights({"b": 2, "c": 1})
    bench.end("a")
    bench.share.set_weights({"b": 2, "c": 1})
    with pytest.raises(KeyError):
        bench.share.admits("a", 0, 0)
    assert bench.share.admits("c", 2, 0)


@pytest.mark.parametrize(
    ("weights", "rates"),
    [
        pytest.param([1, 1], [4, 40], id="equal weights, unequal floods"),
        pytest.param([3, 1], [4, 12], id="weights 3 and 1"),
        pytest.param([2, 1, 1], [12, 4, 8], id="three tenants"),
    ],
)
def test_greedy_tenants_get_work_by_their_weights(weights: list[int], rates: list[int]) -> None:
    """Each tenant demands several times its share of a server with 200 requests per second."""
    rng = random.Random(1)
    names = [f"t{number}" for number in range(len(weights))]
    bench = ShareBench(**dict(zip(names, weights, strict=True)))
    queue: list[str] = []
    served = dict.fromkeys(names, 0)
    total = sum(weights)
    for _ in range(6_000):  # steps of 5 ms; a step ends one request
        for name, weight, rate in zip(names, weights, rates, strict=True):
            # At least four times the tenant's share.
            if rng.random() < min(1.0, rate * weight / total):
                for _ in range(max(1, rate * weight // total)):
                    if bench.send(name, len(queue) / 80):
                        queue.append(name)
        assert len(queue) < 2_000
        if queue:
            ended = queue.pop(0)
            bench.end(ended)
            served[ended] += bench.now_ns >= 10 * NS_PER_S
        bench.now_ns += 5 * NS_PER_MS
    everything = sum(served.values())
    assert everything > 0.98 * 4_000  # the server is never idle
    for name, weight in zip(names, weights, strict=True):
        assert served[name] / everything == pytest.approx(weight / total, rel=0.35, abs=0.02)
