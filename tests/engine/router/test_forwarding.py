"""Forwarding of requests and responses, on real sockets."""

from __future__ import annotations

import asyncio
import gzip
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.builders.http import connect, post_bytes
from tests.engine.router.conftest import END, TOKEN, hang, respond, stream
from yarl import URL

from goodput_engine.router.settings import RouterLimits

if TYPE_CHECKING:
    from tests.engine.router.conftest import Call, StartBench


async def test_a_stream_is_forwarded_unchanged_and_counted_once(start: StartBench) -> None:
    bench = await start()
    status, body = await bench.post()
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    assert body == 3 * TOKEN + END
    assert await bench.settled() == {"attained": 1}


async def test_chunks_are_forwarded_as_they_arrive(start: StartBench) -> None:
    bench = await start()
    go_on = asyncio.Event()
    bench.replicas[0].behave = stream(TOKEN, go_on, END)
    async with bench.complete() as response:
        assert await response.content.readany() == TOKEN
        go_on.set()
        assert await response.read() == END
    assert await bench.settled() == {"attained": 1}


async def test_a_request_is_forwarded_unchanged(start: StartBench) -> None:
    bench = await start()
    body = gzip.compress(b'{"prompt":"x"}')
    await bench.post(
        body,
        path="/v1/chat/completions?debug=a%2Fb",
        Content_Encoding="gzip",
        Authorization="Bearer t",
        X_Goodput_Output_Tokens="7",
        Proxy_Authorization="secret",
    )
    (call,) = bench.replicas[0].calls
    assert call.method == "POST"
    assert call.path == "/v1/chat/completions?debug=a%2Fb"
    assert call.body == body
    assert call.header("Content-Encoding") == "gzip"
    assert call.header("Authorization") == "Bearer t"
    assert call.header("X-Goodput-Output-Tokens") == "7"
    assert call.header("Proxy-Authorization") is None
    assert call.header("Host") == f"127.0.0.1:{bench.replicas[0].port}"


async def test_a_request_line_with_a_host_is_sent_to_a_replica_only(
    start: StartBench,
) -> None:
    bench = await start(2)
    other = bench.replicas[1]
    bench.router.replicas.set_upstreams([bench.replicas[0].upstream])
    async with connect(bench.router.url) as (reader, writer):
        writer.write(post_bytes(b"{}", "Connection: close", path=f"{other.url}/v1/completions"))
        response = await reader.read()
    assert response.startswith(b"HTTP/1.1 200")
    assert other.calls == []
    assert len(bench.replicas[0].calls) == 1


async def test_a_response_is_forwarded_unchanged(start: StartBench) -> None:
    bench = await start()
    packed = gzip.compress(b'{"choices":[]}')
    bench.replicas[0].behave = respond(
        "200 Fine",
        packed,
        "Content-Encoding: gzip",
        "Set-Cookie: a=1",
        "Set-Cookie: b=2",
        "X-Goodput-Replica: r0",
        "Connection: X-Private",
        "X-Private: hop",
    )
    async with (
        aiohttp.ClientSession(auto_decompress=False) as client,
        client.post(bench.router.url + "/v1/completions", data=b"{}") as response,
    ):
        assert response.reason == "Fine"
        assert await response.read() == packed
        assert response.headers.getall("Set-Cookie") == ["a=1", "b=2"]
        assert response.headers["X-Goodput-Replica"] == "r0"
        assert response.headers["Content-Length"] == str(len(packed))
        assert "X-Private" not in response.headers


async def test_a_large_body_is_forwarded_completely(start: StartBench) -> None:
    bench = await start()
    body = b'{"prompt":"' + b"x" * (5 << 20) + b'"}'
    status, _ = await bench.post(body)
    assert status == 200
    assert bench.replicas[0].calls[0].body == body


async def test_a_slow_client_slows_the_reading_from_the_replica(start: StartBench) -> None:
    bench = await start()
    sent = 0
    piece = b": " + b"x" * 65_532 + b"\n\n"

    async def behave(call: Call) -> None:
        nonlocal sent
        call.writer.transport.set_write_buffer_limits(high=65_536)
        await call.stream_head()
        await call.chunk(TOKEN)
        for _ in range(1_000):  # 64 MiB
            await call.chunk(piece)
            sent += len(piece)
        await call.chunk(END)
        await call.end()

    bench.replicas[0].behave = behave
    async with bench.complete(read_bufsize=4096) as response:
        first = await response.content.readany()
        assert first
        # The replica can send only what the buffers of kernel and router hold.
        before = -1
        while sent != before:
            before = sent
            for _ in range(200):
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
        assert sent < 32 << 20
        rest = await response.read()
    assert len(first) + len(rest) == len(TOKEN) + 1_000 * len(piece) + len(END)
    assert await bench.settled() == {"attained": 1}


