from __future__ import annotations

import re
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest

from goodput_core.control import (
    Bounds,
    ClassWindow,
    ControlInput,
    ControlState,
    ControlStep,
    DeviceCapacity,
    EngineReading,
    Knob,
    ReplicaPhase,
    ReplicaReason,
    ServiceParams,
    ServiceState,
    Setpoint,
    Signal,
    TargetCounts,
    Traffic,
    control_step,
)
from goodput_core.control.decision import replicas_change
from goodput_core.engine_state import EngineState
from goodput_core.histogram import LengthBin, LengthMix
from goodput_core.slo.targets import SLOClass
from goodput_core.spec.choices import ControlMode
from goodput_core.steptime import RooflineForm
from goodput_core.units import NS_PER_S

DEVICE = DeviceCapacity(
    form=RooflineForm(
        c0_ns=10e6, c1_ns_per_token=50e3, c2_ns_per_context_token=10, c4_ns_per_request=1e3
    ),
    kv_tokens=200_000,
)
STATE = {field.name for field in fields(EngineState)}
CLASSES = (SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction(9, 10)),)
PARAMS = ServiceParams(mode=ControlMode.AUTO, classes=CLASSES, stabilization_ns=60 * NS_PER_S)
FIRST = Setpoint(limits_revision=0, bounds=Bounds.initial(PARAMS), replicas=1)
KEPT = TargetCounts(judged=100)
MISSED = TargetCounts(judged=100, missed=60)


def measures(
    *, ttft: TargetCounts = KEPT, tpot: TargetCounts = KEPT, arrivals: int = 20, **engine: Any
) -> dict[str, Any]:
    mix = (LengthBin(requests=arrivals, input_tokens=arrivals * 500, cached_tokens=0,
                     output_tokens=arrivals * 100),)  # fmt: skip
    reading: dict[str, Any] = {
        "name": "chat-0",
        "signal": Signal.FRESH,
        "device": DEVICE,
    }
    state: dict[str, Any] = {"budget_law": "model", "kv_total_blocks": 100, "kv_free_blocks": 100}
    for name, value in engine.items():
        (state if name in STATE else reading)[name] = value
    reading["state"] = EngineState(**state)
    return {
        "interval_ns": 10 * NS_PER_S,
        "traffic": Traffic(
            signal=Signal.FRESH,
            arrivals=arrivals,
            in_flight=1,
            finished=LengthMix(bins=mix if arrivals else ()),
        ),
        "classes": (ClassWindow(name="chat", ttft=ttft, tpot=tpot),),
        "engines": (EngineReading(**reading),),
    }


def step(given: dict[str, Any], **changes: Any) -> ControlStep:
    arguments: dict[str, Any] = {
        "params": PARAMS,
        "law": ServiceState(),
        "last": FIRST,
        "recommended": None,
        "phases": {"chat-0": ReplicaPhase.READY},
        "desired": 1,
        "startups_ns": (NS_PER_S,),
        "now_ns": 10 * NS_PER_S,
    }
    arguments |= changes
    bounds = arguments["last"].bounds
    return control_step(
        ControlInput(
            state=ControlState(
                setpoint=arguments["last"],
                law=arguments["law"],
                reported=bounds,
                recommended=arguments["recommended"],
            ),
            params=arguments["params"],
            phases=arguments["phases"],
            desired_replicas=arguments["desired"],
            startups_ns=arguments["startups_ns"],
            now_ns=arguments["now_ns"],
            **given,
        )
    )


def test_a_missed_target_changes_the_token_budget_and_reports_it() -> None:
    result = step(measures(tpot=MISSED))
    assert result.state.setpoint.bounds.max_tokens == 1536
    assert result.state.setpoint.limits_revision == 1
    (push,) = result.pushes
    assert push.name == "chat-0"
    assert push.limits == {
        "revision": 1, "token_budget": 1536, "max_num_seqs": 256, "safety_percent": 85,
    }  # fmt: skip
    (change,) = result.changes
    assert change.knob is Knob.TOKEN_BUDGET
    assert change.applied
    assert change.message == (
        "token budget 2048 → 1536, safety 90 % → 85 %: TPOT is missed and TTFT has slack"
    )


def test_without_a_missed_target_nothing_is_pushed_or_reported() -> None:
    result = step(measures())
    assert result.state.setpoint == FIRST
    assert result.pushes == ()
    assert result.changes == ()


def test_an_engine_without_a_budget_law_gets_no_safety_factor() -> None:
    (push,) = step(measures(tpot=MISSED, budget_law="")).pushes
    assert "safety_percent" not in push.limits


LIMITED = replace(FIRST, limits_revision=4, bounds=replace(FIRST.bounds, max_tokens=1024))


