"""The frozen state of the cluster from which one reconciliation of a TraceReplay decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from goodput_core.replay_job import ShardState
from goodput_operator.kube.objects import Object

__all__ = ["ReplaySnapshot", "ShardReading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReading:
    """The state of one ready shard, or the error of the request.

    Args:
        state: the state; None after an error.
        detail: the error, for users; empty with a state.
        asked_ns, answered_ns: times of request and response on the operator's wall clock.
    """

    state: ShardState | None
    detail: str = ""
    asked_ns: int = 0
    answered_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySnapshot:
    """A TraceReplay and its objects.

    Args:
        unix_ns: current calendar time.
        replay: the TraceReplay.
        jobs: its Jobs.
        pods: pods of its Jobs.
        service: the target LLMService; None if it does not exist, or if the target is a URL.
        claims: access modes of the named PersistentVolumeClaims, None for one that does not exist;
            only read before the shards are created.
        unread: errors of reading these claims; empty if all were read.
        rejected: message with which the API server rejected the last creation of an object; empty
            if it rejected none.
        readings: states of ready shards by the name of the pod; only read until the shards start.
        siblings: all TraceReplays of the namespace.
    """

    unix_ns: int
    replay: Object
    jobs: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    service: Object | None = None
    claims: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    unread: str = ""
    rejected: str = ""
    readings: Mapping[str, ShardReading] = field(default_factory=dict)
    siblings: tuple[Object, ...] = ()
