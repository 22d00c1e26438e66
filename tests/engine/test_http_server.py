"""The HTTP server: addresses, limits of connections and heads, and malformed requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest
import uvloop
from aiohttp import web
from tests.builders.http import PATIENCE_S, RawConnection, connect
from tests.engine.router.conftest import until

from goodput_engine.http_server import listen
from goodput_engine.server_options import CLIENT_CONNECTIONS, ConnectionLimits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

LOOPBACKS = ("127.0.0.1", "[::1]")


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def reachable_at(url: str) -> list[str]:
    """Return the loopback addresses that accept connections on the port of a URL."""
    port, found = url.rpartition(":")[2], []
    async with aiohttp.ClientSession() as http:
        for host in LOOPBACKS:
            try:
                async with http.get(f"http://{host}:{port}/") as response:
                    assert response.status == 404
                found.append(host)
            except aiohttp.ClientConnectorError:
                pass
    return found


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the kernel has no IPv6")
@pytest.mark.parametrize(
    ("host", "reachable"),
    [("::", [*LOOPBACKS]), ("0.0.0.0", [LOOPBACKS[0]]), ("::1", [LOOPBACKS[1]])],
    ids=["every address", "every IPv4 address", "one IPv6 address"],
)
async def test_a_port_is_reachable_at_its_addresses(
    stack: AsyncExitStack, host: str, reachable: list[str]
) -> None:
    url, _ = await listen(stack, web.Application(), (host, 0))
    assert await reachable_at(url) == reachable


async def test_every_address_is_ipv4_only_if_the_kernel_has_no_ipv6(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    url, _ = await listen(stack, web.Application(), ("::", 0))
    assert url.startswith("http://0.0.0.0:")
    assert await reachable_at(url) == ["127.0.0.1"]


HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
HALF_BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
Send = Callable[..., Awaitable[RawConnection]]


async def start(stack: AsyncExitStack, limits: ConnectionLimits) -> Send:
    """Serve 200 for `/`; return a function that opens a connection and sends bytes.

    The body of a POST is read first.
    """

    async def handler(request: web.Request) -> web.Response:
        if request.method == "POST":
            await request.read()
        return web.Response(text="served")

    app = web.Application()
    app.router.add_route("*", "/", handler)
    url, _ = await listen(stack, app, ("127.0.0.1", 0), limits=limits)

    async def send(data: bytes = b"") -> RawConnection:
        reader, writer = await stack.enter_async_context(connect(url))
        writer.write(data)
        return reader, writer

    return send


async def status_of(connection: RawConnection) -> bytes:
    async with asyncio.timeout(10):
        return (await connection[0].readline())[9:12]


async def test_a_head_that_does_not_arrive_in_time_is_408(stack: AsyncExitStack) -> None:
    send = await start(stack, ConnectionLimits(head_s=0.1))
    connection = await send(HEAD)
    assert await status_of(connection) == b"408"
    rest = await connection[0].read()
    assert b'"code":"request_timeout"' in rest


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """A runner of each event loop; the commands use uvloop."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


def test_a_head_that_begins_right_after_connecting_has_the_time_limit(
    runner: asyncio.Runner,
) -> None:
    def exchange(port: int) -> list[bytes]:
        with ExitStack() as stack:
            sockets = []
            for _ in range(20):
                address = ("127.0.0.1", port)
                sockets.append(stack.enter_context(socket.create_connection(address, PATIENCE_S)))
                sockets[-1].sendall(HEAD)
            return [sock.recv(1 << 16)[9:12] for sock in sockets]

    async def serve() -> list[bytes]:
        async with AsyncExitStack() as stack:
            limits = ConnectionLimits(head_s=0.1, idle_s=2 * PATIENCE_S)
            url, _ = await listen(stack, web.Application(), ("127.0.0.1", 0), limits=limits)
            return await asyncio.to_thread(exchange, int(url.rpartition(":")[2]))

    assert runner.run(serve()) == [b"408"] * 20


