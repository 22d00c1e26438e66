"""Forwards a replica's response to the client, byte for byte, and records its outcome.

A response is held back until its first token, so that another replica can still serve the request.
Then each read from the replica is written to the client in the same callback. If the buffer of the
client's connection is full, the router stops reading from the replica until the client has read. So
the buffers of both connections are bounded, and a slow client slows down its replica's stream only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from goodput_core.contract import HEADER_LOAD, HEADER_TIMINGS
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_S
from goodput_engine.http_server import StreamedResponse, error_response
from goodput_engine.openai.errors import error_event
from goodput_engine.router.proxied_request import read_timings
from goodput_engine.router.upstream_client import ReplicaLost, RetryReason
from goodput_engine.router.upstream_connection import ConnectionLost, end_to_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.openai.errors import APIError
    from goodput_engine.openai.sse import TokenObserver
    from goodput_engine.router.proxied_request import ProxiedRequest
    from goodput_engine.router.settings import RouterSettings
    from goodput_engine.router.upstream_client import Watchdog
    from goodput_engine.router.upstream_connection import UpstreamResponse

__all__ = ["SATURATED", "ResponseStream"]

SATURATED: Final = frozenset({429, 503})
"""Statuses of a replica that has no capacity now."""

_STREAM: Final = "text/event-stream"


class ResponseStream:
    """Forwards responses of replicas to clients.

    Args:
        settings: time-outs and limits.
        clock: returns monotonic nanoseconds.
        on_start: called when a response begins, with its request and the time; None for nothing.
    """

    def __init__(
        self,
        settings: RouterSettings,
        clock: Callable[[], int],
        *,
        on_start: Callable[[ProxiedRequest, int], None] | None = None,
    ) -> None:
        self._on_start = on_start
        self._idle_ns = settings.timeouts.idle_ns
        self._held_bytes = settings.limits.held_bytes
        self._clock = clock

    async def forward(
        self,
        request: web.Request,
        state: ProxiedRequest,
        upstream: UpstreamResponse,
        watchdog: Watchdog,
    ) -> web.StreamResponse:
        """Forward a response to its end and record its outcome.

        Raises:
            ReplicaLost: the response ended early; `state.response` is set if a part of the
                response was already forwarded.
            ClientConnectionResetError: the client disconnected.
        """
        successful = 200 <= upstream.status < 300
        readable = successful and "Content-Encoding" not in upstream.headers
        streamed = readable and upstream.content_type == _STREAM
        try:
            if streamed:
                response = await self._forward_stream(request, state, upstream, watchdog)
            else:
                response = await self._forward_body(request, state, upstream, watchdog)
            await response.write_eof()
        except ConnectionLost as error:
            raise ReplicaLost(
                RetryReason.LOST, "the replica closed the connection before its response ended"
            ) from error
        _note_outcome(state, upstream)
        return response

    async def abort(
        self, request: web.Request, state: ProxiedRequest, error: APIError
    ) -> web.StreamResponse:
        """Send an error instead of a response, or after the part that was already sent.

        If an error event cannot be appended to this part, abort the connection.
        """
        response = state.response
        if response is None:
            return error_response(error)
        response.force_close()
        if state.observer is not None:
            try:
                async with asyncio.timeout(self._idle_ns / NS_PER_S):
                    # The line breaks end an incomplete event of the replica.
                    await response.write(b"\n\n" + error_event(error))
                    await response.write_eof()
                return response
            except TimeoutError:
                pass
        # The middle of a body, or a client that does not read, cannot take an error event.
        if request.transport is not None:
            request.transport.abort()
        return response

    async def _forward_stream(
        self,
        request: web.Request,
        state: ProxiedRequest,
        upstream: UpstreamResponse,
        watchdog: Watchdog,
    ) -> web.StreamResponse:
        clock, read = self._clock, upstream.read
        observer = state.watch_tokens()
        observe = observer.feed
        held: list[bytes] = []
        remaining_bytes = self._held_bytes
        while observer.first_ns is None and remaining_bytes > 0 and (chunk := await read()):
            observe(chunk, clock())
            held.append(chunk)
            remaining_bytes -= len(chunk)
        if observer.first_ns is None and remaining_bytes > 0 and not observer.finished:
            raise ReplicaLost(
                RetryReason.LOST, "the replica's response ended before its first token"
            )
        response = await self._begin(request, state, upstream, watchdog)
        await response.write(b"".join(held))
        held.clear()
        writer = _StreamWriter(
            request,
            chunked=response.content_length is None and request.version >= HttpVersion11,
            upstream=upstream,
            observer=observer,
            watchdog=watchdog,
            clock=clock,
        )
        while True:
            await upstream.forward(writer.push)
            if upstream.complete:
                break
            state.reads_slowly = True
            await request.writer.drain()
            upstream.resume()
        observer.end(clock())
        await response.write_eof(writer.last)  # one system call for both
        return response

    async def _forward_body(
        self,
        request: web.Request,
        state: ProxiedRequest,
        upstream: UpstreamResponse,
        watchdog: Watchdog,
    ) -> web.StreamResponse:
        read = upstream.read
        chunk = await read()
        response = await self._begin(request, state, upstream, watchdog)
        while chunk:
            watchdog.progress_ns = self._clock()
            if upstream.at_eof:
                await response.write_eof(chunk)
                break
            await response.write(chunk)
            chunk = await read()
        return response

    async def _begin(
        self,
        request: web.Request,
        state: ProxiedRequest,
        upstream: UpstreamResponse,
        watchdog: Watchdog,
    ) -> web.StreamResponse:
        """Send the response's head; from then on, the request cannot be retried."""
        headers = CIMultiDict(
            (name.decode(errors="surrogateescape"), value.decode(errors="surrogateescape"))
            for name, value in end_to_end(upstream.raw_headers)
        )
        headers.popall(HEADER_LOAD, None)  # for the router only
        response = StreamedResponse(status=upstream.status, reason=upstream.reason, headers=headers)
        state.response = response
        if self._on_start is not None:
            self._on_start(state, self._clock())
        state.drop_body()
        watchdog.restart(self._idle_ns)
        await response.prepare(request)
        return response


