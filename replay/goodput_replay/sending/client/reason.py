"""Why a connection failed, in a few plain words.

The HTTP client's exceptions print themselves with class names, error codes and quoted bytes of
the answer; what a user reads, and what stands in a run's records, holds none of that. What a
failure means for a request or a run is not known here.
"""

from __future__ import annotations

import os
import ssl

import aiohttp

__all__ = ["reason_of"]

_MAX_CHARACTERS = 120


def reason_of(error: BaseException) -> str:
    """The reason of a failed connection or exchange, on one line without an end.

    Args:
        error: what the HTTP client or the system raised.
    """
    if isinstance(error, aiohttp.ClientConnectorError):
        return reason_of(error.os_error)  # what the system said
    if isinstance(error, ssl.SSLCertVerificationError):
        return _line(f"its certificate is not trusted: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        return _line(f"TLS failed: {(error.reason or 'no reason given').replace('_', ' ').lower()}")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server hung up"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer was cut short"
    if isinstance(error, OSError):
        # Name resolution has negative codes of its own, and words for them.
        number = error.errno or 0
        said = os.strerror(number) if number > 0 else error.strerror
        return _line(said or type(error).__name__)
    said = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return _line(said) or type(error).__name__


def _line(text: str) -> str:
    """The first line, without the bytes of the answer that a parser quotes after a colon."""
    first = text.strip().partition("\n")[0].partition(": b'")[0]
    return " ".join(first.split())[:_MAX_CHARACTERS].rstrip(" .:")