def test_a_body_that_arrives_late_is_no_head(runner: asyncio.Runner) -> None:
    """A body that arrives after the response starts no timer, and does not end the connection."""

    async def serve() -> bytes:
        async with AsyncExitStack() as stack:
            head_s = 0.05
            send = await start(stack, ConnectionLimits(head_s=head_s))
            reader, writer = await send(b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await reader.readuntil(b"served")
                writer.write(b"ab")
                await writer.drain()
                # The timer of a connection opened later has expired when this one is answered.
                assert await status_of(await send(HEAD)) == b"408"
                writer.write(b"cd" + HEAD + b"\r\n")
                return await status_of((reader, writer))

    assert runner.run(serve()) == b"200"


def test_a_client_that_left_before_its_head_timed_out_causes_no_error(
    runner: asyncio.Runner,
) -> None:
    async def serve() -> None:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with AsyncExitStack() as stack:
            url, server = await listen(stack, web.Application(), ("127.0.0.1", 0))
            port = int(url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(HEAD)
                await until(lambda: bool(server.connections))
                connection = cast("Any", server.connections[0])
                await until(lambda: connection._head_timer is not None)
            # In the same step of the event loop, so the server has not read that the client left.
            connection._expire_head()
            await until(lambda: not server.connections)
        assert errors == []

    runner.run(serve())


async def test_a_head_may_arrive_in_parts_and_a_second_one_too(stack: AsyncExitStack) -> None:
    send = await start(stack, ConnectionLimits(head_s=5))
    reader, writer = await send()
    for _ in range(2):
        for part in (HEAD[:7], HEAD[7:], b"\r\n"):
            writer.write(part)
            await writer.drain()
        assert await status_of((reader, writer)) == b"200"
        await reader.readuntil(b"served")


async def test_a_connection_without_a_request_is_closed(stack: AsyncExitStack) -> None:
    send = await start(stack, ConnectionLimits(idle_s=0.1))
    reader, _ = await send()
    async with asyncio.timeout(10):
        assert await reader.read() == b""


@pytest.mark.parametrize(
    ("half", "event"),
    [
        pytest.param(HEAD, "closed_while_waiting", id="heads"),
        pytest.param(HALF_BODY, "closed_while_receiving", id="bodies"),
    ],
)
async def test_incomplete_requests_do_not_block_others(
    stack: AsyncExitStack, caplog: pytest.LogCaptureFixture, half: bytes, event: str
) -> None:
    send = await start(stack, ConnectionLimits(connections=64, head_s=600))
    halves = [await send(half) for _ in range(200)]
    assert await status_of(await send(HEAD + b"\r\n")) == b"200"
    ended = [reader.at_eof() for reader, _ in halves]
    assert ended.count(False) <= 64
    assert ended.index(False) >= ended.count(True) - 1, "the oldest were closed"
    (record,) = [r for r in caplog.records if r.message == "connections limited"]
    assert vars(record)[event] >= 1


async def test_a_connection_beyond_the_limit_gets_503_if_all_others_are_busy(
    stack: AsyncExitStack,
) -> None:
    busy, release = asyncio.Semaphore(0), asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        busy.release()
        await release.wait()
        return web.Response()

    app = web.Application()
    app.router.add_get("/", handler)
    url, _ = await listen(stack, app, ("127.0.0.1", 0), limits=ConnectionLimits(connections=2))
    connections = []
    for _ in range(3):
        reader, writer = await stack.enter_async_context(connect(url))
        writer.write(HEAD + b"\r\n")
        connections.append((reader, writer))
        if len(connections) < 3:
            await busy.acquire()
    assert await status_of(connections[2]) == b"503"
    assert b'"code":"too_many_connections"' in await connections[2][0].read()
    release.set()
    assert await status_of(connections[0]) == await status_of(connections[1]) == b"200"


def test_connections_are_bounded_by_the_open_files() -> None:
    limits = ConnectionLimits(connections=8192)
    assert limits.within(100_000, files_each=2) is limits
    assert limits.within(4096, files_each=2).connections == (4096 - 256) // 2
    assert limits.within(10, files_each=1).connections == 1


async def test_a_malformed_request_is_400_in_openais_form(stack: AsyncExitStack) -> None:
    send = await start(stack, CLIENT_CONNECTIONS)
    for request in (b"GET / HTTQ/1.1\r\n\r\n", HEAD + b"X: " + b"x" * 10_000 + b"\r\n\r\n"):
        connection = await send(request)
        assert await status_of(connection) == b"400"
        assert b'"code":"malformed_request"' in await connection[0].read()
    expectation = await send(HEAD + b"Expect: tea\r\nConnection: close\r\n\r\n")
    assert await status_of(expectation) == b"417"
    assert b'{"error":{"message":' in await expectation[0].read()
