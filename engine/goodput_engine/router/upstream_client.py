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
import ssl
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import aiohttp
from yarl import URL

from goodput_core.errors import GoodputError
from goodput_core.units import NS_PER_S
from goodput_engine.openai.errors import bad_request
from goodput_engine.router.upstream_connection import (
    MAX_HEAD_BYTES,
    ConnectionLost,
    UpstreamConnection,
    UpstreamResponse,
    end_to_end,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from aiohttp import web

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
    "out_of_files",
]

# Host and Content-Length are set anew; Expect was handled when the body was read.
_NOT_FORWARDED: Final = frozenset({b"host", b"content-length", b"expect"})
# A tenant's key is for the router alone. Some clients send it in other headers or the query, too.
_NOT_FORWARDED_OF_TENANTS: Final = _NOT_FORWARDED | {b"authorization", b"api-key", b"x-api-key"}
_AUTO_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
# Time after which an unused connection is closed.
_IDLE_S: Final = 30.0


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


@dataclass(frozen=True, slots=True)
class _Origin:
    """Address of a replica.

    Args:
        host, port: the address to connect to.
        tls: TLS settings; None for plain HTTP.
        header: value of the header `Host`.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None
    header: bytes


class UpstreamClient:
    """The router's connections to replicas.

    The number of connections is not limited, because a hidden queue here would delay the replicas'
    admission.

    Args:
        timeouts: time limits; only `connect_ns` is used.
        on_stale: called when a request is sent again because a pooled connection was closed.

    Attributes:
        session: client for probes, which have connections of their own.
    """

    def __init__(self, timeouts: Timeouts, on_stale: Callable[[], None]) -> None:
        self._on_stale = on_stale
        self._connect_s = timeouts.connect_ns / NS_PER_S
        self._loop = asyncio.get_running_loop()
        self._origins: dict[str, _Origin] = {}
        self._idle: dict[str, deque[UpstreamConnection]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self.session: Final = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ttl_dns_cache=5),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_AUTO_HEADERS,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
        await self.session.close()

    async def send(
        self, request: web.BaseRequest, state: ProxiedRequest, replica: Replica
    ) -> UpstreamResponse:
        """Send a request unchanged and wait for the response's head.

        If the replica had closed a pooled connection, the request is sent once more to the same
        replica, at most once per request.

        Raises:
            ReplicaLost: no head arrived.
            FilesExhausted: this process cannot open a connection.
            APIError: 400 if the path cannot be forwarded.
        """
        base = replica.base
        origin = self._origins.get(base)
        if origin is None:
            origin = self._origins[base] = _origin_of(base)
        method, body = request.method, state.body
        head = _encode_head(request, origin, len(body), of_tenant=state.tenant is not None)
        try:
            connection = self._take_idle(base)
            if connection is not None:
                try:
                    return await connection.send(method, head, body)
                except ConnectionLost:
                    if state.resent:
                        raise
                state.resent = True
                self._on_stale()
            connection = await self._connect(base, origin, replica)
            return await connection.send(method, head, body)
        except ConnectionLost as error:
            raise ReplicaLost(
                RetryReason.LOST, f"replica {replica.name} closed the connection without a response"
            ) from error

    async def _connect(self, base: str, origin: _Origin, replica: Replica) -> UpstreamConnection:
        loop = self._loop
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(loop, partial(self._keep, base)),
                    origin.host,
                    origin.port,
                    ssl=origin.tls,
                )
        except OSError as error:  # including TimeoutError
            if out_of_files(error):
                raise FilesExhausted("the limit of open files is reached") from error
            raise ReplicaLost(
                RetryReason.CONNECT, f"cannot connect to replica {replica.name}"
            ) from error
        return connection

    def _take_idle(self, base: str) -> UpstreamConnection | None:
        """Return the connection that was used last, which is the most likely one to be open."""
        idle = self._idle.get(base)
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        return None

    def _keep(self, base: str, connection: UpstreamConnection) -> None:
        if self._closed:
            connection.abort()
            return
        self._idle.setdefault(base, deque()).append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_IDLE_S / 2, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connections that were not used for some time."""
        self._sweep = None
        expired_s = self._loop.time() - _IDLE_S
        for base, idle in tuple(self._idle.items()):
            while idle and (idle[0].idle_since_s < expired_s or not idle[0].is_open):
                idle.popleft().abort()
            if not idle:
                del self._idle[base]
                self._origins.pop(base, None)  # of a replica that may be gone
        if self._idle:
            self._sweep = self._loop.call_later(_IDLE_S / 2, self._close_idle)


def _origin_of(base: str) -> _Origin:
    url = URL(base)
    assert url.host is not None, "the URLs of replicas are validated"
    assert url.port is not None, "http and https have default ports"
    tls = ssl.create_default_context() if url.scheme == "https" else None
    header = base.partition("://")[2].encode()
    return _Origin(url.host, url.port, tls, header)


def _encode_head(
    request: web.BaseRequest, origin: _Origin, body_bytes: int, *, of_tenant: bool
) -> bytes:
    """Return the head of a request to a replica, without headers that are not forwarded.

    Args:
        request: the client's request.
        origin: the replica.
        body_bytes: length of the body.
        of_tenant: True to leave out everything that may contain a tenant's key.

    Raises:
        APIError: 400 if the path cannot be forwarded.
    """
    # Use only the path, because the request line may contain a host ("GET http://… HTTP/1.1").
    url = request.rel_url
    path = url.raw_path if of_tenant else url.raw_path_qs
    if not path.isascii() or not path.isprintable() or " " in path:
        raise bad_request("the request's path cannot be forwarded")
    lines = [f"{request.method} {path} HTTP/1.1".encode(), b"Host: " + origin.header]
    hidden = _NOT_FORWARDED_OF_TENANTS if of_tenant else _NOT_FORWARDED
    forwarded = end_to_end(request.raw_headers, also=hidden)
    lines += [b"%b: %b" % header for header in forwarded]
    if body_bytes or request.method == "POST":
        lines.append(b"Content-Length: %d" % body_bytes)
    return b"\r\n".join((*lines, b"", b""))
