"""Replicas: each sentence of DESIGN.md's "Control" that is about their number.

All of them stand in this one module, long as it is: it is read beside that section, and one device
and one service, whose figures follow from each other, serve every test.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from goodput_core.control import (
    Bounds,
    DeviceCapacity,
    ReplicaDecision,
    ReplicaPhase,
    ReplicaReason,
    ReplicaState,
    ReplicaWindow,
    ServiceObservation,
    ServiceParams,
    Signal,
    TargetStatus,
    TokenBudgetDecision,
    TokenBudgetReason,
    Traffic,
    replica_law,
)
from goodput_core.histogram import LengthMix
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS, NS_PER_S

S = NS_PER_S
INTERVAL = 10
# 20 ms a step whatever it holds, up to 20 tokens: with a promise of 25 ms and answers of 100
# tokens a replica that never idles gives 10 requests per second with 20 of them in the batch.
DEVICE = DeviceCapacity(
    form=RooflineForm(
        c0_ns=20 * NS_PER_MS,
        c1_ns_per_token=1 * NS_PER_MS,
        c2_ns_per_context_token=0,
        c4_ns_per_request=0,
    ),
    kv_tokens=1_000_000,
)
ANSWERED = LengthMix.of_requests([(1, 1, 100)] * 50)
PARAMS = ServiceParams(
    mode=ControlMode.AUTO,
    classes=(SLOClass(name="chat", ttft_ms=500, tpot_ms=22, objective=Fraction(99, 100)),),
    min_replicas=1,
    max_replicas=20,
    default_startup_ns=60 * S,
)
CARRIES = 10
"""Requests per second of one replica that never idles; it may be busy for 0.8 of its time."""


def _judged(
    reason: TokenBudgetReason = TokenBudgetReason.KEPT, slack_s: int = 0
) -> TokenBudgetDecision:
    missed = reason is TokenBudgetReason.NEEDS_REPLICAS
    return TokenBudgetDecision(
        bounds=replace(Bounds.initial(PARAMS), safety_percent=95),
        reason=reason,
        ttft=TargetStatus.MISSED if missed else TargetStatus.SLACK,
        tpot=TargetStatus.KEPT,
        slack_ns=slack_s * S,
        at_ns=0,
    )


def _replica(index: int, phase: ReplicaPhase = ReplicaPhase.READY) -> ReplicaWindow:
    return ReplicaWindow(name=f"chat-{index}", phase=phase, signal=Signal.FRESH)


class Service:
    """A service whose replicas follow the decisions, unless a test says otherwise."""

    def __init__(self, replicas: int = 1, params: ServiceParams = PARAMS) -> None:
        self.params = params
        self.asked = replicas
        self.now_s = 0
        self.state = ReplicaState()
        self.startup_s = 0
        self.decisions: list[ReplicaDecision] = []

    def step(
        self,
        rate: float = 0,
        *,
        signal: Signal = Signal.FRESH,
        judged: TokenBudgetDecision | None = None,
        ready: int | None = None,
        waiting: int = 0,
        settled: bool = True,
        in_flight: int = 0,
        device: DeviceCapacity | None = DEVICE,
        startups_s: tuple[int, ...] = (60,),
    ) -> ReplicaDecision:
        """One interval of ten seconds."""
        self.now_s += INTERVAL
        ready = self.asked if ready is None else ready
        windows = [replace(_replica(i), waiting=waiting, settled=settled) for i in range(ready)]
        windows += [_replica(i, ReplicaPhase.STARTING) for i in range(ready, self.asked)]
        observation = ServiceObservation(
            interval_ns=INTERVAL * S,
            traffic=Traffic(
                signal=signal,
                arrivals=round(rate * INTERVAL),
                in_flight=in_flight,
                finished=ANSWERED if rate else LengthMix(),
            ),
            replicas=tuple(windows),
            replicas_asked=self.asked,
            startups_ns=tuple(s * S for s in startups_s),
            device=device,
        )
        judged = _judged() if judged is None else judged
        self.state, decision = replica_law(
            self.state, observation, judged, self.params, self.now_s * S
        )
        self.asked = decision.replicas
        self.decisions.append(decision)
        return decision

    def run(self, seconds: int, rate: float = 0, **how: object) -> ReplicaDecision:
        """So many seconds of the same."""
        for _ in range(seconds // INTERVAL):
            decision = self.step(rate, **how)  # type: ignore[arg-type]
        return decision


# --- capacity -----------------------------------------------------------------------------------
def test_capacity_is_predicted_device_seconds_per_second_over_the_observed_mix() -> None:
    decision = Service(replicas=4).step(rate=25)
    assert decision.load == pytest.approx(2.5)
    assert decision.bearable == 0.8


def test_rates_that_a_replica_was_seen_to_sustain_are_only_lower_bounds() -> None:
    service = Service(replicas=4)
    idle = service.run(900, rate=2, judged=_judged(slack_s=400))
    assert idle.bearable == 0.8, "a replica with little to do shows nothing"
    busy = Service(replicas=1, params=replace(PARAMS, max_replicas=1))
    sustained = busy.run(900, rate=12, judged=_judged(slack_s=400))
    assert 1.1 < sustained.bearable < 1.2, "one that carries more than predicted can"


def test_what_replicas_failed_at_is_not_asked_of_them_again() -> None:
    service = Service(replicas=2)
    service.run(300, rate=14)
    failed = service.step(14, judged=_judged(TokenBudgetReason.NEEDS_REPLICAS))
    assert (failed.replicas, failed.reason) == (3, ReplicaReason.MISSED)
    after = service.run(2 * 3600, rate=14)
    assert after.replicas == 3, "two would do by prediction, and did not"
    assert 0.7 < after.bearable < 0.75, "what 0.7 may have been at most, less a twentieth"
    forgotten = service.run(5 * 3600, rate=14)
    assert forgotten.bearable == 0.8


# --- frozen -------------------------------------------------------------------------------------
def test_it_is_frozen_while_pods_start() -> None:
    service = Service(replicas=1)
    grown = [service.step(rate=60).replicas]
    while grown[-1] == 1:
        grown.append(service.step(rate=60).replicas)
    assert grown[-1] == 5
    for _ in range(12):
        decision = service.step(rate=60, ready=1)
        assert (decision.replicas, decision.reason) == (5, ReplicaReason.STARTING)
    assert service.step(rate=60).replicas == 8


def test_a_replica_that_never_starts_does_not_freeze_the_others_for_ever() -> None:
    service = Service(replicas=3)
    frozen = [service.step(rate=40, ready=2) for _ in range(60)]
    assert frozen[0].reason is ReplicaReason.STARTING
    assert frozen[29].reason is ReplicaReason.STARTING
    assert ReplicaReason.DEMAND in {d.reason for d in frozen[30:]}
    assert len({d.replicas for d in frozen}) == 2, "more are asked for once, then it waits again"


def test_it_is_frozen_while_the_inner_loop_is_unsettled() -> None:
    service = Service(replicas=1)
    service.run(20, rate=3)
    decision = service.run(40, rate=60, settled=False)
    assert (decision.replicas, decision.reason) == (1, ReplicaReason.UNSETTLED)
    assert service.run(60, rate=60, settled=False).replicas > 1, "but for a minute only"


# --- up and down --------------------------------------------------------------------------------
def test_it_goes_up_at_once() -> None:
    service = Service(replicas=2)
    service.run(600, rate=10)
    decision = service.run(60, rate=30)
    assert decision.replicas == 4
    assert ReplicaReason.DEMAND in {d.reason for d in service.decisions}


def test_once_it_is_certain_that_more_are_needed_it_asks_for_enough() -> None:
    decision = Service(replicas=3).step(rate=33)
    assert decision.load == pytest.approx(3.3)
    # Of 330 arrivals 294 are certain: more than three sustain, and four do. 330 take five.
    assert (decision.replicas, decision.reason) == (5, ReplicaReason.DEMAND)


@pytest.mark.parametrize(("current", "most"), [(1, 5), (3, 7), (6, 12)])
def test_one_step_up_is_capped(current: int, most: int) -> None:
    service = Service(replicas=current)
    decision = service.run(60, rate=1000, ready=current)
    assert max(d.replicas for d in service.decisions[:2]) <= most
    assert decision.replicas <= most, "and then it is frozen"


def test_it_goes_down_only_when_fewer_would_still_attain() -> None:
    service = Service(replicas=3)
    # Two replicas sustain 16 per second at 0.8; with a tenth to spare, 14.4.
    assert service.run(3600, rate=15).replicas == 3
    assert service.run(3600, rate=14).replicas == 2


def test_it_goes_down_only_after_the_stabilisation_window() -> None:
    service = Service(replicas=3)
    service.run(600, rate=20)
    reasons = []
    while (decision := service.step(rate=10)).replicas == 3:
        reasons.append(decision.reason)
    # Five minutes of stabilisation, behind five of the demand's own mean.
    assert 300 <= len(reasons) * INTERVAL <= 610
    assert reasons[-1] is ReplicaReason.STABILIZING
    assert decision.reason is ReplicaReason.FEWER_SUFFICE


def test_it_takes_half_away_at_most_and_then_waits_for_a_window_with_those_who_are_left() -> None:
    service = Service(replicas=8)
    service.run(600, rate=60)
    assert service.asked == 8
    service.run(3600, rate=2)
    asked = [d.replicas for d in service.decisions]
    moves = [(i * INTERVAL, n) for i, n in enumerate(asked) if i and n != asked[i - 1]]
    assert [n for _, n in moves] == [7, 4, 2, 1], "the rate's mean falls slowly"
    assert all(after - before >= 300 for (before, _), (after, _) in pairwise(moves))


def test_a_busy_moment_begins_the_stabilisation_window_anew() -> None:
    service = Service(replicas=3)
    service.run(600, rate=20)
    for _ in range(10):
        service.run(240, rate=10)
        service.run(60, rate=20)
    assert {d.replicas for d in service.decisions} == {3}


def test_it_does_not_go_down_while_a_promise_is_missed() -> None:
    service = Service(replicas=3)
    missed = replace(_judged(), ttft=TargetStatus.MISSED)
    assert service.run(3600, rate=1, judged=missed).replicas == 3


def test_start_up_time_sets_how_long_fewer_must_suffice() -> None:
    service = Service(replicas=3)
    service.run(600, rate=20, startups_s=(1200, 1200))
    assert service.run(1100, rate=10, startups_s=(1200, 1200)).replicas == 3
    assert service.run(600, rate=10, startups_s=(1200, 1200)).replicas == 2


def test_start_up_time_sets_how_far_a_trend_is_followed() -> None:
    def grown(startup_s: int) -> list[ReplicaDecision]:
        service = Service(replicas=10)
        for i in range(130):
            service.step(rate=30 + i / 2, startups_s=(startup_s,))
        return service.decisions

    slow, quick = grown(300), grown(20)
    assert slow[-1].horizon_ns == 300 * S
    assert max(d.replicas for d in slow) > max(d.replicas for d in quick)
    assert ReplicaReason.TREND in {d.reason for d in slow}


def test_a_sudden_step_is_no_trend() -> None:
    service = Service(replicas=10, params=replace(PARAMS, min_replicas=10))
    service.run(1200, rate=50, startups_s=(300,))
    service.run(1200, rate=75, startups_s=(300,))
    assert {d.replicas for d in service.decisions} == {10}


# --- three kinds of silence ---------------------------------------------------------------------
def test_no_traffic_needs_no_replica() -> None:
    service = Service(replicas=3)
    decision = service.run(3600)
    assert (decision.load, decision.needed) == (0.0, 0)
    assert decision.replicas == 1
    assert ReplicaReason.NO_TRAFFIC in {d.reason for d in service.decisions}


@pytest.mark.parametrize(
    ("signal", "reason"),
    [
        (Signal.MISSING, ReplicaReason.METRICS_MISSING),
        (Signal.FAILED, ReplicaReason.SCRAPE_FAILED),
    ],
)
def test_silence_is_no_reason_to_go_down(signal: Signal, reason: ReplicaReason) -> None:
    service = Service(replicas=3)
    decision = service.run(3600, signal=signal)
    assert (decision.replicas, decision.reason, decision.load) == (3, reason, None)


def test_floors_hold_when_metrics_are_missing() -> None:
    service = Service(replicas=1, params=replace(PARAMS, min_replicas=2))
    decision = service.step(signal=Signal.FAILED)
    assert (decision.replicas, decision.reason) == (2, ReplicaReason.BELOW_FLOOR)


def test_ceilings_hold_when_metrics_are_missing() -> None:
    service = Service(replicas=9, params=replace(PARAMS, max_replicas=4))
    decision = service.step(signal=Signal.MISSING)
    assert (decision.replicas, decision.reason) == (4, ReplicaReason.ABOVE_CEILING)


def test_an_outage_breaks_the_stabilisation_window_and_one_failed_scrape_does_not() -> None:
    def down_after(outage_s: int) -> int:
        service = Service(replicas=3)
        service.run(600, rate=20)
        service.run(450, rate=10)
        service.run(outage_s, signal=Signal.FAILED)
        passed = 0
        while service.asked == 3:
            service.step(rate=10)
            passed += INTERVAL
        return passed

    assert down_after(120) >= 300
    assert down_after(10) < 300


def test_one_replica_that_cannot_be_scraped_does_not_stall_scaling() -> None:
    service = Service(replicas=2)
    service.run(600, rate=10)
    observation = ServiceObservation(
        interval_ns=INTERVAL * S,
        traffic=Traffic(signal=Signal.FRESH, arrivals=1000, finished=ANSWERED),
        replicas=(_replica(0), replace(_replica(1), signal=Signal.FAILED)),
        replicas_asked=2,
        device=DEVICE,
    )
    _, decision = replica_law(service.state, observation, _judged(), PARAMS, 610 * S)
    assert decision.reason is ReplicaReason.DEMAND


def test_without_a_model_of_the_device_only_missed_promises_move_it() -> None:
    service = Service(replicas=2)
    decision = service.run(600, rate=30, device=None)
    assert (decision.replicas, decision.reason) == (2, ReplicaReason.UNKNOWN_CAPACITY)
    missed = service.step(30, device=None, judged=_judged(TokenBudgetReason.NEEDS_REPLICAS))
    assert (missed.replicas, missed.reason) == (3, ReplicaReason.MISSED)


# --- what more replicas cannot mend -------------------------------------------------------------
def test_replicas_that_have_little_to_do_are_not_multiplied() -> None:
    service = Service(replicas=4)
    service.run(300, rate=8)
    decision = service.step(8, judged=_judged(TokenBudgetReason.NEEDS_REPLICAS))
    assert (decision.replicas, decision.reason) == (4, ReplicaReason.NOT_LOAD)


def test_a_promise_that_one_request_alone_breaks_is_not_met_by_more_replicas() -> None:
    slow = replace(
        DEVICE,
        form=replace(DEVICE.form, c0_ns=40 * NS_PER_MS),  # type: ignore[type-var]
    )
    service = Service(replicas=2)
    service.run(600, rate=5, device=slow)
    decision = service.step(5, device=slow, judged=_judged(TokenBudgetReason.NEEDS_REPLICAS))
    assert decision.reason is ReplicaReason.INFEASIBLE


def test_a_queue_that_gets_shorter_needs_no_replica() -> None:
    service = Service(replicas=2)
    service.run(600, rate=15, waiting=9)
    missed = _judged(TokenBudgetReason.NEEDS_REPLICAS)
    assert service.step(15, waiting=5, judged=missed).reason is ReplicaReason.QUEUE_DRAINING
    assert service.step(15, waiting=5, judged=missed).reason is ReplicaReason.MISSED


def test_a_decision_shows_that_max_replicas_limits_it() -> None:
    service = Service(replicas=3, params=replace(PARAMS, max_replicas=4))
    decision = service.run(120, rate=100)
    assert (decision.replicas, decision.limited) == (4, True)
    assert not Service(replicas=3).run(120, rate=20).limited


# --- zero ---------------------------------------------------------------------------------------
def test_it_scales_to_zero_only_where_the_floor_is_zero() -> None:
    zero = Service(replicas=2, params=replace(PARAMS, min_replicas=0))
    assert zero.run(3600).replicas == 0
    assert zero.decisions[-1].reason is ReplicaReason.NO_TRAFFIC
    assert Service(replicas=2).run(3600).replicas == 1


def test_one_request_in_the_stabilisation_window_keeps_the_last_replica() -> None:
    service = Service(replicas=1, params=replace(PARAMS, min_replicas=0))
    for _ in range(20):
        service.step(rate=0.1)
        service.run(290)
    assert {d.replicas for d in service.decisions} == {1}


def test_a_request_in_flight_keeps_the_last_replica() -> None:
    service = Service(replicas=1, params=replace(PARAMS, min_replicas=0))
    service.run(60, rate=1)
    assert service.run(3600, in_flight=1).replicas == 1
    assert service.run(3600).replicas == 0


@pytest.mark.parametrize("how", [{"rate": 0.1}, {"in_flight": 1}], ids=["arrived", "waits"])
def test_a_request_wakes_a_service_from_zero_at_once(how: dict[str, float]) -> None:
    service = Service(replicas=0, params=replace(PARAMS, min_replicas=0))
    service.run(600)
    decision = service.step(**how)  # type: ignore[arg-type]
    assert (decision.replicas, decision.reason) == (1, ReplicaReason.WOKEN)
