"""How long engines take to start: from first seen to routable, the horizon of the replicas' law."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goodput_operator.decide.memory import Memory
    from goodput_operator.decide.view import PodView

__all__ = ["started"]

_STARTS: Final = 16
"""So many of the latest start-up times are told to the law."""


def started(
    memory: Memory, engines: Sequence[PodView], now_ns: int
) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...]]:
    """`created_ns` and `startups_ns` of the next memory.

    A pod that was ready when it was first seen says nothing: it started while nobody looked.
    """
    known = dict(memory.created_ns)
    startups = list(memory.startups_ns)
    waiting = []
    for pod in engines:
        begun_ns = known.get(pod.uid)
        if pod.ready and begun_ns is not None:
            startups.append(now_ns - begun_ns)
        elif not pod.ready and not pod.leaving:
            waiting.append((pod.uid, now_ns if begun_ns is None else begun_ns))
    return tuple(waiting), tuple(startups[-_STARTS:])
