"""TLS between the router and its replicas: its connections verify certificates."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.builders.certificates import make_certificate
from tests.builders.http import PATIENCE_S
from tests.engine.router.conftest import END, TOKEN, FakeReplica, started, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def replica(certificate: Path) -> AsyncIterator[FakeReplica]:
    """A replica that only accepts TLS."""
    fake = FakeReplica("a")
    fake.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    fake.tls.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    async with AsyncExitStack() as stack:
        await fake.start()
        stack.push_async_callback(fake.refuse)
        yield fake


async def start_router(stack: ExitStack, replica: FakeReplica, trusted: Path | None) -> str:
    """Start a router that trusts one certificate, or those of the system; return its URL."""
    variables = {} if trusted is None else {"SSL_CERT_FILE": str(trusted / "cert.pem")}
    upstream = ("--upstream", f"{replica.name}={replica.url}", "--connect-timeout", "5s")
    event = await asyncio.to_thread(
        started, stack, "router", "router", *upstream, variables=variables
    )
    return event["url"]


async def complete(client: aiohttp.ClientSession, url: str) -> tuple[int, bytes]:
    async with client.post(f"{url}/v1/completions", data=b"{}") as response:
        return response.status, await response.read()


async def ready(client: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await complete(client, url))[0] != 200:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.01)  # the router probes its replicas at times of its own


async def test_streams_of_a_trusted_replica_are_forwarded_over_one_connection(
    replica: FakeReplica, certificate: Path
) -> None:
    with ExitStack() as stack:
        url = await start_router(stack, replica, certificate)
        async with aiohttp.ClientSession() as client:
            await ready(client, url)
            for _ in range(2):
                assert await complete(client, url) == (200, TOKEN * 3 + END)
    assert len({call.connection for call in replica.calls}) == 1
    assert {call.header("Host") for call in replica.calls} == {f"127.0.0.1:{replica.port}"}


async def test_an_unknown_certificate_keeps_a_replica_from_requests(replica: FakeReplica) -> None:
    with ExitStack() as stack:
        url = await start_router(stack, replica, None)
        async with aiohttp.ClientSession() as client:
            status, body = await complete(client, url)
    assert status == 503
    assert b"error" in body
    assert not replica.calls


async def test_a_replica_that_changes_to_an_unknown_certificate_gets_no_request(
    replica: FakeReplica, certificate: Path, tmp_path: Path
) -> None:
    """Here the router believes that the replica is ready, so its own connection must refuse it."""
    make_certificate(tmp_path)

    async def once(call: object) -> None:
        await original(call)  # type: ignore[arg-type]
        call.writer.close()  # type: ignore[attr-defined]

    original, replica.behave = replica.behave, once
    with ExitStack() as stack:
        url = await start_router(stack, replica, certificate)
        async with aiohttp.ClientSession() as client:
            await ready(client, url)
            await until(lambda: bool(replica.calls))
            served = len(replica.calls)
            assert replica.tls is not None
            replica.tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
            status, body = await complete(client, url)
    assert status in {502, 503}, body
    # 503 if a probe came first.
    assert (status, b"replica_lost" in body) in {(502, True), (503, False)}, body
    assert len(replica.calls) == served
