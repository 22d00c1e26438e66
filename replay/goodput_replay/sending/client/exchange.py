"""One request from its bytes to its record: send, stamp every token, say how it ended.

Every way in which a server can misbehave ends in an outcome and a short sentence, never in an
exception: a run judges its target's failures, it does not die of them. There are no retries,
which would hide failures.
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
from goodput_replay.sending.client.answer import (
    DONE,
    MalformedChunkError,
    decode_chunk,
    error_sentence,
    refusal_sentence,
)
from goodput_replay.sending.client.reason import reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http import StreamWriter
    from yarl import URL

    from goodput_replay.sending.body import PreparedRequest

__all__ = ["Exchange", "unsent"]

_MAX_ERROR_BODY: Final = 4096
_MAX_DETAIL: Final = 200
_SHED_STATUS: Final = frozenset({429, 503})
# What the client's own machine ran out of: the request was not the target's to answer.
_OUR_FAULT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS})
# How long the end of a stream may take after its last event, so that the connection is reused.
_LINGER_S: Final = 1.0


class _Body(Payload):
    """Bytes that note when they were handed to the socket."""

    def __init__(self, value: bytes) -> None:
        super().__init__(value, content_type="application/json")
        self._size = len(value)
        self.sent_ns: int | None = None

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text; aiohttp asks for it in error messages only."""
        return cast("bytes", self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Hand everything over at once; how fast the server reads is not our lag."""
        stream = cast("StreamWriter", writer)
        await stream.write(self._value, drain=False)
        if self.sent_ns is None:
            self.sent_ns = time.monotonic_ns()


class _Answer:
    """What came back so far. Times are of the monotonic clock."""

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
        self.detail = ""

    def take(self, data: bytes, now_ns: int) -> None:
        """Count the events of one piece of the stream, all of which came at `now_ns`."""
        for event in self.parser.feed(data):
            if self.done or self.failed:
                return
            if event == DONE:
                self.done = True
                self.end_ns = now_ns
                continue
            self._chunk(event, now_ns)

    def _chunk(self, event: bytes, now_ns: int) -> None:
        chunk = decode_chunk(event)
        if chunk.failed:
            self.failed = True
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
        """As the server accounts for them, else counted chunk by chunk."""
        return self.tokens if self.usage_tokens is None else self.usage_tokens


class Exchange:
    """Sends requests to one endpoint.

    Args:
        session: with the connection pool and the headers of every request.
        url: the endpoint.
        timeout_ns: how long a request may take from its scheduled arrival.
        pinned: whether answers have to be as long as the trace's.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: URL, *, timeout_ns: int, pinned: bool
    ) -> None:
        self._session = session
        self._url = url
        self._timeout_ns = timeout_ns
        self._pinned = pinned

    async def run(self, request: PreparedRequest, zero_ns: int) -> RequestRecord:
        """Send one request now and follow its answer to the end.

        Args:
            request: what to send.
            zero_ns: the run's zero on the monotonic clock.

        Returns:
            The record, also when the task is cancelled: the answer so far, as `cancelled`.
        """
        planned = request.planned
        scheduled_ns = zero_ns + planned.scheduled_ns
        cancel_ns = planned.cancel_after_ns
        gives_up = cancel_ns is not None and cancel_ns < self._timeout_ns
        patience_ns = cancel_ns if gives_up and cancel_ns is not None else self._timeout_ns
        body, answer = _Body(request.body), _Answer()
        status: int | None = None
        headers: Mapping[str, str] = {}
        outcome, detail = Outcome.ERROR, ""
        patience_s = (scheduled_ns + patience_ns - time.monotonic_ns()) / NS_PER_S
        try:
            async with asyncio.timeout(patience_s) as patience:
                async with self._session.post(
                    self._url, data=body, headers=request.headers, allow_redirects=False
                ) as response:
                    status, headers = response.status, response.headers
                    outcome, detail = await _read(response, answer, patience)
        except TimeoutError:
            if answer.done:
                outcome = Outcome.OK
            elif gives_up:
                outcome = Outcome.CANCELLED
            else:
                outcome = Outcome.TIMEOUT
                detail = f"nothing complete within {self._timeout_ns / NS_PER_S:g} s"
        except asyncio.CancelledError:
            # The run is being stopped. What is known of this request is kept, and the task
            # ends right here, so nothing that was cancelled goes on.
            outcome, detail = Outcome.CANCELLED, "the run was stopped"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome, detail = _failure(error, status=status, answered=answer.tokens)
            if answer.done and outcome is Outcome.ERROR:
                outcome, detail = Outcome.OK, ""
        end_ns = answer.end_ns if outcome is Outcome.OK else None
        if end_ns is None:
            end_ns = time.monotonic_ns()
        return RequestRecord(
            request_id=planned.request_id,
            slo_class=planned.slo_class,
            scheduled_ns=planned.scheduled_ns,
            outcome=outcome,
            sent_ns=_since(body.sent_ns, zero_ns),
            first_token_ns=_since(answer.first_ns, zero_ns),
            last_token_ns=_since(answer.last_ns, zero_ns),
            end_ns=end_ns - zero_ns,
            gaps_us=answer.gaps_us,
            input_tokens=request.input_tokens,
            output_tokens=answer.output_tokens,
            pinned_output_tokens=planned.output_tokens if self._pinned else None,
            targets=planned.targets,
            cancel_after_ns=cancel_ns,
            status=status,
            detail=_printable(detail),
            replica=_printable(headers.get(HEADER_REPLICA, "")),
            revision=_printable(headers.get(HEADER_REVISION, "")),
            cached_tokens=answer.cached_tokens,
        )


