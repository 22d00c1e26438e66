"""How long engines take to start: from first seen to routable, the horizon of the replicas' law."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from goodput_core.control import ReplicaPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_operator.reconcile.memory import Memory
    from goodput_operator.reconcile.view import PodView

__all__ = ["begun", "started"]

_STARTS: Final = 16
"""So many of the latest start-up times are told to the law."""


def started(
    memory: Memory, engines: Sequence[PodView], now_ns: int
) -> tuple[tuple[tuple[str, int | None], ...], tuple[int, ...]]:
    """`created_ns` and `startups_ns` of the next memory.

    A pod that was ready when it was first seen says nothing: it started while nobody looked. Nor
    does one that is ready again: it did not start, it had missed a few probes.
    """
    known = dict(memory.created_ns)
    startups = list(memory.startups_ns)
    created = []
    for pod in engines:
        begun_ns = known.get(pod.uid, now_ns)
        if pod.ready and pod.uid in known and begun_ns is not None:
            startups.append(now_ns - begun_ns)
        created.append((pod.uid, begun_ns if pod.phase is ReplicaPhase.STARTING else None))
    return tuple(created), tuple(startups[-_STARTS:])


def begun(memory: Memory, engines: Sequence[PodView]) -> set[str]:
    """Revisions with a pod that starts and was not there in the last round."""
    known = dict(memory.created_ns)
    new = (pod for pod in engines if pod.uid not in known)
    return {pod.revision for pod in new if pod.phase is ReplicaPhase.STARTING}
