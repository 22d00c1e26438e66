"""The control laws on a fleet in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from tests.builders.fleets import make_fleet, plan

from goodput_core.control import ReplicaReason, ServiceDecision, ServiceParams, Signal
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode, RouterPolicy
from goodput_core.steptime import UnitForm
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.emulation.control import ControlLoop, decision_line
from goodput_replay.emulation.emulate import emulate
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_replay.plan import PlannedRequest

CLASS = SLOClass(name="fast", ttft_ms=200, tpot_ms=125, objective=Fraction(95, 100))
STARTUP_S = 30
FORM = UnitForm(unit_ns=25 * NS_PER_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Controlled:
    """Records and decisions of a run."""

    records: list[RequestRecord]
    decisions: list[ServiceDecision]
    replica_s: float
    peak_replicas: int
    final_replicas: int

    @property
    def replicas(self) -> list[int]:
        return [d.apply_replicas for d in self.decisions]

    def attained(self, begin_s: float, end_s: float) -> float:
        """Return the share of requests that arrived in [begin, end) and met their TTFT target."""
        arrived = [
            r for r in self.records if begin_s * NS_PER_S <= r.scheduled_ns < end_s * NS_PER_S
        ]
        on_time = [
            r
            for r in arrived
            if r.first_token_ns is not None and r.first_token_ns - r.scheduled_ns <= 200 * NS_PER_MS
        ]
        return len(on_time) / len(arrived)


def run_controlled(
    *pieces: tuple[float, float],
    replicas: int = 1,
    control: bool = True,
    signal: Callable[[int], Signal] | None = None,
    **bounds: Any,
) -> Controlled:
    """Serve requests of one second each; a replica sustains almost 16 requests/s."""
    settings = make_fleet(
        replicas=replicas,
        placement=RouterPolicy.LEAST_LOADED,
        slo=SLOClasses(classes=(CLASS,), default="fast"),
        profile={"startup_seconds": STARTUP_S, "kv_blocks": 4000, "form": FORM},
        max_num_seqs=16,
    )
    rng, at_s, end_s = random.Random(7), 0.0, 0.0
    requests: list[PlannedRequest] = []
    for rate, seconds in pieces:
        end_s += seconds
        while (at_s := at_s + rng.expovariate(rate)) < end_s:
            requests.append(plan(f"r{len(requests)}", at_s * 1000, 64, 40))
        at_s = end_s
    values: dict[str, Any] = {
        "mode": ControlMode.AUTO,
        "max_replicas": 6,
        "max_num_seqs": 16,
    } | bounds
    params = ServiceParams(classes=(CLASS,), stabilization_ns=300 * NS_PER_S, **values)
    decisions: list[ServiceDecision] = []
    loop = ControlLoop(params, interval_ns=10 * NS_PER_S, decided=decisions.append, signal=signal)
    records: list[RequestRecord] = []

    def ended(one: Any, record: RequestRecord) -> None:
        records.append(record)
        loop.ended(one, record)

    actors = [loop] if control else []
    outcome = emulate(iter(requests), settings, ended, actors=actors)
    return Controlled(
        records=records,
        decisions=decisions,
        replica_s=outcome.replica_ns / NS_PER_S,
        peak_replicas=outcome.peak_replicas,
        final_replicas=outcome.final_replicas,
    )


@pytest.mark.slow
def test_limits_and_replicas_are_unchanged_by_two_hours_of_constant_load() -> None:
    run = run_controlled((4, 7200))
    assert set(run.replicas) == {1}
    assert len({d.apply_bounds for d in run.decisions[60:]}) == 1
    assert run.attained(0, 7200) > 0.99


@pytest.mark.slow
def test_the_fleet_scales_up_and_meets_the_target_again_after_a_rise_in_load() -> None:
    pieces = ((4, 200), (36, 500))
    run = run_controlled(*pieces)
    assert run.replicas[-1] >= 3
    assert run.attained(550, 700) > 0.95
    assert run_controlled(*pieces, control=False).attained(550, 700) < 0.5, "without the loop"


@pytest.mark.slow
def test_a_burst_shorter_than_a_start_up_costs_replicas_without_a_benefit() -> None:
    # A replica takes 30 s to start, so the requests of these 40 s queue on the first replica. The
    # second one serves the rest of the queue, and stays for the stabilisation window.
    pieces = ((4, 100), (36, 40), (4, 250))
    loop, fixed = run_controlled(*pieces), run_controlled(*pieces, control=False)
    assert max(loop.replicas) > 1
    assert loop.attained(100, 140) == fixed.attained(100, 140) < 0.1
    assert loop.replica_s > 1.4 * fixed.replica_s


@pytest.mark.slow
def test_a_fall_in_load_removes_replicas_after_stabilisation_without_losing_a_request() -> None:
    run = run_controlled((36, 500), (4, 1500), replicas=4)
    fewer = [d for d in run.decisions if d.apply_replicas < d.observation.desired_replicas]
    assert fewer
    assert fewer[0].at_ns >= (500 + 300 - 60) * NS_PER_S
    assert run.replicas[-1] == 1
    assert {r.outcome for r in run.records} == {Outcome.OK}
    assert run.attained(500, 2000) > 0.95
    assert run.replica_s < 0.8 * 4 * 2000
    assert (run.peak_replicas, run.final_replicas) == (4, 1)


@pytest.mark.slow
def test_minimum_and_maximum_replicas_are_respected() -> None:
    run = run_controlled((36, 600), (2, 900), replicas=2, min_replicas=2, max_replicas=2)
    assert set(run.replicas) == {2}
    assert any(d.replicas is not None and d.replicas.limited for d in run.decisions)


def test_limits_and_replicas_are_unchanged_during_an_outage_of_the_metrics() -> None:
    run = run_controlled(
        (4, 400),
        (36, 400),
        signal=lambda now_ns: Signal.FAILED if now_ns > 390 * NS_PER_S else Signal.FRESH,
    )
    outage = [d for d in run.decisions if d.at_ns > 390 * NS_PER_S]
    assert {d.apply_replicas for d in outage} == {1}
    assert {d.replicas.reason for d in outage if d.replicas} == {ReplicaReason.SCRAPE_FAILED}
    assert len({d.apply_bounds for d in outage}) == 1


def test_mode_recommend_records_decisions_without_applying_them() -> None:
    run = run_controlled((4, 300), (36, 200), mode=ControlMode.RECOMMEND)
    assert set(run.replicas) == {1}
    assert max(d.replicas.replicas for d in run.decisions if d.replicas) > 1
    assert len(run.decisions[-1].observation.replicas) == 1


@pytest.mark.slow
def test_the_same_run_gives_the_same_decisions() -> None:
    first, second = (run_controlled((4, 200), (36, 200)) for _ in range(2))
    lines = [b"".join(map(decision_line, run.decisions)) for run in (first, second)]
    assert lines[0] == lines[1]
    assert lines[0].count(b"\n") == len(first.decisions)
    assert first.records == second.records
