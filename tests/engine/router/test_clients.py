"""Errors of clients, which count against neither the service nor a replica."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from typing import TYPE_CHECKING

import pytest
from tests.builders.http import PATIENCE_S, connect, post_bytes
from tests.engine.router.conftest import TOKEN, respond, until

from goodput_core.slo.targets import SLOClass
from goodput_core.units import NS_PER_MS, NS_PER_S
from goodput_engine.router.settings import RouterLimits, Timeouts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.router.conftest import Call, RouterBench, StartBench

SHORT = Timeouts(
    connect_ns=500 * NS_PER_MS,
    first_byte_ns=150 * NS_PER_MS,
    idle_ns=150 * NS_PER_MS,
    body_ns=150 * NS_PER_MS,
)


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "422 Unprocessable"])
async def test_a_client_error_has_no_outcome(start: StartBench, status: str) -> None:
    bench = await start(2)
    for replica in bench.replicas:
        replica.behave = respond(status, b'{"error":{"message":"no"}}')
    assert await bench.post() == (int(status[:3]), b'{"error":{"message":"no"}}')
    assert await bench.settled() == {}
    assert bench.router.outcomes.client_errors == 1
    assert bench.router.outcomes.retries == {}
    assert f'goodput_router_client_errors_total{{llmservice="chat",status="{status[:3]}"}} 1.0' in (
        await bench.metrics()
    )


async def test_a_client_that_stops_reading_is_disconnected(start: StartBench) -> None:
    bench = await start(timeouts=SHORT)
    piece = b": " + b"x" * 65_532 + b"\n\n"

    async def behave(call: Call) -> None:
        await call.stream_head()
        await call.chunk(TOKEN)
        while True:
            await call.chunk(piece)

    bench.replicas[0].behave = behave
    async with connect(bench.router.url, receive_bytes=4096) as (_, writer):
        writer.write(post_bytes(b"{}"))
        await bench.replicas[0].arrived.get()
        assert await bench.settled() == {"cancelled": 1}


async def _response(bench: RouterBench, request: bytes) -> bytes:
    async with connect(bench.router.url) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(request)
        return await reader.read(65_536)


async def test_a_body_that_does_not_arrive_is_408(start: StartBench) -> None:
    bench = await start(timeouts=SHORT)
    response = await _response(bench, post_bytes(b"{", length=9))
    assert response.startswith(b"HTTP/1.1 408")
    assert await bench.settled() == {}
    assert bench.router.outcomes.client_errors == 1


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(b"Content-Length: 99999999999\r\n\r\n", id="announced"),
        pytest.param(
            b"Transfer-Encoding: chunked\r\n\r\n" + b"800\r\n" + b"x" * 2048 + b"\r\n",
            id="detected",
        ),
        pytest.param(
            b"Transfer-Encoding: chunked\r\n\r\n" + b"800\r\n" + b"x" * 2048 + b"\r\n0\r\n\r\n",
            id="complete at once",
        ),
    ],
)
async def test_a_body_that_is_too_large_is_413(start: StartBench, request_: bytes) -> None:
    bench = await start(limits=RouterLimits(body_bytes=1024))
    response = await _response(bench, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + request_)
    assert response.startswith(b"HTTP/1.1 413")
    assert await bench.settled() == {}
    assert bench.router.outcomes.client_errors == 1


async def test_a_client_that_disconnects_during_its_upload_is_not_a_miss(
    start: StartBench,
) -> None:
    upload_ns = 0
    bench = await start(clock=lambda: time.monotonic_ns() + upload_ns)
    async with connect(bench.router.url) as (_, writer):
        writer.write(post_bytes(b"{", length=100))
        await until(lambda: bench.router.outcomes.in_flight == 1)
        upload_ns = 3_600 * NS_PER_S  # past the TTFT target
    assert await bench.settled() == {"cancelled": 1}
    assert bench.router.outcomes.target_counts() == {}


async def test_a_slow_upload_counts_towards_neither_ttft_nor_e2e(start: StartBench) -> None:
    upload_ns = 0
    bench = await start(
        interactive=SLOClass(name="interactive", ttft_ms=60_000, tpot_ms=60_000, e2e_ms=60_000),
        clock=lambda: time.monotonic_ns() + upload_ns,
    )
    request = post_bytes(b"{}", "Connection: close")
    async with connect(bench.router.url) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(request[:-1])
        await until(lambda: bench.router.outcomes.in_flight == 1)
        upload_ns = 3_600 * NS_PER_S
        writer.write(request[-1:])
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
    assert await bench.settled() == {"attained": 1}


async def test_at_the_limit_of_open_files_the_response_is_503_and_no_replica_counts_as_failed(
    start: StartBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await start()
    async with connect(bench.router.url) as (reader, writer), asyncio.timeout(PATIENCE_S):
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"live")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            writer.write(post_bytes(b"{}"))
            response = await reader.readuntil(b'"code":"open_files_exhausted"')
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert b"HTTP/1.1 503" in response
    assert await bench.settled() == {"shed": 1}
    assert all(replica.ready for replica in bench.router.replicas)
    assert bench.router.outcomes.retries == {}
    assert [r.message for r in caplog.records].count("open files exhausted") == 1
    assert (await bench.post())[0] == 200


async def test_a_request_without_a_key_is_a_client_error_and_probes_need_none(
    start: StartBench, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("secret-key\n")
    bench = await start(api_key_file=file)  # the replica became ready, so it was probed
    assert [(await bench.post())[0], (await bench.post(Authorization="Bearer x"))[0]] == [401, 401]
    async with bench.client.get(bench.router.url + "/v1/models") as response:
        assert response.status == 401
    async with bench.client.get(bench.router.url + "/health/ready") as response:
        assert response.status == 200
    assert (await bench.post(Authorization="Bearer secret-key"))[0] == 200
    assert await bench.settled() == {"attained": 1}
    assert (await bench.state())["client_errors"] == 2
    assert bench.replicas[0].calls[-1].header("Authorization") == "Bearer secret-key"
    assert len(bench.replicas[0].calls) == 1
