"""A replica's life: listen, start the core, serve, drain, end.

Both ports open before the core is ready, so that a probe tells a slow start from a dead
process. SIGTERM drains; a second one, a closed stdin or a dead core does not wait.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from aiohttp import web

from goodput_core.contract import EVENT_LISTENING
from goodput_core.errors import ExitCode, UsageError
from goodput_engine.core_client import CoreClient
from goodput_engine.server.admin import admin_app
from goodput_engine.server.front import Front, Phase
from goodput_engine.server.metrics import EngineMetrics
from goodput_engine.server.serving import serving_app

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from goodput_engine.server.settings import EngineSettings

__all__ = ["serve"]

_log = logging.getLogger(__name__)

_BACKLOG: Final = 2048
_KEEPALIVE_S: Final = 75.0
# After the grace period, or when the core died: for the last events to leave.
_LAST_WORDS_S: Final = 1.0


class _Stops:
    """What asked this process to end: each request to end sets the next of two events."""

    def __init__(self) -> None:
        self.soon = asyncio.Event()
        self.now = asyncio.Event()

    def on_signal(self) -> None:
        (self.now if self.soon.is_set() else self.soon).set()

    def at_once(self) -> None:
        self.soon.set()
        self.now.set()


async def serve(settings: EngineSettings) -> int:
    """Run a replica until it is told to end; returns the process's exit code.

    Raises:
        UsageError: a port cannot be opened.
        GoodputError: the core could not start, or died.
    """
    started = time.monotonic()
    stops = _Stops()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stops.on_signal)
    if settings.exit_with_parent:
        _watch_stdin(loop, stops.at_once)
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
            return _exit_code(stops)
        front.serve(core, ready.result(), startup_s=time.monotonic() - started)
        _settle()
        _log.info("listening", extra={"url": url, "admin_url": admin_url})
        if settings.json:
            _print_listening(url, admin_url)
        await _any(stops.soon.wait(), core.gone)
        if not core.gone.done():
            await _drain(front, core, stops)
        if core.gone.done():
            front.phase = Phase.FAILED
            await _last_words(front)
            raise await core.obituary()
        return _exit_code(stops)


def _settle() -> None:
    """Keep the interpreter's own pauses out of the stream of tokens.

    Measured on two cores: a full garbage collection takes 19 ms before and nothing after what
    lives for ever is frozen; and while a prompt of 500,000 tokens is read in its thread, the
    longest gap of other streams falls from about 30 ms to 16.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(0.0005)


async def _drain(front: Front, core: CoreClient, stops: _Stops) -> None:
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


def _exit_code(stops: _Stops) -> int:
    """0 for a stop in order, 130 for one that was told not to wait."""
    return ExitCode.INTERRUPTED if stops.now.is_set() else ExitCode.PASS


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
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, host, port, backlog=_BACKLOG)
    try:
        await site.start()
    except OSError as error:
        # asyncio's own sentence repeats the address; a name that is not found has no errno.
        by_name = isinstance(error, socket.gaierror) or error.errno is None
        reason = error.strerror if by_name else os.strerror(error.errno or 0)
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; choose another") from error
    got: int = runner.addresses[0][1]
    return f"http://[{host}]:{got}" if ":" in host else f"http://{host}:{got}"


def _print_listening(url: str, admin_url: str) -> None:
    line = {"event": EVENT_LISTENING, "url": url, "admin_url": admin_url, "pid": os.getpid()}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _watch_stdin(loop: asyncio.AbstractEventLoop, closed: Callable[[], None]) -> None:
    """Call `closed` on the loop once nobody holds the other end of stdin.

    A thread, because a regular file or a closed descriptor cannot be watched by the loop.
    """

    def read() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass
        try:
            loop.call_soon_threadsafe(closed)
        except RuntimeError:
            pass  # the loop ended first

    threading.Thread(target=read, name="watch-stdin", daemon=True).start()
