"""The laws for another server than Goodput's engine, in a closed loop without its step times.

Capacity is known from observations alone: no step-time law, no limits that can change, and with
`lengths_known=False` and `readings=False` not even the server's metrics.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

import pytest
from tests.core.control.conftest import CLASS, INTERVAL_NS, LENGTHS

from goodput_core.control import ClassOutcomes, ReplicaReason, ServiceObservation, Signal
from goodput_core.control.demand import ArrivalSample, estimate_demand
from goodput_core.control.observed import REQUEST_UNITS, RecentLoad, are_lighter, recent_load
from goodput_core.histogram import LengthMix
from goodput_core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.core.control.conftest import Plant

    MakePlant = Callable[..., Plant]

SUSTAINED = 1.1
"""Requests per second of one replica (see test_closed_loop.py). The law does not know it."""


def foreign(plant: MakePlant, *, readings: bool = True, **settings: object) -> Plant:
    """Return a service of another server, whose metrics page may be missing."""
    service = plant(foreign=True, **settings)
    service.device = None
    if not readings:
        observe = service._observe

        def blind(arrivals: int) -> ServiceObservation:
            seen = observe(arrivals)
            return replace(
                seen,
                traffic=replace(seen.traffic, finished=LengthMix()),
                replicas=tuple(
                    replace(r, signal=Signal.MISSING, running=0, waiting=0) for r in seen.replicas
                ),
            )

        service._observe = blind  # type: ignore[method-assign]
    return service


LOADS = {
    "mixed lengths": (LENGTHS, SUSTAINED),
    "long prompts": (((3000, 40),), 0.2),
    "spread lengths": (((200, 20), (200, 20), (200, 20), (1000, 400)), 1.7),
}
"""Lengths, and the requests per second of one replica at which about 5 % miss a target."""


@pytest.mark.parametrize(
    ("kind", "high", "low", "startup_s", "readings", "seed"),
    [
        ("mixed lengths", 4.0, 0.5, 20, False, 21),
        ("mixed lengths", 2.2, 1.1, 400, True, 22),
        ("long prompts", 1.7, 0.4, 150, True, 23),
        ("spread lengths", 4.0, 0.5, 150, True, 24),
        ("spread lengths", 1.7, 0.4, 400, False, 25),
    ],
)
def test_replicas_follow_a_load_up_and_down_without_a_hasty_step(
    plant: MakePlant,
    kind: str,
    high: float,
    low: float,
    startup_s: int,
    readings: bool,
    seed: int,
) -> None:
    lengths, sustained = LOADS[kind]
    service = foreign(
        plant,
        rate=lambda s: (high if 600 <= s < 4200 else low) * sustained,
        lengths=lengths,
        startup_s=startup_s,
        readings=readings,
        seed=seed,
        replicas=ceil(low),
    )
    service.run(600 + 2400)
    assert attained_after(service, 1200) > 0.93
    highest = service.desired[-1]
    assert high <= highest <= high / 0.6 + 2
    assert attained_after(service, 4200) > 0.93
    assert ceil(low) <= service.desired[-1] <= low / 0.7 + 1
    assert service.desired[-1] < highest
    raised_ns = -(10**18)
    for decision in service.decisions:
        replicas, budget = decision.replicas, decision.bounds
        assert replicas is not None
        assert budget is not None
        if replicas.replicas > replicas.current:
            raised_ns = decision.at_ns
        if replicas.replicas < replicas.current:
            assert not budget.missed, "no replica is removed while a target is missed"
            assert decision.at_ns - raised_ns >= startup_s * NS_PER_S


def test_a_batch_that_fills_does_not_lower_the_known_capacity(plant: MakePlant) -> None:
    """After a step of the load, fewer requests finish at first than a replica sustains."""
    service = foreign(plant, rate=lambda s: 3.0 * SUSTAINED if s >= 600 else 0.05)
    while service.desired[-1:] != [2]:
        service.run(10)
    assert service.state.replicas.learnt.failed > SUSTAINED


def attained_after(service: Plant, seconds: float) -> float:
    service.judged = service.good = 0
    service.run(seconds)
    return service.good / service.judged


@pytest.mark.parametrize("readings", [True, False], ids=["metrics", "no metrics"])
@pytest.mark.parametrize("load", [0.75, 1.6])
def test_a_constant_load_gets_enough_replicas_and_not_many_more(
    plant: MakePlant, load: float, readings: bool
) -> None:
    service = foreign(plant, rate=lambda _: load * SUSTAINED, readings=readings)
    service.run(3600)
    settled = len(service.desired)
    assert attained_after(service, 3600) > 0.95
    assert median(service.desired[settled:]) <= load / 0.7 + 2


@pytest.mark.parametrize("readings", [True, False], ids=["metrics", "no metrics"])
def test_too_many_replicas_are_removed_although_none_has_shown_its_capacity(
    plant: MakePlant, readings: bool
) -> None:
    service = foreign(plant, rate=lambda _: 0.6 * SUSTAINED, replicas=6, readings=readings)
    service.run(2 * 3600)
    assert service.desired[-1] <= 2
    assert attained_after(service, 1800) > 0.95


def test_no_load_at_all_leaves_the_fewest_replicas(plant: MakePlant) -> None:
    service = foreign(plant, rate=lambda s: 0.0 if s > 600 else SUSTAINED, replicas=5)
    service.run(3600)
    assert service.desired[-1] == 1


@pytest.mark.parametrize("readings", [True, False], ids=["metrics", "no metrics"])
def test_replicas_follow_a_step_up_and_down(plant: MakePlant, readings: bool) -> None:
    service = foreign(
        plant,
        rate=lambda s: (2.6 if 600 <= s < 3000 else 0.5) * SUSTAINED,
        readings=readings,
    )
    service.run(600)
    assert service.desired[-1] == 1
    service.run(900)
    assert 3 <= service.desired[-1] <= 6
    assert attained_after(service, 1500) > 0.95
    service.run(2400)
    assert service.desired[-1] <= 2


def test_an_expected_capacity_adds_replicas_before_a_target_is_missed(plant: MakePlant) -> None:
    def missed(expected_per_s: float | None) -> tuple[int, int]:
        service = foreign(
            plant,
            rate=lambda at_s: 0.5 + at_s / 1000,
            startup_s=120,
            expected_per_s=expected_per_s,
        )
        service.run(3000)
        if expected_per_s is not None:
            first = next(d.replicas for d in service.decisions if d.apply_replicas > 1)
            assert first is not None
            assert first.reason in (ReplicaReason.DEMAND, ReplicaReason.TREND)
            assert first.sustained_per_s == pytest.approx(first.replicas * expected_per_s)
        return service.judged - service.good, sum(service.desired)

    unknown, known = missed(None), missed(0.8 * SUSTAINED)
    assert known[0] < unknown[0] / 2
    assert known[1] < 1.25 * unknown[1]


def test_an_expected_capacity_that_is_too_high_changes_nothing(plant: MakePlant) -> None:
    services = [
        foreign(plant, rate=lambda _: 3.0, startup_s=60, expected_per_s=expected_per_s)
        for expected_per_s in (None, 100.0)
    ]
    for service in services:
        service.run(2400)
    assert services[0].desired == services[1].desired


def test_an_expected_capacity_that_is_too_low_is_corrected_by_loads_with_slack(
    plant: MakePlant,
) -> None:
    service = foreign(plant, rate=lambda _: 2.0, startup_s=60, expected_per_s=0.25)
    service.run(1800)
    assert median(service.desired[-60:]) >= 8, "at first, the expectation counts"
    service.run(1.5 * 3600)
    assert median(service.desired[-60:]) <= 7


def test_a_second_rise_of_the_load_is_followed_at_once(plant: MakePlant) -> None:
    """The first rise has shown what a replica does not sustain."""
    service = foreign(plant, rate=lambda s: (2.6 if s % 4800 >= 2400 else 0.5) * SUSTAINED)
    service.run(3000)
    assert attained_after(service, 1800) > 0.9
    service.run(2400)
    assert service.desired[-1] <= 2
    service.run(300)
    reasons = {d.replicas.reason for d in service.decisions[-30:] if d.replicas}
    assert ReplicaReason.DEMAND in reasons
    assert service.desired[-1] >= 3


def test_a_target_that_one_request_alone_misses_does_not_add_replicas(plant: MakePlant) -> None:
    service = foreign(plant, rate=lambda _: 0.2, lengths=((50, 10),))
    service.slowness = 3.0
    service.run(3600)
    assert max(service.desired) == 1
    reasons = {d.replicas.reason for d in service.decisions if d.replicas}
    assert ReplicaReason.NOT_LOAD in reasons


def test_requests_that_fail_prove_no_load(plant: MakePlant) -> None:
    """For 20 minutes, a broken client sends four times the load, and gets 500 at once."""
    service = foreign(plant, rate=lambda _: 6 * SUSTAINED, replicas=8, startup_s=150)
    observe = service._observe
    earlier = [0, 0]

    def with_failed(arrivals: int) -> ServiceObservation:
        seen = observe(arrivals)
        good, total = service.good - earlier[0], service.judged - earlier[1]
        earlier[:] = service.good, service.judged
        is_broken = 1200 <= service.now_ns / NS_PER_S < 2400
        failed = round(4 * 6 * SUSTAINED * INTERVAL_NS / NS_PER_S) if is_broken else 0
        return replace(
            seen,
            traffic=replace(seen.traffic, arrivals=seen.traffic.arrivals + failed),
            outcomes=(ClassOutcomes(name=CLASS.name, good=good, total=total + failed),),
        )

    service._observe = with_failed  # type: ignore[method-assign]
    service.run(2700)
    assert 0 < service.state.replicas.learnt.proven <= SUSTAINED
    assert attained_after(service, 1200) > 0.95


def test_no_limit_is_ever_changed(plant: MakePlant) -> None:
    service = foreign(plant, rate=lambda s: (0.5 + s / 1800) * SUSTAINED)
    service.run(3600)
    assert len({d.apply_bounds for d in service.decisions}) == 1


@pytest.mark.parametrize("signal", [Signal.MISSING, Signal.FAILED])
def test_routers_without_measurements_change_nothing(plant: MakePlant, signal: Signal) -> None:
    service = foreign(plant, rate=lambda _: 2.0 * SUSTAINED, replicas=4)
    service.signal = lambda s: signal if s >= 600 else Signal.FRESH
    service.run(600)
    before = service.desired[-1]
    service.run(3600)
    assert service.desired[-1] == before


def test_heavier_requests_add_replicas(plant: MakePlant) -> None:
    service = foreign(plant, rate=lambda _: 1.2 * SUSTAINED, replicas=2)
    service.run(3600)
    before = service.desired[-1]
    service._lengths = ((2000, 150),)
    service.run(3600)
    assert service.desired[-1] > before
    assert attained_after(service, 1800) > 0.9


def test_lighter_requests_remove_replicas_although_heavier_ones_missed(plant: MakePlant) -> None:
    service = foreign(plant, rate=lambda _: 0.9, lengths=((800, 150),))
    service.run(3600)
    before = service.desired[-1]
    assert before >= 2
    service._lengths = ((200, 30),)
    service.run(2400)
    assert service.desired[-1] == 1
    assert attained_after(service, 1800) > 0.95


def test_shorter_prompts_with_equal_outputs_are_not_lighter() -> None:
    heavy = LengthMix.of_requests([(1000, 0, 100)] * 60)
    assert are_lighter(LengthMix.of_requests([(600, 0, 60)] * 60), heavy)
    assert not are_lighter(LengthMix.of_requests([(100, 0, 90)] * 60), heavy)
    assert not are_lighter(LengthMix.of_requests([(600, 0, 60)] * 20), heavy)
    assert not are_lighter(heavy, None)


def traffic(*spans: tuple[int, int, int, int]) -> list[ArrivalSample]:
    """Return minutes of arrivals in ten seconds, requests in flight, ready replicas and misses."""
    return [
        ArrivalSample(
            at_ns=(10 * number + 10) * NS_PER_S,
            interval_ns=10 * NS_PER_S,
            requests=requests,
            finished=LengthMix(),
            in_flight=in_flight,
            ready=ready,
            missed=missed,
        )
        for number, (requests, in_flight, ready, missed) in enumerate(
            span for span in spans for _ in range(6)
        )
    ]


def load_at_miss(samples: list[ArrivalSample]) -> tuple[RecentLoad, float | None]:
    now_ns = samples[-1].at_ns
    load = recent_load(samples, now_ns)
    return load, load.load_at_miss(estimate_demand(samples, REQUEST_UNITS, now_ns))


def test_misses_after_the_load_has_fallen_say_nothing_about_the_lower_load() -> None:
    busy = (50, 200, 4, 20)
    _, load = load_at_miss(traffic(busy, busy, busy))
    assert load is not None
    assert 1.2 < load < 1.7
    fallen, load = load_at_miss(traffic(busy, busy, (5, 20, 4, 5)))
    assert fallen.falls
    assert load is None


def test_a_miss_with_more_replicas_than_before_is_attributed_to_the_fewer() -> None:
    _, load = load_at_miss(traffic((50, 200, 1, 20), (50, 200, 4, 20)))
    assert load is not None
    assert load > 5


def test_misses_of_a_minute_ago_are_no_reason_to_change() -> None:
    _, load = load_at_miss(traffic((50, 200, 4, 20), (50, 200, 4, 0)))
    assert load is None
