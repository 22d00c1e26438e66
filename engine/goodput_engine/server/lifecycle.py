"""A replica's life: listen, start the core, serve, drain, end.

Both ports open before the core is ready, so that a probe tells a slow start from a dead
process. SIGTERM drains; a second one, a closed stdin or a dead core does not wait.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from aiohttp import web

from goodput_engine.core_client import CoreClient
from goodput_engine.listening import announce, listen
from goodput_engine.server.admin import admin_app
from goodput_engine.server.following import follow_manifest
from goodput_engine.server.front import Front, Phase
from goodput_engine.server.metrics import EngineMetrics
from goodput_engine.server.serving import serving_app
from goodput_engine.stopping import Stops, require_running

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from goodput_engine.server.settings import EngineSettings

__all__ = ["serve"]

_log = logging.getLogger(__name__)

_KEEPALIVE_S: Final = 75.0
# After the grace period, or when the core died: for the last events to leave.
_LAST_WORDS_S: Final = 1.0


async def serve(settings: EngineSettings) -> int:
    """Run a replica until it is told to end; returns the process's exit code.

    Raises:
        UsageError: a port cannot be opened.
        GoodputError: the core could not start, or died.
        Exception: whatever ended a task that should not have ended.
    """
    started = time.monotonic()
    stops = Stops(exit_with_parent=settings.exit_with_parent)
    front = Front(settings)
    metrics = EngineMetrics(
        settings.names, lambda: None if front.core is None else front.core.state
    )
    async with AsyncExitStack() as stack:
        readers = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="long-bodies"))
        url = await _open(stack, serving_app(front, readers), settings.host, settings.port)
        admin_url = await _open(
            stack, admin_app(front, metrics), settings.host, settings.admin_port
        )
        core = await CoreClient.start(settings.configure, on_step=metrics.observe)
        stack.push_async_callback(core.close)
        ready = asyncio.ensure_future(core.await_ready())
        await _any(stops.soon.wait(), ready)
        if not ready.done():
            ready.cancel()
            return stops.exit_code
        if settings.limits is not None:
            core.set_limits(settings.limits)
        front.serve(core, ready.result(), startup_s=time.monotonic() - started)
        following = asyncio.create_task(
            follow_manifest(settings.manifest, settings.followed, front.follow)
        )
        stack.callback(following.cancel)
        _settle()
        announce(url, admin_url, as_json=settings.json)
        await _any(stops.wait(following), core.gone)
        if not core.gone.done():
            await _drain(front, core, stops)
        if core.gone.done():
            front.phase = Phase.FAILED
            await _last_words(front)
            raise await core.obituary()
        require_running(following)
        return stops.exit_code


def _settle() -> None:
    """Keep the interpreter's own pauses out of the stream of tokens.

    Measured on two cores: a full garbage collection takes 19 ms before and nothing after what
    lives for ever is frozen; and while a prompt of 500,000 tokens is read in its thread, the
    longest gap of other streams falls from about 30 ms to 16.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(0.0005)


async def _drain(front: Front, core: CoreClient, stops: Stops) -> None:
    """Let what runs finish, within the grace period."""
    grace_s = front.settings.grace_s
    _log.info("draining", extra={"in_flight": front.in_flight, "grace_s": grace_s})
    front.phase = Phase.DRAINING
    core.drain()
    try:
        async with asyncio.timeout(grace_s):
            await _any(front.idle.wait(), stops.now.wait(), core.gone)
    except TimeoutError:
        pass
    if core.gone.done():
        return
    cut_short = front.in_flight
    core.abandon()
    await _last_words(front)
    _log.info("stopped", extra={"cut_short": cut_short})


async def _last_words(front: Front) -> None:
    """Wait until the handlers have told their clients, but not for clients that do not read."""
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await front.idle.wait()
    except TimeoutError:
        pass


async def _any(*awaitables: Awaitable[object]) -> None:
    """Wait for the first; a future that was passed in goes on, a coroutine is cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, awaitable in zip(tasks, awaitables, strict=True):
            if task is not awaitable:
                task.cancel()


async def _open(stack: AsyncExitStack, app: web.Application, host: str, port: int) -> str:
    """Listen, and return the URL with the port that it got."""
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,
        keepalive_timeout=_KEEPALIVE_S,
        shutdown_timeout=_LAST_WORDS_S,
    )
    return await listen(stack, runner, host, port)
