"""The ladder before KV memory runs out, where there is host memory to swap to.

Three rungs, each for a worse shortage than the one before:

1. *Offload ahead*. The request that would have to yield leaves while there are still blocks for
   the others, as many steps before as its copy takes. Nobody waits for blocks being copied.
2. *Keep the width*. While a copy of somebody lies in host memory, a further request starts only
   if every running one can grow by a block beside it. A request that came back, or a new one,
   would otherwise be out again before its copies had been worth it.
3. *Refuse*. When host memory is full of copies too, a request that would have to wait for
   memory is turned away. From there on victims are recomputed, so that more work makes less of
   it; those who were accepted have to get on first.

Without host memory nothing of this happens: freeing blocks takes no time then, and a full pool is
a pool well used. The functions here decide and do nothing.
"""

from __future__ import annotations

from typing import Final

from goodput_core.units import NS_PER_MS

__all__ = ["host_is_full", "offload_steps", "room_to_widen"]

_STEP_NS: Final = 10 * NS_PER_MS
"""What a copy is measured against. Steps are seldom shorter; where they are longer, a copy is
done earlier than it has to be. A measured time would make the decision hang on noise."""
_FULL: Final = 10
"""Host memory is full when less than one part in so many is free; as FastServe's bound, below
which no prompt is started."""


def offload_steps(*, blocks: int, ns_per_block: int, depth: int) -> int:
    """Plans between the decision to offload a request and the first that may use its blocks.

    Those under way still use the blocks, and as many are made until they are done; then the
    blocks are copied beside the steps that follow.

    Args:
        blocks: of the request.
        ns_per_block: time to copy one.
        depth: plans that wait beside the one that runs.
    """
    return 2 * depth + max(1, -(-blocks * ns_per_block // _STEP_NS))


def room_to_widen(*, free_blocks: int, running: int) -> bool:
    """Whether a request may start while copies of others lie in host memory.

    Args:
        free_blocks: those that would be left after its start.
        running: requests that run, without it.
    """
    return not running or free_blocks > running


def host_is_full(*, free_blocks: int, total_blocks: int, typical_blocks: int) -> bool:
    """Whether so little host memory is left that nobody new should wait for memory.

    Args:
        free_blocks: of host memory.
        total_blocks: of host memory.
        typical_blocks: of a running request on average: what the next copy is likely to take.
    """
    short = free_blocks * _FULL < total_blocks or free_blocks < typical_blocks
    return short and free_blocks < total_blocks
