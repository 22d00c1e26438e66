"""Failures of replicas: the retry, the response to the client, and the outcome."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from tests.engine.router.conftest import END, TOKEN, hang, respond, stream

from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.router.settings import RouterLimits, Timeouts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.engine.router.conftest import Call, StartBench

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
SHORT = Timeouts(
    connect_ns=500 * NS_PER_MS,
    first_byte_ns=150 * NS_PER_MS,
    idle_ns=150 * NS_PER_MS,
    body_ns=150 * NS_PER_MS,
)


async def reset(call: Call) -> None:
    call.reset()


async def close_cleanly(call: Call) -> None:
    call.writer.close()


async def reset_after_head(call: Call) -> None:
    await call.stream_head()
    call.reset()


async def reset_after_role(call: Call) -> None:
    await call.stream_head()
    await call.chunk(ROLE)
    call.reset()


async def send_garbage(call: Call) -> None:
    await call.send(b"\x00\x01garbage\r\n\r\n")


STATUS_500 = respond("500 Internal Server Error", b"<html>oops</html>", content_type="text/html")
STATUS_429 = respond("429 Too Many Requests", b'{"error":{}}', "Retry-After: 3")
STATUS_503 = respond("503 Service Unavailable", b'{"error":{}}')
ERROR_EVENT = b'data: {"error":{"message":"engine died"}}\n\n'


def error_of(body: bytes) -> dict[str, object]:
    error: dict[str, object] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


BEFORE_THE_TOKEN = [
    pytest.param(reset, "lost", id="reset"),
    pytest.param(close_cleanly, "lost", id="close"),
    pytest.param(send_garbage, "lost", id="not HTTP"),
    pytest.param(STATUS_500, "server_error", id="500"),
    pytest.param(STATUS_429, "saturated", id="429"),
    pytest.param(STATUS_503, "saturated", id="503"),
    pytest.param(reset_after_head, "lost", id="reset after the head"),
    pytest.param(reset_after_role, "lost", id="reset after the role"),
    pytest.param(stream(), "lost", id="end without a token"),
    pytest.param(stream(ERROR_EVENT), "lost", id="error before a token"),
]


@pytest.mark.parametrize(("behave", "reason"), BEFORE_THE_TOKEN)
async def test_after_a_failure_before_the_first_token_another_replica_serves_the_request(
    start: StartBench, behave: Callable[[Call], Awaitable[None]], reason: str
) -> None:
    bench = await start(2)
    bench.replicas[0].behave = behave
    status, body = await bench.post(b'{"prompt":"again"}')
    assert status == 200
    assert body.endswith(END)
    assert b"assistant" not in body
    assert [c.body for r in bench.replicas for c in r.calls] == [b'{"prompt":"again"}'] * 2
    assert await bench.settled() == {"attained": 1}
    assert bench.router.outcomes.retries == {reason: 1}
    assert [r.in_flight for r in bench.router.replicas] == [0, 0]


@pytest.mark.parametrize(("behave", "reason"), BEFORE_THE_TOKEN)
async def test_a_second_failure_is_sent_to_the_client(
    start: StartBench, behave: Callable[[Call], Awaitable[None]], reason: str
) -> None:
    bench = await start(3)
    for replica in bench.replicas:
        replica.behave = behave
    status, body = await bench.post()
    passed: dict[object, int] = {STATUS_500: 500, STATUS_429: 429, STATUS_503: 503}
    assert status == passed.get(behave, 502)
    if behave not in passed:
        assert error_of(body)["code"] == "replica_lost"
    shed = behave in {STATUS_429, STATUS_503}
    assert await bench.settled() == ({"shed": 1} if shed else {"error": 1})
    assert sum(len(r.calls) for r in bench.replicas) == 2


async def test_a_replica_that_refuses_connections_gets_no_requests(start: StartBench) -> None:
    bench = await start(2)
    await bench.replicas[0].refuse()
    for _ in range(4):
        assert (await bench.post())[0] == 200
    assert await bench.settled() == {"attained": 4}
    assert bench.router.outcomes.retries in ({"connect": 1}, {"stale_connection": 1, "connect": 1})
    first = next(iter(bench.router.replicas))
    assert not first.ready
    assert "cannot connect" in first.detail


async def test_without_a_ready_replica_requests_are_shed(start: StartBench) -> None:
    bench = await start()
    next(iter(bench.router.replicas)).mark_not_ready("test")
    async with bench.complete() as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert error_of(await response.read())["code"] == "no_replica_ready"
    assert await bench.settled() == {"shed": 1}


async def test_the_429_of_an_overdue_request_is_forwarded_without_a_retry(
    start: StartBench,
) -> None:
    bench = await start(2)
    for replica in bench.replicas:
        replica.behave = STATUS_429
    assert (await bench.post(b"{}", X_SLO_TTFT_Ms="0.000001"))[0] == 429
    assert await bench.settled() == {"shed": 1}
    assert sum(len(replica.calls) for replica in bench.replicas) == 1


async def test_the_429_of_a_single_replica_is_forwarded(start: StartBench) -> None:
    bench = await start()
    bench.replicas[0].behave = STATUS_429
    async with bench.complete() as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "3"
        assert await response.read() == b'{"error":{}}'
    # The replica is known to be saturated, so the next request is rejected without it.
    async with bench.complete() as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        assert error_of(await response.read())["type"] == "rate_limit_error"
    assert len(bench.replicas[0].calls) == 1
    assert await bench.settled() == {"shed": 2}


@pytest.mark.parametrize(
    "half",
    [pytest.param(b"", id="between events"), pytest.param(b'data: {"choi', id="half an event")],
)
async def test_a_stream_that_breaks_ends_with_an_error_and_is_not_retried(
    start: StartBench, half: bytes
) -> None:
    bench = await start(2)

    async def behave(call: Call) -> None:
        await call.stream_head()
        await call.chunk(TOKEN + half)
        call.reset()

    for replica in bench.replicas:
        replica.behave = behave
    async with bench.complete() as response:
        body = await response.read()
        assert response.connection is None
    assert body.startswith(TOKEN + half + b"\n\ndata: ")
    last = body.rstrip().rpartition(b"\n\ndata: ")[2]
    assert error_of(last)["code"] == "replica_lost"
    assert await bench.settled() == {"error": 1}
    assert sum(len(r.calls) for r in bench.replicas) == 1


async def test_a_stream_that_ends_without_its_end_marker_is_an_error(start: StartBench) -> None:
    bench = await start()
    bench.replicas[0].behave = stream(TOKEN)
    assert await bench.post() == (200, TOKEN)
    assert await bench.settled() == {"error": 1}


async def test_a_broken_response_that_is_not_streamed_is_cut_off(start: StartBench) -> None:
    bench = await start()

    async def behave(call: Call) -> None:
        await call.head("200 OK", "Content-Type: application/json", "Content-Length: 100")
        await call.send(b'{"choices":')
        call.reset()

    bench.replicas[0].behave = behave
    with pytest.raises(Exception, match=r"[Pp]ayload|closed|reset"):
        await bench.post()
    assert await bench.settled() == {"error": 1}


@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_request_at_a_hung_replica_times_out(start: StartBench, tokens: int) -> None:
    bench = await start(2, timeouts=SHORT)
    for replica in bench.replicas:
        replica.behave = stream(TOKEN, asyncio.Event()) if tokens else hang
    status, body = await bench.post()
    assert status == (200 if tokens else 504)
    assert error_of(body.rstrip().rpartition(b"data: ")[2])["code"] == "replica_timeout"
    assert await bench.settled() == {"timeout": 1}
    (call,) = (c for r in bench.replicas for c in r.calls)
    await asyncio.wait_for(call.hung_up.wait(), 5)


async def test_a_page_of_html_is_an_error(start: StartBench) -> None:
    bench = await start()
    bench.replicas[0].behave = respond("200 OK", b"<html></html>", content_type="text/html")
    assert await bench.post() == (200, b"<html></html>")
    assert await bench.settled() == {"error": 1}


async def test_a_line_of_ten_megabytes_is_forwarded(start: StartBench) -> None:
    bench = await start()
    line = b'data: {"choices":[{"text":"' + b"x" * (10 << 20) + b'"}]}\n\n'
    bench.replicas[0].behave = stream(line, TOKEN + END)
    status, body = await bench.post()
    assert status == 200
    assert body == line + TOKEN + END
    assert await bench.settled() == {"attained": 1}


async def test_a_stale_connection_costs_no_retry(start: StartBench) -> None:
    bench = await start(limits=RouterLimits(retry_percent=0, retry_burst=0))
    assert (await bench.post())[0] == 200
    old = bench.replicas[0].calls[0].connection

    async def behave(call: Call) -> None:
        if call.connection == old:
            call.reset()
        else:
            await stream(TOKEN + END)(call)

    bench.replicas[0].behave = behave
    assert (await bench.post())[0] == 200
    assert bench.replicas[0].calls[1].connection == old
    assert await bench.settled() == {"attained": 2}
    assert bench.router.outcomes.retries == {"stale_connection": 1}


async def test_retries_end_with_their_budget(start: StartBench) -> None:
    bench = await start(2, limits=RouterLimits(retry_percent=0))
    bench.replicas[0].behave = STATUS_500
    statuses = [(await bench.post())[0] for _ in range(24)]
    assert bench.router.outcomes.retries == {"server_error": 10}
    assert statuses.count(500) > 0
    settled = await bench.settled()
    assert settled["attained"] + settled["error"] == 24


async def test_a_drain_finishes_running_requests_and_rejects_new_ones(start: StartBench) -> None:
    bench = await start(timeouts=Timeouts(idle_drain_ns=0))
    go_on = asyncio.Event()
    bench.replicas[0].behave = stream(TOKEN, go_on, END)
    async with bench.complete() as response:
        assert await response.content.readany() == TOKEN
        draining = asyncio.ensure_future(bench.router.drain(60 * NS_PER_S))
        await asyncio.sleep(0)
        assert (await bench.post())[0] == 503
        async with bench.client.get(bench.router.url + "/health/ready") as ready:
            assert ready.status == 503
        assert not draining.done()
        go_on.set()
        assert await response.read() == END
    await asyncio.wait_for(draining, 5)
    assert bench.outcomes() == {"attained": 1, "shed": 1}


async def test_a_kept_connection_is_served_one_more_response_that_announces_the_close(
    start: StartBench,
) -> None:
    bench = await start()
    assert (await bench.post())[0] == 200
    draining = asyncio.ensure_future(bench.router.drain(60 * NS_PER_S))
    await asyncio.sleep(0)
    async with bench.client.get(bench.router.url + "/health/ready") as ready:
        assert ready.status == 503, "no new client may come"
    async with bench.complete() as response:
        assert response.status == 200
        assert response.headers["Connection"] == "close"
        await response.read()
    # No connection is left, so the drain does not wait for the rest of `idle_drain_ns`.
    await asyncio.wait_for(draining, 2.5)
    assert bench.outcomes() == {"attained": 2}


async def test_after_a_long_response_a_client_may_send_one_more_request_on_its_connection(
    start: StartBench,
) -> None:
    bench = await start(timeouts=Timeouts(idle_drain_ns=NS_PER_S // 5))
    go_on = asyncio.Event()
    calls = iter([go_on.wait])

    async def behave(call: Call) -> None:
        await call.stream_head()
        await call.chunk(TOKEN)
        for first in calls:
            await first()
        await call.chunk(END)
        await call.end()

    bench.replicas[0].behave = behave
    async with bench.complete() as response:
        assert await response.content.readany() == TOKEN
        draining = asyncio.ensure_future(bench.router.drain(60 * NS_PER_S))
        await asyncio.sleep(0)
        while (await bench.post())[0] == 200:
            pass  # `idle_drain_ns` is not over
        assert not draining.done()
        go_on.set()
        assert await response.read() == END
    async with bench.complete() as response:
        assert (response.status, response.headers["Connection"]) == (200, "close")
        assert await response.read() == TOKEN + END
    await asyncio.wait_for(draining, 5)


async def test_an_unused_connection_does_not_keep_a_router_running(start: StartBench) -> None:
    bench = await start(timeouts=Timeouts(idle_drain_ns=NS_PER_S // 10))
    assert (await bench.post())[0] == 200
    await asyncio.wait_for(bench.router.drain(60 * NS_PER_S), 2.5)
    assert (await bench.post())[0] == 503


async def test_a_request_that_runs_after_the_grace_period_ends_with_an_error(
    start: StartBench,
) -> None:
    bench = await start()
    bench.replicas[0].behave = stream(TOKEN, asyncio.Event())
    async with bench.complete() as response:
        assert await response.content.readany() == TOKEN
        await bench.router.drain(1)
        assert b"the router stopped" in await response.read()
    assert bench.outcomes() == {"error": 1}