@pytest.mark.parametrize(
    ("reported", "signal", "pushed"),
    [
        pytest.param(4, Signal.FRESH, False, id="same revision"),
        pytest.param(3, Signal.FRESH, True, id="older revision"),
        pytest.param(0, Signal.FRESH, True, id="restarted"),
        pytest.param(0, Signal.FAILED, False, id="failed scrape"),
    ],
)
def test_limits_are_pushed_again_to_an_engine_with_older_ones(
    reported: int, signal: Signal, pushed: bool
) -> None:
    given = measures(limits_revision=reported, signal=signal)
    result = step(given, last=LIMITED)
    assert result.state.setpoint.limits_revision == 4
    assert [push.limits["token_budget"] for push in result.pushes] == [1024] * pushed


def test_a_new_law_continues_from_the_limits_in_force() -> None:
    result = step(measures(), last=LIMITED)
    assert result.state.setpoint == LIMITED
    assert result.changes == ()


@pytest.mark.parametrize(
    ("bounds", "widest", "pushed"),
    [
        pytest.param((256, 8192), 256, (1024, 256), id="not clamped"),
        pytest.param((256, 512), 256, (512, 256), id="clamped to the maximum"),
        pytest.param((2048, 4096), 256, (2048, 256), id="clamped to the minimum"),
        pytest.param(None, 64, (1024, 64), id="a narrower batch"),
    ],
)
def test_limits_are_clamped_to_the_manifest_that_the_engine_has_read(
    bounds: tuple[int, int] | None, widest: int, pushed: tuple[int, int]
) -> None:
    given = measures(limits_revision=3, token_bounds=bounds, max_width=widest)
    (push,) = step(given, last=LIMITED).pushes
    assert (push.limits["token_budget"], push.limits["max_num_seqs"]) == pushed


IN_FORCE: dict[str, Any] = {
    "limits_revision": 4, "token_budget": 1024, "max_num_seqs": 256, "safety_percent": 90,
}  # fmt: skip


@pytest.mark.parametrize(
    ("reported", "revision"),
    [
        pytest.param({}, 4, id="limits in force"),
        pytest.param({"token_budget": 512, "token_bounds": (256, 512)}, 4, id="clamped"),
        pytest.param(
            {"token_budget": 512, "token_bounds": (256, 8192)}, 5, id="manifest allows more"
        ),
        pytest.param(
            {"token_budget": 2048, "token_bounds": (256, 8192)}, 5, id="manifest allows less"
        ),
        pytest.param({"max_num_seqs": 64, "max_width": 256}, 5, id="a wider batch"),
        pytest.param({"safety_percent": 85}, 5, id="another safety factor"),
        pytest.param({"safety_percent": 0, "budget_law": ""}, 4, id="no law, no safety factor"),
        pytest.param({"token_budget": 0, "max_num_seqs": 0}, 4, id="not reported"),
        pytest.param({"token_budget": 512, "signal": Signal.FAILED}, 4, id="failed scrape"),
        pytest.param({"token_budget": 512, "limits_revision": 3}, 4, id="older revision"),
    ],
)
def test_limits_get_a_new_revision_if_a_changed_manifest_allows_other_ones(
    reported: dict[str, Any], revision: int
) -> None:
    result = step(measures(**(IN_FORCE | reported)), last=LIMITED)
    assert result.state.setpoint == replace(LIMITED, limits_revision=revision)
    for push in result.pushes:
        assert (push.limits["revision"], push.limits["token_budget"]) == (revision, 1024)
    assert len(result.pushes) == (revision == 5 or reported.get("limits_revision") == 3)


def test_a_higher_revision_of_another_client_is_exceeded() -> None:
    result = step(measures(limits_revision=9), last=LIMITED)
    assert result.state.setpoint.limits_revision == 10
    assert [push.limits["revision"] for push in result.pushes] == [10]


def busy(params: ServiceParams, **changes: Any) -> ControlStep:
    return step(measures(arrivals=4000), params=params, **changes)


def test_demand_sets_replicas_within_max_replicas_and_reports_why() -> None:
    result = busy(replace(PARAMS, max_replicas=3))
    assert result.state.setpoint.replicas == result.state.recommended == 3
    (change,) = result.changes
    assert (change.knob, change.reason, change.applied) == (Knob.REPLICAS, "Demand", True)
    assert change.message.startswith("replicas 1 → 3: ")
    assert change.message.endswith("; maxReplicas allows no more")
    why = r"400\.0 requests/s arrive; 3 replicas keep the targets at up to [\d.]+, 2 only at up to"
    assert re.search(why, change.message), "why 3, and not 2"


