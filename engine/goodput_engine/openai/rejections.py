"""The HTTP error of a request that the engine core rejected.

The engine's server responds with it, and an emulated fleet records it, so a replay in virtual time
has the same errors as one over HTTP.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from goodput_engine.openai.errors import APIError, bad_request, overloaded, too_long, unavailable

if TYPE_CHECKING:
    from goodput_engine.messages import Rejected

__all__ = ["rejection_error"]

_MAX_RETRY_AFTER_S: Final = 60


def rejection_error(rejected: Rejected) -> APIError:
    """Return the error of a request that the engine core rejected or removed.

    It is a 429 or a 503 if a retry can help, a 400 if the request is invalid, and a 500 if the
    model is damaged.
    """
    if rejected.reason == "too_long":
        return too_long(rejected.detail)
    if rejected.reason == "draining":
        return unavailable("the engine is stopping; use another replica", "draining")
    if rejected.reason == "out_of_memory":
        return unavailable(rejected.detail, "out_of_memory")
    if rejected.reason == "not_finite":
        return APIError(HTTPStatus.INTERNAL_SERVER_ERROR, rejected.detail, code="logits_not_finite")
    if rejected.retry_after_s:
        return overloaded(rejected.detail, max(1, min(rejected.retry_after_s, _MAX_RETRY_AFTER_S)))
    # Only an output with a grammar becomes invalid after its admission.
    param = rejected.detail.partition(":")[0]
    return bad_request(rejected.detail, param if param == "response_format" else None)
