"""Connection pool of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import aiohttp

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

__all__ = ["open_session"]

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
