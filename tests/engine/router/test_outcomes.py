"""The class, the targets and the outcome of a request."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client.utils import floatToGoString
from tests.engine.router.conftest import END, TOKEN

from goodput_core.units import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from tests.engine.router.conftest import Call, StartBench


@pytest.mark.parametrize(
    ("body", "headers", "counted"),
    [
        pytest.param(b"{}", {}, "interactive", id="default"),
        pytest.param(b"{}", {"X_SLO_Class": "batch"}, "batch", id="header"),
        pytest.param(b'{"slo_class":"batch"}', {}, "batch", id="body"),
        pytest.param(b'{"slo_class":null}', {}, "interactive", id="null in the body"),
        pytest.param(
            b'{"slo_class":"interactive"}', {"X_SLO_Class": "batch"}, "batch", id="header first"
        ),
        pytest.param(
            b'"slo_class" not json', {}, "interactive", id="not JSON, which the engine reports"
        ),
    ],
)
async def test_a_request_is_counted_in_its_class(
    start: StartBench, body: bytes, headers: dict[str, str], counted: str
) -> None:
    bench = await start()
    assert (await bench.post(body, **headers))[0] == 200
    await bench.settled()
    assert bench.outcomes(counted) == {"attained": 1}


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        pytest.param(b"{}", {"X_SLO_Class": "gold"}, "interactive, batch", id="unknown class"),
        pytest.param(b'{"slo_class":"gold"}', {}, "interactive, batch", id="unknown in the body"),
        pytest.param(b'{"slo_class":7}', {}, "slo_class", id="not a string"),
        pytest.param(b"{}", {"X_SLO_TTFT_Ms": "soon"}, "X-SLO-TTFT-Ms", id="not a number"),
        pytest.param(b"{}", {"X_SLO_TPOT_Ms": "-1"}, "X-SLO-TPOT-Ms", id="negative"),
        pytest.param(b"{}", {"X_SLO_E2E_Ms": "nan"}, "X-SLO-E2E-Ms", id="NaN"),
        pytest.param(b"{}", {"X_SLO_E2E_Ms": "inf"}, "X-SLO-E2E-Ms", id="infinite"),
    ],
)
async def test_an_invalid_class_or_target_is_400(
    start: StartBench, body: bytes, headers: dict[str, str], message: str
) -> None:
    bench = await start()
    status, response = await bench.post(body, **headers)
    assert status == 400
    assert message in json.loads(response)["error"]["message"]
    assert await bench.settled() == {}
    assert bench.router.outcomes.client_errors == 1
    assert bench.replicas[0].calls == []


@pytest.mark.parametrize("header", ["X_SLO_TTFT_Ms", "X_SLO_E2E_Ms"])
async def test_a_requests_own_targets_override_its_class(start: StartBench, header: str) -> None:
    bench = await start()
    assert (await bench.post(b"{}", **{header: "0.000001"}))[0] == 200
    assert await bench.settled() == {"missed": 1}


@pytest.mark.parametrize(
    ("timings", "headers", "outcome"),
    [
        pytest.param('{"ttft_ms":10,"tpot_ms":20,"e2e_ms":50}', {}, "attained", id="met"),
        pytest.param('{"ttft_ms":9000,"tpot_ms":20}', {}, "missed", id="late"),
        pytest.param('{"ttft_ms":10,"tpot_ms":9000}', {}, "missed", id="slow"),
        pytest.param('{"ttft_ms":10,"tpot_ms":null}', {}, "attained", id="one token"),
        pytest.param(None, {}, "unjudged", id="no timings, no E2E target"),
        pytest.param("invalid", {}, "unjudged", id="invalid"),
        pytest.param(None, {"X_SLO_E2E_Ms": "5000"}, "attained", id="judged by its end"),
        pytest.param(None, {"X_SLO_E2E_Ms": "0.000001"}, "missed", id="missed by its end"),
    ],
)
async def test_a_response_that_is_not_streamed_is_judged_by_the_engines_timings(
    start: StartBench, timings: str | None, headers: dict[str, str], outcome: str
) -> None:
    bench = await start()

    async def behave(call: Call) -> None:
        header = () if timings is None else (f"X-Goodput-Timings: {timings}",)
        await call.whole("200 OK", b'{"choices":[]}', *header)

    bench.replicas[0].behave = behave
    assert (await bench.post(b"{}", **headers))[0] == 200
    assert await bench.settled() == {outcome: 1}
    without_timings = timings in {None, "invalid"}
    assert (await bench.state())["judged_on_e2e_only"] == int(without_timings)


@pytest.mark.parametrize(
    ("kind", "outcome"), [("rate_limit_error", "shed"), ("server_error", "error")]
)
async def test_a_stream_that_ends_with_an_error_event_is_counted_by_its_type(
    start: StartBench, kind: str, outcome: str
) -> None:
    bench = await start()

    async def behave(call: Call) -> None:
        await call.stream_head()
        await call.chunk(TOKEN)
        await call.chunk(b'data: {"error":{"message":"m","type":"%b"}}\n\n' % kind.encode())
        await call.end()

    bench.replicas[0].behave = behave
    status, response = await bench.post(b'{"stream":true}')
    assert status == 200
    assert kind.encode() in response
    assert await bench.settled() == {outcome: 1}


@pytest.mark.parametrize(
    ("usage", "prompt", "output"),
    [
        pytest.param({"prompt_tokens": 7, "completion_tokens": 4}, 7, 4, id="reported"),
        pytest.param({"prompt_tokens": "7", "completion_tokens": 4}, 0, 4, id="prompt as text"),
        pytest.param({"prompt_tokens": -7, "completion_tokens": 4}, 0, 4, id="negative"),
        pytest.param({"prompt_tokens": 10**12, "completion_tokens": 4}, 1 << 30, 4, id="huge"),
        pytest.param(None, 0, 3, id="not reported, so the events count"),
    ],
)
async def test_the_metrics_count_tokens_and_the_times_between_them(
    start: StartBench, usage: dict[str, object] | None, prompt: int, output: int
) -> None:
    bench = await start()

    async def behave(call: Call) -> None:
        await call.stream_head()
        await call.chunk(TOKEN)
        await call.chunk(TOKEN + TOKEN)
        if usage is not None:
            event = json.dumps({"choices": [], "usage": usage}).encode()
            await call.chunk(b"data: %b\n\n" % event)
        await call.chunk(END)
        await call.end()

    bench.replicas[0].behave = behave
    assert (await bench.post(b'{"stream":true}'))[0] == 200
    await bench.settled()
    labels = '{llmservice="chat",slo_class="interactive"}'
    lines = (await bench.metrics()).splitlines()
    assert f"goodput_router_prompt_tokens_total{labels} {floatToGoString(prompt)}" in lines
    assert f"goodput_router_output_tokens_total{labels} {float(output)}" in lines
    assert f"goodput_request_tbt_seconds_count{labels} 2.0" in lines
    (first,) = [
        line for line in lines if 'tbt_seconds_bucket{le="0.001"' in line and "inter" in line
    ]
    assert float(first.split()[1]) >= 1, "two tokens of one read have the same time"


async def test_tokens_whose_text_is_held_back_count(start: StartBench) -> None:
    now_ns = 0
    bench = await start(clock=lambda: now_ns)
    held_back = TOKEN.replace(b'"x"', b'""')
    usage = b'data: {"choices":[],"usage":{"completion_tokens":5}}\n\n'
    read = asyncio.Event()

    async def behave(call: Call) -> None:
        nonlocal now_ns
        await call.stream_head()
        for event in (TOKEN, held_back, held_back, held_back, END.partition(b"data: [")[0] + usage):
            read.clear()
            now_ns += 40 * NS_PER_MS
            await call.chunk(event)
            await read.wait()
        await call.end()

    bench.replicas[0].behave = behave
    async with bench.complete() as response:
        async for _ in response.content.iter_any():
            read.set()
    await bench.settled()
    labels = '{llmservice="chat",slo_class="interactive"}'
    lines = (await bench.metrics()).splitlines()
    assert f"goodput_router_output_tokens_total{labels} 5.0" in lines
    assert f"goodput_request_tbt_seconds_count{labels} 4.0" in lines
    assert f"goodput_request_tbt_seconds_sum{labels} 0.16" in lines
    within = f'goodput_request_tbt_seconds_bucket{{le="0.05",{labels[1:]} 4.0'
    assert within in lines, "no gap is as long as two tokens"


async def test_tokens_of_a_response_that_is_not_streamed_come_from_its_timings(
    start: StartBench,
) -> None:
    bench = await start()

    async def behave(call: Call) -> None:
        timings = '{"ttft_ms":10,"tpot_ms":20,"prompt_tokens":11,"output_tokens":5}'
        await call.whole("200 OK", b'{"choices":[]}', f"X-Goodput-Timings: {timings}")

    bench.replicas[0].behave = behave
    assert (await bench.post(b"{}"))[0] == 200
    await bench.settled()
    labels = '{llmservice="chat",slo_class="interactive"}'
    lines = (await bench.metrics()).splitlines()
    assert f"goodput_router_prompt_tokens_total{labels} 11.0" in lines
    assert f"goodput_router_output_tokens_total{labels} 5.0" in lines
    assert f"goodput_request_tbt_seconds_count{labels} 0.0" in lines


async def test_the_metrics_count_outcomes_targets_and_latencies(start: StartBench) -> None:
    bench = await start()
    await bench.post()
    await bench.post(X_SLO_Class="batch")
    await bench.settled()
    lines = (await bench.metrics()).splitlines()
    for line in (
        'goodput_requests_total{llmservice="chat",outcome="attained",slo_class="batch"} 1.0',
        'goodput_requests_total{llmservice="chat",outcome="shed",slo_class="batch"} 0.0',
        'goodput_request_ttft_seconds_count{llmservice="chat",slo_class="batch"} 1.0',
        'goodput_request_tpot_seconds_count{llmservice="chat",slo_class="batch"} 1.0',
        'goodput_request_e2e_seconds_count{llmservice="chat",slo_class="interactive"} 1.0',
        (
            'goodput_promises_total{llmservice="chat",promise="ttft",result="kept",'
            'slo_class="batch"} 1.0'
        ),
        (
            'goodput_promises_total{llmservice="chat",promise="tpot",result="missed",'
            'slo_class="interactive"} 0.0'
        ),
        'goodput_router_in_flight_requests{llmservice="chat",role="router"} 0.0',
        'goodput_router_replica_ready{llmservice="chat",replica="r0"} 1.0',
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("timings", "headers", "reasons"),
    [
        pytest.param('{"ttft_ms":10,"tpot_ms":20}', {}, set(), id="met"),
        pytest.param('{"ttft_ms":9000,"tpot_ms":9000}', {}, {"ttft", "tpot"}, id="both"),
        pytest.param(None, {"X_SLO_E2E_Ms": "0.000001"}, {"e2e"}, id="end-to-end alone"),
        pytest.param("429", {}, {"shed"}, id="refused"),
    ],
)
async def test_a_miss_is_counted_by_the_missed_targets(
    start: StartBench, timings: str | None, headers: dict[str, str], reasons: set[str]
) -> None:
    bench = await start()

    async def behave(call: Call) -> None:
        header = () if timings is None else (f"X-Goodput-Timings: {timings}",)
        status = "429 Too Many Requests" if timings == "429" else "200 OK"
        await call.whole(status, b'{"choices":[]}', *header)

    bench.replicas[0].behave = behave
    await bench.post(b"{}", **headers)
    await bench.settled()
    lines = (await bench.metrics()).splitlines()
    for reason in ("ttft", "tpot", "tbt", "e2e", "shed", "error", "timeout"):
        labels = f'llmservice="chat",reason="{reason}",slo_class="interactive"'
        assert f"goodput_misses_total{{{labels}}} {float(reason in reasons)}" in lines


async def test_the_state_has_replicas_and_outcomes(start: StartBench) -> None:
    bench = await start(2)
    await bench.post()
    await bench.settled()
    state = await bench.state()
    assert state["policy"] == "round-robin"
    assert state["in_flight"] == 0
    assert [r["name"] for r in state["replicas"]] == ["r0", "r1"]
    assert all(r["ready"] and not r["saturated"] for r in state["replicas"])
    assert state["outcomes"]["interactive"]["attained"] == 1
    kept = {"judged": 1, "missed": 0, "close": 0}
    assert state["promises"] == {"interactive": {"ttft": kept, "tpot": kept}}
    assert state["arrivals"] == 1
    assert (await bench.state())["epoch"] == state["epoch"], "the epoch is constant until a restart"


async def test_the_state_has_counts_per_second_on_request(start: StartBench) -> None:
    bench = await start()
    for body in (b"{}", b'{"slo_class":"batch"}'):
        assert (await bench.post(body))[0] == 200
    await bench.settled()
    assert "seconds" not in await bench.state()
    seconds = bench.router.outcomes.seconds(0, time.monotonic_ns() + NS_PER_S)
    assert {name: sum(c.good) for name, c in seconds.classes.items()} == {
        "interactive": 1,
        "batch": 1,
    }
    state = await bench.state(seconds_since="0")
    assert state["seconds"]["end_s"] == pytest.approx(time.monotonic(), abs=60)
    assert state["seconds"]["first_s"] <= state["seconds"]["end_s"]
    later = await bench.state(seconds_since=str(state["seconds"]["end_s"] + 1000))
    assert later["seconds"]["classes"] == {}


@pytest.mark.parametrize("since", ["", "-1", "1.5", "soon", "9" * 13])
async def test_an_invalid_second_is_400(start: StartBench, since: str) -> None:
    bench = await start()
    url = bench.router.admin_url + "/control/state"
    async with bench.client.get(url, params={"seconds_since": since}) as response:
        assert response.status == 400
        assert "seconds_since" in await response.text()
