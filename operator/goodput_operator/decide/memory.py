"""What is remembered of a service between two rounds; nothing that matters is lost with it.

A restarted operator begins with an empty one: what must outlive it stands in the service's status
and ConfigMap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from goodput_core.control import ServiceState

__all__ = ["Memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One service's.

    Args:
        law: the control law's own.
        created_ns: when each engine pod was first seen, by uid, until it is routable.
        startups_ns: from created to routable, of the latest pods that started.
        status_written_ns: when the status was last written; None: not by this operator.
    """

    law: ServiceState = field(default_factory=ServiceState)
    created_ns: tuple[tuple[str, int], ...] = ()
    startups_ns: tuple[int, ...] = ()
    status_written_ns: int | None = None
