"""The HTTP server of engine and router: listening, limits of connections, error responses.

aiohttp limits neither the time for a request's head nor the number of connections. This module adds
both limits, so that incomplete requests cannot exhaust a port. It also converts aiohttp's own error
responses, which are plain text, to OpenAI's form. It defines no paths and no metrics.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import os
import socket
import sys
from contextlib import suppress
from http import HTTPStatus
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from goodput_core.contract import EVENT_LISTENING
from goodput_core.errors import InternalError, UsageError
from goodput_engine.logs import EventCounter
from goodput_engine.openai.errors import APIError, error_body, unavailable
from goodput_engine.server_options import CLIENT_CONNECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AsyncExitStack

    from aiohttp import StreamReader

    from goodput_engine.server_options import ConnectionLimits

__all__ = [
    "StreamedResponse",
    "announce",
    "error_response",
    "listen",
    "no_such_path",
    "require_running",
    "share_port",
    "url_of",
]

_EVERY_ADDRESS: Final = "::"
_BACKLOG: Final = 4096
_MAX_SHOWN: Final = 200
_REJECTION_S: Final = 1.0
# Time for the rest of a body that is too large, or was not expected.
_UNREAD_BODY_S: Final = 10.0
_log: Final = logging.getLogger(__name__)


async def listen(
    stack: AsyncExitStack,
    app: web.Application,
    address: tuple[str, int] | socket.socket,
    *,
    limits: ConnectionLimits = CLIENT_CONNECTIONS,
    shared: bool = False,
    shutdown_s: float = 1.0,
    **options: Any,
) -> tuple[str, web.Server]:
    """Serve an application until the stack is closed.

    Args:
        stack: closing it closes the port and ends the connections.
        app: the application.
        address: host and port, or a bound socket. The host is an address, or a name of which the
            first address is used. `::` is every IPv6 address, and every IPv4 address if the kernel
            supports both on one socket. Port 0 takes any free port.
        limits: limits of the connections.
        shared: True if other processes listen on the same port.
        shutdown_s: time for running handlers to end after the stack is closed.
        options: options of aiohttp's `AppRunner`.

    Returns:
        The URL with the actual port, and the server, which has the open connections.

    Raises:
        UsageError: the port cannot be opened.
    """
    listener = address if isinstance(address, socket.socket) else _bind(*address, shared=shared)
    stack.callback(listener.close)
    runner = _Runner(app, limits, shutdown_s=shutdown_s, **options)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.SockSite(runner, listener, backlog=_BACKLOG).start()
    assert runner.server is not None, "the runner was set up"
    host = _EVERY_ADDRESS if isinstance(address, socket.socket) else address[0]
    return url_of(listener, host), runner.server


def url_of(listener: socket.socket, host: str) -> str:
    """Return the URL of a bound socket; for every address, that with the socket's own host."""
    own, port = listener.getsockname()[:2]
    host = own if host == _EVERY_ADDRESS else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def share_port(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port that other processes of this user may share.

    Raises:
        UsageError: the port is in use, or the address is invalid.
    """
    if port:
        _bind(host, port).close()  # fails if the port is in use, unlike the next call
    return _bind(host, port, shared=True)


def announce(url: str, admin_url: str, *, as_json: bool) -> None:
    """Log the URLs of a process and, for a parent process, print them as one line of JSON.

    Args:
        url: URL of the serving port.
        admin_url: URL of the admin port.
        as_json: True to print the line on stdout.
    """
    _log.info("listening", extra={"url": url, "admin_url": admin_url})
    if as_json:
        event = {"event": EVENT_LISTENING, "url": url, "admin_url": admin_url, "pid": os.getpid()}
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()


def require_running(*tasks: asyncio.Future[None]) -> None:
    """Raise an error if a background task has ended.

    Raises:
        InternalError: a task ended without an error.
        Exception: a task ended with this error.
    """
    for task in tasks:
        if task.done():
            task.result()
            raise InternalError("a background task of this process ended; report it as a bug")


def error_response(error: APIError, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return an error as an HTTP response.

    Args:
        error: the error.
        headers: headers to send in addition to the error's own.
    """
    response = web.Response(
        status=error.status,
        body=error_body(error),
        content_type="application/json",
        headers={**error.headers, **(headers or {})},
    )
    if error.close:
        response.force_close()
    return response


async def no_such_path(request: web.Request) -> web.Response:
    """Respond to a request that no other route of the application serves.

    This is the handler of the last route. The response is 405 with the methods of the path, or 404
    with the paths of the port.
    """
    methods, paths = set[str](), []
    for resource in request.app.router.resources():
        match, allowed = await resource.resolve(request)
        if match is None:
            methods |= allowed
            paths.append(resource.canonical)
    path = request.path[:_MAX_SHOWN]
    if methods:
        allow = ", ".join(sorted(methods))
        message = f"{path} has no method {request.method}; use {allow}"
        error = APIError(405, message, code="method_not_allowed")
        return error_response(error, {"Allow": allow})
    message = f"no {request.method} {path} here; the paths of this port are {', '.join(paths)}"
    return error_response(APIError(404, message, code="unknown_path"))


class StreamedResponse(web.StreamResponse):
    """A response whose head is sent together with the first bytes of its body."""

    # aiohttp's own switch, which its `web.Response` sets as well.
    _send_headers_immediately = False


class _Connection(web.RequestHandler):
    """One client connection, with a time limit for heads and errors in OpenAI's form."""

    __slots__ = ("_body", "_body_since_s", "_discards_body", "_head_timer", "_server")

    def __init__(self, server: _Server, **options: Any) -> None:
        super().__init__(server, keepalive_timeout=server.limits.idle_s, **options)
        self._server = server
        self._head_timer: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None  # that of the latest request
        self._body_since_s = 0.0
        self._discards_body = False

    @property
    def waiting_since_s(self) -> float | None:
        """Loop time at which the wait for a request began; None while a request runs."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return None
        return self._next_keepalive_close_time - self._server.limits.idle_s

    @property
    def receiving_since_s(self) -> float | None:
        """Loop time at which the body of the latest request began; None once it is complete."""
        if self._body is None or self._body.is_eof():
            return None
        if self._force_close and not self._discards_body:
            return None
        return self._body_since_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close another connection if there are too many; reject this one if none can be closed."""
        super().connection_made(transport)
        if not self._server.enforce_limit():
            self._send_last(_TOO_MANY_CONNECTIONS)

    @property
    def _expects_head(self) -> bool:
        """True if the next bytes begin or continue a head, and no earlier request runs.

        On Python 3.11 the handler task of a connection starts after its first bytes were read, so
        the state of that task does not decide this.
        """
        return (
            (self._body is None or self._body.is_eof())
            and self._current_request is None
            and not self._messages
            and not self._force_close
        )

    def data_received(self, data: bytes) -> None:
        """Start the timer of a head that arrives in parts; runs once per read."""
        requests, expects_head = self._request_count, self._expects_head
        super().data_received(data)
        if self._request_count != requests:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
            self._body, self._body_since_s = self._messages[-1][1], self._loop.time()
        elif expects_head and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._server.limits.head_s, self._expire_head)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the timer of an unfinished head."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to a request that cannot be parsed, or to a bug in a handler."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun; it cannot become an error") from exc
        if isinstance(exc, APIError):
            return error_response(exc)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("request failed", exc_info=exc)
            error = APIError(status, "internal error; see the log", code="internal_error")
        else:
            first_line = (message or "").strip().partition("\n")[0][:_MAX_SHOWN]
            if isinstance(exc, LineTooLong):  # its message quotes the line, such as one with a key
                first_line = "a line of the head is too long"
            error = APIError(
                status,
                f"malformed HTTP request: {first_line}".rstrip(": "),
                code="malformed_request",
            )
        error.close = True
        return error_response(error)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; convert aiohttp's own errors to OpenAI's form.

        If the body was not read completely and the connection ends, the rest is discarded as it
        arrives. aiohttp would decompress it first, in one piece: 256 MiB of spaces are 255 KiB as
        gzip, and would delay all other streams by 0.8 s.
        """
        if isinstance(resp, web.HTTPException):
            error = APIError(resp.status, f"{request.method} {request.path[:200]}: {resp.reason}")
            resp = error_response(error)
        resp, reset = await super().finish_response(request, resp, start_time)
        if not reset and not resp.keep_alive and not request.content.is_eof():
            self._discards_body = True
            self._end_sending(_UNREAD_BODY_S)
        return resp, reset

    def _expire_head(self) -> None:
        self._head_timer = None
        if self._expects_head:
            self._server.events.add("head_timeouts")
            self._send_last(_HEAD_TIMEOUT)
            self.close()

    def _send_last(self, response: bytes) -> None:
        """Send a response without aiohttp and end the connection."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(response)
        self._end_sending(_REJECTION_S)

    def _end_sending(self, abort_s: float) -> None:
        """End the connection after its last response.

        If the connection were closed while the client still sends, the kernel would reset it and
        the client could lose the response. So only the sending direction is closed at first.

        Args:
            abort_s: time after which the connection is aborted if the client has not closed it.
        """
        self._force_close = True  # aiohttp parses nothing more
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        # The client may have left, although no read has reported it yet.
        with suppress(OSError):
            transport.write_eof()
        self._resume_transport_reading()
        self._loop.call_later(abort_s, transport.abort)


