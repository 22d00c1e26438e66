"""Send one request, record the time of each token, and return the request's record.

A failure of the server is an outcome with a short message, never an exception, because a run
judges the failures of its target. Retries would hide failures, so they must be asked for, and are
recorded.
"""

from __future__ import annotations

import asyncio
import errno
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import TYPE_CHECKING, Final, NamedTuple

import aiohttp
from aiohttp.http import HttpProcessingError

from goodput_core.contract import HEADER_REPLICA, HEADER_REVISION
from goodput_core.slo.conformance import Deviation
from goodput_core.slo.record import Outcome, RequestRecord
from goodput_core.units import NS_PER_S
from goodput_engine.openai.errors import read_error
from goodput_engine.openai.sse import LineTooLongError
from goodput_replay.sending.client.chunks import (
    MalformedChunkError,
    error_sentence,
    status_sentence,
)
from goodput_replay.sending.client.connection import StreamWatch, TimedBody
from goodput_replay.sending.client.reason import reason_of
from goodput_replay.sending.client.redaction import Redaction
from goodput_replay.sending.client.stream import ResponseReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from yarl import URL

    from goodput_replay.sending.body import PreparedRequest

__all__ = ["RequestClient", "SendingPolicy"]

_MAX_ERROR_BODY: Final = 4096
_MAX_DETAIL: Final = 200
_SHED_STATUS: Final = frozenset({429, 503})
# Errors of this machine, which ran out of files, ports or memory, has no network, or whose rules
# forbid the connection (EACCES, such as by a prohibited route). EPERM is not among them: Cilium
# returns it for a service without ready pods.
_LOCAL_ERRORS: Final = frozenset(
    {
        errno.EACCES,
        errno.EMFILE,
        errno.ENFILE,
        errno.EADDRNOTAVAIL,
        errno.ENOBUFS,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOMEM,
    }
)
# Names that this machine cannot resolve, and certificates that it does not trust.
_SETUP_ERRORS: Final = (aiohttp.ClientConnectorDNSError, aiohttp.ClientConnectorCertificateError)
# Names of a content coding that leave the body as it is; some servers send an empty one.
_NO_CODING: Final = frozenset({"", "identity"})
# Time allowed for the usage and [DONE] after the finish reason; some servers send neither and keep
# the connection open.
_FINISH_S: Final = 5.0
# Time allowed for the end of a stream after [DONE], so that the connection is reused.
_LINGER_S: Final = 1.0
# Wait before the first retry, doubled for each further one, unless the server states `Retry-After`.
_BACKOFF_S: Final = 0.1
_MAX_DIGITS: Final = 6
_ANY_TIME_NS: Final = 1 << 62
# Deviations of the target's set-up, which a retry cannot cure.
_UNUSABLE: Final = frozenset({Deviation.NOT_STREAMED, Deviation.COMPRESSED})
_STOPPED: Final = "the run was stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingPolicy:
    """Rules for all requests of a run.

    Args:
        timeout_ns: time limit of a request from its scheduled arrival.
        class_timeouts_ns: time limits of the classes that have their own.
        pinned: True if outputs must have the length in the trace.
        limited: True if the length in the trace is the maximum, but outputs may be shorter.
        retries: how often a request that failed before its first token is sent again.
        redaction: masks secrets in recorded texts.
        sender: number of the process that sends, for its records.
    """

    timeout_ns: int
    class_timeouts_ns: Mapping[str, int] = field(default_factory=dict)
    pinned: bool
    limited: bool = False
    retries: int = 0
    redaction: Redaction = field(default_factory=Redaction)
    sender: int = 0


class _Attempt(NamedTuple):
    """A request that was sent once.

    Args:
        record: its record.
        retry_after_s: time after which the server accepts requests again; None if not stated.
    """

    record: RequestRecord
    retry_after_s: float | None


