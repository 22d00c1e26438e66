"""Clients that misbehave: they read slowly, not at all, or never finish what they send.

The front runs in the test's own loop with tight limits, and a real core in its process.
"""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from goodput_core.slo.targets import SLOClass
from goodput_engine.core_client import CoreClient
from goodput_engine.http_server import CLIENT_CONNECTIONS, ConnectionLimits, listen
from goodput_engine.messages import Configure, FollowManifest
from goodput_engine.openai.headers import ServiceClasses
from goodput_engine.server.app import serving_app
from goodput_engine.server.manifest_watch import FollowedFields
from goodput_engine.server.settings import ClientLimits, EngineSettings, ReplicaIdentity
from goodput_engine.server.state import ServerState
from goodput_engine.tokens import answer_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from goodput_core.engine_state import EngineState

PATIENCE_S = 20.0

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A front, its port, and an event that every step of the core sets."""

    server: ServerState
    port: int
    stepped: asyncio.Event

    async def until(self, holds: Callable[[EngineState], bool]) -> None:
        """Wait until this is true of the core's state."""
        assert self.server.core is not None
        async with asyncio.timeout(PATIENCE_S):
            while not holds(self.server.core.state):
                self.stepped.clear()
                await self.stepped.wait()

    async def until_idle(self) -> None:
        """Until no request is left, in front or core."""
        async with asyncio.timeout(PATIENCE_S):
            await self.server.idle.wait()
        await self.until(lambda state: not state.running)


@asynccontextmanager
async def serving(
    clients: ClientLimits,
    device: str = "unit",
    connections: ConnectionLimits = CLIENT_CONNECTIONS,
) -> AsyncIterator[Served]:
    """A front on sockets whose send buffers are as small as can be."""
    configure = Configure(
        device=device,
        policy="sarathi",
        preemption="recompute",
        token_budget=2048,
        min_token_budget=256,
        max_token_budget=8192,
        max_num_seqs=16,
        max_waiting=16,
    )
    server = ServerState(
        EngineSettings(
            identity=ReplicaIdentity(llmservice="chat", replica="r", revision="1"),
            followed=FollowedFields(
                slo=ServiceClasses(
                    classes={"c": SLOClass(name="c", ttft_ms=1, tpot_ms=1)}, default="c"
                ),
                core=FollowManifest(min_token_budget=256, max_token_budget=8192),
            ),
            manifest=Path("none.yaml"),
            configure=configure,
            device={},
            host="127.0.0.1",
            port=0,
            admin_port=0,
            grace_s=1,
            exit_with_parent=False,
            json=False,
            control_token=None,
            clients=clients,
        )
    )
    stepped = asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with AsyncExitStack() as stack:
        parsers = stack.enter_context(ThreadPoolExecutor(1))
        core = await CoreClient.start(configure, on_step=lambda _: stepped.set())
        server.serve(core, await core.await_ready(), startup_s=0)
        await listen(
            stack,
            serving_app(server, parsers),
            listener,
            limits=connections,
            shutdown_s=0.1,
            handler_cancellation=True,
        )
        stack.push_async_callback(core.close)
        yield Served(server=server, port=listener.getsockname()[1], stepped=stepped)


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps({"model": "chat", "prompt": "x", "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    """A connection that takes little before the sender must wait."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def texts(reader: asyncio.StreamReader) -> list[str]:
    """The texts of a stream's events, to its end."""
    data = b""
    async with asyncio.timeout(PATIENCE_S):
        while b"data: [DONE]" not in data:
            data += await reader.read(4096)
    # Chunk sizes stand between the events; no event spans two chunks.
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line[6:])["choices"][0]["text"] for line in lines]


async def test_a_slow_reader_gets_every_token_in_fewer_events_and_delays_no_other() -> None:
    tokens = 2500
    async with serving(ClientLimits()) as served, connected(served.port) as (reader, writer):
        writer.write(post({"max_tokens": tokens, "stream": True}))
        await reader.readuntil(b"\r\n\r\n")
        # It reads no further; meanwhile another client's answer comes as if alone.
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                f"http://127.0.0.1:{served.port}/v1/completions",
                json={"model": "chat", "prompt": "y", "max_tokens": 50, "ignore_eos": True},
            ) as response,
        ):
            timings = json.loads(response.headers["X-Goodput-Timings"])
        assert timings["e2e_ms"] < 2000
        await served.until(lambda state: state.output_tokens >= tokens + 50)
        assert served.server.in_flight == 1
        pieces = await texts(reader)
        assert "".join(pieces) == answer_text(0, tokens)
        assert len(pieces) < tokens / 2
        await served.until_idle()


