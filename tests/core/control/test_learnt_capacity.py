"""Learnt capacity: observed loads, the burstiness of arrivals, and the queueing model."""

from __future__ import annotations

import random

import pytest

from goodput_core.control.capacity import EngineQueue, ReplicaCapacity
from goodput_core.control.learnt import ArrivalBlocks, Capacities, LearntCapacity, RecentBlocks
from goodput_core.control.queueing import TTFTTarget, late_share, sustained_load
from goodput_core.units import NS_PER_S

HOUR_NS = 3600 * NS_PER_S
QUEUE = EngineQueue(alone_s=2.0, prefill_s=0.05, prompt_spread=1.5, memory_spread=2.0)
ONE = ReplicaCapacity(device_s=0.2, spread=1.5, batch=20, feasible=True, queue=QUEUE)
TARGETS = [TTFTTarget(ttft_s=0.5, late=0.01)]


def _burstiness(counts: list[int], interval_s: int = 10) -> float:
    blocks, burstiness = ArrivalBlocks(), 1.0
    for count in counts:
        blocks, burstiness = blocks.add(count, interval_s * NS_PER_S, burstiness)
    return burstiness


def _poisson(rng: random.Random, mean: float) -> int:
    count, at = 0, rng.expovariate(1)
    while at < mean:
        count, at = count + 1, at + rng.expovariate(1)
    return count


@pytest.mark.parametrize("interval_s", [1, 10, 30])
def test_independent_arrivals_have_a_burstiness_of_one(interval_s: int) -> None:
    rng = random.Random(3)
    counts = [_poisson(rng, 4 * interval_s) for _ in range(7200 // interval_s)]
    assert _burstiness(counts, interval_s) == pytest.approx(1, abs=0.3)


def test_arrivals_in_groups_are_bursty_and_a_slow_rise_is_not() -> None:
    rng = random.Random(3)
    assert _burstiness([4 * _poisson(rng, 10) for _ in range(720)]) == pytest.approx(4, rel=0.4)
    assert _burstiness([_poisson(rng, 10 + i / 10) for i in range(720)]) < 1.5


def test_observed_loads_expire() -> None:
    learnt = LearntCapacity().with_proven(1.2, 0)
    assert learnt.factor == 1.2
    learnt = learnt.with_failed(0.9, HOUR_NS)
    assert learnt.factor == pytest.approx(0.9 * 0.95)
    assert learnt.without_expired(6 * HOUR_NS).factor == learnt.factor
    assert learnt.without_expired(8 * HOUR_NS).factor == 1.0


def test_a_miss_at_a_higher_load_does_not_renew_a_failed_load() -> None:
    learnt = LearntCapacity().with_failed(0.7, 0).with_failed(0.9, 5 * HOUR_NS)
    assert learnt.failed == 0.7, "the lower one still counts"
    assert learnt.without_expired(7 * HOUR_NS).failed == 0, "for six hours, not for eleven"
    assert learnt.with_failed(0.6, 5 * HOUR_NS).without_expired(7 * HOUR_NS).failed == 0.6


def _peaks(rates: list[float], seed: int = 1, interval_s: int = 10) -> list[tuple[float, int]]:
    """Return the recurring peak after each interval of independent arrivals at these rates."""
    rng, recent, found = random.Random(seed), RecentBlocks(), []
    for i, rate in enumerate(rates):
        now_ns = (i + 1) * interval_s * NS_PER_S
        recent = recent.add(_poisson(rng, rate * interval_s), interval_s * NS_PER_S, now_ns)
        found.append(recent.recurring_peak())
    return found


@pytest.mark.parametrize("interval_s", [2, 5, 10, 30])
def test_the_rate_of_bursts_that_recur_is_found(interval_s: int) -> None:
    cycle = [2.0] * (60 // interval_s) + [8.0] * (30 // interval_s)
    for seed in range(5):
        peaks = _peaks(cycle * 20, seed, interval_s)
        assert peaks[2 * len(cycle) - 1] == (0.0, 0), "two bursts may be chance"
        assert peaks[-1][0] == pytest.approx(8, rel=0.15)
        assert peaks[-1][1] == pytest.approx(1800 * NS_PER_S, abs=30 * NS_PER_S)


@pytest.mark.parametrize(
    "rates",
    [
        pytest.param([4.0] * 2160, id="constant"),
        pytest.param([0.5 + i / 120 for i in range(720)], id="a slow rise"),
        pytest.param([2.0] * 180 + [8.0] * 90 + [2.0] * 180, id="one crowd"),
        pytest.param([2.0, 2.0, 2.0, 2.4, 2.4, 2.4] * 120, id="small waves"),
    ],
)
def test_chance_a_rise_and_a_single_crowd_are_no_bursts(rates: list[float]) -> None:
    for seed in range(5):
        assert set(_peaks(rates, seed)) == {(0.0, 0)}


def test_bursts_are_forgotten_half_an_hour_after_the_last_one() -> None:
    learnt = LearntCapacity().with_peak(8.0, HOUR_NS).with_peak(7.0, HOUR_NS + 1)
    assert (learnt.peak_per_s, learnt.peak_ns) == (8.0, HOUR_NS)
    assert learnt.without_expired(HOUR_NS + HOUR_NS // 2).peak_per_s == 8.0
    assert learnt.without_expired(HOUR_NS + HOUR_NS // 2 + 1).peak_per_s == 0.0


def test_replicas_for_bursts_sustain_their_rate() -> None:
    learnt = LearntCapacity(peak_per_s=20.0, burstiness=4.0)
    bursts = Capacities(predicted=ONE, targets=TARGETS, learnt=learnt, shared=True)
    steady = Capacities(predicted=ONE, targets=TARGETS, learnt=LearntCapacity(), shared=True)
    assert bursts.fewest_for_peaks() == steady.fewest_for(20.0 * ONE.device_s)
    assert steady.fewest_for_peaks() == 0


def test_a_higher_load_served_with_slack_replaces_a_failed_one() -> None:
    learnt = LearntCapacity().with_failed(0.9, 0)
    assert learnt.with_proven(0.95, 1).factor == 1.0


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9])
def test_fewer_requests_are_late_with_less_load_more_replicas_and_smaller_bursts(
    load: float,
) -> None:
    def late(load: float, replicas: int = 2, burstiness: float = 1.5) -> float:
        return late_share(ONE, load=load, ttft_s=0.5, replicas=replicas, burstiness=burstiness)

    assert 0 <= late(load) <= 1
    assert late(load * 0.9) <= late(load)
    assert late(load, replicas=3) <= late(load)
    assert late(load, burstiness=1) <= late(load)


def test_a_target_shorter_than_a_prompt_does_not_limit_the_load() -> None:
    impossible = [TTFTTarget(ttft_s=0.04, late=0.01)]
    load = sustained_load(ONE, impossible, replicas=1, burstiness=1, most=0.8)
    assert load == 0.8, "more replicas would not help"


def test_the_fewest_replicas_sustain_the_load_and_one_fewer_does_not() -> None:
    capacities = Capacities(predicted=ONE, targets=TARGETS, learnt=LearntCapacity(), shared=True)
    assert capacities.fewest_for(0) == 0
    for load in (0.1, 0.5, 0.9, 2.5, 7, 30):
        fewest = capacities.fewest_for(load)
        assert fewest * capacities.of(fewest) >= load
        assert fewest == 1 or (fewest - 1) * capacities.of(fewest - 1) < load
        rate = capacities.requests_per_s(fewest)
        assert rate is not None
        assert rate >= load / ONE.device_s
