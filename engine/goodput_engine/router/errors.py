"""What can end a request inside the router; none of these reaches a user as an exception.

GoodputError
└── RouterError
    ├── ClientFault            the client's own doing: answered with 4xx, never a missed promise
    ├── ReplicaLost            no usable, or no whole, answer came; says why
    └── Expired                nothing moved for too long, or the router is stopping
"""

from __future__ import annotations

from enum import StrEnum

from goodput_core.errors import GoodputError

__all__ = ["ClientFault", "Expired", "ReplicaLost", "RetryReason", "RouterError"]


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
    """A replica gave no answer, or only a part of one."""

    def __init__(self, reason: RetryReason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


class Expired(RouterError):
    """A request's watchdog ended it.

    Args:
        stopping: because the router stops, not because of a time-out.
    """

    def __init__(self, *, stopping: bool) -> None:
        self.stopping = stopping
        super().__init__("the router is stopping" if stopping else "nothing came in time")
