"""Forwarding of requests and responses, on real sockets."""

from __future__ import annotations

import asyncio
import gzip
from typing import TYPE_CHECKING

import aiohttp
import pytest

from goodput_engine.router.settings import RouterLimits

if TYPE_CHECKING:
    from tests.engine.router.conftest import Call, StartBench

TOKEN = b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


async def test_a_stream_passes_byte_for_byte_and_is_counted_once(start: StartBench) -> None:
    bench = await start()
    status, body = await bench.post()
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    assert body.count(b'"text":"a"') == 1
    assert await bench.settled() == {"attained": 1}


async def test_chunks_reach_the_client_as_they_come(start: StartBench) -> None:
    bench = await start()
    go_on = asyncio.Event()

    async def behave(call: Call) -> None:
        await call.stream_head()
        await call.chunk(TOKEN)
        await go_on.wait()
        await call.chunk(END)
        await call.end()

    bench.replicas[0].behave = behave
    async with bench.client.post(bench.router.url + "/v1/completions", data=b"{}") as answer:
        assert await answer.content.readany() == TOKEN
        go_on.set()
        assert await answer.read() == END
    assert await bench.settled() == {"attained": 1}


async def test_a_request_arrives_as_it_was_sent(start: StartBench) -> None:
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


async def test_a_request_line_that_names_a_host_does_not_leave_the_fleet(
    start: StartBench,
) -> None:
    bench = await start(2)
    bait = bench.replicas[1]
    bench.router.replicas.set_upstreams([bench.replicas[0].upstream])
    host, _, port = bench.router.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST {bait.url}/v1/completions HTTP/1.1\r\nHost: {host}\r\n"
        "Content-Length: 2\r\nConnection: close\r\n\r\n{}".encode()
    )
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert bait.calls == []
    assert len(bench.replicas[0].calls) == 1


async def test_an_answer_arrives_as_it_was_sent(start: StartBench) -> None:
    bench = await start()
    packed = gzip.compress(b'{"choices":[]}')

    async def behave(call: Call) -> None:
        await call.whole(
            "200 Fine",
            packed,
            "Content-Encoding: gzip",
            "Set-Cookie: a=1",
            "Set-Cookie: b=2",
            "X-Goodput-Replica: r0",
            "Connection: X-Private",
            "X-Private: hop",
        )

    bench.replicas[0].behave = behave
    async with (
        aiohttp.ClientSession(auto_decompress=False) as client,
        client.post(bench.router.url + "/v1/completions", data=b"{}") as answer,
    ):
        assert answer.reason == "Fine"
        assert await answer.read() == packed
        assert answer.headers.getall("Set-Cookie") == ["a=1", "b=2"]
        assert answer.headers["X-Goodput-Replica"] == "r0"
        assert answer.headers["Content-Length"] == str(len(packed))
        assert "X-Private" not in answer.headers


async def test_a_large_body_passes_whole(start: StartBench) -> None:
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
    async with bench.client.post(
        bench.router.url + "/v1/completions", data=b"{}", read_bufsize=4096
    ) as answer:
        first = await answer.content.readany()
        assert first
        # The replica stalls: what it could send is what the kernel and bounded buffers hold.
        before = -1
        while sent != before:
            before = sent
            for _ in range(200):
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
        assert sent < 32 << 20
        rest = await answer.read()
    assert len(first) + len(rest) == len(TOKEN) + 1_000 * len(piece) + len(END)
    assert await bench.settled() == {"attained": 1}


async def test_the_bodies_of_all_requests_together_are_bounded(start: StartBench) -> None:
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
    first = asyncio.ensure_future(
        bench.client.post(f"{bench.router.url}/v1/completions", data=body)
    )
    await bench.replicas[0].arrived.get()
    async with bench.client.post(f"{bench.router.url}/v1/completions", data=body) as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert (await refused.json())["error"]["code"] == "rate_limit_exceeded"
    begin.set()
    answer = await first
    await answer.content.readany()  # its first token: the body is held no longer
    second = asyncio.ensure_future(bench.post(body))
    await bench.replicas[0].arrived.get()
    end.set()
    assert (await second)[0] == 200
    await answer.read()
    assert await bench.settled() == {"attained": 2, "shed": 1}
    assert bench.router._proxy._memory.held_bytes == 0


async def test_a_client_that_leaves_ends_its_request_at_the_replica(start: StartBench) -> None:
    bench = await start()

    async def behave(call: Call) -> None:
        await call.stream_head()
        await call.chunk(TOKEN)
        await asyncio.Event().wait()

    bench.replicas[0].behave = behave
    answer = await bench.client.post(bench.router.url + "/v1/completions", data=b"{}")
    await answer.content.readany()
    call = await bench.replicas[0].arrived.get()
    answer.close()
    async with asyncio.timeout(5):
        await call.hung_up.wait()
    assert await bench.settled() == {"cancelled": 1}
    assert next(iter(bench.router.replicas)).in_flight == 0


async def test_a_client_that_leaves_before_the_head_is_noticed(start: StartBench) -> None:
    bench = await start()

    async def behave(_call: Call) -> None:
        await asyncio.Event().wait()

    bench.replicas[0].behave = behave
    asking = asyncio.ensure_future(bench.post())
    call = await bench.replicas[0].arrived.get()
    asking.cancel()
    async with asyncio.timeout(5):
        await call.hung_up.wait()
    assert await bench.settled() == {"cancelled": 1}


async def test_a_client_that_hangs_up_on_done_was_served(start: StartBench) -> None:
    bench = await start()

    async def behave(call: Call) -> None:
        await call.stream_head()
        await call.chunk(TOKEN + END)
        await asyncio.Event().wait()  # the end of the body never comes

    bench.replicas[0].behave = behave
    answer = await bench.client.post(bench.router.url + "/v1/completions", data=b"{}")
    assert await answer.content.readexactly(len(TOKEN + END)) == TOKEN + END
    answer.close()
    assert await bench.settled() == {"attained": 1}


async def test_models_are_passed_on_and_not_counted(start: StartBench) -> None:
    bench = await start()

    async def behave(call: Call) -> None:
        await call.whole("200 OK", b'{"data":[]}')

    bench.replicas[0].behave = behave
    async with bench.client.get(bench.router.url + "/v1/models") as answer:
        assert await answer.read() == b'{"data":[]}'
    assert await bench.settled() == {}


@pytest.mark.parametrize("path", ["/metrics", "/control/state", "/control/limits", "/v2", "/"])
async def test_nothing_else_is_passed_on(start: StartBench, path: str) -> None:
    bench = await start()
    for method in ("GET", "POST", "PATCH"):
        async with bench.client.request(method, bench.router.url + path) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "unknown_path"
    assert bench.replicas[0].calls == []


async def test_health_tells_of_ready_replicas(start: StartBench) -> None:
    bench = await start(2)
    async with bench.client.get(bench.router.url + "/health/live") as answer:
        assert answer.status == 200
    async with bench.client.get(bench.router.url + "/health/ready") as answer:
        assert (await answer.json())["ready_replicas"] == 2
    for replica in bench.router.replicas:
        replica.mark_gone("test")
    async with bench.client.get(bench.router.url + "/health/ready") as answer:
        assert answer.status == 503
