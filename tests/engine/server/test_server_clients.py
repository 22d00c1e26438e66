"""Clients that read slowly, read nothing, or never finish their request.

The HTTP process runs in the test's own loop with tight limits; the core is a real process.
"""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.builders.http import PATIENCE_S, connect, post_bytes
from tests.builders.serving import server_state, serving

from goodput_engine.server.settings import ClientLimits
from goodput_engine.server.state import ServerState
from goodput_engine.tokens import answer_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.builders.http import RawConnection

    from goodput_core.engine_state import EngineState


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessEngine:
    """An engine, its URL, and an event that every step of the core sets."""

    server: ServerState
    url: str
    stepped: asyncio.Event

    async def until(self, condition: Callable[[EngineState], bool]) -> None:
        """Wait until a condition holds for the core's state."""
        assert self.server.core is not None
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self.server.core.state):
                self.stepped.clear()
                await self.stepped.wait()

    async def until_idle(self) -> None:
        """Wait until neither the HTTP process nor the core has a request."""
        async with asyncio.timeout(PATIENCE_S):
            await self.server.idle.wait()
        await self.until(lambda state: not state.running)


@asynccontextmanager
async def start_engine(
    clients: ClientLimits | None = None, device: str = "unit"
) -> AsyncIterator[InProcessEngine]:
    """Start an engine on a port whose send buffers are as small as possible."""
    server = server_state(clients=clients, device=device)
    stepped = asyncio.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with serving(server, address=listener, on_step=lambda _: stepped.set()) as url:
        yield InProcessEngine(server=server, url=url, stepped=stepped)


def completion(**fields: Any) -> bytes:
    """Return a request for a completion."""
    body = {"model": "chat", "prompt": "x", "ignore_eos": True, **fields}
    return post_bytes(json.dumps(body).encode())


def connect_slowly(engine: InProcessEngine) -> AbstractAsyncContextManager[RawConnection]:
    """Open a connection that takes few bytes before the sender must wait."""
    return connect(engine.url, receive_bytes=4096)


async def texts(reader: asyncio.StreamReader) -> list[str]:
    """Return the texts of a stream's events, up to its end."""
    data = b""
    async with asyncio.timeout(PATIENCE_S):
        while b"data: [DONE]" not in data:
            data += await reader.read(4096)
    # HTTP chunk sizes are between the events; no event spans two chunks.
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line[6:])["choices"][0]["text"] for line in lines]


async def test_a_slow_client_gets_all_tokens_in_fewer_events_and_delays_no_other() -> None:
    tokens = 2500
    async with start_engine() as engine, connect_slowly(engine) as (reader, writer):
        writer.write(completion(max_tokens=tokens, stream=True))
        await reader.readuntil(b"\r\n\r\n")
        # This client stops reading; another client's response is not delayed by it.
        async with (
            aiohttp.ClientSession() as http,
            http.post(
                engine.url + "/v1/completions",
                json={"model": "chat", "prompt": "y", "max_tokens": 50, "ignore_eos": True},
            ) as response,
        ):
            timings = json.loads(response.headers["X-Goodput-Timings"])
        assert timings["e2e_ms"] < 2000
        await engine.until(lambda state: state.output_tokens >= tokens + 50)
        assert engine.server.in_flight == 1
        pieces = await texts(reader)
        assert "".join(pieces) == answer_text(0, tokens)
        assert len(pieces) < tokens / 2
        await engine.until_idle()


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    async with (
        start_engine(ClientLimits(stall_s=0.2)) as engine,
        connect_slowly(engine) as (reader, writer),
    ):
        writer.write(completion(max_tokens=60_000, stream=True))
        await reader.read(1)
        await engine.until_idle()
        assert engine.server.core is not None
        assert engine.server.core.state.output_tokens < 60_000


async def test_a_client_that_reads_nothing_is_disconnected_from_an_unstreamed_response_too(
    tmp_path: Path,
) -> None:
    unit = resources.files("goodput_engine.device").joinpath("profiles/unit.yaml").read_text()
    fast = tmp_path / "fast.yaml"
    fast.write_text(unit.replace("unit_ms: {value: 1,", "unit_ms: {value: 0.02,"))
    async with (
        start_engine(ClientLimits(stall_s=0.2), str(fast)) as engine,
        connect_slowly(engine) as (reader, writer),
    ):
        writer.write(completion(max_tokens=60_000))
        await reader.read(1)
        assert engine.server.in_flight == 1
        await engine.until_idle()
        taken = 0
        with suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                taken += len(data)
        assert taken < len(answer_text(0, 60_000))


async def test_a_body_that_never_ends_is_408() -> None:
    async with (
        start_engine(ClientLimits(body_s=0.2)) as engine,
        connect_slowly(engine) as (reader, writer),
    ):
        writer.write(completion()[:-5])
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        await engine.until_idle()


async def test_a_core_that_lags_gets_limits_but_no_requests() -> None:
    async with (
        start_engine() as engine,
        aiohttp.ClientSession(engine.url) as http,
    ):
        core = engine.server.require_core()
        body = {"model": "chat", "prompt": "x", "max_tokens": 1}
        core.pause_writing()  # as asyncio does while the core does not read
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        assert engine.server.require_core() is core, "PATCH /control/limits still works"
        core.resume_writing()
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200


async def test_the_bodies_of_all_requests_share_one_limit() -> None:
    limits = ClientLimits(all_bodies_bytes=10_000)
    long = completion(prompt="w " * 3000, max_tokens=1)
    async with (
        start_engine(limits) as engine,
        connect_slowly(engine) as one,
        connect_slowly(engine) as other,
        asyncio.timeout(PATIENCE_S),
    ):
        heads = {}
        for reader, writer in (one, other):
            writer.write(long[:-1])
            heads[asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))] = writer
        # The request that exceeds the limit is rejected before its body is complete.
        (rejected,), (accepted,) = await asyncio.wait(heads, return_when=asyncio.FIRST_COMPLETED)
        assert rejected.result().startswith(b"HTTP/1.1 429")
        assert b"Retry-After: 1\r\n" in rejected.result()
        heads[accepted].write(long[-1:])
        assert (await accepted).startswith(b"HTTP/1.1 200")
        await engine.until_idle()


@pytest.mark.parametrize("length", [10, 200], ids=["mid-head", "mid-body"])
async def test_a_client_that_disconnects_during_its_upload_leaves_no_request(length: int) -> None:
    async with start_engine() as engine:
        async with connect_slowly(engine) as (_, writer):
            writer.write(completion(prompt="w " * 200)[:length])
            await writer.drain()
        await engine.until_idle()


async def test_a_long_body_is_parsed_in_a_thread_with_the_same_checks() -> None:
    async with (
        start_engine(ClientLimits(inline_bytes=10)) as engine,
        aiohttp.ClientSession(engine.url) as http,
    ):
        body = {"model": "chat", "prompt": "w " * 500, "max_tokens": 1}
        async with http.post("/v1/completions", json=body) as response:
            assert (await response.json())["usage"]["prompt_tokens"] == 500
        async with http.post("/v1/completions", json={**body, "n": 2}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "n"


async def test_the_events_of_a_slow_client_have_a_size_limit() -> None:
    async with (
        start_engine(ClientLimits(event_tokens=7)) as engine,
        connect_slowly(engine) as (reader, writer),
    ):
        writer.write(completion(max_tokens=1500, stream=True))
        await engine.until(lambda state: state.output_tokens >= 1500)
        sizes = [len(text.split()) for text in await texts(reader)]
        assert sum(sizes) == 1500
        assert max(sizes) == 7
