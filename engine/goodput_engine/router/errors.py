"""What can end a request inside the router; none of these reaches a user as an exception.

GoodputError
└── RouterError
    ├── ClientFault            the client's own doing: answered with 4xx, never a missed promise
    ├── ReplicaLost            no usable answer came; carries why, for the retry and its metric
    └── TryElsewhere           the attempt is given up in favour of another replica
"""

from __future__ import annotations

from enum import StrEnum

from goodput_core.errors import GoodputError

__all__ = ["ClientFault", "ReplicaLost", "RetryReason", "RouterError", "TryElsewhere"]


class RetryReason(StrEnum):
    """Why a request was sent a second time; a label of the metric of retries."""

    CONNECT = "connect"
    """The replica could not be connected to."""
    LOST = "lost"
    """The connection broke before the first token."""
    SERVER_ERROR = "server_error"
    """The replica answered 5xx."""
    SATURATED = "saturated"
    """The replica answered 429 or 503."""
    STALE_CONNECTION = "stale_connection"
    """A connection from the pool had been closed meanwhile; the same replica is asked again."""


class RouterError(GoodputError):
    """Base of the router's own errors."""


class ClientFault(RouterError):
    """A request that the router itself refuses.

    Args:
        status: an HTTP status from 400 to 499.
        message: one sentence for the client.
        code: OpenAI's short code.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        self.status = status
        self.code = code
        super().__init__(message)


class ReplicaLost(RouterError):
    """No usable answer came from a replica, and nothing was sent to the client."""

    def __init__(self, reason: RetryReason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


class TryElsewhere(RouterError):
    """Ask another replica; the retry is already paid for."""

    def __init__(self, reason: RetryReason) -> None:
        self.reason = reason
        super().__init__(reason.value)