class _StreamWriter:
    """Writes each read of a stream directly to the client's connection: the hot path.

    Args:
        request: the client's request.
        chunked: True if the response has the transfer coding `chunked`.
        upstream: the replica's response.
        observer: times the tokens.
        watchdog: limits the time without progress.
        clock: returns monotonic nanoseconds.

    Attributes:
        last: bytes that arrived with the end of the stream, and are not written yet.
    """

    __slots__ = (
        "_chunked",
        "_clock",
        "_observe",
        "_protocol",
        "_transport",
        "_upstream",
        "_watchdog",
        "last",
    )

    def __init__(
        self,
        request: web.Request,
        *,
        chunked: bool,
        upstream: UpstreamResponse,
        observer: TokenObserver,
        watchdog: Watchdog,
        clock: Callable[[], int],
    ) -> None:
        transport = request.transport
        if transport is None:
            raise aiohttp.ClientConnectionResetError("the client disconnected")
        self._transport = transport
        self._protocol = request.protocol
        self._chunked = chunked
        self._upstream = upstream
        self._observe = observer.feed
        self._watchdog = watchdog
        self._clock = clock
        self.last = b""

    def push(self, data: bytes) -> None:
        """Observe and write the bytes of one read."""
        self._watchdog.progress_ns = now_ns = self._clock()
        self._observe(data, now_ns)
        if self._upstream.complete:
            self.last = data
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if self._protocol.writing_paused:
            self._upstream.pause()


def _note_outcome(state: ProxiedRequest, upstream: UpstreamResponse) -> None:
    """Set the outcome of a response that was forwarded to its end."""
    status = upstream.status
    if 200 <= status < 300:
        if state.observer is not None:
            if state.observer.shed:
                state.outcome = Outcome.SHED
                return
            complete = state.complete
        else:
            state.timings = read_timings(upstream.headers.get(HEADER_TIMINGS))
            complete = upstream.content_type in {"application/json", _STREAM}
        state.outcome = Outcome.OK if complete else Outcome.ERROR
    elif status in SATURATED:
        state.outcome = Outcome.SHED
    elif 400 <= status < 500:
        state.client_error = status
    else:
        state.outcome = Outcome.ERROR
