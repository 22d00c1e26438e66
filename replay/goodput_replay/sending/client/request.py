"""Send one request, record the time of each token, and return the request's record.

A failure of the server is an outcome with a short message, never an exception, because a run
judges the failures of its target. There are no retries, which would hide failures.
"""

from __future__ import annotations

import asyncio
import errno
import time
from typing import TYPE_CHECKING, Final, cast

import aiohttp
from aiohttp.payload import Payload

from goodput_core.contract import HEADER_REPLICA, HEADER_REVISION
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_S, NS_PER_US
from goodput_engine.openai.sse import LineTooLongError, SSEReader
from goodput_replay.sending.client.chunks import (
    DONE,
    MalformedChunkError,
    decode_chunk,
    error_sentence,
    status_sentence,
)
from goodput_replay.sending.client.reason import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http import StreamWriter
    from yarl import URL

    from goodput_replay.sending.body import PreparedRequest

__all__ = ["RequestClient"]

_MAX_ERROR_BODY: Final = 4096
_MAX_DETAIL: Final = 200
_SHED_STATUS: Final = frozenset({429, 503})
# Errors of this machine, which ran out of files, ports or buffers.
_LOCAL_ERRORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS})
# Time allowed for the end of a stream after its last event, so that the connection is reused.
_LINGER_S: Final = 1.0


class _Body(Payload):
    """A request body that records the time at which it was written to the socket."""

    def __init__(self, value: bytes) -> None:
        super().__init__(value, content_type="application/json")
        self._size = len(value)
        self.sent_ns: int | None = None

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text, which aiohttp uses only in error messages."""
        return cast("bytes", self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the complete body without draining, because a slow server is not send lag."""
        stream = cast("StreamWriter", writer)
        await stream.write(self._value, drain=False)
        if self.sent_ns is None:
            self.sent_ns = time.monotonic_ns()


