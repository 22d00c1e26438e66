"""One attempt on one replica: its time limits, the request, and the errors that end it early.

A connection that fails before the response's head arrives raises `ReplicaLost` or `FilesExhausted`,
and the caller decides about a retry. These errors are never sent to the client: the router's own
error responses are `APIError`s.

GoodputError
└── AttemptError
    ├── ReplicaLost            the replica sent no response, or an incomplete one
    ├── FilesExhausted         this process cannot open another file for a connection
    ├── Expired                no data arrived in time
    ├── Stopping               the router's grace period ended
    └── Rerouted               the replica hangs, and another replica gets the request
"""

from __future__ import annotations

import asyncio
import errno
import io
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from goodput_core.errors import GoodputError
from goodput_core.units import NS_PER_S
from goodput_engine.openai.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace, TracebackType

    from aiohttp import web
    from multidict import CIMultiDictProxy

    from goodput_engine.router.proxied_request import ProxiedRequest
    from goodput_engine.router.replicas import Replica
    from goodput_engine.router.settings import Timeouts

__all__ = [
    "AttemptError",
    "Expired",
    "FilesExhausted",
    "ReplicaLost",
    "Rerouted",
    "RetryReason",
    "Stopping",
    "UpstreamClient",
    "Watchdog",
    "end_to_end",
    "out_of_files",
]

# RFC 9110, 7.6.1: these headers apply to a single connection.
_HOP_BY_HOP: Final = (
    "Connection",
    "Keep-Alive",
    "Proxy-Authenticate",
    "Proxy-Authorization",
    "Proxy-Connection",
    "TE",
    "Trailer",
    "Transfer-Encoding",
    "Upgrade",
)
# Host and Content-Length are set anew; Expect was handled when the body was read.
_NOT_FORWARDED: Final = ("Host", "Content-Length", "Expect")
_AUTO_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
# Larger bodies are written in pieces, so that a long prompt does not stall other streams.
_MAX_SINGLE_WRITE_BYTES: Final = 256 << 10
_CLOSED: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)


class RetryReason(StrEnum):
    """Reason for a second attempt; a label of the metric of retries."""

    CONNECT = "connect"
    """The connection to the replica failed."""
    LOST = "lost"
    """The connection broke before the first token."""
    SERVER_ERROR = "server_error"
    """The replica responded with 5xx."""
    HUNG = "hung"
    """The replica did not respond to probes, and no part of the response had arrived."""
    SATURATED = "saturated"
    """The replica responded with 429 or 503."""
    STALE_CONNECTION = "stale_connection"
    """The replica had closed a pooled connection; the request is sent to it again."""


class AttemptError(GoodputError):
    """Base of the errors that end an attempt."""


