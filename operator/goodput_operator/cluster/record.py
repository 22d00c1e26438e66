"""What the operator keeps of one service from one turn to the next, in this process alone.

Nothing that matters is lost with it: a fresh operator starts from an empty one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from goodput_operator.decide.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goodput_operator.cluster.answers import Object

__all__ = ["Record"]


@dataclass(slots=True)
class Record:
    """One service's; changed during its turns and at no other time.

    Args:
        uid: a namesake that comes later starts afresh.
        memory: of the decisions.
        failures: what was answered to the last turn's actions, by kind and name.
        tokens: the Secrets that are known to be there, and since when (ns): they are never read.
        foreign: objects of others that stand where ours should, as last seen.
        written: the service as our last write of its status left it.
    """

    uid: str
    memory: Memory = field(default_factory=Memory)
    failures: Mapping[tuple[str, str], str] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    foreign: dict[tuple[str, str], Object] = field(default_factory=dict)
    written: Object | None = None
