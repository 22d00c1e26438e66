"""The live page is served to this machine alone, and ends with the report."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest

from goodput_core.errors import UsageError
from goodput_replay.live.server import LiveServer, open_site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class _CountedPage:
    def __init__(self) -> None:
        self.updates = 0

    def render(self) -> str:
        return "<p>live</p>"

    def update(self) -> bytes:
        self.updates += 1
        return b'{"update": %d}' % self.updates


@asynccontextmanager
async def _served(page: _CountedPage | None) -> AsyncIterator[tuple[LiveServer, int]]:
    server = LiveServer(("live.js",))
    if page is not None:
        server.begin(page)
    runner, port = await open_site(server.app, 0, "--ui-port")
    try:
        yield server, port
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


async def test_the_page_has_a_strict_policy_and_permits_no_other_origin() -> None:
    async with _served(_CountedPage()) as (_, port), _session() as session:
        headers = {"Origin": "https://evil.example"}
        async with session.get(f"http://localhost:{port}/", headers=headers) as response:
            assert response.status == 200
            assert await response.text() == "<p>live</p>"
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["Cache-Control"] == "no-store"
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert not [name for name in response.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "[::ffff:7f00:1]", "localhost.evil", ""]
)
@pytest.mark.parametrize("path", ["/", "/events", "/report", "/nowhere"])
async def test_a_foreign_host_header_is_rejected(host: str, path: str) -> None:
    async with _served(_CountedPage()) as (_, port), _session() as session:
        address = f"http://127.0.0.1:{port}{path}"
        async with session.get(address, headers={"Host": host}) as response:
            assert response.status in {400, 403}
            assert "live" not in await response.text()


async def test_only_reading_is_allowed() -> None:
    async with (
        _served(_CountedPage()) as (_, port),
        _session() as session,
        session.post(f"http://127.0.0.1:{port}/") as response,
    ):
        assert response.status == 405


async def test_before_the_run_a_page_waits_and_before_the_end_there_is_no_report() -> None:
    async with _served(None) as (server, port), _session() as session:
        async with session.get(f"http://127.0.0.1:{port}/") as response:
            assert (response.status, response.headers["Refresh"]) == (200, "1")
            assert "The run has not started yet." in await response.text()
        server.begin(_CountedPage())
        async with session.get(f"http://127.0.0.1:{port}/report") as response:
            assert response.status == 404


async def test_events_update_the_page_until_the_report_was_read() -> None:
    async with _served(_CountedPage()) as (server, port), _session() as session:
        async with session.get(f"http://127.0.0.1:{port}/events") as events:
            assert events.content_type == "text/event-stream"
            assert await events.content.readline() == b"event: update\n"
            assert await events.content.readline() == b'data: {"update": 1}\n'
            assert server.clients == 1
            ending = asyncio.ensure_future(server.end("<p>report</p>"))
            rest = await events.content.read()
            assert rest.endswith(b"event: finished\ndata: {}\n\n")
            assert not ending.done(), "waits for the page to load the report"
            async with session.get(f"http://127.0.0.1:{port}/report") as response:
                assert await response.text() == "<p>report</p>"
            await ending
        async with session.get(f"http://127.0.0.1:{port}/") as response:
            assert await response.text() == "<p>report</p>"


async def test_many_pages_share_one_update_and_too_many_are_rejected() -> None:
    page = _CountedPage()
    async with _served(page) as (_, port), _session() as session:
        address = f"http://127.0.0.1:{port}/events"
        opened = [await session.get(address) for _ in range(16)]
        for events in opened:
            assert await events.content.readline() == b"event: update\n"
        assert page.updates <= 2
        async with session.get(address) as response:
            assert response.status == 503
        for events in opened:
            events.close()


async def test_a_port_in_use_is_an_error_in_one_sentence() -> None:
    async with _served(_CountedPage()) as (_, port):
        with pytest.raises(UsageError, match=rf"--ui-port: port {port} on 127.0.0.1 is in use"):
            await open_site(LiveServer(()).app, port, "--ui-port")
