"""What can end a request inside the router; none of these reaches a user as an exception.

GoodputError
└── RouterError
    ├── ClientFault            the client's own doing: answered with 4xx, never a missed promise
    ├── Crowded                no room for one more request's body: answered with 429
    ├── ReplicaLost            no usable, or no whole, answer came; says why
    ├── Expired                nothing moved for too long
    ├── Stopping               the router's time to drain is over
    └── Diverted               the replica hangs, and another is asked instead
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from goodput_core.errors import GoodputError

if TYPE_CHECKING:
    from goodput_engine.router.replicas import Replica

__all__ = [
    "ClientFault",
    "Crowded",
    "Diverted",
    "Expired",
    "ReplicaLost",
    "RetryReason",
    "RouterError",
    "Stopping",
]


class RetryReason(StrEnum):
    """Why a request was sent a second time; a label of the metric of retries."""

    CONNECT = "connect"
    """The replica could not be connected to."""
    LOST = "lost"
    """The connection broke before the first token."""
    SERVER_ERROR = "server_error"
    """The replica answered 5xx."""
    HUNG = "hung"
    """The replica answered no probes any more, and nothing had come of the request's answer."""
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


class Crowded(RouterError):
    """The router holds as many bytes of requests as it may."""


class ReplicaLost(RouterError):
    """A replica gave no answer, or only a part of one."""

    def __init__(self, reason: RetryReason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


class Expired(RouterError):
    """Nothing came in time."""


class Stopping(RouterError):
    """The router ends what still runs."""


class Diverted(RouterError):
    """A request leaves a replica that hangs.

    Args:
        to: the replica to ask instead; the retry is paid for.
    """

    def __init__(self, to: Replica) -> None:
        self.to = to
        super().__init__(f"the replica hangs; {to.name} is asked instead")
