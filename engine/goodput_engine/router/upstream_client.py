"""One attempt on one replica: open or reuse a connection, send, wait for the answer's head.

Everything that can go wrong before the head becomes `ReplicaLost`; what to do about it is the
caller's to decide.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from goodput_core.units import NS_PER_S
from goodput_engine.router.errors import ReplicaLost, RetryReason

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

    from aiohttp import web
    from multidict import CIMultiDictProxy

    from goodput_engine.router.replicas import Replica
    from goodput_engine.router.request_state import RequestState
    from goodput_engine.router.settings import Timeouts

__all__ = ["UpstreamClient", "end_to_end"]

# RFC 9110, 7.6.1: these belong to one connection. Host and the length are the new
# connection's own; Expect was answered when the body was read.
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
_OF_REQUEST: Final = ("Host", "Content-Length", "Expect")
_AUTO_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
# Larger bodies are written in pieces, so that one long prompt does not stall every stream.
_WHOLE_BYTES: Final = 256 << 10
_GONE: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers that a proxy passes on."""
    passed = CIMultiDict(headers)
    for named in headers.getall("Connection", ()):
        for name in named.split(","):
            passed.popall(name.strip(), None)
    for name in _HOP_BY_HOP:
        passed.popall(name, None)
    return passed


class UpstreamClient:
    """The router's one pool of connections to replicas.

    Args:
        timeouts: how long to wait for a connection.
        on_stale: called when a pooled connection turned out to be closed.
    """

    def __init__(self, timeouts: Timeouts, on_stale: Callable[[], None]) -> None:
        self._on_stale = on_stale
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self.session: Final = aiohttp.ClientSession(
            # No limit: admission is the replicas' to decide, a hidden queue here would delay it.
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
        self, request: web.BaseRequest, state: RequestState, replica: Replica
    ) -> aiohttp.ClientResponse:
        """Send the request as it came and wait for the answer's head.

        A pooled connection that the replica had closed meanwhile fails before a byte of answer;
        the request is sent once more then, on the same replica, at most once in its life.

        Raises:
            ReplicaLost: no head came.
        """
        # Never the request's own idea of a host: its line may name one ("GET http://… HTTP/1.1").
        url = URL(replica.base + request.rel_url.raw_path_qs, encoded=True)
        headers = end_to_end(request.headers)
        for name in _OF_REQUEST:
            headers.popall(name, None)
        reused: list[bool] = []
        try:
            try:
                return await self._open(request.method, url, headers, state.body, reused)
            except _GONE as error:
                connecting = isinstance(error, aiohttp.ClientConnectorError)
                if connecting or not reused or state.met_stale:
                    raise
            state.met_stale = True
            self._on_stale()
            return await self._open(request.method, url, headers, state.body, reused)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ReplicaLost(
                RetryReason.CONNECT, f"cannot connect to replica {replica.name}"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(
                RetryReason.LOST, f"replica {replica.name} closed the connection unanswered"
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
            data=body if len(body) <= _WHOLE_BYTES else io.BytesIO(body),
            allow_redirects=False,
            trace_request_ctx=reused,
        )


async def _note_reuse(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    if context.trace_request_ctx is not None:  # a probe has none
        context.trace_request_ctx.append(True)
