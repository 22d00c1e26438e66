"""Connection pool of a run, the times of sends, and the streams on its connections."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, cast

import aiohttp
from aiohttp.payload import Payload

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Mapping, Sequence

    from aiohttp.abc import AbstractStreamWriter, ResolveResult
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.http import StreamWriter
    from aiohttp.tracing import Trace

__all__ = ["StreamWatch", "TimedBody", "open_session"]

# Common servers close an idle connection after five seconds. A request that is sent at that moment
# would fail, although neither the client nor the server is at fault.
_KEEPALIVE_S: Final = 4.0
_READ_BUFFER: Final = 1 << 18
# Longest line of a response's head. Cookies and traces of gateways exceed aiohttp's 8,190 bytes.
_MAX_HEAD_LINE: Final = 1 << 16
# Nanoseconds in which the name of a connection's host was resolved.
_RESOLVING: Final[ContextVar[list[int]]] = ContextVar("_RESOLVING")


class TimedBody(Payload):
    """A request body that records the time at which the client was ready to send it.

    This is the time of the write to the socket, less the time in which the client waited for a new
    connection. An overloaded service accepts connections late, and that is not send lag.
    """

    def __init__(self, value: bytes) -> None:
        super().__init__(value, content_type="application/json")
        self._size = len(value)
        self.sent_ns: int | None = None
        self.connecting_ns = 0

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text, which aiohttp uses only in error messages."""
        return cast("bytes", self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the complete body without draining, because a slow server is not send lag."""
        stream = cast("StreamWriter", writer)
        await stream.write(self._value, drain=False)
        if self.sent_ns is None:
            self.sent_ns = time.monotonic_ns() - self.connecting_ns


class _Connector(aiohttp.TCPConnector):
    """Opens connections, and tells the body of a request how long it waited for its own.

    The time in which this thread computed, and in which a name was resolved, are the client's.
    """

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - as in the base class
    ) -> ResponseHandler:
        began_ns, computed_ns = time.monotonic_ns(), time.thread_time_ns()
        resolving = [0]
        token = _RESOLVING.set(resolving)
        try:
            connection = await super()._create_connection(req, traces, timeout)
        finally:
            _RESOLVING.reset(token)
        if isinstance(req.body, TimedBody):
            own_ns = time.thread_time_ns() - computed_ns + resolving[0]
            req.body.connecting_ns = max(0, time.monotonic_ns() - began_ns - own_ns)
        return connection

    async def _resolve_host(
        self, host: str, port: int, traces: Sequence[Trace] | None = None
    ) -> list[ResolveResult]:
        began_ns = time.monotonic_ns()
        try:
            return await super()._resolve_host(host, port, traces)
        finally:
            if (resolving := _RESOLVING.get(None)) is not None:
                resolving[0] += time.monotonic_ns() - began_ns


def open_session(
    headers: Mapping[str, str], tls: ssl.SSLContext | None = None
) -> aiohttp.ClientSession:
    """Open a session without a limit of connections, so that sends never wait for responses.

    Args:
        headers: headers of every request.
        tls: TLS settings; None for certificates that the system trusts.
    """
    return aiohttp.ClientSession(
        connector=_Connector(
            limit=0,
            keepalive_timeout=_KEEPALIVE_S,
            ttl_dns_cache=60,
            happy_eyeballs_delay=None,
            ssl=True if tls is None else tls,
        ),
        headers={"Accept-Encoding": "identity", **headers},
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        auto_decompress=False,
        read_bufsize=_READ_BUFFER,
        max_line_size=_MAX_HEAD_LINE,
        max_field_size=_MAX_HEAD_LINE,
        raise_for_status=False,
        trust_env=False,
    )


class StreamWatch:
    """Ends streams whose connection was closed.

    If the chunks of a body are malformed, aiohttp closes the connection, but the reader of the body
    would wait until its time limit.
    """

    def __init__(self) -> None:
        self._streams: dict[asyncio.Future[None], aiohttp.StreamReader] = {}

    def add(self, response: aiohttp.ClientResponse) -> None:
        """Watch the body of a response; its connection no longer belongs to an earlier one."""
        connection = response.connection
        if connection is None or connection.protocol is None:
            return  # the body is complete
        closed = connection.protocol.closed
        if closed is None:
            _end(response.content)
            return
        if closed not in self._streams:
            closed.add_done_callback(self._close)
        self._streams[closed] = response.content

    def _close(self, closed: asyncio.Future[None]) -> None:
        _end(self._streams.pop(closed))
        if not closed.cancelled():
            closed.exception()  # already known to the stream; asyncio would log it otherwise


def _end(stream: aiohttp.StreamReader) -> None:
    if not stream.is_eof() and stream.exception() is None:
        stream.set_exception(aiohttp.ClientPayloadError("malformed chunks"))
