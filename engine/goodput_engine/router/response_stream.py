"""Passes a replica's answer on to the client, byte for byte, and says how it ended.

Before its first token an answer is held back, so that a replica lost until then can be replaced
by another without the client seeing it. From then on every chunk goes on as it comes; a client
that reads slowly stops the reading from the replica, because one chunk is written before the
next is read and both sides' buffers are bounded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp import web

from goodput_core.contract import HEADER_LOAD, HEADER_TIMINGS
from goodput_core.slo.record import Outcome
from goodput_core.units import NS_PER_S
from goodput_engine.router.errors import ReplicaLost, RetryReason
from goodput_engine.router.replies import error_event, error_response
from goodput_engine.router.request_state import read_timings
from goodput_engine.router.upstream_client import end_to_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.router.request_state import RequestState
    from goodput_engine.router.settings import RouterSettings
    from goodput_engine.router.watchdog import Watchdog

__all__ = ["SATURATED", "ResponseStream"]

SATURATED: Final = frozenset({429, 503})
"""Statuses with which a replica refuses for load, or for now."""

_STREAM: Final = "text/event-stream"


class ResponseStream:
    """Passes answers on.

    Args:
        settings: time-outs and limits.
        clock: nanoseconds, monotonic.
    """

    def __init__(self, settings: RouterSettings, clock: Callable[[], int]) -> None:
        self._idle_ns = settings.timeouts.idle_ns
        self._held_bytes = settings.limits.held_bytes
        self._clock = clock

    async def forward(
        self,
        request: web.Request,
        state: RequestState,
        upstream: aiohttp.ClientResponse,
        watchdog: Watchdog,
    ) -> web.StreamResponse:
        """Pass on an answer to its end and note its outcome.

        Raises:
            ReplicaLost: it broke; `state.response` tells whether the client saw any of it.
            ClientConnectionResetError: the client is gone.
        """
        good = 200 <= upstream.status < 300
        readable = good and "Content-Encoding" not in upstream.headers
        streamed = readable and upstream.content_type == _STREAM
        try:
            if streamed:
                response = await self._pass_stream(request, state, upstream, watchdog)
            else:
                response = await self._pass_body(request, state, upstream, watchdog)
            await response.write_eof()
        except aiohttp.ClientConnectionResetError:
            raise  # the client's side, not the replica's
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(
                RetryReason.LOST, "the replica closed the connection before its answer ended"
            ) from error
        _note_outcome(state, upstream)
        return response

    async def abort(
        self, request: web.Request, state: RequestState, status: int, message: str, code: str
    ) -> web.StreamResponse:
        """Tell the client that no answer, or no more of it, will come."""
        response = state.response
        if response is None:
            return error_response(status, message, code)
        response.force_close()
        if state.observer is not None:
            try:
                async with asyncio.timeout(self._idle_ns / NS_PER_S):
                    await response.write(error_event(message, code))
                    await response.write_eof()
                return response
            except TimeoutError:
                pass
        # No error fits into the middle of a body; an end without its end tells of one.
        if request.transport is not None:
            request.transport.abort()
        return response

    async def _pass_stream(
        self,
        request: web.Request,
        state: RequestState,
        upstream: aiohttp.ClientResponse,
        watchdog: Watchdog,
    ) -> web.StreamResponse:
        clock, read = self._clock, upstream.content.readany
        observer = state.watch_tokens()
        look = observer.feed
        held: list[bytes] = []
        room = self._held_bytes
        while observer.first_ns is None and room > 0 and (chunk := await read()):
            look(chunk, clock())
            held.append(chunk)
            room -= len(chunk)
        if observer.first_ns is None and room > 0 and not observer.finished:
            raise ReplicaLost(RetryReason.LOST, "the replica's answer ended before it began")
        response = await self._begin(request, state, upstream, watchdog)
        write, at_end = response.write, upstream.content.at_eof
        await write(b"".join(held))
        held.clear()
        # The hot path: one turn per chunk of every stream.
        while chunk := await read():
            watchdog.touched_ns = now_ns = clock()
            look(chunk, now_ns)
            if at_end():
                await response.write_eof(chunk)  # one system call for both
                break
            await write(chunk)
        return response

    async def _pass_body(
        self,
        request: web.Request,
        state: RequestState,
        upstream: aiohttp.ClientResponse,
        watchdog: Watchdog,
    ) -> web.StreamResponse:
        read = upstream.content.readany
        chunk = await read()
        response = await self._begin(request, state, upstream, watchdog)
        while chunk:
            watchdog.touched_ns = self._clock()
            if upstream.content.at_eof():
                await response.write_eof(chunk)
                break
            await response.write(chunk)
            chunk = await read()
        return response

    async def _begin(
        self,
        request: web.Request,
        state: RequestState,
        upstream: aiohttp.ClientResponse,
        watchdog: Watchdog,
    ) -> web.StreamResponse:
        """Send the answer's head: from here on it is this replica's answer or none."""
        headers = end_to_end(upstream.headers)
        headers.popall(HEADER_LOAD, None)  # the router's to know, not the client's
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=headers
        )
        state.response = response
        state.drop_body()  # no retry can need it now
        watchdog.allow(self._idle_ns)
        await response.prepare(request)
        return response


def _note_outcome(state: RequestState, upstream: aiohttp.ClientResponse) -> None:
    """How an answer that came to its end is to be counted."""
    status = upstream.status
    if 200 <= status < 300:
        if state.observer is not None:
            whole = state.said_all
        else:
            state.timings = read_timings(upstream.headers.get(HEADER_TIMINGS))
            whole = upstream.content_type in {"application/json", _STREAM}
        state.outcome = Outcome.OK if whole else Outcome.ERROR
    elif status in SATURATED:
        state.outcome = Outcome.SHED
    elif 400 <= status < 500:
        state.client_fault = status
    else:
        state.outcome = Outcome.ERROR