async def test_the_bodies_of_all_requests_share_one_limit(start: StartBench) -> None:
    bench = await start(limits=RouterLimits(all_bodies_bytes=300_000))
    begin, end = asyncio.Event(), asyncio.Event()

    async def behave(call: Call) -> None:
        await begin.wait()
        await call.stream_head()
        await call.chunk(TOKEN)
        await end.wait()
        await call.chunk(END)
        await call.end()

    bench.replicas[0].behave = behave
    body = b"x" * 200_000
    first = asyncio.ensure_future(bench.complete(data=body))
    await bench.replicas[0].arrived.get()
    async with bench.complete(data=body) as rejected:
        assert (rejected.status, rejected.headers["Retry-After"]) == (429, "1")
        assert (await rejected.json())["error"]["code"] == "rate_limit_exceeded"
    begin.set()
    response = await first
    await response.content.readany()  # after its first token the body is freed
    second = asyncio.ensure_future(bench.post(body))
    await bench.replicas[0].arrived.get()
    end.set()
    assert (await second)[0] == 200
    await response.read()
    assert await bench.settled() == {"attained": 2, "shed": 1}
    assert bench.router._proxy._memory.held_bytes == 0


async def test_a_client_that_disconnects_cancels_its_request_at_the_replica(
    start: StartBench,
) -> None:
    bench = await start()
    bench.replicas[0].behave = stream(TOKEN, asyncio.Event())
    response = await bench.complete()
    await response.content.readany()
    call = await bench.replicas[0].arrived.get()
    response.close()
    async with asyncio.timeout(5):
        await call.hung_up.wait()
    assert await bench.settled() == {"cancelled": 1}
    assert next(iter(bench.router.replicas)).in_flight == 0


async def test_a_client_that_disconnects_before_the_head_cancels_its_request(
    start: StartBench,
) -> None:
    bench = await start()
    bench.replicas[0].behave = hang
    asking = asyncio.ensure_future(bench.post())
    call = await bench.replicas[0].arrived.get()
    asking.cancel()
    async with asyncio.timeout(5):
        await call.hung_up.wait()
    assert await bench.settled() == {"cancelled": 1}


async def test_a_client_that_disconnects_after_done_was_served(start: StartBench) -> None:
    bench = await start()
    bench.replicas[0].behave = stream(TOKEN + END, asyncio.Event())  # without the body's end
    response = await bench.complete()
    assert await response.content.readexactly(len(TOKEN + END)) == TOKEN + END
    response.close()
    assert await bench.settled() == {"attained": 1}


async def test_models_are_forwarded_and_not_counted(start: StartBench) -> None:
    bench = await start()
    bench.replicas[0].behave = respond("200 OK", b'{"data":[]}')
    async with bench.client.get(bench.router.url + "/v1/models") as response:
        assert await response.read() == b'{"data":[]}'
    assert await bench.settled() == {}


@pytest.mark.parametrize("path", ["/metrics", "/control/state", "/control/limits", "/v2", "/"])
async def test_no_other_path_is_forwarded(start: StartBench, path: str) -> None:
    bench = await start()
    for method in ("GET", "POST", "PATCH"):
        async with bench.client.request(method, bench.router.url + path) as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "unknown_path"
    assert bench.replicas[0].calls == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/chat", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_not_forwarded(
    start: StartBench, method: str, path: str, allowed: str
) -> None:
    bench = await start()
    async with bench.client.request(method, bench.router.url + path) as response:
        assert (response.status, response.headers["Allow"]) == (405, allowed)
        error = (await response.json())["error"]
        assert error["message"] == f"{path} has no method {method}; use {allowed}"
    assert bench.replicas[0].calls == []
    assert await bench.settled() == {}


@pytest.mark.parametrize("name", ["org/chat", "a%2Fb", "a..b"])
async def test_one_model_is_forwarded(start: StartBench, name: str) -> None:
    bench = await start()
    bench.replicas[0].behave = respond("200 OK", b"{}")
    url = URL(f"{bench.router.url}/v1/models/{name}", encoded=True)
    async with bench.client.get(url) as response:
        assert await response.read() == b"{}"
    (call,) = bench.replicas[0].calls
    assert (call.method, call.path) == ("GET", f"/v1/models/{name}")


@pytest.mark.parametrize("name", ["../../metrics", "%2e%2e/%2E./metrics", "a/.."])
async def test_no_other_path_is_reached_through_a_models_name(start: StartBench, name: str) -> None:
    bench = await start()
    url = URL(f"{bench.router.url}/v1/models/{name}", encoded=True)
    async with bench.client.get(url) as response:
        assert response.status == 400
    assert bench.replicas[0].calls == []


async def test_readiness_requires_a_ready_replica(start: StartBench) -> None:
    bench = await start(2)
    async with bench.client.get(bench.router.url + "/health/live") as response:
        assert response.status == 200
    async with bench.client.get(bench.router.url + "/health/ready") as response:
        assert (await response.json())["ready_replicas"] == 2
    for replica in bench.router.replicas:
        replica.mark_not_ready("test")
    async with bench.client.get(bench.router.url + "/health/ready") as response:
        assert response.status == 503