class ReplicaLost(AttemptError):
    """A replica sent no response, or only a part of one.

    Args:
        reason: reason for a second attempt.
        detail: one sentence.
    """

    def __init__(self, reason: RetryReason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


class FilesExhausted(AttemptError):
    """This process reached its limit of open files."""


class Expired(AttemptError):
    """No data arrived in time."""


class Stopping(AttemptError):
    """The router ends all running requests."""


class Rerouted(AttemptError):
    """A request moves from a hung replica to another one.

    Args:
        to: the other replica; the retry is already taken from the budget.
    """

    def __init__(self, to: Replica) -> None:
        self.to = to
        super().__init__(f"the replica hangs; {to.name} gets the request")


class Watchdog:
    """A context that cancels its own task and raises `Expired` after a time without progress.

    `end` cancels the task immediately and raises another error. There is no timer per chunk: the
    hot path only stores the time of the last chunk. When the one timer fires, the watchdog compares
    this time with the limit, and either cancels the task or starts the timer again.

    Args:
        clock: returns monotonic nanoseconds.
        limit_ns: maximum time without progress.

    Attributes:
        progress_ns: time of the last progress; the guarded code sets it.
    """

    __slots__ = (
        "_cancelling",
        "_clock",
        "_error",
        "_handle",
        "_limit_ns",
        "_loop",
        "_task",
        "progress_ns",
    )

    def __init__(self, clock: Callable[[], int], *, limit_ns: int) -> None:
        task = asyncio.current_task()
        assert task is not None, "a watchdog guards a task"
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._cancelling = task.cancelling()
        self._clock = clock
        self._limit_ns = limit_ns
        self._handle: asyncio.TimerHandle | None = None
        self._error: AttemptError | None = None
        self.progress_ns = clock()

    def __enter__(self) -> Self:
        self._arm(self._limit_ns)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        # As in asyncio.timeout, a cancellation from outside takes precedence.
        if (
            self._error is not None
            and self._task.uncancel() <= self._cancelling
            and kind is asyncio.CancelledError
        ):
            raise self._error from error

    def restart(self, limit_ns: int) -> None:
        """Start again with another limit."""
        self._limit_ns = limit_ns
        self.progress_ns = self._clock()
        if self._handle is not None:
            self._handle.cancel()
            self._arm(limit_ns)

    def end(self, error: AttemptError) -> None:
        """Cancel the task now and raise `error`, unless the task is already cancelled."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def _arm(self, left_ns: int) -> None:
        self._handle = self._loop.call_later(left_ns / NS_PER_S, self._check)

    def _check(self) -> None:
        left_ns = self.progress_ns + self._limit_ns - self._clock()
        if left_ns > 0:
            self._arm(left_ns)
        else:
            self.end(Expired())


def out_of_files(error: BaseException) -> bool:
    """Return True if a connection failed because the limit of open files is reached."""
    return isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers that a proxy forwards: those that do not apply to a single connection."""
    forwarded = CIMultiDict(headers)
    for value in headers.getall("Connection", ()):
        for name in value.split(","):
            forwarded.popall(name.strip(), None)
    for name in _HOP_BY_HOP:
        forwarded.popall(name, None)
    return forwarded


class UpstreamClient:
    """The router's pool of connections to replicas.

    Args:
        timeouts: time limits; only `connect_ns` is used.
        on_stale: called when a request is sent again because a pooled connection was closed.
    """

    def __init__(self, timeouts: Timeouts, on_stale: Callable[[], None]) -> None:
        self._on_stale = on_stale
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self.session: Final = aiohttp.ClientSession(
            # No limit, because a hidden queue here would delay the replicas' admission.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30, ttl_dns_cache=5),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_ns / NS_PER_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_AUTO_HEADERS,
            trust_env=False,
            trace_configs=[tracing],
        )

    async def close(self) -> None:
        """Close every connection."""
        await self.session.close()

    async def send(
        self, request: web.BaseRequest, state: ProxiedRequest, replica: Replica
    ) -> aiohttp.ClientResponse:
        """Send a request unchanged and wait for the response's head.

        If the replica had closed a pooled connection, the request is sent once more to the same
        replica, at most once per request.

        Raises:
            ReplicaLost: no head arrived.
            FilesExhausted: this process cannot open a connection.
            APIError: 400 if the path or the headers cannot be forwarded.
        """
        # Use only the path, because the request line may contain a host ("GET http://… HTTP/1.1").
        url = URL(replica.base + request.rel_url.raw_path_qs, encoded=True)
        headers = end_to_end(request.headers)
        for name in _NOT_FORWARDED:
            headers.popall(name, None)
        reused: list[bool] = []
        try:
            try:
                return await self._open(request.method, url, headers, state.body, reused)
            except _CLOSED as error:
                connecting = isinstance(error, aiohttp.ClientConnectorError)
                if connecting or not reused or state.resent:
                    raise
            state.resent = True
            self._on_stale()
            return await self._open(request.method, url, headers, state.body, reused)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if out_of_files(error):
                raise FilesExhausted("the limit of open files is reached") from error
            raise ReplicaLost(
                RetryReason.CONNECT, f"cannot connect to replica {replica.name}"
            ) from error
        except ValueError as error:  # an invalid URL, or a header that HTTP cannot carry
            raise bad_request("the request's path or headers cannot be forwarded") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(
                RetryReason.LOST, f"replica {replica.name} closed the connection without a response"
            ) from error

    async def _open(
        self,
        method: str,
        url: URL,
        headers: CIMultiDict[str],
        body: bytes,
        reused: list[bool],
    ) -> aiohttp.ClientResponse:
        return await self.session.request(
            method,
            url,
            headers=headers,
            data=body if len(body) <= _MAX_SINGLE_WRITE_BYTES else io.BytesIO(body),
            allow_redirects=False,
            trace_request_ctx=reused,
        )


async def _note_reuse(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    if context.trace_request_ctx is not None:  # None for probes
        context.trace_request_ctx.append(True)
