"""The result of a decision about a TraceReplay: actions in the order of execution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from goodput_operator.reconcile.actions import Create, Delete, Emit, WriteStatus

__all__ = ["CreateReplayToken", "PostStart", "ReplayAction", "ReplayDecision"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateReplayToken:
    """Create the Secret with the token of the shards; the token is added to `body`."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostStart:
    """Send the start to one armed shard."""

    pod: str
    url: str
    start_at: str


ReplayAction = Create | CreateReplayToken | PostStart | WriteStatus | Delete | Emit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDecision:
    """Actions in order, and the time after which to decide again; None to wait for a change."""

    actions: tuple[ReplayAction, ...] = ()
    wake_after_s: float | None = None
