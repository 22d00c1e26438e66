"""What is remembered of a service between two rounds; nothing that matters is lost with it.

A restarted operator begins with an empty one: what must outlive it stands in the service's status
and ConfigMap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from goodput_core.control import ServiceState
from goodput_core.spec.llmservice import LLMServiceSpec
from goodput_operator.control.decided import Decided

__all__ = ["Memory", "Settled", "Tallied", "Told", "Tried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """An apply to an object that exists, and the version at which it was tried.

    Where the same is asked for again and the version has not moved, the API server took it for no
    change: whatever looks different is not ours to mend, and is not tried again.

    Args:
        kind: of the object.
        name: its name.
        digest: of what was applied.
        version: the object's resourceVersion before.
    """

    kind: str
    name: str
    digest: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """That every object was as it should be, so that nothing need be rendered to see it again.

    Args:
        wanted: all that the objects are made from.
        versions: (kind, name, resourceVersion) of each.
    """

    wanted: tuple[object, ...]
    versions: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tallied:
    """Outcomes of one interval.

    Args:
        at_ns: its end.
        interval_ns: its length.
        counts: (class, good, total).
    """

    at_ns: int
    interval_ns: int
    counts: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What Events have told: it is told again only when it was otherwise in between.

    Args:
        silent: (pod, reason) of the pods that tell no numbers.
        refusing: pods that do not take their limits.
        decided: limits and replicas as the last interval left them; None: none has ended. Between
            two intervals they may follow the manifest, of which the next one tells.
    """

    silent: frozenset[tuple[str, str]] = frozenset()
    refusing: frozenset[str] = frozenset()
    decided: Decided | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One service's.

    Args:
        law: the control law's own.
        decided: limits and replicas in force; None: what the ConfigMap says.
        created_ns: when each engine pod was first seen, by uid; None: it has been routable.
        startups_ns: from created to routable, of the latest pods that started.
        measured_ns: the end of the last interval that was measured; None: none was.
        window: outcomes of the last minutes.
        tokens: uids of the revisions whose Secret was made.
        told: what Events have told.
        spec: as it was read, and of which generation; None: it was not, or cannot be followed.
        settled: that nothing was to be applied in the last round; None: something was.
        tried: what was applied in the last round to objects that exist.
        status_written_ns: when the status was last written; None: not by this operator.
    """

    law: ServiceState = field(default_factory=ServiceState)
    decided: Decided | None = None
    created_ns: tuple[tuple[str, int | None], ...] = ()
    startups_ns: tuple[int, ...] = ()
    measured_ns: int | None = None
    window: tuple[Tallied, ...] = ()
    tokens: tuple[str, ...] = ()
    told: Told = field(default_factory=Told)
    spec: tuple[int, LLMServiceSpec] | None = None
    settled: Settled | None = None
    tried: tuple[Tried, ...] = ()
    status_written_ns: int | None = None