def test_a_change_for_bursts_names_their_rate() -> None:
    decision = busy(PARAMS).decision
    assert decision.replicas is not None
    bursts = replace(decision.replicas, arrivals_per_s=3.7, peak_per_s=7.25)
    change = replicas_change(replace(decision, replicas=bursts), recommended=None)
    assert change is not None
    assert "3.7 requests/s arrive, in repeated bursts of 7.2; " in change.message
    slower = replace(bursts, peak_per_s=3.0)
    change = replicas_change(replace(decision, replicas=slower), recommended=None)
    assert change is not None
    assert "bursts" not in change.message, "more arrive now"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param(
            {"needed": 9, "replicas": 5}, "; 9 are needed, and 4 start at a time", id="up"
        ),
        pytest.param({"needed": 5, "replicas": 5}, "", id="as many as are needed"),
        pytest.param(
            {"reason": ReplicaReason.FEWER_SUFFICE, "current": 6, "held": 1, "replicas": 3},
            "; one decision removes at most half",
            id="down",
        ),
        pytest.param(
            {"reason": ReplicaReason.FEWER_SUFFICE, "current": 6, "held": 4, "replicas": 4},
            "",
            id="as few as suffice",
        ),
    ],
)
def test_a_change_says_if_another_number_than_the_needed_one_is_decided(
    changes: dict[str, Any], text: str
) -> None:
    decision = busy(replace(PARAMS, max_replicas=20)).decision
    assert decision.replicas is not None
    law = replace(decision.replicas, limited=False, **changes)
    change = replicas_change(replace(decision, replicas=law), recommended=None)
    assert change is not None
    assert change.message.endswith(text)
    assert ("; one decision" in change.message or "are needed" in change.message) is bool(text)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(replace(PARAMS, mode=ControlMode.RECOMMEND, max_replicas=3), id="Recommend"),
        pytest.param(replace(PARAMS, replicas=1, max_replicas=3), id="replicas is set"),
    ],
)
def test_a_recommendation_is_reported_once_and_not_applied(params: ServiceParams) -> None:
    result = busy(params)
    assert (result.state.setpoint.replicas, result.state.recommended) == (1, 3)
    (change,) = result.changes
    assert not change.applied
    assert change.message.endswith("(recommended, not applied)")
    assert busy(params, recommended=3).changes == ()


def test_mode_recommend_keeps_the_initial_budget_and_reports_each_change_once() -> None:
    params = replace(PARAMS, mode=ControlMode.RECOMMEND)
    first = step(measures(tpot=MISSED), params=params)
    assert first.state.setpoint.bounds == FIRST.bounds
    assert first.pushes == ()
    (change,) = first.changes
    assert change.message.startswith("token budget 2048 → 1536")
    assert not change.applied
    second = step(measures(), params=params, law=first.state.law, now_ns=20 * NS_PER_S)
    assert second.changes == ()


def test_mode_manual_computes_nothing_and_restores_the_initial_budget() -> None:
    result = step(measures(tpot=MISSED), params=replace(PARAMS, mode=ControlMode.MANUAL),
                     last=LIMITED)  # fmt: skip
    assert result.state.recommended is None
    assert result.state.setpoint.bounds == FIRST.bounds
    (change,) = result.changes
    assert change.reason == "SpecChanged"


def test_a_batch_widened_for_more_replicas_and_a_changed_spec_have_different_reasons() -> None:
    narrow = replace(FIRST, bounds=replace(FIRST.bounds, max_num_seqs=64))
    first = step(measures(), last=narrow)
    assert first.changes == ()
    two = {"chat-0": ReplicaPhase.READY, "chat-1": ReplicaPhase.READY}
    (change,) = step(
        measures(),
        last=first.state.setpoint,
        law=first.state.law,
        phases=two,
        desired=2,
        now_ns=20 * NS_PER_S,
    ).changes
    assert change.reason == "MoreReplicas"
    assert change.message == "batch width 64 → 256: more replicas share the requests"
    recommended = replace(first.state.law.bounds, bounds=replace(FIRST.bounds, max_tokens=1024))
    law = replace(first.state.law, bounds=recommended)
    (change,) = step(measures(), law=law, last=FIRST, now_ns=20 * NS_PER_S).changes
    assert change.reason == "SpecChanged", "the recommended limits apply after a change of the mode"
    assert change.message == "token budget 2048 → 1024: the spec has changed"
    smaller = replace(PARAMS, max_tokens=1024, initial_tokens=1024)
    (change,) = step(measures(), last=FIRST, params=smaller).changes
    assert change.reason == "SpecChanged"
    assert change.message == "token budget 2048 → 1024: the spec has changed"


def test_an_engine_without_a_reading_has_a_missing_signal() -> None:
    result = step(
        measures(), phases={"chat-0": ReplicaPhase.READY, "chat-1": ReplicaPhase.STARTING}
    )
    windows = {r.name: r for r in result.decision.observation.replicas}
    assert windows["chat-1"].signal is Signal.MISSING
    assert windows["chat-0"].signal is Signal.FRESH


def test_another_server_gets_no_limits_and_a_miss_is_left_to_its_replicas() -> None:
    given = measures(tpot=MISSED, limits_revision=7, device=None, foreign=True)
    result = step(given, params=replace(PARAMS, foreign=True))
    assert result.pushes == ()
    assert result.state.setpoint.bounds == FIRST.bounds
    assert result.state.setpoint.limits_revision == FIRST.limits_revision
    assert result.decision.bounds is not None
    assert result.decision.bounds.needs_replicas
