"""The replica law, rule by rule as docs/control.md lists them, on one device and one service."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from goodput_core.control import (
    Bounds,
    ClassOutcomes,
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
from goodput_core.control.learnt import BUSY
from goodput_core.histogram import LengthMix
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_MS, NS_PER_S

S = NS_PER_S
INTERVAL = 10
# A step of up to 20 tokens takes 20 ms. With a TPOT target of 22 ms and outputs of 100 tokens, a
# replica that is never idle serves 10 requests per second, with 20 of them in the batch.
DEVICE = DeviceCapacity(
    form=RooflineForm(
        c0_ns=20 * NS_PER_MS,
        c1_ns_per_token=1 * NS_PER_MS,
        c2_ns_per_context_token=0,
        c4_ns_per_request=0,
    ),
    kv_tokens=1_000_000,
)
FINISHED = LengthMix.of_requests([(1, 1, 100)] * 50)
PARAMS = ServiceParams(
    mode=ControlMode.AUTO,
    classes=(SLOClass(name="chat", ttft_ms=5_000, tpot_ms=22, objective=Fraction(99, 100)),),
    min_replicas=1,
    max_replicas=20,
    default_startup_ns=60 * S,
)


def _budget(
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
    """A service whose replicas follow the decisions, unless a test sets `ready`."""

    def __init__(self, replicas: int = 1, params: ServiceParams = PARAMS) -> None:
        self.params = params
        self.desired = replicas
        self.now_s = 0
        self.state = ReplicaState()
        self.startup_s = 0
        self.finished = FINISHED
        self.decisions: list[ReplicaDecision] = []

    def step(
        self,
        rate: float = 0,
        *,
        signal: Signal = Signal.FRESH,
        budget: TokenBudgetDecision | None = None,
        ready: int | None = None,
        waiting: int = 0,
        settled: bool = True,
        in_flight: int = 0,
        device: DeviceCapacity | None = DEVICE,
        startups_s: tuple[int, ...] = (60,),
        good: int | None = None,
        objective_missed: bool = False,
    ) -> ReplicaDecision:
        """Run one interval of ten seconds; of 100 requests that end, `good` meet the targets."""
        self.now_s += INTERVAL
        ready = self.desired if ready is None else ready
        windows = [replace(_replica(i), waiting=waiting, settled=settled) for i in range(ready)]
        windows += [_replica(i, ReplicaPhase.STARTING) for i in range(ready, self.desired)]
        observation = ServiceObservation(
            interval_ns=INTERVAL * S,
            traffic=Traffic(
                signal=signal,
                arrivals=round(rate * INTERVAL),
                in_flight=in_flight,
                finished=self.finished if rate else LengthMix(),
            ),
            outcomes=() if good is None else (ClassOutcomes(name="chat", good=good, total=100),),
            objective_missed=objective_missed,
            replicas=tuple(windows),
            desired_replicas=self.desired,
            startups_ns=tuple(s * S for s in startups_s),
            device=device,
        )
        budget = _budget() if budget is None else budget
        self.state, decision = replica_law(
            self.state, observation, budget, self.params, self.now_s * S
        )
        self.desired = decision.replicas
        self.decisions.append(decision)
        return decision

    def run(self, seconds: int, rate: float = 0, **interval: object) -> ReplicaDecision:
        """Run equal intervals for this long."""
        for _ in range(seconds // INTERVAL):
            decision = self.step(rate, **interval)  # type: ignore[arg-type]
        return decision


# --- capacity -----------------------------------------------------------------------------------
def test_capacity_is_predicted_device_seconds_per_second_over_the_observed_mix() -> None:
    decision = Service(replicas=4).step(rate=25)
    assert decision.load == pytest.approx(2.5)
    assert decision.capacity == 0.8


def test_observed_load_only_raises_the_predicted_capacity() -> None:
    service = Service(replicas=4)
    idle = service.run(900, rate=2, budget=_budget(slack_s=400))
    assert idle.capacity == 0.8, "an idle replica does not show its capacity"
    busy = Service(replicas=1, params=replace(PARAMS, max_replicas=1))
    sustained = busy.run(900, rate=12, budget=_budget(slack_s=400))
    assert sustained.capacity == pytest.approx(1.15, abs=0.05), "it sustained more than predicted"


def test_a_load_at_which_a_target_was_missed_lowers_the_capacity() -> None:
    service = Service(replicas=2)
    service.run(300, rate=14)
    failed = service.step(14, budget=_budget(TokenBudgetReason.NEEDS_REPLICAS))
    assert (failed.replicas, failed.reason) == (3, ReplicaReason.MISSED)
    after = service.run(2 * 3600, rate=14)
    assert after.replicas == 3, "two suffice by prediction, but missed a target"
    assert after.capacity == pytest.approx(0.725, abs=0.025), (
        "the upper bound of the load, less 5 %"
    )
    forgotten = service.run(5 * 3600, rate=14)
    assert forgotten.capacity == 0.8


# --- frozen -------------------------------------------------------------------------------------
def test_the_number_is_frozen_while_replicas_start() -> None:
    service = Service(replicas=1)
    grown = [service.step(rate=60).replicas]
    while grown[-1] == 1:
        grown.append(service.step(rate=60).replicas)
    assert grown[-1] == 5
    for _ in range(12):
        decision = service.step(rate=60, ready=1)
        assert (decision.replicas, decision.reason) == (5, ReplicaReason.STARTING)
    assert service.step(rate=60).replicas == 8


def test_a_replica_that_never_starts_freezes_the_number_for_a_limited_time() -> None:
    service = Service(replicas=3)
    missed = _budget(TokenBudgetReason.NEEDS_REPLICAS)
    frozen = [service.step(rate=20, ready=2, budget=missed) for _ in range(60)]
    assert frozen[0].reason is ReplicaReason.STARTING
    assert frozen[29].reason is ReplicaReason.STARTING
    assert ReplicaReason.MISSED in {d.reason for d in frozen[30:]}
    assert len({d.replicas for d in frozen}) == 2, "one increase, then frozen again"


def test_a_demand_beyond_the_replicas_that_start_adds_more() -> None:
    service = Service(replicas=2)
    service.run(600, rate=10)
    while service.desired == 2:
        service.step(rate=22)
    assert service.desired == 3
    while (decision := service.step(rate=35, ready=2)).replicas == 3:
        assert decision.reason is ReplicaReason.STARTING
    assert decision.reason is ReplicaReason.DEMAND
    most = service.run(120, rate=100, ready=2)
    assert (most.replicas, most.reason) == (6, ReplicaReason.STARTING), "four may start at a time"


def test_the_number_is_frozen_while_token_budgets_are_unsettled() -> None:
    service = Service(replicas=1)
    service.run(20, rate=3)
    decision = service.run(40, rate=60, settled=False)
    assert (decision.replicas, decision.reason) == (1, ReplicaReason.UNSETTLED)
    assert service.run(60, rate=60, settled=False).replicas > 1, "frozen for a minute only"


# --- up and down --------------------------------------------------------------------------------
def test_replicas_are_added_at_once() -> None:
    service = Service(replicas=2)
    service.run(600, rate=10)
    decision = service.run(60, rate=30)
    assert decision.replicas == 4
    assert ReplicaReason.DEMAND in {d.reason for d in service.decisions}


def test_a_certain_demand_adds_enough_replicas_for_its_mean() -> None:
    decision = Service(replicas=3).step(rate=33)
    assert decision.load == pytest.approx(3.3)
    # The lower bound of 330 arrivals is 294, more than three replicas sustain. 330 need five.
    assert (decision.replicas, decision.reason) == (5, ReplicaReason.DEMAND)


@pytest.mark.parametrize(("current", "most"), [(1, 5), (3, 7), (6, 12)])
def test_one_increase_is_limited(current: int, most: int) -> None:
    service = Service(replicas=current)
    decision = service.run(60, rate=1000, ready=current)
    assert max(d.replicas for d in service.decisions[:2]) <= most
    assert decision.replicas <= most, "frozen after the increase"


def test_replicas_are_removed_only_if_fewer_suffice_with_a_margin() -> None:
    service = Service(replicas=3)
    # Two replicas sustain 16 per second at 0.8; with a tenth to spare, 14.4.
    assert service.run(3600, rate=15).replicas == 3
    assert service.run(3600, rate=14).replicas == 2


def test_a_busy_minute_of_few_requests_does_not_restart_the_stabilisation_window() -> None:
    """One replica sustains 0.79 of these long requests per second; 0.55 arrive, at random."""
    waited_s = []
    for seed in range(20):
        service, rng = Service(replicas=2), random.Random(seed)
        service.finished = LengthMix.of_requests([(1, 1, 1000)] * 50)
        while service.desired == 2:
            service.step(rate=sum(rng.random() < 0.055 for _ in range(100)) / INTERVAL)
        waited_s.append(service.now_s)
    assert median(waited_s) <= 600


def test_no_replica_is_removed_in_the_seconds_in_which_the_load_rises() -> None:
    service = Service(replicas=3)
    while service.now_s < 300:
        service.step(rate=10)
    risen = service.step(rate=25)
    assert (risen.replicas, risen.reason) == (3, ReplicaReason.STABILIZING)
    assert service.run(20, rate=10).reason is ReplicaReason.FEWER_SUFFICE


def test_replicas_are_removed_only_after_the_stabilisation_window() -> None:
    service = Service(replicas=3)
    service.run(600, rate=20)
    reasons = []
    while (decision := service.step(rate=10)).replicas == 3:
        reasons.append(decision.reason)
    # Five minutes of stabilisation, after five in which the mean demand falls.
    assert 300 <= len(reasons) * INTERVAL <= 610
    assert reasons[-1] is ReplicaReason.STABILIZING
    assert decision.reason is ReplicaReason.FEWER_SUFFICE


def test_at_most_half_of_the_replicas_are_removed_in_one_window() -> None:
    service = Service(replicas=8)
    service.run(600, rate=60)
    assert service.desired == 8
    service.run(3600, rate=2)
    numbers = [d.replicas for d in service.decisions]
    moves = [(i * INTERVAL, n) for i, n in enumerate(numbers) if i and n != numbers[i - 1]]
    assert [n for _, n in moves] == [7, 4, 2, 1], "the mean demand falls slowly"
    assert all(after - before >= 300 for (before, _), (after, _) in pairwise(moves))


def test_a_busy_minute_restarts_the_stabilisation_window() -> None:
    service = Service(replicas=3)
    service.run(600, rate=20)
    for _ in range(10):
        service.run(240, rate=10)
        service.run(60, rate=20)
    assert {d.replicas for d in service.decisions} == {3}


def test_no_replica_is_removed_while_a_target_is_missed() -> None:
    service = Service(replicas=3)
    missed = replace(_budget(), ttft=TargetStatus.MISSED)
    assert service.run(3600, rate=1, budget=missed).replicas == 3


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param({"good": 98}, id="in the last five minutes"),
        pytest.param({"objective_missed": True}, id="in the window of the status"),
    ],
)
def test_no_replica_is_removed_while_the_window_misses_an_objective(
    missing: dict[str, Any],
) -> None:
    service = Service(replicas=3)
    held = service.run(3600, rate=1, **missing)
    assert (held.replicas, held.reason) == (3, ReplicaReason.OBJECTIVE_MISSED)
    # A window of the status that no longer misses counts at once. Of the requests of the last five
    # minutes, those that missed still count.
    after = service.step(rate=1, good=100)
    assert after.reason is (
        ReplicaReason.OBJECTIVE_MISSED if "good" in missing else ReplicaReason.FEWER_SUFFICE
    )
    assert service.run(130, rate=1, good=100).replicas == after.replicas
    assert service.run(600, rate=1, good=100).replicas < 3


def test_the_stabilisation_window_starts_when_all_replicas_are_ready() -> None:
    service = Service(replicas=3)
    service.run(240, rate=1, ready=2)
    ready_s = service.now_s
    while service.step(rate=1).replicas == 3:
        pass
    assert service.now_s - ready_s >= 300


def test_a_replica_that_starts_while_measurements_are_missing_restarts_the_window() -> None:
    service = Service(replicas=3)
    service.run(280, rate=1)
    service.step(ready=2, signal=Signal.FAILED)
    ready_s = service.now_s
    while service.step(rate=1).replicas == 3:
        pass
    assert service.now_s - ready_s >= 300


def test_the_stabilisation_window_starts_when_token_budgets_have_settled() -> None:
    service = Service(replicas=3)
    settling = replace(_budget(), reason=TokenBudgetReason.SETTLING)
    service.run(600, rate=1, budget=settling)
    settled_s = service.now_s
    while service.step(rate=1).replicas == 3:
        pass
    assert service.now_s - settled_s >= 300


def test_no_replica_is_removed_before_an_added_one_was_ready() -> None:
    """The start-up time is not known before, and here it is ten times the assumed one."""
    service = Service(replicas=2)
    service.run(60, rate=30, ready=2, startups_s=())
    assert service.desired == 4
    held = service.run(1200, rate=1, ready=2, startups_s=())
    assert (held.replicas, held.reason) == (4, ReplicaReason.STABILIZING)


def test_a_long_queue_keeps_the_replicas() -> None:
    """Two queues of 60 requests take 6 s of device time each, longer than the TTFT target."""
    service = Service(replicas=2)
    assert service.run(1200, rate=7, waiting=60).replicas == 2
    assert service.run(400, rate=7).replicas == 1


# --- capacity by TTFT ---------------------------------------------------------------------------
def test_a_small_fleet_sustains_less_of_its_time_if_ttft_is_tight() -> None:
    """Two replicas cannot even out the arrivals as eight can."""
    tight = replace(PARAMS, classes=(replace(PARAMS.classes[0], ttft_ms=200),))

    def capacity(replicas: int, params: ServiceParams) -> float:
        found = Service(replicas=replicas, params=params).step(rate=5 * replicas).capacity
        assert found is not None
        return found

    assert capacity(1, tight) < capacity(2, tight) < capacity(8, tight) == BUSY
    assert capacity(2, PARAMS) == BUSY
    apart = replace(tight, balanced=False)
    assert capacity(8, apart) == capacity(1, tight), "each replica has its own queue"


def test_bursts_lower_the_capacity() -> None:
    tight = replace(PARAMS, classes=(replace(PARAMS.classes[0], ttft_ms=200),))
    steady, bursty = Service(replicas=3, params=tight), Service(replicas=3, params=tight)
    steady.run(1800, rate=15)
    for _ in range(90):
        bursty.step(rate=10)
        bursty.step(rate=20)
    lower, higher = bursty.decisions[-1].capacity, steady.decisions[-1].capacity
    assert lower is not None
    assert higher is not None
    assert lower < higher - 0.03


def _burst(service: Service) -> None:
    service.run(60, rate=10)
    service.run(30, rate=40)


def test_replicas_that_serve_bursts_are_kept_between_them() -> None:
    service = Service(replicas=2)
    for _ in range(8):
        _burst(service)
    learnt = service.desired
    assert learnt == 5, "40 requests per second at 8 per replica"
    decided = len(service.decisions)
    for _ in range(20):
        _burst(service)
    assert {d.replicas for d in service.decisions[decided:]} == {learnt}
    assert service.decisions[-1].peak_per_s == pytest.approx(40, rel=0.1)
    service.run(1780, rate=10)
    assert service.desired == learnt
    assert service.run(900, rate=10).replicas == 2, "no burst for more than half an hour"


def test_bursts_do_not_keep_an_idle_service_from_zero() -> None:
    service = Service(replicas=5, params=replace(PARAMS, min_replicas=0))
    for _ in range(8):
        _burst(service)
    assert service.run(900).replicas == 0


def test_a_ttft_without_slack_confirms_a_demand_that_chance_could_explain() -> None:
    def replicas(ttft: TargetStatus) -> int:
        service = Service(replicas=2)
        return service.run(600, rate=16.3, budget=replace(_budget(), ttft=ttft)).replicas

    assert replicas(TargetStatus.SLACK) == replicas(TargetStatus.UNKNOWN) == 2
    assert replicas(TargetStatus.KEPT) == 3


def test_the_demand_of_the_last_minute_determines_when_the_window_begins() -> None:
    service = Service(replicas=3)
    service.run(900, rate=20)
    fallen_s = service.now_s
    while service.step(rate=2).replicas == 3:
        pass
    assert 300 <= service.now_s - fallen_s <= 370, "the window, and a minute"


def test_a_decision_tells_the_rates_that_explain_it() -> None:
    decision = Service(replicas=3).step(rate=33)
    assert decision.replicas == 5
    assert decision.arrivals_per_s == pytest.approx(33)
    assert decision.sustained_per_s == pytest.approx(40)
    assert decision.fewer_sustained_per_s == pytest.approx(32)


def test_a_long_start_up_time_extends_the_stabilisation_window() -> None:
    service = Service(replicas=3)
    service.run(600, rate=20, startups_s=(1200, 1200))
    assert service.run(1100, rate=10, startups_s=(1200, 1200)).replicas == 3
    assert service.run(600, rate=10, startups_s=(1200, 1200)).replicas == 2


def test_a_trend_is_extrapolated_by_the_start_up_time() -> None:
    def follow_ramp(startup_s: int) -> list[ReplicaDecision]:
        service = Service(replicas=10)
        for i in range(130):
            service.step(rate=30 + i / 2, startups_s=(startup_s,))
        return service.decisions

    slow, quick = follow_ramp(300), follow_ramp(20)
    assert slow[-1].horizon_ns == 300 * S
    assert max(d.replicas for d in slow) > max(d.replicas for d in quick)
    assert ReplicaReason.TREND in {d.reason for d in slow}


def test_a_sudden_step_of_the_load_is_not_a_trend() -> None:
    service = Service(replicas=10, params=replace(PARAMS, min_replicas=10))
    service.run(1200, rate=50, startups_s=(300,))
    service.run(1200, rate=75, startups_s=(300,))
    assert {d.replicas for d in service.decisions} == {10}


def test_after_a_sudden_step_the_stated_rate_is_more_than_fewer_replicas_sustain() -> None:
    service = Service(replicas=1)
    service.run(1200, rate=5)
    service.run(600, rate=60, startups_s=(120,))
    added = [d for d in service.decisions if d.reason is ReplicaReason.DEMAND]
    assert added
    for decision in added:
        arrivals, fewer = decision.arrivals_per_s, decision.fewer_sustained_per_s
        assert arrivals is not None
        assert fewer is not None
        assert max(arrivals, decision.peak_per_s or 0) > fewer


# --- no traffic, and missing measurements -------------------------------------------------------
def test_without_traffic_the_number_falls_to_min_replicas() -> None:
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
def test_missing_measurements_remove_no_replica(signal: Signal, reason: ReplicaReason) -> None:
    service = Service(replicas=3)
    decision = service.run(3600, signal=signal)
    assert (decision.replicas, decision.reason, decision.load) == (3, reason, None)


def test_min_replicas_applies_while_metrics_are_missing() -> None:
    service = Service(replicas=1, params=replace(PARAMS, min_replicas=2))
    decision = service.step(signal=Signal.FAILED)
    assert (decision.replicas, decision.reason) == (2, ReplicaReason.BELOW_FLOOR)


def test_max_replicas_applies_while_metrics_are_missing() -> None:
    service = Service(replicas=9, params=replace(PARAMS, max_replicas=4))
    decision = service.step(signal=Signal.MISSING)
    assert (decision.replicas, decision.reason) == (4, ReplicaReason.ABOVE_CEILING)


def test_a_long_outage_of_metrics_restarts_the_stabilisation_window() -> None:
    def seconds_until_removal(outage_s: int) -> int:
        service = Service(replicas=3)
        service.run(600, rate=20)
        service.run(300, rate=10)
        service.run(outage_s, signal=Signal.FAILED)
        passed = 0
        while service.desired == 3:
            service.step(rate=10)
            passed += INTERVAL
        return passed

    assert seconds_until_removal(120) >= 300
    assert seconds_until_removal(10) < 300


def test_one_replica_that_cannot_be_scraped_does_not_block_scaling() -> None:
    service = Service(replicas=2)
    service.run(600, rate=10)
    observation = ServiceObservation(
        interval_ns=INTERVAL * S,
        traffic=Traffic(signal=Signal.FRESH, arrivals=1000, finished=FINISHED),
        replicas=(_replica(0), replace(_replica(1), signal=Signal.FAILED)),
        desired_replicas=2,
        device=DEVICE,
    )
    _, decision = replica_law(service.state, observation, _budget(), PARAMS, 610 * S)
    assert decision.reason is ReplicaReason.DEMAND


def test_with_an_unknown_device_only_missed_targets_add_replicas() -> None:
    service = Service(replicas=2)
    decision = service.run(600, rate=30, device=None)
    assert (decision.replicas, decision.reason) == (2, ReplicaReason.UNKNOWN_CAPACITY)
    missed = service.step(30, device=None, budget=_budget(TokenBudgetReason.NEEDS_REPLICAS))
    assert (missed.replicas, missed.reason) == (3, ReplicaReason.MISSED)


# --- misses that more replicas do not prevent ---------------------------------------------------
def test_replicas_with_little_load_are_not_increased() -> None:
    service = Service(replicas=4)
    service.run(300, rate=8)
    decision = service.step(8, budget=_budget(TokenBudgetReason.NEEDS_REPLICAS))
    assert (decision.replicas, decision.reason) == (4, ReplicaReason.NOT_LOAD)


def test_a_target_that_a_single_request_misses_adds_no_replica() -> None:
    slow = replace(
        DEVICE,
        form=replace(DEVICE.form, c0_ns=40 * NS_PER_MS),  # type: ignore[type-var]
    )
    service = Service(replicas=2)
    service.run(600, rate=5, device=slow)
    decision = service.step(5, device=slow, budget=_budget(TokenBudgetReason.NEEDS_REPLICAS))
    assert decision.reason is ReplicaReason.INFEASIBLE


def test_a_queue_that_gets_shorter_adds_no_replica() -> None:
    service = Service(replicas=2)
    service.run(600, rate=15, waiting=9)
    missed = _budget(TokenBudgetReason.NEEDS_REPLICAS)
    assert service.step(15, waiting=5, budget=missed).reason is ReplicaReason.QUEUE_DRAINING
    assert service.step(15, waiting=5, budget=missed).reason is ReplicaReason.MISSED


def test_a_decision_reports_that_max_replicas_limits_it() -> None:
    service = Service(replicas=3, params=replace(PARAMS, max_replicas=4))
    decision = service.run(120, rate=100)
    assert (decision.replicas, decision.limited) == (4, True)
    assert not Service(replicas=3).run(120, rate=20).limited


# --- zero ---------------------------------------------------------------------------------------
def test_the_number_falls_to_zero_only_if_min_replicas_is_zero() -> None:
    zero = Service(replicas=2, params=replace(PARAMS, min_replicas=0))
    assert zero.run(3600).replicas == 0
    assert zero.decisions[-1].reason is ReplicaReason.NO_TRAFFIC
    assert Service(replicas=2).run(3600).replicas == 1


def test_an_idle_service_falls_to_zero_within_its_window() -> None:
    service = Service(replicas=1, params=replace(PARAMS, min_replicas=0))
    service.run(900, rate=1)
    assert service.run(620).replicas == 0, "five minutes without a request, and the window"


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


@pytest.mark.parametrize("traffic", [{"rate": 0.1}, {"in_flight": 1}], ids=["arrived", "in flight"])
def test_a_request_starts_a_replica_of_an_idle_service_at_once(traffic: dict[str, float]) -> None:
    service = Service(replicas=0, params=replace(PARAMS, min_replicas=0))
    service.run(600)
    decision = service.step(**traffic)  # type: ignore[arg-type]
    assert (decision.replicas, decision.reason) == (1, ReplicaReason.WOKEN)
