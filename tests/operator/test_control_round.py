from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from goodput_core.control import (
    Bounds,
    ClassWindow,
    DeviceCapacity,
    PromiseCounts,
    ReplicaPhase,
    ServiceParams,
    ServiceState,
    Signal,
    Traffic,
)
from goodput_core.histogram import LengthBin, LengthMix
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_S
from goodput_operator.control.decided import Decided
from goodput_operator.control.measures import EngineReading, Measures
from goodput_operator.control.rounds import ControlRound, control_round
from goodput_operator.control.words import Knob

DEVICE = DeviceCapacity(
    form=RooflineForm(
        c0_ns=10e6, c1_ns_per_token=50e3, c2_ns_per_context_token=10, c4_ns_per_request=1e3
    ),
    kv_tokens=200_000,
)
CLASSES = (SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction(9, 10)),)
PARAMS = ServiceParams(mode=ControlMode.AUTO, classes=CLASSES, stabilization_ns=60 * NS_PER_S)
FIRST = Decided(limits_revision=0, bounds=Bounds.initial(PARAMS), replicas=1)
KEPT = PromiseCounts(judged=100)
MISSED = PromiseCounts(judged=100, missed=60)


def measures(
    *, ttft: PromiseCounts = KEPT, tpot: PromiseCounts = KEPT, arrivals: int = 20, **engine: Any
) -> Measures:
    mix = (LengthBin(requests=arrivals, input_tokens=arrivals * 500, cached_tokens=0,
                     output_tokens=arrivals * 100),)  # fmt: skip
    reading: dict[str, Any] = {
        "pod": "chat-0",
        "signal": Signal.FRESH,
        "paced": True,
        "device": DEVICE,
        "kv_total_blocks": 100,
    }
    return Measures(
        interval_ns=10 * NS_PER_S,
        traffic=Traffic(
            signal=Signal.FRESH,
            arrivals=arrivals,
            in_flight=1,
            finished=LengthMix(bins=mix if arrivals else ()),
        ),
        classes=(ClassWindow(name="chat", ttft=ttft, tpot=tpot),),
        engines=(EngineReading(**(reading | engine)),),
    )


def one_round(given: Measures, **changes: Any) -> ControlRound:
    arguments: dict[str, Any] = {
        "params": PARAMS,
        "law": ServiceState(),
        "last": FIRST,
        "recommended": None,
        "phases": {"chat-0": ReplicaPhase.READY},
        "asked": 1,
        "startups_ns": (NS_PER_S,),
        "now_ns": 10 * NS_PER_S,
    }
    arguments |= changes
    return control_round(given, **({"told": arguments["last"].bounds} | arguments))


def test_a_missed_promise_turns_the_budget_and_says_so() -> None:
    came = one_round(measures(tpot=MISSED))
    assert came.decided.bounds.max_tokens == 1536
    assert came.decided.limits_revision == 1
    (push,) = came.pushes
    assert push.name == "chat-0"
    assert push.limits == {
        "revision": 1, "token_budget": 1536, "max_num_seqs": 256, "safety_percent": 85,
    }  # fmt: skip
    (change,) = came.changes
    assert change.knob is Knob.TOKEN_BUDGET
    assert change.applied
    assert change.message == (
        "token budget 2048 → 1536, safety 90 % → 85 %: "
        "TPOT is missed and TTFT can bear smaller steps"
    )


def test_where_nothing_is_missed_nothing_is_told_and_nothing_said() -> None:
    came = one_round(measures())
    assert came.decided == FIRST
    assert came.pushes == ()
    assert came.changes == ()


def test_an_engine_whose_steps_no_law_sizes_is_told_no_safety_factor() -> None:
    (push,) = one_round(measures(tpot=MISSED, paced=False)).pushes
    assert "safety_percent" not in push.limits


LIMITED = replace(FIRST, limits_revision=4, bounds=replace(FIRST.bounds, max_tokens=1024))


@pytest.mark.parametrize(
    ("reported", "signal", "told"),
    [
        pytest.param(4, Signal.FRESH, False, id="it has them"),
        pytest.param(3, Signal.FRESH, True, id="it has older ones"),
        pytest.param(0, Signal.FRESH, True, id="it has started again"),
        pytest.param(0, Signal.FAILED, False, id="it does not answer"),
    ],
)
def test_limits_are_told_again_to_whoever_has_older_ones(
    reported: int, signal: Signal, told: bool
) -> None:
    given = measures(limits_revision=reported, signal=signal)
    came = one_round(given, last=LIMITED)
    assert came.decided.limits_revision == 4
    assert [push.limits["token_budget"] for push in came.pushes] == [1024] * told


def test_a_fresh_law_goes_on_from_the_limits_in_force() -> None:
    came = one_round(measures(), last=LIMITED)
    assert came.decided == LIMITED
    assert came.changes == ()


@pytest.mark.parametrize(
    ("bounds", "widest", "told"),
    [
        pytest.param((256, 8192), 256, (1024, 256), id="all of it"),
        pytest.param((256, 512), 256, (512, 256), id="as far as it goes up"),
        pytest.param((2048, 4096), 256, (2048, 256), id="as far as it goes down"),
        pytest.param(None, 64, (1024, 64), id="a narrower batch"),
    ],
)
def test_an_engine_is_told_no_more_than_its_manifest_allows(
    bounds: tuple[int, int] | None, widest: int, told: tuple[int, int]
) -> None:
    given = measures(limits_revision=3, token_bounds=bounds, most_seqs=widest)
    (push,) = one_round(given, last=LIMITED).pushes
    assert (push.limits["token_budget"], push.limits["max_num_seqs"]) == told


IN_FORCE: dict[str, Any] = {
    "limits_revision": 4, "token_budget": 1024, "max_num_seqs": 256, "safety_percent": 90,
}  # fmt: skip


