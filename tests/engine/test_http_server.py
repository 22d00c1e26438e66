"""Where a process listens: on one address, or on all of a pod's, whatever the cluster's family."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from goodput_engine.http_server import listen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOOPBACKS = ("127.0.0.1", "[::1]")


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def answers_at(url: str) -> list[str]:
    """Of the loopback addresses, those at which somebody listens on the port of a URL."""
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
    ("host", "answering"),
    [("::", [*LOOPBACKS]), ("0.0.0.0", [LOOPBACKS[0]]), ("::1", [LOOPBACKS[1]])],
    ids=["everywhere", "every IPv4 address", "one IPv6 address"],
)
async def test_a_process_answers_where_it_listens(
    stack: AsyncExitStack, host: str, answering: list[str]
) -> None:
    url, _ = await listen(stack, web.Application(), (host, 0))
    assert await answers_at(url) == answering


async def test_everywhere_is_every_ipv4_address_where_the_kernel_has_no_ipv6(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    url, _ = await listen(stack, web.Application(), ("::", 0))
    assert url.startswith("http://0.0.0.0:")
    assert await answers_at(url) == ["127.0.0.1"]