class RequestClient:
    """Sends requests to one endpoint of one or more servers, to each of them in turn.

    Args:
        session: connection pool and headers of every request.
        urls: URL of the endpoint at each server.
        policy: rules for all requests.
    """

    def __init__(
        self, session: aiohttp.ClientSession, urls: Sequence[URL], policy: SendingPolicy
    ) -> None:
        self._session = session
        names = [url.authority for url in urls]
        if len(set(names)) < len(set(urls)):  # servers behind one gateway have paths of their own
            names = [f"{url.authority}{url.path.rpartition('/v1/')[0]}" for url in urls]
        if len(urls) == 1:  # its name would only repeat the target of the run
            names = [""]
        self._servers = cycle(list(zip(urls, names, strict=True)))
        self._policy = policy
        self._watch = StreamWatch()

    async def run(self, request: PreparedRequest, zero_ns: int) -> RequestRecord:
        """Send one request now and read its response to the end.

        A request that fails before its first token is sent again as often as the policy says. Its
        latencies still count from its scheduled arrival, and the record has the first send and the
        last response.

        Args:
            request: the request.
            zero_ns: time zero of the run, on the monotonic clock.

        Returns:
            The record. If the task is cancelled, the record of the partial response with the
            outcome `cancelled`.
        """
        began_ns = time.monotonic_ns() - zero_ns
        attempt = await self._send(request, zero_ns)
        record = attempt.record
        for retry in range(1, self._policy.retries + 1):
            if not _may_retry(record):
                break
            wait_s = attempt.retry_after_s
            if wait_s is None:
                wait_s = _BACKOFF_S * 2 ** (retry - 1)
            limit_ns = min(self._timeout_ns(request), record.cancel_after_ns or _ANY_TIME_NS)
            sent_again_ns = time.monotonic_ns() - zero_ns + round(wait_s * NS_PER_S)
            if sent_again_ns >= record.scheduled_ns + limit_ns:
                break
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                return replace(record, outcome=Outcome.CANCELLED, detail=_STOPPED)
            attempt = await self._send(request, zero_ns)
            sent_ns = record.sent_ns
            if sent_ns is None and attempt.record.sent_ns is not None:
                # The service delayed the send, not the client.
                sent_ns = began_ns
            record = replace(attempt.record, sent_ns=sent_ns, retries=retry)
        return record

    def _timeout_ns(self, request: PreparedRequest) -> int:
        policy = self._policy
        return policy.class_timeouts_ns.get(request.planned.slo_class, policy.timeout_ns)

    async def _send(self, request: PreparedRequest, zero_ns: int) -> _Attempt:
        """Send one request once."""
        planned, policy = request.planned, self._policy
        url, server = next(self._servers)
        scheduled_ns = zero_ns + planned.scheduled_ns
        cancel_ns, limit_ns = planned.cancel_after_ns, self._timeout_ns(request)
        trace_cancels = cancel_ns is not None and cancel_ns < limit_ns
        if trace_cancels and cancel_ns is not None:
            limit_ns = cancel_ns
        body, stream = TimedBody(request.body), ResponseReader()
        status: int | None = None
        headers: Mapping[str, str] = {}
        outcome, detail = Outcome.ERROR, ""
        limit_s = (scheduled_ns + limit_ns - time.monotonic_ns()) / NS_PER_S
        try:
            async with asyncio.timeout(limit_s) as limit:
                async with self._session.post(
                    url, data=body, headers=request.headers, allow_redirects=False
                ) as response:
                    status, headers = response.status, response.headers
                    self._watch.add(response)
                    outcome, detail = await _read(response, stream, limit)
        except TimeoutError:
            if stream.complete:
                outcome = Outcome.OK
            elif trace_cancels:
                outcome = Outcome.CANCELLED
            else:
                outcome = Outcome.TIMEOUT
                detail = f"nothing complete within {limit_ns / NS_PER_S:g} s"
        except asyncio.CancelledError:
            # The run is stopped. The partial response is recorded. The task ends after that, so the
            # cancellation is not raised again.
            outcome, detail = Outcome.CANCELLED, _STOPPED
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
            outcome, detail = _failure(error, status=status, tokens=stream.events)
            if stream.complete and not isinstance(error, LineTooLongError | MalformedChunkError):
                outcome, detail = Outcome.OK, ""
        end_ns = stream.end_ns if outcome is Outcome.OK else None
        if end_ns is None:
            end_ns = time.monotonic_ns()
        has_length = policy.pinned or policy.limited
        count = stream.count(
            limit=planned.output_tokens if has_length else planned.max_output_tokens,
            pinned=policy.pinned,
            complete=outcome is Outcome.OK,
        )
        if Deviation.WRONG_USAGE in count.deviations:
            detail = (
                f"usage reports {stream.usage_tokens} tokens, {stream.events} events have output"
            )
        mask = policy.redaction.mask
        record = RequestRecord(
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
            output_tokens=count.tokens,
            most_output_tokens=count.most_tokens if count.most_tokens > count.tokens else None,
            pinned_output_tokens=planned.output_tokens if policy.pinned else None,
            targets=planned.targets,
            cancel_after_ns=cancel_ns,
            status=stream.reported_status or status,
            detail=_printable(mask(detail)),
            replica=_printable(mask(headers.get(HEADER_REPLICA, ""))) or server,
            revision=_printable(mask(headers.get(HEADER_REVISION, ""))),
            reported_input_tokens=stream.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            deviations=count.deviations,
            sender=policy.sender,
        )
        return _Attempt(record, _retry_after_s(headers) if policy.retries else None)


