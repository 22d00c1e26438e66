"""Reasons of failed connections contain no class names, codes or quoted bytes of the client."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.http_exceptions import BadStatusLine

from goodput_replay.sending.client.reason import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

KEY: Any = ConnectionKey("h", 1, False, True, None, None, None)


def untrusted() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] … (_ssl.c:1006)")
    error.verify_message = "self-signed certificate"
    return error


def no_tls() -> ssl.SSLError:
    error = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)")
    error.reason = "WRONG_VERSION_NUMBER"
    return error


def response(message: str) -> aiohttp.ClientResponseError:
    return aiohttp.ClientResponseError(None, (), status=400, message=message)  # type: ignore[arg-type]  # never sent


REASONS = {
    "refused": (
        lambda: aiohttp.ClientConnectorError(
            KEY, OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 9)")
        ),
        "Connection refused",
    ),
    "no such host": (
        lambda: aiohttp.ClientConnectorDNSError(
            KEY, socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        ),
        "Name or service not known",
    ),
    "a certificate": (
        lambda: aiohttp.ClientConnectorCertificateError(KEY, untrusted()),
        "its certificate is not trusted: self-signed certificate",
    ),
    "no TLS": (
        lambda: aiohttp.ClientConnectorSSLError(KEY, no_tls()),
        "TLS failed: wrong version number",
    ),
    "reset": (
        lambda: aiohttp.ClientOSError(errno.ECONNRESET, "[Errno 104] Connection reset by peer"),
        "Connection reset by peer",
    ),
    "closed": (aiohttp.ServerDisconnectedError, "the server closed the connection"),
    "truncated": (
        lambda: aiohttp.ClientPayloadError(
            "Response payload is not completed: <ContentLengthError: 400, message='Not enough'>"
        ),
        "the response was truncated or malformed",
    ),
    "no HTTP": (
        lambda: response(BadStatusLine("SSH-2.0", "Bad status line:\n\n  b'SSH-2.0'\n").message),
        "Bad status line",
    ),
    "a long header": (
        lambda: response("Got more than 8190 bytes when reading: b'aaaaaa...'."),
        "Got more than 8190 bytes when reading",
    ),
    "without a message": (OSError, "OSError"),
    "a bare error": (ValueError, "ValueError"),
}


@pytest.mark.parametrize(("make", "words"), REASONS.values(), ids=REASONS)
def test_a_failed_connection_has_a_plain_reason(
    make: Callable[[], BaseException], words: str
) -> None:
    assert reason_of(make()) == words
