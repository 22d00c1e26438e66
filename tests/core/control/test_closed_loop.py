"""Both laws in a closed loop with a simulated service, over hours."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from goodput_core.control import ReplicaReason, ServiceState, Signal, service_law
from goodput_core.control.capacity import replica_capacity
from goodput_core.histogram import LengthMix
from goodput_core.spec.choices import ControlMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.core.control.conftest import Plant

    MakePlant = Callable[..., Plant]


def _predicted_rate(plant: Plant) -> float:
    """Return the requests per second that one replica of this service sustains, by prediction."""
    assert plant.device is not None
    mix = LengthMix.of_requests([(400, 0, 60)] * 3 + [(2000, 0, 150)])
    one = replica_capacity(plant.device, mix, tpot_ns=180_000_000, max_num_seqs=64, max_tokens=512)
    assert one is not None
    return 1 / one.device_s


SUSTAINED = 1.1


def test_the_predicted_capacity_of_a_replica_is_reached(plant: MakePlant) -> None:
    service = plant(rate=lambda _: 10, max_replicas=1)
    assert _predicted_rate(service) == pytest.approx(SUSTAINED, rel=0.02)
    service.run(600)
    assert service.judged / 600 == pytest.approx(SUSTAINED, rel=0.1), "it is never idle"


@pytest.mark.parametrize("load", [0.4, 0.75, 1.6, 3.2])
def test_replicas_do_not_oscillate_under_constant_load(plant: MakePlant, load: float) -> None:
    service = plant(rate=lambda _: load * SUSTAINED)
    service.run(3600)
    settled = len(service.desired)
    service.judged = service.good = 0
    service.run(2 * 3600)
    assert len(set(service.desired[settled:])) == 1, "no oscillation"
    assert service.desired[-1] <= load / 0.8 + 2
    assert service.good / service.judged > 0.95


def test_limits_do_not_change_under_constant_load(plant: MakePlant) -> None:
    service = plant(rate=lambda _: 1.2 * SUSTAINED, replicas=2)
    service.run(2 * 3600)
    assert len({d.apply_bounds for d in service.decisions}) == 1


def test_replicas_follow_a_step_of_the_load_without_overshoot(
    plant: MakePlant,
) -> None:
    service = plant(rate=lambda s: (3.0 if 900 <= s < 4500 else 0.5) * SUSTAINED)
    service.run(900)
    assert service.desired[-1] == 1
    service.run(1200)
    risen = service.desired[-1]
    assert 4 <= risen <= 6, "3 device seconds per second take 4 replicas at 0.8"
    assert max(service.desired) == risen
    service.judged = service.good = 0
    service.run(2400)
    assert service.good / service.judged > 0.95
    assert service.desired[-1] == risen
    service.run(1500)
    assert service.desired[-1] == 1


def test_targets_are_met_on_a_slow_ramp_with_slow_starts(plant: MakePlant) -> None:
    service = plant(rate=lambda s: (0.5 + s / 900) * SUSTAINED, startup_s=240)
    service.run(2 * 3600)
    assert service.good / service.judged > 0.9
    assert ReplicaReason.TREND in {d.replicas.reason for d in service.decisions if d.replicas}
    assert max(service.desired) <= 12


def test_no_replica_is_added_while_others_start(plant: MakePlant) -> None:
    """Otherwise the number would double in each interval until the first pod is ready."""
    service = plant(rate=lambda _: 3.5 * SUSTAINED, startup_s=600, max_replicas=64)
    service.run(2400)
    assert max(service.desired) <= 8


@pytest.mark.parametrize("signal", [Signal.MISSING, Signal.FAILED])
def test_the_number_stays_during_an_outage_of_metrics_and_follows_the_load_after_it(
    plant: MakePlant, signal: Signal
) -> None:
    service = plant(rate=lambda s: (2.4 if s < 3600 else 1.2) * SUSTAINED, replicas=4)
    service.signal = lambda s: signal if 2400 <= s < 4800 else Signal.FRESH
    service.run(2400)
    before = service.desired[-1]
    service.run(2400)
    assert service.desired[-1] == before
    service.run(2400)
    assert service.desired[-1] < before
    assert service.good / service.judged > 0.95


def test_a_slower_device_adds_replicas(plant: MakePlant) -> None:
    service = plant(rate=lambda _: 1.4 * SUSTAINED, replicas=2)
    service.run(1800)
    assert service.desired[-1] == 2
    service.slowness = 1.5
    service.run(3600)
    assert service.desired[-1] > 2
    service.judged = service.good = 0
    service.run(1800)
    assert service.good / service.judged > 0.9


def test_a_service_without_traffic_scales_to_zero_and_back(plant: MakePlant) -> None:
    service = plant(rate=lambda s: 0 if 600 <= s < 3600 else 0.5 * SUSTAINED, min_replicas=0)
    service.run(3590)
    assert service.desired[-1] == 0
    service.run(600)
    assert service.desired[-1] == 1
    assert service.replicas[0].steps > 0


def test_every_decision_can_be_recomputed_from_its_inputs(plant: MakePlant) -> None:
    service = plant(rate=lambda s: (0.5 + s / 600) * SUSTAINED, startup_s=90)
    service.run(1800)
    state = ServiceState()
    for decision in service.decisions:
        state, again = service_law(state, decision.observation, decision.params, decision.at_ns)
        assert again == decision
    assert state == service.state


@pytest.mark.parametrize("mode", [ControlMode.RECOMMEND, ControlMode.MANUAL])
def test_modes_that_apply_nothing_keep_budget_and_replicas(
    plant: MakePlant, mode: ControlMode
) -> None:
    service = plant(rate=lambda _: 2 * SUSTAINED, mode=mode, min_replicas=1)
    service.run(900)
    assert set(service.desired) == {1}
    assert {d.apply_bounds.max_tokens for d in service.decisions} == {512}
    if mode is ControlMode.MANUAL:
        assert {d.replicas for d in service.decisions} == {None}
        assert {d.bounds for d in service.decisions} == {None}
    else:
        wanted = {d.replicas.replicas for d in service.decisions if d.replicas is not None}
        assert max(wanted) >= 2


def test_replicas_set_in_the_manifest_are_kept_and_ours_are_a_recommendation(
    plant: MakePlant,
) -> None:
    service = plant(rate=lambda _: 2 * SUSTAINED, replicas=1)
    service.params = replace(service.params, replicas=1)
    service.run(900)
    assert set(service.desired) == {1}
    last = service.decisions[-1]
    assert last.replicas is not None
    assert last.replicas.replicas >= 2
    assert last.bounds is not None
    assert last.apply_bounds == last.bounds.bounds, "the budget is applied all the same"
