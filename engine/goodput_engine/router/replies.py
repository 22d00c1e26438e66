"""The answers that the router gives itself, in OpenAI's error form."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

__all__ = ["error_event", "error_response"]

_TYPES: Final = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_SERVER_ERROR: Final = "server_error"


def _body(message: str, type_: str, code: str) -> bytes:
    error = {"message": message, "type": type_, "param": None, "code": code}
    return msgspec.json.encode({"error": error})


def error_response(
    status: int, message: str, code: str, *, retry_after_s: int | None = None
) -> web.Response:
    """A whole answer of the router's own.

    Args:
        status: the HTTP status.
        message: one sentence for the client.
        code: a short stable word.
        retry_after_s: when to try again, where that can help.
    """
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return web.Response(
        status=status,
        body=_body(message, _TYPES.get(status, _SERVER_ERROR), code),
        content_type="application/json",
        headers=headers,
    )


def error_event(message: str, code: str) -> bytes:
    """The last event of a stream that broke; it first ends whatever line was left open."""
    return b"\n\ndata: " + _body(message, _SERVER_ERROR, code) + b"\n\n"
