"""How the engines of a service are spread over its revisions while a new one comes in.

By surge, a step at a time: the new revision grows into a small surplus, and the old one shrinks
by as much as the new one serves. At no time do fewer serve than the service has; what the new one
loses again the stable one takes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Part", "spread"]

_SURGE: Final = 4
"""One in so many may be there beyond what the service has, and at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one revision has.

    Args:
        revision: its name.
        wanted: engines that it is asked for.
        pods: that it has.
        available: of these, serving.
    """

    revision: str
    wanted: int
    pods: int
    available: int


def spread(
    replicas: int, *, update: str, stable: str | None, parts: Sequence[Part]
) -> Mapping[str, int]:
    """How many engines each revision is to be asked for now.

    Args:
        replicas: of the service.
        update: the revision that is asked for.
        stable: the one that served before; None: none has yet.
        parts: of all revisions that have a workload, the latest first.
    """
    new = next(
        (part for part in parts if part.revision == update),
        Part(revision=update, wanted=0, pods=0, available=0),
    )
    others = [part for part in parts if part.revision != update]
    # Of more than are wanted some are on their way out already.
    missing = max(0, replicas - min(new.available, new.wanted))
    kept = dict.fromkeys((part.revision for part in others), 0)
    # What serves is worth keeping first, that of the stable revision before others'.
    for part in sorted(others, key=lambda part: part.revision != stable):
        kept[part.revision] = min(missing, part.wanted, part.available)
        missing -= kept[part.revision]
    if stable in kept:
        kept[stable] += missing
    holding = sum(max(part.pods, kept[part.revision]) for part in others)
    room = replicas if not holding else replicas + max(1, -(-replicas // _SURGE)) - holding
    return {update: min(replicas, max(new.wanted, room)), **kept}
