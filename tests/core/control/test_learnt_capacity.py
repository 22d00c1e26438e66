"""Learnt capacity: observed loads, the burstiness of arrivals, and the queueing model."""

from __future__ import annotations

import random

import pytest

from goodput_core.control.capacity import EngineQueue, ReplicaCapacity
from goodput_core.control.learnt import ArrivalBlocks, Capacities, LearntCapacity
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
