"""The ways in which an attempt on a replica ends early; none of them reaches a user.

GoodputError
└── RouterError
    ├── ReplicaLost            no usable, or no complete, response came
    ├── FilesExhausted         this process has no file left for a connection
    ├── Expired                nothing arrived in time
    ├── Stopping               the router's grace period ended
    └── Rerouted               the replica hangs, and another gets the request

What the router answers itself is an `APIError`.
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
    """The reasons of a second attempt; a label of the metric of retries."""

    CONNECT = "connect"
    """No connection to the replica."""
    LOST = "lost"
    """The connection broke before the first token."""
    SERVER_ERROR = "server_error"
    """The replica answered 5xx."""
    HUNG = "hung"
    """The replica stopped answering probes, and nothing of the response had arrived."""
    SATURATED = "saturated"
    """The replica answered 429 or 503."""
    STALE_CONNECTION = "stale_connection"
    """The replica had closed a pooled connection; it gets the request again."""


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
    """Nothing arrived in time."""


class Stopping(RouterError):
    """The router ends all running requests."""


class Rerouted(RouterError):
    """A request leaves a replica that hangs.

    Args:
        to: the replica that gets it; the retry is already taken from the budget.
    """

    def __init__(self, to: Replica) -> None:
        self.to = to
        super().__init__(f"the replica hangs; {to.name} gets the request")