class _Server(web.Server):
    """The connections of one port."""

    def __init__(
        self, server: web.Server, limits: ConnectionLimits, options: dict[str, Any]
    ) -> None:
        super().__init__(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
        )
        self.limits = limits
        self.events = EventCounter(_log, "connections limited")
        self._options = options

    def __call__(self) -> _Connection:
        return _Connection(self, loop=asyncio.get_running_loop(), **self._options)

    def enforce_limit(self) -> bool:
        """Close connections above the limit; return False if too few can be closed.

        Those without a request are closed first, then those whose body has not arrived, so that
        clients that send half a request cannot exhaust the port.
        """
        excess = len(self._connections) - self.limits.connections
        if excess <= 0:
            return True
        ours = [one for one in self._connections if isinstance(one, _Connection)]
        # Close some in advance, so that a flood does not cause a search for each new connection.
        most = excess + self.limits.connections // 64
        waiting = ((one.waiting_since_s, one) for one in ours)
        closed = self._close_oldest(waiting, most, "closed_while_waiting")
        if closed < excess:
            receiving = ((one.receiving_since_s, one) for one in ours)
            closed += self._close_oldest(receiving, most - closed, "closed_while_receiving")
        if closed >= excess:
            return True
        self.events.add("rejected")
        return False

    def _close_oldest(
        self, connections: Iterable[tuple[float | None, _Connection]], most: int, event: str
    ) -> int:
        """Close the connections that have been in a state longest; return their number.

        Args:
            connections: each with the time since which it is in the state, or None if it is not.
            most: number of connections to close at most.
            event: name under which they are counted in the log.
        """
        found = [(since_s, one) for since_s, one in connections if since_s is not None]
        oldest = heapq.nsmallest(most, found, key=itemgetter(0))
        for _, connection in oldest:
            self.events.add(event)
            connection.force_close()
        return len(oldest)


class _Runner(web.AppRunner):
    def __init__(
        self, app: web.Application, limits: ConnectionLimits, *, shutdown_s: float, **options: Any
    ) -> None:
        super().__init__(app, access_log=None, shutdown_timeout=shutdown_s, **options)
        self._limits = limits
        self._options = {k: v for k, v in options.items() if k != "handler_cancellation"}

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(server, self._limits, {**self._options, "access_log": None})


def _bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    if host == _EVERY_ADDRESS and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104 - every address was requested
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if host == _EVERY_ADDRESS:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: IDNA cannot encode the name
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; choose another") from error
    return listener


def _encode_response(error: APIError) -> bytes:
    body = error_body(error)
    status = HTTPStatus(error.status)
    headers = {
        **error.headers,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


_TOO_MANY_CONNECTIONS: Final = _encode_response(
    unavailable("too many connections; retry later", "too_many_connections")
)
_HEAD_TIMEOUT: Final = _encode_response(
    APIError(
        HTTPStatus.REQUEST_TIMEOUT,
        "the request's head did not arrive in time",
        code="request_timeout",
    )
)
