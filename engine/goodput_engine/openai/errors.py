"""Errors in OpenAI's form, as a response body and as the last event of a broken stream.

Server and router respond with one of these errors to every request that they do not serve, so a
client library always finds the same fields.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from goodput_core.errors import GoodputError

__all__ = [
    "FAILURE_REASONS",
    "APIError",
    "bad_request",
    "error_body",
    "error_event",
    "is_overload",
    "overloaded",
    "read_error",
    "too_long",
    "unavailable",
]

FAILURE_REASONS: Final = frozenset({"error", "abort"})
"""Values of `finish_reason` with which servers report that they failed to complete an output."""

_RATE_LIMIT: Final = "rate_limit_error"
_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_OVERLOADED: Final = "rate_limit_exceeded"


class APIError(GoodputError):
    """An error response.

    Args:
        status: HTTP status.
        message: one sentence for the client: the problem and the remedy.
        param: the invalid field of the body, or the invalid header; None if there is none.
        code: OpenAI's `code`, for programs.
        retry_after_s: seconds after which to retry; 0 if a retry cannot help.
        close: True to close the connection after the response, because the request's body was not
            read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = int(status)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.close = close

    @property
    def kind(self) -> str:
        """OpenAI's `type`, which follows from the status."""
        if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return _SERVER
        return _RATE_LIMIT if self.status == HTTPStatus.TOO_MANY_REQUESTS else _INVALID

    @property
    def headers(self) -> dict[str, str]:
        """The response headers that belong to the status."""
        headers: dict[str, str] = {}
        if self.retry_after_s:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def error_body(error: APIError) -> bytes:
    """Return OpenAI's error object as JSON."""
    fields = {
        "message": _escape_surrogates(error.message),
        "type": error.kind,
        "param": None if error.param is None else _escape_surrogates(error.param),
        "code": error.code,
    }
    return msgspec.json.encode({"error": fields})


def error_event(error: APIError) -> bytes:
    """Return the server-sent event that ends a broken stream."""
    return b"data: %b\n\n" % error_body(error)


class _ErrorObject(msgspec.Struct):
    type: object = None
    code: object = None


class _ErrorChoice(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw()


class _ErrorEvent(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw()
    object: msgspec.Raw = msgspec.Raw()
    choices: list[_ErrorChoice] | None = None


_ERROR_OBJECT: Final = msgspec.json.Decoder(_ErrorObject)
_ERROR_EVENT: Final = msgspec.json.Decoder(_ErrorEvent)
_IS_ERROR: Final = msgspec.Raw(b'"error"')
_NO_ERRORS: Final = (msgspec.Raw(b"null"), msgspec.Raw(b"false"))


def read_error(event: bytes) -> bytes | None:
    """Return the error object in an event of a stream, as JSON; None if it reports no error.

    Servers report an error as `{"error": …}`, as `{"object": "error", …}` with the fields of the
    error beside it, or as the `error` of a choice.
    """
    if b'"error"' not in event:
        return None
    try:
        decoded = _ERROR_EVENT.decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if decoded.object == _IS_ERROR:
        return event
    for raw in (decoded.error, *(choice.error for choice in decoded.choices or ())):
        if len(raw) > 2 and raw not in _NO_ERRORS:  # not absent, 0, "", [] or {} either
            return bytes(raw)
    return None


def is_overload(error: bytes | msgspec.Raw) -> bool:
    """Return True if an error object of a stream has the meaning of a 429.

    Args:
        error: the value of `error` in an event, as JSON.
    """
    try:
        decoded = _ERROR_OBJECT.decode(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    codes = (_OVERLOADED, HTTPStatus.TOO_MANY_REQUESTS, str(HTTPStatus.TOO_MANY_REQUESTS.value))
    return decoded.type == _RATE_LIMIT or decoded.code in codes


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """Return a 400."""
    return APIError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def too_long(message: str, param: str | None = None) -> APIError:
    """Return the 400 for a prompt and an output that exceed the model's context."""
    return bad_request(message, param, "context_length_exceeded")


def overloaded(message: str, retry_after_s: int) -> APIError:
    """Return a 429."""
    return APIError(
        HTTPStatus.TOO_MANY_REQUESTS,
        message,
        code=_OVERLOADED,
        retry_after_s=retry_after_s,
    )


def unavailable(message: str, code: str) -> APIError:
    """Return a 503 with `Retry-After: 1`."""
    return APIError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, retry_after_s=1)


def _escape_surrogates(text: str) -> str:
    """Replace lone surrogates, which request lines and headers can contain but JSON cannot."""
    return text.encode("utf-8", "backslashreplace").decode()