def _may_retry(record: RequestRecord) -> bool:
    """True if a request failed before its first token, for a reason that may pass."""
    return (
        record.outcome in {Outcome.ERROR, Outcome.SHED}
        and record.first_token_ns is None
        and not record.client_error
        and _UNUSABLE.isdisjoint(record.deviations)
    )


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`; None if it is absent or a date."""
    text = headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def _printable(text: str) -> str:
    """Truncate a text from a server and replace control and invalid characters."""
    return "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:_MAX_DETAIL]
    )


async def _read(
    response: aiohttp.ClientResponse, stream: ResponseReader, limit: asyncio.Timeout
) -> tuple[Outcome, str]:
    """Read a response to its end; close the connection if more data could follow."""
    if response.status != 200:
        body = await _read_start(response)
        outcome = Outcome.SHED if response.status in _SHED_STATUS else Outcome.ERROR
        return outcome, status_sentence(response.status, response.headers.get("Location"), body)
    coding = ", ".join(response.headers.getall("Content-Encoding", ()))
    if any(name.strip().lower() not in _NO_CODING for name in coding.split(",")):
        response.close()
        stream.deviations = (Deviation.COMPRESSED,)
        return Outcome.ERROR, f"the response is compressed ({coding}), which was not requested"
    if response.content_type != "text/event-stream":
        return await _read_body(response, stream)
    content, loop = response.content, asyncio.get_running_loop()
    finished = lingering = False
    while True:
        data = await content.readany()
        if data:
            stream.take(data, time.monotonic_ns())
        else:
            stream.end(time.monotonic_ns())
        if stream.failure is not None:
            response.close()
            return Outcome.SHED if stream.overloaded else Outcome.ERROR, stream.failure
        if not data:
            break
        if stream.end_ns is None or lingering:
            continue
        if stream.done:
            lingering = True
            limit.reschedule(loop.time() + _LINGER_S)
        elif not finished:
            finished = True
            limit.reschedule(min(limit.when() or math.inf, loop.time() + _FINISH_S))
    if stream.complete:
        return Outcome.OK, ""
    if stream.parser.inside_event:
        return Outcome.ERROR, "the stream ended in the middle of an event"
    # Without a length or chunks, an interrupted body looks like a complete one.
    stream.ended = any(name in response.headers for name in ("Content-Length", "Transfer-Encoding"))
    return Outcome.ERROR, "the stream ended before the response was complete"


async def _read_body(
    response: aiohttp.ClientResponse, stream: ResponseReader
) -> tuple[Outcome, str]:
    """Read a response with status 200 that is not an event stream."""
    body = await _read_start(response)
    if read_error(body) is not None:
        stream.fail(body)
        outcome = Outcome.SHED if stream.overloaded else Outcome.ERROR
        return outcome, f"the response reported: {error_sentence(body)}"
    stream.deviations = (Deviation.NOT_STREAMED,)
    return Outcome.ERROR, f"the response is {response.content_type}, not an event stream"


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
    if isinstance(error, _SETUP_ERRORS):
        return Outcome.UNSENT, f"this machine could not connect: {reason_of(error)}"
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
