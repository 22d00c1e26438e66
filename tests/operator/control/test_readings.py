"""Decoding of the states of routers and engines, valid and invalid."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goodput_core.control import (
    ControlInput,
    ControlState,
    EngineReading,
    ReplicaPhase,
    ServiceParams,
    Setpoint,
    Signal,
    TargetCounts,
    Traffic,
    control_step,
)
from goodput_core.histogram import LengthMix
from goodput_core.slo.attainment import SecondCounts
from goodput_core.slo.targets import SLOClass
from goodput_core.slo.window import RecentSeconds
from goodput_core.spec.choices import ControlMode
from goodput_core.steptime import PiecewiseForm, RooflineForm, TableForm, UnitForm
from goodput_core.units import NS_PER_S
from goodput_operator.control.readings import decode_engine, decode_router

ROUTER: dict[str, Any] = {
    "role": "router",
    "epoch": "0011aabb",
    "uptime_seconds": 12.5,
    "arrivals": 20,
    "client_errors": 3,
    "in_flight": 4,
    "outcomes": {
        "chat": {"attained": 7, "missed": 2, "shed": 1, "error": 1, "timeout": 1,
                 "cancelled": 5, "unjudged": 6},
    },
    "promises": {
        "chat": {"ttft": {"judged": 10, "missed": 2, "close": 1},
                 "tpot": {"judged": 8, "missed": 0, "close": 0}},
    },
    "replicas": [],
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "epoch": "77",
    "running": 3,
    "waiting": 2,
    "preemptions": 1,
    "kv_total_blocks": 100,
    "kv_free_blocks": 60,
    "block_size": 16,
    "token_budget": 1024,
    "max_num_seqs": 48,
    "safety_percent": 85,
    "limits_revision": 6,
    "bounds": {"token_budget": [256, 8192], "max_num_seqs": [1, 64], "max_waiting": [0, 9]},
    "answered": [[2, 300, 16, 40]],
    "budget_law": "model",
    "step_time_error": 0.01,
    "device": {
        "name": "unit", "host_ns_per_step": 5, "host_ns_per_request": 2,
        "step_time": {"form": "unit", "unit_ns": 1000000, "chunk_tokens": None},
    },
}  # fmt: skip


def encoded(state: dict[str, Any], **changes: Any) -> bytes:
    body = {key: value for key, value in (state | changes).items() if value is not ...}
    return json.dumps(body).encode()


def seconds(good: list[int], total: list[int], *, end_s: int = 11) -> dict[str, Any]:
    counts = {"good": good, "total": total}
    return {"first_s": 10, "end_s": end_s, "classes": {"chat": counts}}


def test_requested_seconds_of_a_router_are_decoded() -> None:
    assert decode_router(encoded(ROUTER)).seconds is None
    counters = decode_router(encoded(ROUTER, seconds=seconds([1, 0], [2, 1], end_s=12)))
    assert counters.seconds == RecentSeconds(
        first_s=10, end_s=12, classes={"chat": SecondCounts(good=[1, 0], total=[2, 1])}
    )


def test_counters_of_a_router_are_decoded_by_class() -> None:
    counters = decode_router(encoded(ROUTER))
    assert (counters.epoch, counters.uptime_ns) == ("0011aabb", 12.5 * NS_PER_S)
    assert (counters.arrivals, counters.client_errors) == (20, 3)
    assert counters.in_flight == 4
    chat = counters.classes["chat"]
    assert (chat.good, chat.total) == (7, 12), "without cancelled and unjudged"
    assert chat.ttft == TargetCounts(judged=10, missed=2, close=1)


def test_the_state_and_the_device_of_an_engine_are_decoded() -> None:
    counters = decode_engine(encoded(ENGINE))
    state = counters.state
    assert (state.running, state.waiting, state.kv_total_blocks) == (3, 2, 100)
    assert state.kv_free_blocks == 60
    assert (state.budget_law, state.settled, state.limits_revision) == ("model", True, 6)
    assert (counters.token_bounds, counters.max_width) == ((256, 8192), 64)
    assert (state.token_budget, state.max_num_seqs, state.safety_percent) == (1024, 48, 85)
    (bin_,) = counters.lengths
    assert (bin_.requests, bin_.input_tokens, bin_.cached_tokens, bin_.output_tokens) == (
        2, 300, 16, 40,
    )  # fmt: skip
    device = counters.device
    assert device is not None
    assert device.form == UnitForm(unit_ns=1_000_000)
    assert (device.kv_tokens, device.host_ns_per_step) == (1600, 5)


@pytest.mark.parametrize(
    ("step_time", "form"),
    [
        pytest.param(
            {"form": "roofline", "c0_ns": 1, "c1_ns_per_token": 2.5,
             "c2_ns_per_context_token": 3, "c4_ns_per_request": 4},
            RooflineForm(c0_ns=1, c1_ns_per_token=2.5, c2_ns_per_context_token=3,
                         c4_ns_per_request=4),
            id="roofline",
        ),
        pytest.param(
            {"form": "table", "decodes": [1, 2], "prefill_tokens": [0, 8],
             "times_ns": [[5, 6], [7, 8]]},
            TableForm(decodes=(1, 2), prefill_tokens=(0, 8), times_ns=((5, 6), (7, 8))),
            id="table",
        ),
        pytest.param(
            {"form": "piecewise", "tokens": [1, 8], "times_ns": [5.5, 7], "c4_ns_per_request": 1,
             "c2_ns_per_context_token": 3, "c3_ns_per_square": 0},
            PiecewiseForm(tokens=(1, 8), times_ns=(5.5, 7), c4_ns_per_request=1,
                          c2_ns_per_context_token=3, c3_ns_per_square=0),
            id="piecewise",
        ),
    ],
)  # fmt: skip
def test_each_step_time_form_is_decoded(step_time: dict[str, Any], form: object) -> None:
    device = decode_engine(encoded(ENGINE, device={"step_time": step_time})).device
    assert device is not None
    assert device.form == form


@pytest.mark.parametrize(
    "step_time",
    [
        pytest.param({}, id="none"),
        pytest.param({"form": "magic"}, id="unknown"),
        pytest.param({"form": "unit", "unit_ns": -1}, id="negative"),
        pytest.param({"form": "unit", "unit_ns": "fast"}, id="text"),
        pytest.param({"form": "unit", "unit_ns": 1e300}, id="too large"),
        pytest.param({"form": "unit", "unit_ns": 0}, id="no time"),
        pytest.param({"form": "unit", "chunk_tokens": 0}, id="no tokens"),
        pytest.param(
            {"form": "table", "decodes": [], "prefill_tokens": [0, 8], "times_ns": []},
            id="an empty table",
        ),
        pytest.param(
            {"form": "table", "decodes": [1], "prefill_tokens": [0], "times_ns": [[5]]},
            id="not a table",
        ),
    ],
)
def test_an_invalid_device_is_ignored(step_time: dict[str, Any]) -> None:
    counters = decode_engine(encoded(ENGINE, device={"step_time": step_time}))
    assert counters.device is None
    assert counters.state.running == 3, "the rest is valid"


@pytest.mark.parametrize(
    ("law", "error", "settled"),
    [("model", 0.3, False), ("model", 0.04, True), ("", 0.3, True)],
    ids=["large error", "small error", "no law"],
)
def test_an_engine_is_settled_if_its_steps_take_the_predicted_time(
    law: str, error: float, settled: bool
) -> None:
    counters = decode_engine(encoded(ENGINE, budget_law=law, step_time_error=error))
    assert counters.state.settled is settled


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"<html>", id="not JSON"),
        pytest.param(b"\xff\xfe", id="not text"),
        pytest.param(b"[" * 100_000, id="deeply nested"),
        pytest.param(encoded(ROUTER, epoch=...), id="no epoch"),
        pytest.param(encoded(ROUTER, arrivals=-1), id="negative"),
        pytest.param(encoded(ROUTER, arrivals=2**60), id="too large"),
        pytest.param(encoded(ROUTER, arrivals=True), id="not a number"),
        pytest.param(encoded(ROUTER, uptime_seconds=-1), id="negative time"),
        pytest.param(encoded(ROUTER, outcomes={"chat": {"attained": "7"}}), id="text"),
        pytest.param(
            encoded(ROUTER, promises={"chat": {"tpot": {"judged": -1}}}), id="a negative target"
        ),
        pytest.param(encoded(ROUTER, promises={str(i): {} for i in range(300)}), id="too many"),
        pytest.param(encoded(ROUTER, tenants_problem="x" * 1025), id="a long problem"),
        pytest.param(encoded(ROUTER, seconds=seconds([1], [1], end_s=12)), id="a second too few"),
        pytest.param(encoded(ROUTER, seconds=seconds([1], [1, 2], end_s=12)), id="uneven seconds"),
        pytest.param(encoded(ROUTER, seconds=seconds([2], [1])), id="more good than requests"),
        pytest.param(encoded(ROUTER, seconds=seconds([-1], [1])), id="a negative second"),
        pytest.param(encoded(ROUTER, seconds=seconds([], [], end_s=9)), id="seconds backwards"),
        pytest.param(
            encoded(ROUTER, seconds={"first_s": 0, "end_s": 3601, "classes": {}}), id="too long"
        ),
        pytest.param(
            encoded(ROUTER, seconds=seconds([0] * 3601, [0] * 3601, end_s=3611)),
            id="too many seconds",
        ),
    ],
)
def test_an_invalid_state_of_a_router_is_rejected_completely(body: bytes) -> None:
    with pytest.raises(ValueError, match="the state cannot be used"):
        decode_router(body)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"running": ...}, id="while it starts"),
        pytest.param({"answered": [[0, 0, 0, 0]]}, id="an empty bin"),
        pytest.param({"answered": [[1, 1, 0, 1]] * 5000}, id="too many bins"),
        pytest.param({"answered": [[1, 1]]}, id="half a bin"),
        pytest.param({"answered": [[1, 1, 2, 1]]}, id="more cached tokens than prompt tokens"),
        pytest.param({"limits_revision": -1}, id="negative"),
        pytest.param({"waiting": 2**60}, id="too large"),
        pytest.param({"kv_free_blocks": "60"}, id="text"),
    ],
)
def test_an_invalid_state_of_an_engine_is_rejected_completely(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the state cannot be used"):
        decode_engine(encoded(ENGINE, **changes))


COUNTS = st.sampled_from([0, 1, 2, 100, 2**31, 2**53]) | st.integers(0, 10**6)
TIMES = st.sampled_from([0, 1e-9, 0.5, 100, 1e15])
STEP_TIMES = st.one_of(
    st.fixed_dictionaries(
        {"form": st.just("unit"), "unit_ns": COUNTS, "chunk_tokens": st.none() | COUNTS}
    ),
    st.fixed_dictionaries(
        {"form": st.just("roofline"), "c0_ns": TIMES, "c1_ns_per_token": TIMES,
         "c2_ns_per_context_token": TIMES, "c4_ns_per_request": TIMES}
    ),
    st.fixed_dictionaries(
        {"form": st.just("table"), "decodes": st.lists(COUNTS, max_size=2).map(sorted),
         "prefill_tokens": st.lists(COUNTS, max_size=2).map(sorted),
         "times_ns": st.lists(st.lists(COUNTS, max_size=2).map(sorted), max_size=2)}
    ),
)  # fmt: skip
PARAMS = ServiceParams(
    mode=ControlMode.AUTO,
    classes=(SLOClass(name="chat", ttft_ms=500, tpot_ms=50, objective=Fraction(95, 100)),),
)


@settings(deadline=None)
@given(
    step_time=STEP_TIMES,
    bins=st.lists(st.tuples(COUNTS, COUNTS, COUNTS, COUNTS), max_size=3),
    blocks=COUNTS,
    host_ns=COUNTS,
    arrivals=COUNTS,
)
def test_the_control_laws_decide_on_every_state_that_is_decoded(
    step_time: dict[str, Any], bins: list[tuple[int, ...]], blocks: int, host_ns: int, arrivals: int
) -> None:
    device = {"step_time": step_time, "host_ns_per_step": host_ns}
    body = encoded(ENGINE, answered=bins, device=device, kv_total_blocks=blocks)
    try:
        counters = decode_engine(body)
    except ValueError:
        return
    state = ControlState(setpoint=Setpoint.initial(PARAMS))
    for second in (10, 20, 30):
        state = control_step(
            ControlInput(
                state=state,
                params=PARAMS,
                interval_ns=10 * NS_PER_S,
                traffic=Traffic(
                    signal=Signal.FRESH,
                    arrivals=arrivals,
                    finished=LengthMix.of(counters.lengths),
                ),
                classes=(),
                engines=(
                    EngineReading(
                        name="a",
                        signal=Signal.FRESH,
                        state=counters.state,
                        device=counters.device,
                    ),
                ),
                phases={"a": ReplicaPhase.READY},
                desired_replicas=1,
                startups_ns=(),
                now_ns=second * NS_PER_S,
            )
        ).state
        assert 1 <= state.setpoint.replicas <= PARAMS.max_replicas
