"""Properties of the control laws under random loads, start-up times and intervals.

A fleet in virtual time serves random loads on two devices: on one, requests wait for a place in the
batch, so TTFT is missed; on the other, large steps and batches miss TPOT as well.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.builders.examples import examples
from tests.builders.fleets import make_fleet, plan

from goodput_core.control import ServiceDecision, ServiceParams
from goodput_core.slo.judging import JudgementKind, judge
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode, RouterPolicy
from goodput_core.steptime import RooflineForm, UnitForm
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_replay.emulation.control import ControlLoop
from goodput_replay.emulation.emulate import emulate
from goodput_replay.runs.slo import SLOClasses

if TYPE_CHECKING:
    from goodput_core.slo.record import RequestRecord
    from goodput_replay.plan import PlannedRequest

CLASS = SLOClass(name="fast", ttft_ms=2000, tpot_ms=150, objective=Fraction(95, 100))
WINDOW_NS = 300 * NS_PER_S
WIDTH = 8
# A replica sustains about 0.8 requests per second of each device: eight requests at a time, which
# take ten seconds each.
FORMS = {
    "unit": UnitForm(unit_ns=100 * NS_PER_MS),
    "roofline": RooflineForm(
        c0_ns=80 * NS_PER_MS,
        c1_ns_per_token=NS_PER_MS,
        c2_ns_per_context_token=10_000,
        c4_ns_per_request=NS_PER_MS,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A load and the fleet that serves it.

    Args:
        form: key of `FORMS`.
        pieces: requests per second and seconds of each part of the load.
        startup_s: start-up time of a replica.
        interval_s: control interval.
        stabilization_s: stabilisation window.
        replicas: replicas at the start.
        seed: seed of the arrivals.
    """

    form: str
    pieces: tuple[tuple[float, int], ...]
    startup_s: int
    interval_s: int
    stabilization_s: int
    replicas: int
    seed: int


SCENARIOS = st.builds(
    Scenario,
    form=st.sampled_from(sorted(FORMS)),
    pieces=st.lists(
        st.tuples(st.sampled_from([0.05, 0.2, 0.5, 0.8, 1.2, 2.0]), st.integers(60, 500)),
        min_size=2,
        max_size=4,
    ).map(tuple),
    startup_s=st.sampled_from([1, 10, 40, 120, 300]),
    interval_s=st.sampled_from([2, 5, 10, 30]),
    stabilization_s=st.sampled_from([1, 5, 60, 300]),
    replicas=st.integers(1, 4),
    seed=st.integers(0, 1000),
)


def serve(scenario: Scenario) -> tuple[list[ServiceDecision], list[RequestRecord]]:
    """Return the decisions and the records of a scenario."""
    fleet = make_fleet(
        replicas=scenario.replicas,
        placement=RouterPolicy.LEAST_LOADED,
        slo=SLOClasses(classes=(CLASS,), default="fast"),
        profile={
            "startup_seconds": scenario.startup_s,
            "kv_blocks": 4000,
            "form": FORMS[scenario.form],
        },
        max_num_seqs=WIDTH,
    )
    rng, at_s, end_s = random.Random(scenario.seed), 0.0, 0.0
    requests: list[PlannedRequest] = []
    for rate, seconds in scenario.pieces:
        end_s += seconds
        while (at_s := at_s + rng.expovariate(rate)) < end_s:
            requests.append(plan(f"r{len(requests)}", at_s * 1000, 64, rng.randint(50, 150)))
        at_s = end_s
    params = ServiceParams(
        mode=ControlMode.AUTO,
        classes=(CLASS,),
        max_replicas=6,
        max_num_seqs=WIDTH,
        stabilization_ns=scenario.stabilization_s * NS_PER_S,
    )
    decisions: list[ServiceDecision] = []
    records: list[RequestRecord] = []
    loop = ControlLoop(params, interval_ns=scenario.interval_s * NS_PER_S, decided=decisions.append)

    def ended(one: Any, record: RequestRecord) -> None:
        records.append(record)
        loop.ended(one, record)

    emulate(iter(requests), fleet, ended, actors=[loop])
    return decisions, records


def attained_in_window(
    decisions: list[ServiceDecision], records: list[RequestRecord], at_ns: int
) -> Fraction | None:
    """Return the attainment of the intervals that ended in the last five minutes."""
    begin_ns = max((d.at_ns for d in decisions if d.at_ns <= at_ns - WINDOW_NS), default=0)
    kinds = [
        judge(r, CLASS.targets).kind
        for r in records
        if r.end_ns is not None and begin_ns < r.end_ns <= at_ns
    ]
    total = kinds.count(JudgementKind.ATTAINED) + kinds.count(JudgementKind.MISSED)
    return Fraction(kinds.count(JudgementKind.ATTAINED), total) if total else None


@pytest.mark.slow
@settings(max_examples=examples(12), deadline=None)
@given(scenario=SCENARIOS)
@example(
    Scenario(
        form="unit",
        pieces=((0.5, 60), (3.0, 120), (0.5, 600)),
        startup_s=40,
        interval_s=5,
        stabilization_s=5,
        replicas=1,
        seed=1,
    )
)
@example(
    Scenario(
        form="roofline",
        pieces=((0.2, 60), (2.0, 40)) * 4 + ((0.2, 400),),
        startup_s=40,
        interval_s=10,
        stabilization_s=60,
        replicas=1,
        seed=2,
    )
)
def test_no_replica_is_removed_soon_after_one_was_added_or_while_an_objective_is_missed(
    scenario: Scenario,
) -> None:
    decisions, records = serve(scenario)
    assert CLASS.objective is not None
    raised_ns: int | None = None
    for decision in decisions:
        before, after = decision.observation.desired_replicas, decision.apply_replicas
        if after > before:
            raised_ns = decision.at_ns
        if after >= before:
            continue
        assert raised_ns is None or decision.at_ns - raised_ns >= scenario.startup_s * NS_PER_S
        attained = attained_in_window(decisions, records, decision.at_ns)
        assert attained is None or attained >= CLASS.objective, (
            f"{before} → {after} at {decision.at_ns / NS_PER_S:g} s: {float(attained):.1%} attained"
        )
