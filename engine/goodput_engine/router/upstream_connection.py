"""A connection to a replica, and a response on it.

Streams cost a callback per read here, without a task switch: `UpstreamResponse.forward` passes each
read directly to a function. httptools parses HTTP. This module does not decide about retries or
outcomes, and knows no client.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

import httptools
from multidict import CIMultiDict

from goodput_core.errors import GoodputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from multidict import MultiMapping

__all__ = [
    "MAX_HEAD_BYTES",
    "ConnectionLost",
    "UpstreamConnection",
    "UpstreamResponse",
    "end_to_end",
]

# RFC 9110, 7.6.1: these headers apply to a single connection.
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
MAX_HEAD_BYTES: Final = 64 << 10
"""Longest head of a response."""
_MAX_UNREAD_BYTES: Final = 64 << 10
# Larger bodies are written in pieces, so that a long prompt does not stall other streams.
_PIECE_BYTES: Final = 256 << 10


class ConnectionLost(GoodputError):
    """The connection ended, or the replica violated HTTP, before the response was complete."""


def end_to_end(
    headers: Iterable[tuple[bytes, bytes]], *, also: Collection[bytes] = ()
) -> list[tuple[bytes, bytes]]:
    """Return the headers that a proxy forwards: those that do not apply to a single connection.

    Args:
        headers: names and values.
        also: names in lower case that are not forwarded either.
    """
    kept = []
    named: list[bytes] = []
    for pair in headers:
        name = pair[0].lower()
        if name not in _HOP_BY_HOP and name not in also:
            kept.append(pair)
        elif name == b"connection":
            named += pair[1].lower().split(b",")
    if named:
        more = frozenset(name.strip() for name in named)
        kept = [pair for pair in kept if pair[0].lower() not in more]
    return kept


class UpstreamResponse:
    """The response to one request.

    Attributes:
        status, reason: the status line.
        headers: all headers.
        raw_headers: all headers as received.
        complete: True if the response has arrived to its end.
        sink: the function that gets further bytes; None if they are stored for `read`.
    """

    __slots__ = (
        "_chunks",
        "_connection",
        "_error",
        "_loop",
        "_paused",
        "_unread_bytes",
        "_waiter",
        "complete",
        "headers",
        "raw_headers",
        "reason",
        "sink",
        "status",
    )

    def __init__(self, connection: UpstreamConnection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._loop = loop
        self._chunks: list[bytes] = []
        self._unread_bytes = 0
        self._paused = False
        self._error: ConnectionLost | None = None
        self.sink: Callable[[bytes], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.raw_headers: list[tuple[bytes, bytes]] = []
        self.headers: MultiMapping[str] = CIMultiDict()
        self.status = 0
        self.reason = ""
        self.complete = False

    @property
    def content_type(self) -> str:
        """The media type, in lower case and without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def at_eof(self) -> bool:
        """True if nothing is left to read."""
        return self.complete and not self._chunks

    async def head(self) -> None:
        """Wait for the head.

        Raises:
            ConnectionLost: the connection ended before it.
        """
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """Return the next bytes of the body, or no bytes at its end.

        Raises:
            ConnectionLost: the body ended early; the bytes before were returned.
        """
        while not self._chunks:
            if self.complete:
                return b""
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._unread_bytes = 0
        self.resume()
        return data

    async def forward(self, sink: Callable[[bytes], None]) -> None:
        """Pass the further bytes to a function, and return at the end or when reading is paused.

        Args:
            sink: called with the bytes of each read; if the response is `complete`, they are the
                last ones. It may call `pause`.

        Raises:
            ConnectionLost: the body ended early.
        """
        self.sink = sink
        if self._chunks:
            sink(await self.read())
        while not (self.complete or self._paused):
            await self._wait()

    def pause(self) -> None:
        """Stop reading from the replica."""
        if not self._paused:
            self._paused = True
            self._connection.pause_reading()
            self._wake()

    def resume(self) -> None:
        """Read again after `pause`."""
        if self._paused:
            self._paused = False
            self._connection.resume_reading()

    def close(self) -> None:
        """Close the connection unless the response is complete; the replica then cancels it."""
        self.sink = None
        if not self.complete:
            self._connection.abort()

    def push(self, data: bytes) -> None:
        """Add bytes of the body; called by the connection."""
        if self.sink is not None:
            self.sink(data)
            return
        self._chunks.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > _MAX_UNREAD_BYTES and not self.complete and not self._paused:
            self._paused = True
            self._connection.pause_reading()
        self._wake()

    def begin(self, status: int, reason: str) -> None:
        """Set the status after all headers; called by the connection."""
        self.headers = CIMultiDict(
            (name.decode(errors="surrogateescape"), value.decode(errors="surrogateescape"))
            for name, value in self.raw_headers
        )
        self.reason = reason
        self.status = status
        self._wake()

    def end(self, error: ConnectionLost | None = None) -> None:
        """Record the end of the response; called by the connection."""
        self.complete = error is None
        self._error = error
        self._wake()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class UpstreamConnection(asyncio.Protocol):
    """One connection to a replica, for one request at a time.

    Args:
        loop: the running event loop.
        on_idle: called when a response is complete and the connection can take another request.

    Attributes:
        idle_since_s: loop time at which the last response was complete.
        on_body: part of httptools' protocol; adds bytes to those of the current read.
    """

    __slots__ = (
        "_body_until_close",
        "_head_bytes",
        "_loop",
        "_method",
        "_on_idle",
        "_parser",
        "_pieces",
        "_response",
        "_sent",
        "_status_text",
        "_transport",
        "_writable",
        "idle_since_s",
        "on_body",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_idle: Callable[[UpstreamConnection], None]
    ) -> None:
        self._loop = loop
        self._on_idle = on_idle
        self._pieces: list[bytes] = []
        self.on_body: Final = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._response: UpstreamResponse | None = None
        self._head_bytes = 0
        self._status_text = b""
        self._method = ""
        self._sent = True
        self._body_until_close = False
        self._writable: asyncio.Future[None] | None = None
        self.idle_since_s = 0.0

    @property
    def is_open(self) -> bool:
        """True if the connection can be used."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, method: str, head: bytes, body: bytes) -> UpstreamResponse:
        """Send a request and return the response once its head has arrived.

        Raises:
            ConnectionLost: the connection ended before the head.
        """
        assert self._response is None, "one request at a time"
        self._head_bytes = 0
        self._method = method
        response = self._response = UpstreamResponse(self, self._loop)
        try:
            if not self.is_open:
                raise ConnectionLost("the connection is closed")
            assert self._transport is not None
            if len(body) <= _PIECE_BYTES:
                self._transport.write(head + body)
            else:
                await self._send_pieces(self._transport, response, head, body)
            await response.head()
        except BaseException:
            self.abort()
            raise
        return response

    async def _send_pieces(
        self, transport: asyncio.Transport, response: UpstreamResponse, head: bytes, body: bytes
    ) -> None:
        self._sent = False
        transport.write(head)
        view = memoryview(body)
        for at in range(0, len(body), _PIECE_BYTES):
            transport.write(view[at : at + _PIECE_BYTES])
            if self._writable is not None:
                await self._writable
            else:
                await asyncio.sleep(0)
            if response.status or not self.is_open:
                return  # a response before the end of the request; the rest is not sent
        self._sent = True

    def pause_reading(self) -> None:
        """Stop reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection immediately."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base class

    def data_received(self, data: bytes) -> None:
        """Part of `asyncio.Protocol`; on the hot path, once per read of every stream."""
        response = self._response
        if response is None:
            self.abort()  # bytes without a request
            return
        pieces = self._pieces
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(ConnectionLost(f"invalid HTTP: {error}"))
            return
        if self._response is not response:
            pieces.clear()  # the response is complete
            return
        if not response.status:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._lose(ConnectionLost("the response's head is too long"))
            return
        if pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if response.sink is None:
                response.push(body)
            else:
                response.sink(body)

    def on_message_begin(self) -> None:
        """Part of httptools' protocol."""
        if self._response is None or self._response.complete:
            self.abort()  # a response without a request

    def on_status(self, status: bytes) -> None:
        """Part of httptools' protocol; a text may arrive in parts."""
        self._status_text += status

    def on_header(self, name: bytes, value: bytes) -> None:
        """Part of httptools' protocol."""
        if self._response is not None:
            self._response.raw_headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Part of httptools' protocol."""
        response = self._response
        reason, self._status_text = self._status_text, b""
        if response is None:
            return
        status = self._parser.get_status_code()
        if status < 200:  # an interim response
            response.raw_headers.clear()
            return
        response.begin(status, reason.decode(errors="surrogateescape"))
        self._body_until_close = not (
            "Content-Length" in response.headers or "Transfer-Encoding" in response.headers
        )
        if self._method == "HEAD":
            # The parser does not know that no body follows, so the connection is not used again.
            self._response = None
            response.end()
            self.abort()

    def on_message_complete(self) -> None:
        """Part of httptools' protocol; the last bytes of the body are still in `_pieces`."""
        response = self._response
        if response is None or not response.status:
            return
        reusable = self._sent and self._parser.should_keep_alive()
        self._response = None
        response.complete = True
        if self._pieces:
            body = b"".join(self._pieces)
            self._pieces.clear()
            response.push(body)
        response.end()
        if reusable:
            response.resume()
            self.idle_since_s = self._loop.time()
            self._on_idle(self)
        elif self._transport is not None:
            self._transport.close() if self._sent else self._transport.abort()

    def pause_writing(self) -> None:
        """Part of `asyncio.Protocol`."""
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """Part of `asyncio.Protocol`."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of `asyncio.Protocol`."""
        self._transport = None
        self.resume_writing()
        response = self._response
        if response is not None:
            self._response = None
            if exc is None and response.status and self._body_until_close:
                response.end()
            else:
                response.end(ConnectionLost("the connection was closed"))

    def _lose(self, error: ConnectionLost) -> None:
        response, self._response = self._response, None
        self._pieces.clear()
        self.abort()
        if response is not None:
            response.end(error)
