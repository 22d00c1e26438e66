"""Limits reach engines with the token of their revision, and only while the Lease is held."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from goodput_core.contract import PATH_CONTROL_LIMITS
from goodput_core.units import NS_PER_MS
from goodput_operator.kube.errors import LeaseLostError
from goodput_operator.reconcile.actions import Push
from goodput_operator.reconcile.apply import LimitsPusher
from goodput_operator.render.secrets import control_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

KEY = b"k" * 32
LIMITS = {"revision": 7, "token_budget": 512}


@contextlib.asynccontextmanager
async def engine(
    respond: Callable[[web.Request], Awaitable[web.Response]],
) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """Start an engine with a handler; yield its URL and a session."""
    app = web.Application()
    app.router.add_patch(PATH_CONTROL_LIMITS, respond)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield str(server.make_url("/")), session


def pushes(url: str, count: int) -> list[Push]:
    return [Push(pod=f"pod-{n}", url=url, revision=f"r{n}", limits=LIMITS) for n in range(count)]


async def test_each_engine_gets_limits_with_the_token_of_its_revision(bench: Any) -> None:
    tokens = []

    async def respond(request: web.Request) -> web.Response:
        tokens.append(request.headers["Authorization"])
        return web.Response()

    async with engine(respond) as (url, session):
        pusher = LimitsPusher(session, fence=bench.fence, key=KEY)
        assert await pusher.push("uid", pushes(url, 2)) == {}
    assert sorted(tokens) == sorted(
        f"Bearer {control_token(KEY, service_uid='uid', revision=name)}" for name in ("r0", "r1")
    )


async def test_nothing_is_sent_once_the_lease_is_no_longer_certain(bench: Any) -> None:
    """This includes pushes that waited for a slot when the Lease expired."""
    sent = []

    async def respond(request: web.Request) -> web.Response:
        sent.append(await request.json())
        bench.fence.close()
        return web.Response()

    async with engine(respond) as (url, session):
        pusher = LimitsPusher(session, fence=bench.fence, key=KEY)
        with pytest.raises(LeaseLostError, match="limits of pod-16 not written"):
            await pusher.push("uid", pushes(url, 17))
        assert len(sent) <= 16
        sent.clear()
        with pytest.raises(LeaseLostError):
            await pusher.push("uid", pushes(url, 1))
    assert sent == []


async def test_a_push_is_cancelled_when_the_lease_expires(bench: Any) -> None:
    ended = asyncio.Event()

    async def respond(_: web.Request) -> web.Response:
        await ended.wait()
        return web.Response()

    bench.fence.extend(bench.clock.now_ns() + 50 * NS_PER_MS)
    async with engine(respond) as (url, session):
        pusher = LimitsPusher(session, fence=bench.fence, key=KEY)
        errors = await pusher.push("uid", pushes(url, 1))
        ended.set()
    assert errors == {"pod-0": "limits not pushed: no response within 0.05 s"}
