"""The bad requests of the benchmark of hostile clients, sent to a tiny real model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
import pytest

pytest.importorskip("torch", reason="NOT RUN: torch is missing; run `make test-torch`")

from benchmarks.hostile_clients import NO_STATUS, BadClient
from tests.builders.http import PATIENCE_S
from tests.engine.conftest import EngineStarter
from tests.engine.server.test_hostile_templates import save_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import RunningEngine

pytestmark = pytest.mark.torch

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """An engine of a model with a tokenizer and a chat template."""
    folder = save_model(tmp_path_factory.mktemp("tiny"), TEMPLATE)
    engines = EngineStarter(tmp_path_factory.mktemp("engine"))
    yield engines.start("--kv-blocks", "64", "--threads", "1", source=f"file://{folder}")
    engines.close()


async def sent(url: str, *, model: str) -> BadClient:
    """Send each bad request of the benchmark at least once to a URL; return the client."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    client = BadClient(address.hostname, address.port, per_s=20, model=model)
    sending = asyncio.ensure_future(client.send())
    async with asyncio.timeout(PATIENCE_S):
        while not all(one.statuses for one in client.responses.values()):
            assert not sending.done()
            await asyncio.sleep(0.02)
    sending.cancel()
    await asyncio.wait([sending])
    return client


async def test_every_bad_request_gets_its_status_and_a_good_one_is_served_afterwards(
    engine: RunningEngine,
) -> None:
    client = await sent(engine.url, model="chat")
    assert client.unexpected() == []
    state = await engine.state_when(lambda state: not state["in_flight"] and not state["running"])
    assert state["kv_free_blocks"] == state["kv_total_blocks"]
    body = {"model": "chat", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
    async with (
        aiohttp.ClientSession(engine.url) as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()


async def test_another_status_or_no_response_is_reported() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"chunked" not in head:
            writer.write(b"HTTP/1.1 413 Request Entity Too Large\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        client = await sent(f"http://{host}:{port}", model="chat")
    right = {"40 MiB", "4 MiB"}
    assert set(client.unexpected()) == client.responses.keys() - right
    assert set(client.responses["40 MiB, length not announced"].statuses) == {NO_STATUS}
