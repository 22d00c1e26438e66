"""A router of several processes on one port, for more streams than one core can forward.

Each process is a complete router: it listens on the same port (`SO_REUSEPORT`, so the kernel
distributes the connections), probes the replicas, and places its own requests. This module starts
the processes and serves the admin port, on which they appear as one router. If a process ends, the
others drain and the router ends, as a single process would; its supervisor starts it again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from goodput_core.contract import PATH_CONTROL_STATE, PATH_METRICS
from goodput_core.errors import ExitCode, GoodputError, InternalError, UsageError
from goodput_core.process import share_session_priority
from goodput_core.signals import Shutdown
from goodput_core.units import NS_PER_S
from goodput_engine.http_server import (
    announce,
    error_response,
    listen,
    no_such_path,
    share_port,
    url_of,
)
from goodput_engine.openai.errors import unavailable
from goodput_engine.router.merging import merge_metrics, merge_states
from goodput_engine.server_options import ADMIN_CONNECTIONS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["serve_processes"]

_SCRAPE_S: Final = 5.0
# Time for a process to end after its grace period, before it is killed.
_END_S: Final = 10.0


class _Process:
    """One of the processes.

    Args:
        process: the running process.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        share_session_priority(process.pid)
        self._process = process
        self.admin_url = ""
        self.ended: asyncio.Task[None] = asyncio.create_task(self._wait())

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while the process runs."""
        return self._process.returncode

    async def announced(self) -> None:
        """Wait until the process listens.

        Raises:
            GoodputError: the process ended before.
        """
        assert self._process.stdout is not None, "stdout is a pipe"
        line = await self._process.stdout.readline()
        if not line:
            await self.ended
            raise self.failure()
        self.admin_url = json.loads(line)["admin_url"]

    def failure(self) -> GoodputError:
        """Return the error of a router whose process ended without a request."""
        code = self.exit_code or 0
        end = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        message = f"a process of the router ended {end}; see its log above"
        return UsageError(message) if code == ExitCode.USAGE else InternalError(message)

    def drain(self) -> None:
        """Start the drain of the process."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def stop(self) -> None:
        """End the process without a drain."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def close(self) -> None:
        """End the process, and kill it if it does not end."""
        self.stop()
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self.ended)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self.ended

    async def _wait(self) -> None:
        await self._process.wait()


async def serve_processes(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Serve with `args.processes` processes until a stop request, then drain all of them.

    Args:
        args: the parsed arguments.
        argv: the arguments, which the processes get too.

    Returns:
        0 after a drain; 130 after Ctrl-C or a stop without a drain.

    Raises:
        UsageError: a port cannot be opened, or a process rejected its arguments.
        InternalError: a process ended unexpectedly.
    """
    shutdown = Shutdown(exit_with_parent=args.exit_with_parent)
    async with AsyncExitStack() as stack:
        # Not listening, this socket only reserves the port.
        reserved = stack.enter_context(share_port(args.host, args.port))
        port = reserved.getsockname()[1]
        options = ("--port", f"{port}", "--admin-port", "0", "--one-of", f"{args.processes}")
        processes: list[_Process] = []
        for _ in range(args.processes):
            process = _Process(
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "goodput_core", "router", *argv, *options),
                    *("--json", "--exit-with-parent"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    # In a session of its own, the process does not receive Ctrl-C.
                    start_new_session=True,
                )
            )
            processes.append(process)
            stack.push_async_callback(process.close)
        starting = asyncio.ensure_future(_await_start(processes))
        await shutdown.wait(starting)
        if not starting.done():
            starting.cancel()
            return shutdown.exit_code
        await starting
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SCRAPE_S))
        )
        admin_url, _ = await listen(
            stack,
            _admin_app(_AdminPort(session, processes)),
            (args.host, args.admin_port),
            limits=ADMIN_CONNECTIONS,
        )
        announce(url_of(reserved, args.host), admin_url, as_json=args.json)
        await shutdown.wait(*(process.ended for process in processes))
        failed = next((p.failure() for p in processes if p.exit_code is not None), None)
        for process in processes:
            process.drain()
        await _await_end(processes, shutdown.immediate, args.grace / NS_PER_S + _END_S)
        if failed is not None and not shutdown.requested.is_set():
            raise failed
    return shutdown.exit_code


async def _await_start(processes: Sequence[_Process]) -> None:
    """Wait until all processes listen.

    Raises:
        GoodputError: a process ended before.
    """
    await asyncio.gather(*(process.announced() for process in processes))


async def _await_end(
    processes: Sequence[_Process], immediate: asyncio.Event, limit_s: float
) -> None:
    """Wait until all processes have ended, an immediate stop is requested, or the limit passes."""
    all_ended = asyncio.ensure_future(asyncio.wait([process.ended for process in processes]))
    stopped = asyncio.ensure_future(immediate.wait())
    await asyncio.wait({all_ended, stopped}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (all_ended, stopped):
        task.cancel()


class _AdminPort:
    """The handlers of the admin port.

    Args:
        session: client for the admin ports of the processes.
        processes: the running processes.
    """

    def __init__(self, session: aiohttp.ClientSession, processes: Sequence[_Process]) -> None:
        self._session = session
        self._processes = processes
        self._epoch = secrets.token_hex(8)
        self._started_ns = time.monotonic_ns()

    async def control_state(self, request: web.Request) -> web.Response:
        """Return the state of all processes as that of one router."""
        bodies, rejection = await self._read(request, PATH_CONTROL_STATE)
        if rejection is not None:
            return rejection
        state: dict[str, Any] = merge_states([msgspec.json.decode(body) for body in bodies])
        state["epoch"] = self._epoch
        state["uptime_seconds"] = (time.monotonic_ns() - self._started_ns) / NS_PER_S
        state["processes"] = len(self._processes)
        return web.Response(body=msgspec.json.encode(state), content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        """Return the metrics of all processes as those of one router."""
        bodies, rejection = await self._read(request, PATH_METRICS)
        if rejection is not None:
            return rejection
        text = merge_metrics([body.decode() for body in bodies])
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _read(
        self, request: web.Request, path: str
    ) -> tuple[list[bytes], web.Response | None]:
        """Return the responses of all processes, or the response of one that is an error."""

        async def get(process: _Process) -> tuple[int, bytes]:
            async with self._session.get(
                process.admin_url + path, params=request.query
            ) as response:
                return response.status, await response.read()

        try:
            responses = await asyncio.gather(*(get(process) for process in self._processes))
        except (aiohttp.ClientError, OSError):
            error = unavailable("a process of the router does not respond", "process_lost")
            return [], error_response(error)
        for status, body in responses:
            if status != 200:
                return [], web.Response(status=status, body=body, content_type="application/json")
        return [body for _, body in responses], None


def _admin_app(handlers: _AdminPort) -> web.Application:
    app = web.Application()
    app.router.add_get(PATH_METRICS, handlers.metrics)
    app.router.add_get(PATH_CONTROL_STATE, handlers.control_state)
    app.router.add_route("*", "/{path:.*}", no_such_path)
    return app
