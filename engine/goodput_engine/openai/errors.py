"""Errors in OpenAI's form, as a response body and as the last event of a broken stream.

Server and router respond with one of these errors to every request that they do not serve, so a
client library always finds the same fields.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from goodput_core.errors import GoodputError
from goodput_core.placement import PlacementReason

__all__ = [
    "APIError",
    "bad_request",
    "error_body",
    "error_event",
    "is_failure",
    "is_known_reason",
    "is_overload",
    "not_placed",
    "overloaded",
    "read_error",
    "reported_status",
    "too_long",
    "unavailable",
]

_FAILURES: Final = ("error", "abort")
# Reasons of OpenAI, and of other servers and models that have its API.
_REASONS: Final = frozenset(
    {
        "content_filter",
        "end_turn",
        "eos",
        "eos_token",
        "function_call",
        "length",
        "max_tokens",
        "model_length",
        "stop",
        "stop_sequence",
        "tool_calls",
        "tool_use",
    }
)
_RATE_LIMIT: Final = "rate_limit_error"
_INVALID: Final = "invalid_request_error"
# Types of errors in OpenAI's and Anthropic's APIs that blame the request, and their statuses.
_STATUSES: Final = {
    _INVALID: 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
}
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


class _ErrorFields(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw()
    errors: msgspec.Raw = msgspec.Raw()


_ERROR_OBJECT: Final = msgspec.json.Decoder(_ErrorObject)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES: Final = msgspec.json.Decoder(list[_ErrorFields] | None)
_NO_ERRORS: Final = (msgspec.Raw(b"null"), msgspec.Raw(b"false"))
# Fields of events of a completion; the last two are those of llama.cpp and Azure.
_COMPLETION_FIELDS: Final = frozenset({"choices", "usage", "timings", "prompt_filter_results"})
_KEEP_ALIVE: Final = frozenset(
    b'"%b"' % word for word in (b"ping", b"heartbeat", b"keepalive", b"keep-alive", b"keep_alive")
)


def read_error(event: bytes) -> bytes | None:
    """Return the error in an event of a stream, as JSON; None if it reports no error.

    Servers report an error as the `error` or the `errors` of an event or of a choice, or as an
    event that has the fields of the error in place of those of a completion. An event without any
    field of a completion therefore is an error, unless it is empty or keeps the connection alive.
    """
    try:
        fields = _FIELDS.decode(event)
        choices = _CHOICES.decode(fields.get("choices", b"[]"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    kind = bytes(fields.get("object", b""))
    if kind == b'"error"':
        return event
    values = [fields.get("error", b""), fields.get("errors", b"")]
    for choice in choices or ():
        values += (choice.error, choice.errors)
    for raw in values:
        if len(raw) > 2 and raw not in _NO_ERRORS:  # not absent, 0, "", [] or {} either
            return bytes(raw)
    if not fields or not _COMPLETION_FIELDS.isdisjoint(fields) or b"completion" in kind:
        return None
    return None if bytes(fields.get("type", kind)) in _KEEP_ALIVE else event


def is_failure(finish_reason: str) -> bool:
    """Return True if a server reports with this reason that it failed to complete an output."""
    return finish_reason.lower().startswith(_FAILURES)


def is_known_reason(finish_reason: str) -> bool:
    """Return True if this reason is known to end a complete output."""
    return finish_reason.lower() in _REASONS


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


def reported_status(error: bytes | msgspec.Raw) -> int | None:
    """Return the status 4xx that an error object of a stream states; None without one.

    The status is the code of the error, or that of its type if the code is no status of an error,
    which are 400 to 599.

    Args:
        error: the value of `error` in an event, as JSON.
    """
    try:
        decoded = _ERROR_OBJECT.decode(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    code = decoded.code
    if isinstance(code, str) and len(code) == 3 and code.isascii() and code.isdigit():
        code = int(code)
    if isinstance(code, int) and 400 <= code < 600:
        return code if code < 500 else None
    return _STATUSES.get(decoded.type) if isinstance(decoded.type, str) else None


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


def unavailable(message: str, code: str, *, retry_after_s: int = 1) -> APIError:
    """Return a 503."""
    return APIError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, retry_after_s=retry_after_s)


def not_placed(reason: PlacementReason) -> APIError:
    """Return the 429 or 503 for a request that no replica can take.

    Args:
        reason: the reason of the placement.
    """
    if reason is PlacementReason.ALL_SATURATED:
        return overloaded("every replica is full; retry shortly", 1)
    return unavailable("no replica is ready; retry shortly", "no_replica_ready")


def _escape_surrogates(text: str) -> str:
    """Replace lone surrogates, which request lines and headers can contain but JSON cannot."""
    return text.encode("utf-8", "backslashreplace").decode()
