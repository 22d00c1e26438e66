"""Scrapes over real sockets, of processes that hang, send invalid states or too many bytes."""

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
from goodput_operator.control.admin_ports import Scraper, session_for_pods
from goodput_operator.control.readings import RouterScrape, ScrapeTarget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def good(_: web.Request) -> web.Response:
    return web.json_response(ROUTER)


async def nonsense(_: web.Request) -> web.Response:
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
    for handler in (good, nonsense, secretive, unready, elsewhere, hanging, dribbling, endless)
}


@pytest.fixture
async def at() -> AsyncIterator[Callable[[str], ScrapeTarget]]:
    """A source that behaves as its name says; each handler has a path of its own."""
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


async def ask(
    session: aiohttp.ClientSession, *sources: ScrapeTarget, concurrent: int = 8
) -> dict[str, RouterScrape]:
    gatherer = Scraper(session, concurrent=concurrent, total_s=0.3)
    return {scrape.source.name: scrape for scrape in await gatherer.routers(sources)}


async def test_each_answer_is_fresh_missing_or_failed(
    session: aiohttp.ClientSession, at: Callable[[str], ScrapeTarget]
) -> None:
    told = await ask(session, *(at(name) for name in HANDLERS))
    assert {name: scrape.signal.value for name, scrape in told.items()} == {
        "good": "fresh",
        "nonsense": "missing",
        "secretive": "failed",
        "unready": "failed",
        "elsewhere": "failed",
        "hanging": "failed",
        "dribbling": "failed",
        "endless": "failed",
    }
    assert told["good"].counters is not None
    assert told["secretive"].detail.endswith("sent an invalid HTTP response")
    assert "503" in told["unready"].detail
    assert "did not respond within 0.3 s" in told["hanging"].detail
    assert "more than" in told["endless"].detail
    assert all(scrape.counters is None for name, scrape in told.items() if name != "good")


async def test_a_refused_connection_is_a_failure(session: aiohttp.ClientSession) -> None:
    unreachable = ScrapeTarget(name="gone", uid="gone", url="http://127.0.0.1:1")
    assert (await ask(session, unreachable))["gone"].signal is Signal.FAILED


async def test_a_connection_outlasts_an_interval_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = set()

    async def answer(request: web.Request) -> web.Response:
        connections.add(request.transport)
        return web.json_response(ROUTER)

    app = web.Application()
    app.router.add_get("/control/state", answer)
    async with TestServer(app) as server, session_for_pods() as session:
        source = ScrapeTarget(name="r", uid="r", url=str(server.make_url("")))
        for late_s in (0, 50):
            now_s = time.monotonic() + late_s
            monkeypatch.setattr("aiohttp.connector.monotonic", lambda now_s=now_s: now_s)
            assert (await ask(session, source))["r"].signal is Signal.FRESH
    assert len(connections) == 1


async def test_one_that_hangs_delays_no_answer_of_another_service(
    session: aiohttp.ClientSession, at: Callable[[str], ScrapeTarget]
) -> None:
    gatherer = Scraper(session, concurrent=4, total_s=30)
    hangs = asyncio.ensure_future(gatherer.routers([at("hanging")]))
    async with asyncio.timeout(10):
        for _ in range(3):
            told = await gatherer.routers([at("good")] * 8)
            assert all(scrape.signal is Signal.FRESH for scrape in told)
    assert not hangs.done()
    hangs.cancel()
    await asyncio.gather(hangs, return_exceptions=True)


async def test_no_more_are_asked_at_a_time_than_allowed(session: aiohttp.ClientSession) -> None:
    now, most = 0, 0

    async def count(request: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(20):
            await asyncio.sleep(0)
        now -= 1
        return web.Response(body=json.dumps(ROUTER))

    app = web.Application()
    app.router.add_get("/control/state", count)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    source = ScrapeTarget(name="r", uid="r", url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    told = await Scraper(session, concurrent=3).routers([source] * 12)
    await runner.cleanup()
    assert all(scrape.signal is Signal.FRESH for scrape in told)
    assert most == 3