@pytest.mark.parametrize(
    ("reported", "revision"),
    [
        pytest.param({}, 4, id="it has all of it"),
        pytest.param({"token_budget": 512, "token_bounds": (256, 512)}, 4, id="all that it may"),
        pytest.param({"token_budget": 512, "token_bounds": (256, 8192)}, 5, id="it may have more"),
        pytest.param({"token_budget": 2048, "token_bounds": (256, 8192)}, 5, id="or less"),
        pytest.param({"max_num_seqs": 64, "most_seqs": 256}, 5, id="a wider batch"),
        pytest.param({"safety_percent": 85}, 5, id="another safety factor"),
        pytest.param({"safety_percent": None, "paced": False}, 4, id="no law, no safety factor"),
        pytest.param({"token_budget": None, "max_num_seqs": None}, 4, id="it does not tell"),
        pytest.param({"token_budget": 512, "signal": Signal.FAILED}, 4, id="nobody knows"),
        pytest.param({"token_budget": 512, "limits_revision": 3}, 4, id="it has older ones"),
    ],
)
def test_limits_get_a_new_revision_where_a_changed_manifest_lets_an_engine_take_more_of_them(
    reported: dict[str, Any], revision: int
) -> None:
    came = one_round(measures(**(IN_FORCE | reported)), last=LIMITED)
    assert came.decided == replace(LIMITED, limits_revision=revision)
    for push in came.pushes:
        assert (push.limits["revision"], push.limits["token_budget"]) == (revision, 1024)
    assert len(came.pushes) == (revision == 5 or reported.get("limits_revision") == 3)


def test_limits_that_somebody_else_set_are_outdone() -> None:
    came = one_round(measures(limits_revision=9), last=LIMITED)
    assert came.decided.limits_revision == 10
    assert [push.limits["revision"] for push in came.pushes] == [10]


def busy(params: ServiceParams, **changes: Any) -> ControlRound:
    return one_round(measures(arrivals=4000), params=params, **changes)


def test_demand_asks_for_replicas_within_the_ceiling_and_says_why() -> None:
    came = busy(replace(PARAMS, max_replicas=3))
    assert came.decided.replicas == came.recommended == 3
    (change,) = came.changes
    assert (change.knob, change.reason, change.applied) == (Knob.REPLICAS, "Demand", True)
    assert change.message.startswith("replicas 1 → 3: ")
    assert change.message.endswith("; the ceiling allows no more")


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(replace(PARAMS, mode=ControlMode.RECOMMEND, max_replicas=3), id="Recommend"),
        pytest.param(replace(PARAMS, replicas=1, max_replicas=3), id="replicas is set"),
    ],
)
def test_what_is_only_recommended_is_said_once_and_not_applied(params: ServiceParams) -> None:
    came = busy(params)
    assert (came.decided.replicas, came.recommended) == (1, 3)
    (change,) = came.changes
    assert not change.applied
    assert change.message.endswith("(recommended, not applied)")
    assert busy(params, recommended=3).changes == ()


def test_recommend_keeps_the_initial_budget_and_says_each_move_once() -> None:
    params = replace(PARAMS, mode=ControlMode.RECOMMEND)
    first = one_round(measures(tpot=MISSED), params=params)
    assert first.decided.bounds == FIRST.bounds
    assert first.pushes == ()
    (change,) = first.changes
    assert change.message.startswith("token budget 2048 → 1536")
    assert not change.applied
    second = one_round(measures(), params=params, law=first.law, now_ns=20 * NS_PER_S)
    assert second.changes == ()


def test_manual_computes_nothing_and_takes_the_initial_budget_back() -> None:
    came = one_round(measures(tpot=MISSED), params=replace(PARAMS, mode=ControlMode.MANUAL),
                     last=LIMITED)  # fmt: skip
    assert came.recommended is None
    assert came.decided.bounds == FIRST.bounds
    (change,) = came.changes
    assert change.reason == "SpecChanged"


def test_a_batch_that_widens_for_more_replicas_and_a_new_spec_are_told_apart() -> None:
    narrow = replace(FIRST, bounds=replace(FIRST.bounds, max_num_seqs=64))
    first = one_round(measures(), last=narrow)
    assert first.changes == ()
    two = {"chat-0": ReplicaPhase.READY, "chat-1": ReplicaPhase.READY}
    (change,) = one_round(
        measures(), last=first.decided, law=first.law, phases=two, asked=2, now_ns=20 * NS_PER_S
    ).changes
    assert change.reason == "MoreReplicas"
    assert change.message == "batch width 64 → 256: more replicas share the requests"
    advised = replace(first.law.bounds, bounds=replace(FIRST.bounds, max_tokens=1024))
    law = replace(first.law, bounds=advised)
    (change,) = one_round(measures(), law=law, last=FIRST, now_ns=20 * NS_PER_S).changes
    assert change.reason == "SpecChanged", "what was only advised is in force with another mode"
    assert change.message == "token budget 2048 → 1024: the spec has changed"
    smaller = replace(PARAMS, max_tokens=1024, initial_tokens=1024)
    (change,) = one_round(measures(), last=FIRST, params=smaller).changes
    assert change.reason == "SpecChanged"
    assert change.message == "token budget 2048 → 1024: the spec has changed"


def test_an_engine_without_a_reading_is_there_and_unknown() -> None:
    came = one_round(
        measures(), phases={"chat-0": ReplicaPhase.READY, "chat-1": ReplicaPhase.STARTING}
    )
    windows = {r.name: r for r in came.decision.observation.replicas}
    assert windows["chat-1"].signal is Signal.MISSING
    assert windows["chat-0"].signal is Signal.FRESH
