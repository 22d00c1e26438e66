"""Errors that end the operator process.

GoodputError
├── InternalError
│   ├── LeaseLostError      the Lease is no longer held, so another operator may write
│   └── WatchFailedError    Kopf ended a watch and does not resume it
└── UnreachableError        no API server, or one without LLMServices
"""

from __future__ import annotations

from goodput_core.errors import InternalError

__all__ = ["LeaseLostError", "WatchFailedError"]


class LeaseLostError(InternalError):
    """The Lease is no longer held; its new holder may write."""


class WatchFailedError(InternalError):
    """A watch of the cluster ended and cannot resume; the operator must restart."""
