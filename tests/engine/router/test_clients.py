"""Clients that misbehave, and what the router makes of it: no fault of a replica's."""

from __future__ import annotations

import asyncio
import os
import resource
from typing import TYPE_CHECKING

import pytest
from tests.engine.router.conftest import until

from goodput_core.slo.targets import SLOClass
from goodput_core.units import NS_PER_MS
from goodput_engine.router.settings import RouterLimits, Timeouts

if TYPE_CHECKING:
    from tests.engine.router.conftest import Bench, Call, StartBench

TOKEN = b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
SHORT = Timeouts(
    connect_ns=500 * NS_PER_MS,
    first_byte_ns=150 * NS_PER_MS,
    idle_ns=150 * NS_PER_MS,
    body_ns=150 * NS_PER_MS,
)


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "422 Unprocessable"])
async def test_the_client_s_own_mistakes_are_no_missed_promise(
    start: StartBench, status: str
) -> None:
    bench = await start(2)

    async def behave(call: Call) -> None:
        await call.whole(status, b'{"error":{"message":"no"}}')

    for replica in bench.replicas:
        replica.behave = behave
    assert await bench.post() == (int(status[:3]), b'{"error":{"message":"no"}}')
    assert await bench.settled() == {}
    assert bench.router.outcomes.client_errors == 1
    assert bench.router.outcomes.retries == {}
    assert f'goodput_router_client_errors_total{{llmservice="chat",status="{status[:3]}"}} 1.0' in (
        await bench.metrics()
    )


async def test_a_client_that_stops_reading_is_given_up(start: StartBench) -> None:
    bench = await start(timeouts=SHORT)
    piece = b": " + b"x" * 65_532 + b"\n\n"

    async def behave(call: Call) -> None:
        await call.stream_head()
        await call.chunk(TOKEN)
        while True:
            await call.chunk(piece)

    bench.replicas[0].behave = behave
    host, _, port = bench.router.url.removeprefix("http://").partition(":")
    _reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
    await bench.replicas[0].arrived.get()
    assert await bench.settled() == {"cancelled": 1}
    writer.close()


async def _raw(bench: Bench, request: bytes) -> bytes:
    host, _, port = bench.router.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(65_536), 5)
    writer.close()
    return answer


async def test_a_body_that_does_not_come_is_refused(start: StartBench) -> None:
    bench = await start(timeouts=SHORT)
    answer = await _raw(
        bench, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
    )
    assert answer.startswith(b"HTTP/1.1 408")
    assert await bench.settled() == {}
    assert bench.router.outcomes.client_errors == 1


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(b"Content-Length: 99999999999\r\n\r\n", id="announced"),
        pytest.param(
            b"Transfer-Encoding: chunked\r\n\r\n" + b"800\r\n" + b"x" * 2048 + b"\r\n",
            id="found out",
        ),
        pytest.param(
            b"Transfer-Encoding: chunked\r\n\r\n" + b"800\r\n" + b"x" * 2048 + b"\r\n0\r\n\r\n",
            id="there at once",
        ),
    ],
)
async def test_a_body_that_is_too_large_is_refused(start: StartBench, request_: bytes) -> None:
    bench = await start(limits=RouterLimits(body_bytes=1024))
    answer = await _raw(bench, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + request_)
    assert answer.startswith(b"HTTP/1.1 413")
    assert await bench.settled() == {}
    assert bench.router.outcomes.client_errors == 1


async def test_a_client_that_leaves_during_its_upload_is_no_miss(start: StartBench) -> None:
    bench = await start(interactive=SLOClass(name="interactive", ttft_ms=1, tpot_ms=1))
    host, _, port = bench.router.url.removeprefix("http://").partition(":")
    _reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await until(lambda: bench.router.outcomes.in_flight == 1)
    await asyncio.sleep(0.01)  # past the TTFT target
    writer.close()
    assert await bench.settled() == {"cancelled": 1}
    assert bench.router.outcomes.promises() == {}


async def test_without_a_free_file_the_answer_is_503_and_no_replica_is_blamed(
    start: StartBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = await start()
    host, _, port = bench.router.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"live")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        answer = await asyncio.wait_for(reader.readuntil(b'"code":"open_files_exhausted"'), 5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    writer.close()
    assert b"HTTP/1.1 503" in answer
    assert await bench.settled() == {"shed": 1}
    assert all(replica.ready for replica in bench.router.replicas)
    assert bench.router.outcomes.retries == {}
    assert [r.message for r in caplog.records].count("open files exhausted") == 1
    assert (await bench.post())[0] == 200
