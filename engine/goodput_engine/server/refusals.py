"""Why a request was not answered, in OpenAI's error form.

Every refusal is one value that both an HTTP answer and an event of a running stream can carry,
so that a client library reads the same fields in both.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

__all__ = [
    "Refusal",
    "bad_request",
    "draining",
    "engine_died",
    "error_json",
    "overloaded",
    "starting",
    "too_long",
]


class Refusal(Exception):
    """An answer other than the one asked for.

    Args:
        status: HTTP status.
        message: one sentence for the client: what, and what to do.
        kind: OpenAI's `type`.
        param: the field of the body, or the header, that is to blame.
        code: OpenAI's `code`, for programs.
        retry_after_s: when trying again may help; 0: it will not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def error_json(refusal: Refusal) -> bytes:
    """OpenAI's error object."""
    return msgspec.json.encode(
        {
            "error": {
                "message": refusal.message,
                "type": refusal.kind,
                "param": refusal.param,
                "code": refusal.code,
            }
        }
    )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """400: the request breaks a rule."""
    return Refusal(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def too_long(message: str, param: str | None = None) -> Refusal:
    """400: prompt and answer do not fit the model's context."""
    return bad_request(message, param, "context_length_exceeded")


def overloaded(message: str, retry_after_s: int) -> Refusal:
    """429: as much waits as may wait."""
    return Refusal(
        HTTPStatus.TOO_MANY_REQUESTS,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=retry_after_s,
    )


def starting() -> Refusal:
    """503: the core has not said that it is ready."""
    return _unavailable("the engine is starting; try again in a moment", "starting", 1)


def draining() -> Refusal:
    """503: the process was told to stop."""
    return _unavailable("the engine is stopping; try another replica", "draining", 1)


def engine_died() -> Refusal:
    """503: the core's process is gone, and this one follows."""
    return _unavailable("the engine failed; try another replica", "engine_died", 1)


def _unavailable(message: str, code: str, retry_after_s: int) -> Refusal:
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        message,
        kind="server_error",
        code=code,
        retry_after_s=retry_after_s,
    )
