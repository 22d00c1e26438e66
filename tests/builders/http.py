"""Raw HTTP over plain connections, for requests that no HTTP library sends."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from yarl import URL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["PATIENCE_S", "RawConnection", "connect", "post_bytes"]

PATIENCE_S = 60.0
"""Time limit of each wait of a test."""

RawConnection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connect(url: str, *, receive_bytes: int | None = None) -> AsyncIterator[RawConnection]:
    """Open a connection to the host and port of a URL.

    At the end the connection is aborted and not only closed: the rest of a request that the
    server does not read would keep it open until the event loop ends.

    Args:
        url: any URL of the server.
        receive_bytes: size of the receive buffers; None for the system's.
    """
    address = URL(url)
    assert address.host is not None
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes or 1 << 16)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


def post_bytes(
    body: bytes, *headers: str, path: str = "/v1/completions", length: int | None = None
) -> bytes:
    """Return a POST request.

    Args:
        body: the body.
        headers: further header lines.
        path: the request's path.
        length: the announced length of the body; None for its real one.
    """
    announced = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {announced}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body
