"""Connection pool of a run, and the streams on its connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import aiohttp

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Mapping

__all__ = ["StreamWatch", "open_session"]

# Common servers close an idle connection after five seconds. A request that is sent at that moment
# would fail, although neither the client nor the server is at fault.
_KEEPALIVE_S: Final = 4.0
_READ_BUFFER: Final = 1 << 18


def open_session(
    headers: Mapping[str, str], tls: ssl.SSLContext | None = None
) -> aiohttp.ClientSession:
    """Open a session without a limit of connections, so that sends never wait for responses.

    Args:
        headers: headers of every request.
        tls: TLS settings; None for certificates that the system trusts.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_KEEPALIVE_S,
            ttl_dns_cache=60,
            happy_eyeballs_delay=None,
            ssl=True if tls is None else tls,
        ),
        headers={"Accept-Encoding": "identity", **headers},
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        auto_decompress=False,
        read_bufsize=_READ_BUFFER,
        raise_for_status=False,
        trust_env=False,
    )


class StreamWatch:
    """Ends streams whose connection was closed.

    If the chunks of a body are malformed, aiohttp closes the connection, but the reader of the body
    would wait until its time limit.
    """

    def __init__(self) -> None:
        self._streams: dict[asyncio.Future[None], aiohttp.StreamReader] = {}

    def add(self, response: aiohttp.ClientResponse) -> None:
        """Watch the body of a response; its connection no longer belongs to an earlier one."""
        connection = response.connection
        if connection is None or connection.protocol is None:
            return  # the body is complete
        closed = connection.protocol.closed
        if closed is None:
            _end(response.content)
            return
        if closed not in self._streams:
            closed.add_done_callback(self._close)
        self._streams[closed] = response.content

    def _close(self, closed: asyncio.Future[None]) -> None:
        _end(self._streams.pop(closed))
        if not closed.cancelled():
            closed.exception()  # already known to the stream; asyncio would log it otherwise


def _end(stream: aiohttp.StreamReader) -> None:
    if not stream.is_eof() and stream.exception() is None:
        stream.set_exception(aiohttp.ClientPayloadError("malformed chunks"))
