"""Errors that end an attempt on a replica early; the user never sees them.

GoodputError
└── RouterError
    ├── ReplicaLost            the replica sent no response, or an incomplete one
    ├── FilesExhausted         this process cannot open another file for a connection
    ├── Expired                no data arrived in time
    ├── Stopping               the router's grace period ended
    └── Rerouted               the replica hangs, and another replica gets the request

The router's own error responses are `APIError`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from goodput_core.errors import GoodputError

if TYPE_CHECKING:
    from goodput_engine.router.replicas import Replica

__all__ = [
    "Expired",
    "FilesExhausted",
    "ReplicaLost",
    "Rerouted",
    "RetryReason",
    "RouterError",
    "Stopping",
]


class RetryReason(StrEnum):
    """Reason for a second attempt; a label of the metric of retries."""

    CONNECT = "connect"
    """No connection to the replica."""
    LOST = "lost"
    """The connection broke before the first token."""
    SERVER_ERROR = "server_error"
    """The replica responded with 5xx."""
    HUNG = "hung"
    """The replica no longer responds to probes, and no part of the response had arrived."""
    SATURATED = "saturated"
    """The replica responded with 429 or 503."""
    STALE_CONNECTION = "stale_connection"
    """The replica had closed a pooled connection; the request is sent to it again."""


class RouterError(GoodputError):
    """Base of the router's own errors."""


class ReplicaLost(RouterError):
    """A replica sent no response, or only a part of one."""

    def __init__(self, reason: RetryReason, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


class FilesExhausted(RouterError):
    """This process reached its limit of open files."""


class Expired(RouterError):
    """No data arrived in time."""


class Stopping(RouterError):
    """The router ends all running requests."""


class Rerouted(RouterError):
    """A request moves from a hung replica to another one.

    Args:
        to: the other replica; the retry is already taken from the budget.
    """

    def __init__(self, to: Replica) -> None:
        self.to = to
        super().__init__(f"the replica hangs; {to.name} gets the request")
