"""Who gives running requests to whom: Llumnix' law for balance and against fragmentation.

A replica's *freeness* is how many blocks each of its requests could still grow by: free blocks
less those that the head of its queue waits for, over its requests. A long request that fits
nowhere makes its replica the least free of all, and what runs there moves away until it fits.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving", OSDI 2024,
sections 4.3 and 4.4. It must not know what moves, nor how.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Occupancy", "pair_up", "shrinks_gap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """How full a replica is.

    Args:
        name: of the replica.
        free_blocks: KV blocks that can be handed out at once.
        demanded_blocks: what the head of the queue waits for.
        requests: that run, and the head of the queue.
    """

    name: str
    free_blocks: int
    demanded_blocks: int
    requests: int

    @property
    def freeness(self) -> float:
        """Blocks per request; negative where the queue cannot move on."""
        return (self.free_blocks - self.demanded_blocks) / max(1, self.requests)


def pair_up(
    replicas: Sequence[Occupancy], *, below_blocks: int
) -> list[tuple[Occupancy, Occupancy]]:
    """The least free with the most free, the second least with the second most, and so on.

    Args:
        replicas: those that may give or take.
        below_blocks: a replica gives only while its freeness is less than this.
    """
    ranked = sorted(replicas, key=lambda r: (r.freeness, r.name))
    half = len(ranked) // 2
    pairs = zip(ranked[:half], reversed(ranked), strict=False)
    return [pair for pair in pairs if pair[0].freeness < below_blocks]


def shrinks_gap(source: Occupancy, target: Occupancy, blocks: int) -> bool:
    """Whether a request of so many blocks, moved, brings the two closer.

    Then it is not moved back: that would take them apart again.
    """
    given = Occupancy(
        name=source.name,
        free_blocks=source.free_blocks + blocks,
        demanded_blocks=source.demanded_blocks,
        requests=source.requests - 1,
    )
    taken = Occupancy(
        name=target.name,
        free_blocks=target.free_blocks - blocks,
        demanded_blocks=target.demanded_blocks,
        requests=target.requests + 1,
    )
    return abs(taken.freeness - given.freeness) < target.freeness - source.freeness