def _printable(text: str) -> str:
    """A server's words as a record can hold them: bounded, no control or broken characters."""
    return "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:_MAX_DETAIL]
    )


def unsent(request: PreparedRequest, detail: str, *, pinned: bool) -> RequestRecord:
    """The record of a request that never left."""
    planned = request.planned
    return RequestRecord(
        request_id=planned.request_id,
        slo_class=planned.slo_class,
        scheduled_ns=planned.scheduled_ns,
        outcome=Outcome.UNSENT,
        input_tokens=request.input_tokens,
        pinned_output_tokens=planned.output_tokens if pinned else None,
        targets=planned.targets,
        cancel_after_ns=planned.cancel_after_ns,
        detail=detail,
    )


async def _read(
    response: aiohttp.ClientResponse, answer: _Answer, patience: asyncio.Timeout
) -> tuple[Outcome, str]:
    """Follow the answer to its end; the connection is closed where more could still come."""
    if response.status != 200:
        body = await _head(response)
        outcome = Outcome.SHED if response.status in _SHED_STATUS else Outcome.ERROR
        return outcome, refusal_sentence(response.status, response.headers.get("Location"), body)
    if response.content_type != "text/event-stream":
        response.close()
        return Outcome.ERROR, f"answered {response.content_type}, not an event stream"
    coding = response.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        response.close()
        return Outcome.ERROR, f"answered in {coding}, although no compression was asked for"
    content = response.content
    lingering = False
    while True:
        data = await content.readany()
        if not data:
            break
        answer.take(data, time.monotonic_ns())
        if answer.failed:
            response.close()
            return Outcome.ERROR, answer.detail
        if answer.done and not lingering:
            lingering = True
            patience.reschedule(asyncio.get_running_loop().time() + _LINGER_S)
    if answer.done or (answer.finished and not answer.parser.inside_event):
        return Outcome.OK, ""
    if answer.parser.inside_event:
        return Outcome.ERROR, "the stream ended in the middle of an event"
    return Outcome.ERROR, "the stream ended before the answer did"


async def _head(response: aiohttp.ClientResponse) -> bytes:
    """The start of a body that is not a stream; a longer one costs the connection."""
    data = b""
    while len(data) < _MAX_ERROR_BODY:
        piece = await response.content.readany()
        if not piece:
            return data
        data += piece
    response.close()
    return data[:_MAX_ERROR_BODY]


def _failure(error: Exception, *, status: int | None, answered: int) -> tuple[Outcome, str]:
    """The outcome and the sentence of an exception."""
    if isinstance(error, LineTooLongError | MalformedChunkError):
        return Outcome.ERROR, str(error)
    if isinstance(error, OSError) and error.errno in _OUR_FAULT:
        return Outcome.UNSENT, f"this machine could not send it: {error.strerror}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return Outcome.ERROR, f"could not connect: {reason_of(error)}"
    if isinstance(error, aiohttp.ClientResponseError):
        return Outcome.ERROR, f"not an HTTP answer: {reason_of(error)}"
    when = "before an answer"
    if status is not None:
        when = "mid-stream" if answered else "before the first token"
    return Outcome.ERROR, f"the connection closed {when}: {reason_of(error)}"


def _since(at_ns: int | None, zero_ns: int) -> int | None:
    return None if at_ns is None else at_ns - zero_ns
