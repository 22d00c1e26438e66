"""Serve a live page on the loopback address, with server-sent events.

Only programs of this machine can connect. A web page of another site cannot read the responses:
requests with a foreign Host header are rejected, which prevents DNS rebinding, and no response
permits another origin.
"""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiohttp import web

from goodput_core.errors import UsageError
from goodput_replay.report.page import policy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

__all__ = ["HOST", "LiveServer", "PageSource", "open_site", "protect", "require_local_host"]

HOST: Final = "127.0.0.1"
_UPDATE_S: Final = 1.0
_MAX_CLIENTS: Final = 16
_WRITE_S: Final = 5.0
_LAST_VISIT_S: Final = 5.0
_NAMES: Final = frozenset({HOST, "localhost"})
_WAITING: Final = (
    '<!doctype html><html lang="en"><link rel="icon" href="data:,"><title>replay</title>'
    "<p>The run has not started yet.\n"
)
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageSource(Protocol):
    """The contents of a live page."""

    def render(self) -> str:
        """Return the complete page."""

    def update(self) -> bytes:
        """Return the changes as JSON without line breaks."""


class LiveServer:
    """Serves one page, which a finished page replaces at the end; belongs to one event loop.

    Args:
        scripts: scripts of the page in `assets`, for its content security policy.
    """

    def __init__(self, scripts: Sequence[str]) -> None:
        self._source: PageSource | None = None
        self._finished: str | None = None
        self._latest = b""
        self._latest_s = 0.0
        self._policy = f"{policy(scripts, live=True)}; frame-ancestors 'none'"
        self._clients = 0
        self._ended = asyncio.Event()
        self._unread = 0
        self._all_read = asyncio.Event()
        self._all_read.set()
        self.app = web.Application(middlewares=[protect()])
        self.app.add_routes(
            [
                web.get("/", self.get_page),
                web.get("/events", self.get_events),
                web.get("/report", self._get_report),
            ]
        )

    @property
    def clients(self) -> int:
        """Number of open pages."""
        return self._clients

    def begin(self, source: PageSource) -> None:
        """Serve this page from now on."""
        self._source = source

    async def end(self, finished: str) -> None:
        """Send the finished page to the open live pages, and wait five seconds at most."""
        self._finished = finished
        self._unread = self._clients
        if self._unread:
            self._all_read.clear()
        self._ended.set()
        try:
            async with asyncio.timeout(_LAST_VISIT_S):
                await self._all_read.wait()
        except TimeoutError:
            pass

    async def get_page(self, _: web.Request) -> web.Response:
        """Return the page."""
        if self._finished is not None:
            return self._respond(self._finished)
        if self._source is None:
            # Browsers log an error for any other status, and for the lack of an icon.
            response = self._respond(_WAITING)
            response.headers["Refresh"] = "1"
            return response
        return self._respond(self._source.render())

    async def _get_report(self, _: web.Request) -> web.Response:
        if self._finished is None:
            raise web.HTTPNotFound(text="the run has not ended\n")
        self._unread -= 1
        if self._unread <= 0:
            # After this response was written.
            asyncio.get_running_loop().call_later(0.2, self._all_read.set)
        return self._respond(self._finished)

    def _respond(self, html: str) -> web.Response:
        return web.Response(
            text=html,
            content_type="text/html",
            headers={"Content-Security-Policy": self._policy},
        )

    async def get_events(self, request: web.Request) -> web.StreamResponse:
        """Send the changes of the page until the client disconnects."""
        if self._source is None:
            raise web.HTTPServiceUnavailable(text="the run has not started yet\n")
        if self._clients >= _MAX_CLIENTS:
            raise web.HTTPServiceUnavailable(text=f"{_MAX_CLIENTS} pages are open already\n")
        self._clients += 1
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **_HEADERS})
            await response.prepare(request)
            await self._send_events(response, self._source)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            self._clients -= 1
        return response

    async def _send_events(self, response: web.StreamResponse, source: PageSource) -> None:
        while not self._ended.is_set():
            await _write(response, b"event: update\ndata: " + self._update(source) + b"\n\n")
            try:
                async with asyncio.timeout(_UPDATE_S):
                    await self._ended.wait()
            except TimeoutError:
                pass
        await _write(response, b"event: finished\ndata: {}\n\n")

    def _update(self, source: PageSource) -> bytes:
        """Return the changes; those of the last second are sent to all pages."""
        now_s = asyncio.get_running_loop().time()
        if not self._latest or now_s - self._latest_s >= _UPDATE_S:
            self._latest, self._latest_s = source.update(), now_s
        return self._latest


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Write to one client; a client that does not read is disconnected."""
    async with asyncio.timeout(_WRITE_S):
        await response.write(data)


def protect(hosts: Iterable[str] = ()) -> Any:
    """Return a middleware that rejects foreign hosts, and adds headers against other sites.

    Args:
        hosts: names of this server besides those of the loopback address.
    """

    @web.middleware
    async def middleware(
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        require_local_host(request, hosts)
        response = await handler(request)
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    return middleware


def require_local_host(request: web.Request, hosts: Iterable[str] = ()) -> None:
    """Reject a request whose Host header names another host, as after DNS rebinding.

    Args:
        request: the request.
        hosts: accepted names besides those of the loopback address.

    Raises:
        HTTPForbidden: the header is missing or names another host.
    """
    if request.url.host not in {*_NAMES, *hosts} or not request.headers.get("Host"):
        raise web.HTTPForbidden(text="only for this machine: use the address that was printed\n")


async def open_site(
    app: web.Application, port: int, option: str, *, host: str = HOST
) -> tuple[web.AppRunner, int]:
    """Serve an application.

    Args:
        app: the application.
        port: the port; 0 for any free one.
        option: command-line option that sets the port.
        host: address to listen on; the loopback address unless the user names another.

    Returns:
        The runner, to be cleaned up, and the port.

    Raises:
        UsageError: the port is in use, the user lacks the permission to use it, or the address is
            not one of this machine.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        problem = {
            errno.EADDRINUSE: "is in use",
            errno.EACCES: "needs privileges that this user lacks",
            errno.EADDRNOTAVAIL: "cannot be used, because the address is not of this machine",
        }.get(error.errno or 0, f"cannot be used ({error.strerror})")
        raise UsageError(
            f"{option}: port {port} on {host} {problem}; choose another port, or 0 for any free one"
        ) from error
    return runner, int(runner.addresses[0][1])
