"""One attempt on one replica: open or reuse a connection, send, wait for the response's head.

Every failure before the head becomes `ReplicaLost` or `FilesExhausted`; the caller decides about
a retry.
"""

from __future__ import annotations

import errno
import io
from typing import TYPE_CHECKING, Final

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from goodput_core.units import NS_PER_S
from goodput_engine.openai.errors import bad_request
from goodput_engine.router.errors import FilesExhausted, ReplicaLost, RetryReason

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import SimpleNamespace

    from aiohttp import web
    from multidict import CIMultiDictProxy

    from goodput_engine.router.replicas import Replica
    from goodput_engine.router.request_state import ProxiedRequest
    from goodput_engine.router.settings import Timeouts

__all__ = ["UpstreamClient", "end_to_end", "out_of_files"]

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
# The new connection sets its own Host and Content-Length; Expect was handled with the body.
_OF_REQUEST: Final = ("Host", "Content-Length", "Expect")
_AUTO_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
# Larger bodies are written in pieces, so that a long prompt does not stall other streams.
_WHOLE_BYTES: Final = 256 << 10
_GONE: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)


def out_of_files(error: BaseException) -> bool:
    """Return True if a connection failed because the limit of open files is reached."""
    return isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers that a proxy forwards."""
    passed = CIMultiDict(headers)
    for named in headers.getall("Connection", ()):
        for name in named.split(","):
            passed.popall(name.strip(), None)
    for name in _HOP_BY_HOP:
        passed.popall(name, None)
    return passed


class UpstreamClient:
    """The router's pool of connections to replicas.

    Args:
        timeouts: time limits, of which the one for connecting is used.
        on_stale: called when a pooled connection turns out to be closed.
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
        # Only the path: the request line may name a host of its own ("GET http://… HTTP/1.1").
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
            if out_of_files(error):
                raise FilesExhausted("the limit of open files is reached") from error
            raise ReplicaLost(
                RetryReason.CONNECT, f"cannot connect to replica {replica.name}"
            ) from error
        except ValueError as error:  # text that HTTP cannot carry, an invalid URL included
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
            data=body if len(body) <= _WHOLE_BYTES else io.BytesIO(body),
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
