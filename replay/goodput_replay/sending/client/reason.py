"""Short reasons of failed connections, for error messages and records.

The messages of the HTTP client's exceptions contain class names, error codes and quoted bytes of
the response. The reasons here contain none of these.
"""

from __future__ import annotations

import os
import ssl

import aiohttp
from aiohttp.http import HttpProcessingError

__all__ = ["reason_of"]

_MAX_CHARACTERS = 120


def reason_of(error: BaseException) -> str:
    """Return the reason of a failed connection, on one line without a full stop.

    Args:
        error: exception of the HTTP client or the system.
    """
    if isinstance(error, aiohttp.ClientConnectorError):
        return reason_of(error.os_error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return _line(f"its certificate is not trusted: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        return _line(f"TLS failed: {(error.reason or 'no reason given').replace('_', ' ').lower()}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError | HttpProcessingError):
        return "the response was truncated or malformed"
    if isinstance(error, OSError):
        # Name resolution errors have negative codes and messages of their own.
        number = error.errno or 0
        message = os.strerror(number) if number > 0 else error.strerror
        return _line(message or type(error).__name__)
    message = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return _line(message) or type(error).__name__


def _line(text: str) -> str:
    """Return the first line, without the response bytes that a parser quotes after a colon."""
    first = text.strip().partition("\n")[0].partition(": b'")[0]
    return " ".join(first.split())[:_MAX_CHARACTERS].rstrip(" .:")