async def test_a_reader_that_takes_nothing_at_all_is_ended() -> None:
    async with (
        serving(ClientLimits(stall_s=0.2)) as served,
        connected(served.port) as (reader, writer),
    ):
        writer.write(post({"max_tokens": 60_000, "stream": True}))
        await reader.read(1)
        await served.until_idle()
        assert served.server.core is not None
        assert served.server.core.state.output_tokens < 60_000


async def test_a_reader_of_a_whole_answer_that_takes_nothing_is_ended(tmp_path: Path) -> None:
    unit = resources.files("goodput_engine.device").joinpath("profiles/unit.yaml").read_text()
    fast = tmp_path / "fast.yaml"
    fast.write_text(unit.replace("unit_ms: {value: 1,", "unit_ms: {value: 0.02,"))
    async with (
        serving(ClientLimits(stall_s=0.2), str(fast)) as served,
        connected(served.port) as (reader, writer),
    ):
        writer.write(post({"max_tokens": 60_000}))
        await reader.read(1)
        assert served.server.in_flight == 1
        await served.until_idle()
        taken = 0
        with suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                taken += len(data)
        assert taken < len(answer_text(0, 60_000))


async def test_a_body_that_never_ends_is_408() -> None:
    async with (
        serving(ClientLimits(body_s=0.2)) as served,
        connected(served.port) as (reader, writer),
    ):
        writer.write(post({})[:-5])
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        await served.until_idle()


async def test_a_core_that_is_behind_gets_no_requests_but_may_get_limits() -> None:
    async with (
        serving(ClientLimits()) as served,
        aiohttp.ClientSession(f"http://127.0.0.1:{served.port}") as http,
    ):
        core = served.server.serving()
        body = {"model": "chat", "prompt": "x", "max_tokens": 1}
        core.pause_writing()  # as asyncio does while the core does not read
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        assert served.server.serving() is core  # what PATCH /control/limits asks for
        core.resume_writing()
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200


async def test_all_bodies_together_have_a_bound() -> None:
    limits = ClientLimits(all_bodies_bytes=10_000)
    long = post({"prompt": "w " * 3000, "max_tokens": 1})
    async with (
        serving(limits) as served,
        connected(served.port) as one,
        connected(served.port) as other,
        asyncio.timeout(PATIENCE_S),
    ):
        heads = {}
        for reader, writer in (one, other):
            writer.write(long[:-1])
            heads[asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))] = writer
        # One of the two, whichever comes second, is refused before it is whole.
        (refused,), (accepted,) = await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED)
        assert refused.result().startswith(b"HTTP/1.1 429")
        assert b"Retry-After: 1\r\n" in refused.result()
        heads[accepted].write(long[-1:])
        assert (await accepted).startswith(b"HTTP/1.1 200")
        await served.until_idle()


@pytest.mark.parametrize("length", [10, 200], ids=["mid-head", "mid-body"])
async def test_a_client_that_leaves_before_it_has_asked_costs_nothing(length: int) -> None:
    async with serving(ClientLimits()) as served:
        async with connected(served.port) as (_, writer):
            writer.write(post({"prompt": "w " * 200})[:length])
            await writer.drain()
        await served.until_idle()


async def test_a_long_body_is_read_beside_the_loop_and_bounds_hold_there_too() -> None:
    async with (
        serving(ClientLimits(inline_bytes=10)) as served,
        aiohttp.ClientSession(f"http://127.0.0.1:{served.port}") as http,
    ):
        body = {"model": "chat", "prompt": "w " * 500, "max_tokens": 1}
        async with http.post("/v1/completions", json=body) as response:
            assert (await response.json())["usage"]["prompt_tokens"] == 500
        async with http.post("/v1/completions", json={**body, "n": 2}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "n"


async def test_events_of_a_client_that_fell_behind_are_bounded() -> None:
    async with (
        serving(ClientLimits(event_tokens=7)) as served,
        connected(served.port) as (reader, writer),
    ):
        writer.write(post({"max_tokens": 1500, "stream": True}))
        await served.until(lambda state: state.output_tokens >= 1500)
        sizes = [len(text.split()) for text in await texts(reader)]
        assert sum(sizes) == 1500
        assert max(sizes) == 7
