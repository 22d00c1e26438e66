"""What ends the operator, each as one sentence.

GoodputError
├── InternalError
│   ├── LeaseLostError      another operator may write now: this one must not
│   └── WatchFailedError    Kopf gave up on a stream of events
└── UnreachableError        no API server, or one that does not know LLMServices
"""

from __future__ import annotations

from goodput_core.errors import InternalError

__all__ = ["LeaseLostError", "WatchFailedError"]


class LeaseLostError(InternalError):
    """The Lease is held no more; whoever holds it now writes."""


class WatchFailedError(InternalError):
    """The watch of the cluster ended; a fresh process starts a fresh one."""
