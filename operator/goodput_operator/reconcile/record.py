"""What the operator keeps of one service from one turn to the next, in this process alone.

Nothing that matters is lost with it: a fresh operator starts from an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from goodput_operator.kube.objects import Object
from goodput_operator.reconcile.memory import Memory

__all__ = ["Record"]


@dataclass(slots=True)
class Record:
    """One service's; changed during its turns and at no other time.

    Args:
        uid: a namesake that comes later starts afresh.
        memory: of the decisions.
        failures: what was answered to the last turn's actions, by kind and name.
        delayed: the same of what may pass by itself.
        foreign: objects of others that stand where ours should, as last seen.
        written: the service as our last write of its status left it.
    """

    uid: str
    memory: Memory = field(default_factory=Memory)
    failures: Mapping[tuple[str, str], str] = field(default_factory=dict)
    delayed: Mapping[tuple[str, str], str] = field(default_factory=dict)
    foreign: dict[tuple[str, str], Object] = field(default_factory=dict)
    written: Object | None = None