class _Stream:
    """Tokens and times of a response stream so far. Times are on the monotonic clock."""

    __slots__ = (
        "cached_tokens",
        "detail",
        "done",
        "end_ns",
        "failed",
        "finished",
        "first_ns",
        "gaps_us",
        "last_ns",
        "parser",
        "shed",
        "tokens",
        "usage_tokens",
    )

    def __init__(self) -> None:
        self.parser = SSEReader()
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.end_ns: int | None = None
        self.gaps_us: list[int] = []
        self.tokens = 0
        self.usage_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finished = False
        self.done = False
        self.failed = False
        self.shed = False
        self.detail = ""

    def take(self, data: bytes, now_ns: int) -> None:
        """Count the events in a piece of the stream that was received at `now_ns`."""
        for event in self.parser.feed(data):
            if self.done or self.failed:
                return
            if event == DONE:
                self.done = True
                self.end_ns = now_ns
                continue
            self._take_chunk(event, now_ns)

    def _take_chunk(self, event: bytes, now_ns: int) -> None:
        chunk = decode_chunk(event)
        if chunk.failed:
            self.failed = True
            self.shed = chunk.shed
            self.detail = f"the stream reported: {error_sentence(event)}"
            return
        usage = chunk.usage
        counted = None if usage is None else usage.completion_tokens
        if chunk.has_token:
            if self.last_ns is None:
                self.first_ns = now_ns
            else:
                self.gaps_us.append((now_ns - self.last_ns) // NS_PER_US)
            self.last_ns = now_ns
            self.tokens += 1
        if counted is not None:
            self.usage_tokens = counted
        if usage is not None and usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if chunk.finished:
            self.finished = True
            self.end_ns = now_ns

    @property
    def output_tokens(self) -> int:
        """Output tokens reported by the server, else the number of chunks with output."""
        return self.tokens if self.usage_tokens is None else self.usage_tokens


class RequestClient:
    """Sends requests to one endpoint.

    Args:
        session: connection pool and headers of every request.
        url: URL of the endpoint.
        timeout_ns: time limit of a request from its scheduled arrival.
        pinned: True if outputs must have the length in the trace.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: URL, *, timeout_ns: int, pinned: bool
    ) -> None:
        self._session = session
        self._url = url
        self._timeout_ns = timeout_ns
        self._pinned = pinned

    async def run(self, request: PreparedRequest, zero_ns: int) -> RequestRecord:
        """Send one request now and read its response to the end.

        Args:
            request: the request.
            zero_ns: time zero of the run, on the monotonic clock.

        Returns:
            The record. If the task is cancelled, the record of the partial response with the
            outcome `cancelled`.
        """
        planned = request.planned
        scheduled_ns = zero_ns + planned.scheduled_ns
        cancel_ns = planned.cancel_after_ns
        trace_cancels = cancel_ns is not None and cancel_ns < self._timeout_ns
        limit_ns = cancel_ns if trace_cancels and cancel_ns is not None else self._timeout_ns
        body, stream = _Body(request.body), _Stream()
        status: int | None = None
        headers: Mapping[str, str] = {}
        outcome, detail = Outcome.ERROR, ""
        limit_s = (scheduled_ns + limit_ns - time.monotonic_ns()) / NS_PER_S
        try:
            async with asyncio.timeout(limit_s) as limit:
                async with self._session.post(
                    self._url, data=body, headers=request.headers, allow_redirects=False
                ) as response:
                    status, headers = response.status, response.headers
                    outcome, detail = await _read(response, stream, limit)
        except TimeoutError:
            if stream.done:
                outcome = Outcome.OK
            elif trace_cancels:
                outcome = Outcome.CANCELLED
            else:
                outcome = Outcome.TIMEOUT
                detail = f"nothing complete within {self._timeout_ns / NS_PER_S:g} s"
        except asyncio.CancelledError:
            # The run is stopped. The partial response is recorded. The task ends after that, so the
            # cancellation is not raised again.
            outcome, detail = Outcome.CANCELLED, "the run was stopped"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome, detail = _failure(error, status=status, tokens=stream.tokens)
            if stream.done and outcome is Outcome.ERROR:
                outcome, detail = Outcome.OK, ""
        end_ns = stream.end_ns if outcome is Outcome.OK else None
        if end_ns is None:
            end_ns = time.monotonic_ns()
        return RequestRecord(
            request_id=planned.request_id,
            slo_class=planned.slo_class,
            scheduled_ns=planned.scheduled_ns,
            outcome=outcome,
            sent_ns=_since(body.sent_ns, zero_ns),
            first_token_ns=_since(stream.first_ns, zero_ns),
            last_token_ns=_since(stream.last_ns, zero_ns),
            end_ns=end_ns - zero_ns,
            gaps_us=stream.gaps_us,
            input_tokens=request.input_tokens,
            output_tokens=stream.output_tokens,
            pinned_output_tokens=planned.output_tokens if self._pinned else None,
            targets=planned.targets,
            cancel_after_ns=cancel_ns,
            status=status,
            detail=_printable(detail),
            replica=_printable(headers.get(HEADER_REPLICA, "")),
            revision=_printable(headers.get(HEADER_REVISION, "")),
            cached_tokens=stream.cached_tokens,
        )


def _printable(text: str) -> str:
    """Truncate a text from a server and replace control and invalid characters."""
    return "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:_MAX_DETAIL]
    )


async def _read(
    response: aiohttp.ClientResponse, stream: _Stream, limit: asyncio.Timeout
) -> tuple[Outcome, str]:
    """Read a response to its end; close the connection if more data could follow."""
    if response.status != 200:
        body = await _read_start(response)
        outcome = Outcome.SHED if response.status in _SHED_STATUS else Outcome.ERROR
        return outcome, status_sentence(response.status, response.headers.get("Location"), body)
    if response.content_type != "text/event-stream":
        response.close()
        return Outcome.ERROR, f"the response is {response.content_type}, not an event stream"
    coding = response.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        response.close()
        return Outcome.ERROR, f"the response is compressed ({coding}), which was not requested"
    content = response.content
    lingering = False
    while True:
        data = await content.readany()
        if not data:
            break
        stream.take(data, time.monotonic_ns())
        if stream.failed:
            response.close()
            return Outcome.SHED if stream.shed else Outcome.ERROR, stream.detail
        if stream.done and not lingering:
            lingering = True
            limit.reschedule(asyncio.get_running_loop().time() + _LINGER_S)
    if stream.done or (stream.finished and not stream.parser.inside_event):
        return Outcome.OK, ""
    if stream.parser.inside_event:
        return Outcome.ERROR, "the stream ended in the middle of an event"
    return Outcome.ERROR, "the stream ended before the response was complete"


async def _read_start(response: aiohttp.ClientResponse) -> bytes:
    """Return the start of a body; close the connection if the body is longer."""
    data = b""
    while len(data) < _MAX_ERROR_BODY:
        piece = await response.content.readany()
        if not piece:
            return data
        data += piece
    response.close()
    return data[:_MAX_ERROR_BODY]


def _failure(error: Exception, *, status: int | None, tokens: int) -> tuple[Outcome, str]:
    """Return the outcome and the message of an exception."""
    if isinstance(error, LineTooLongError | MalformedChunkError):
        return Outcome.ERROR, str(error)
    if isinstance(error, OSError) and error.errno in _LOCAL_ERRORS:
        return Outcome.UNSENT, f"this machine could not send the request: {error.strerror}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return Outcome.ERROR, f"could not connect: {reason_of(error)}"
    if isinstance(error, aiohttp.ClientResponseError):
        return Outcome.ERROR, f"not an HTTP response: {reason_of(error)}"
    when = "before a response"
    if status is not None:
        when = "mid-stream" if tokens else "before the first token"
    return Outcome.ERROR, f"the connection closed {when}: {reason_of(error)}"


def _since(at_ns: int | None, zero_ns: int) -> int | None:
    return None if at_ns is None else at_ns - zero_ns
