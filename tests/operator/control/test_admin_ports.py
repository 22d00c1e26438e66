"""Scrapes over real sockets of processes that hang or send invalid or too long responses."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.operator.control.test_readings import ROUTER

from goodput_core.control import Signal
from goodput_core.replay_job import ABState
from goodput_core.slo.verdict import VerdictKind
from goodput_operator.control.admin_ports import Scraper, read_gate_state, session_for_pods
from goodput_operator.control.readings import RouterScrape, ScrapeTarget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def good(_: web.Request) -> web.Response:
    return web.json_response(ROUTER)


async def invalid(_: web.Request) -> web.Response:
    return web.Response(text="<html>")


async def secretive(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"SSH-2.0-secret\r\n")
    request.transport.close()
    return web.StreamResponse()


async def unready(_: web.Request) -> web.Response:
    return web.Response(status=503)


async def elsewhere(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": "/good"})


async def hanging(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def dribbling(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"{")
    await asyncio.Event().wait()
    return response


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * (1 << 16))


HANDLERS: dict[str, Handler] = {
    handler.__name__: handler
    for handler in (good, invalid, secretive, unready, elsewhere, hanging, dribbling, endless)
}


@pytest.fixture
async def at() -> AsyncIterator[Callable[[str], ScrapeTarget]]:
    """Return the target of a handler by its name; each handler has its own path."""
    app = web.Application()
    for name, handler in HANDLERS.items():
        app.router.add_get(f"/{name}/control/state", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    async with AsyncExitStack() as stack:
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield lambda name: ScrapeTarget(name=name, uid=name, url=f"http://127.0.0.1:{port}/{name}")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


async def scrape(session: aiohttp.ClientSession, *targets: ScrapeTarget) -> dict[str, RouterScrape]:
    scraper = Scraper(session, concurrent=8, total_s=0.3)
    return {found.target.name: found for found in await scraper.routers(targets)}


async def comparing(_: web.Request) -> web.Response:
    return web.json_response({"pairs": 1, "planned": 4, "verdict": "INCONCLUSIVE"})


async def test_only_a_valid_response_is_the_progress_of_a_gate(
    session: aiohttp.ClientSession,
) -> None:
    handlers = {
        handler.__name__: handler
        for handler in (comparing, good, invalid, secretive, unready, elsewhere, endless)
    }
    app = web.Application()
    for name, handler in handlers.items():
        app.router.add_get(f"/{name}/gate/state", handler)
    async with TestServer(app) as server:
        states = {
            name: await read_gate_state(session, str(server.make_url(f"/{name}")))
            for name in handlers
        }
    expected = ABState(pairs=1, planned=4, verdict=VerdictKind.INCONCLUSIVE)
    assert states == {**dict.fromkeys(handlers), "comparing": expected}
    assert await read_gate_state(session, "http://127.0.0.1:9") is None


async def test_each_scrape_is_fresh_missing_or_failed(
    session: aiohttp.ClientSession, at: Callable[[str], ScrapeTarget]
) -> None:
    scrapes = await scrape(session, *(at(name) for name in HANDLERS))
    assert {name: one.signal.value for name, one in scrapes.items()} == {
        "good": "fresh",
        "invalid": "missing",
        "secretive": "failed",
        "unready": "failed",
        "elsewhere": "failed",
        "hanging": "failed",
        "dribbling": "failed",
        "endless": "failed",
    }
    assert scrapes["good"].counters is not None
    assert scrapes["secretive"].detail.endswith("sent an invalid HTTP response")
    assert "503" in scrapes["unready"].detail
    assert "did not respond within 0.3 s" in scrapes["hanging"].detail
    assert "more than" in scrapes["endless"].detail
    assert all(one.counters is None for name, one in scrapes.items() if name != "good")


async def test_a_refused_connection_is_a_failure(session: aiohttp.ClientSession) -> None:
    unreachable = ScrapeTarget(name="gone", uid="gone", url="http://127.0.0.1:1")
    assert (await scrape(session, unreachable))["gone"].signal is Signal.FAILED


async def test_a_connection_is_reused_after_a_long_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = set()

    async def handle(request: web.Request) -> web.Response:
        connections.add(request.transport)
        return web.json_response(ROUTER)

    app = web.Application()
    app.router.add_get("/control/state", handle)
    async with TestServer(app) as server, session_for_pods() as session:
        target = ScrapeTarget(name="r", uid="r", url=str(server.make_url("")))
        for late_s in (0, 50):
            now_s = time.monotonic() + late_s
            monkeypatch.setattr("aiohttp.connector.monotonic", lambda now_s=now_s: now_s)
            assert (await scrape(session, target))["r"].signal is Signal.FRESH
    assert len(connections) == 1


async def test_a_hanging_process_does_not_delay_scrapes_of_another_service(
    session: aiohttp.ClientSession, at: Callable[[str], ScrapeTarget]
) -> None:
    scraper = Scraper(session, concurrent=4, total_s=30)
    hanging_scrape = asyncio.ensure_future(scraper.routers([at("hanging")]))
    async with asyncio.timeout(10):
        for _ in range(3):
            scrapes = await scraper.routers([at("good")] * 8)
            assert all(one.signal is Signal.FRESH for one in scrapes)
    assert not hanging_scrape.done()
    hanging_scrape.cancel()
    await asyncio.gather(hanging_scrape, return_exceptions=True)


async def test_concurrent_requests_are_bounded(session: aiohttp.ClientSession) -> None:
    running, most = 0, 0

    async def count(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1
        return web.Response(body=json.dumps(ROUTER))

    app = web.Application()
    app.router.add_get("/control/state", count)
    async with TestServer(app) as server:
        target = ScrapeTarget(name="r", uid="r", url=str(server.make_url("")))
        scrapes = await Scraper(session, concurrent=3).routers([target] * 12)
    assert all(one.signal is Signal.FRESH for one in scrapes)
    assert most == 3
