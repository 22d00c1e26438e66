"""Sending running requests back to wait: what becomes of the blocks they had.

A victim's blocks are recomputed later, or copied to host memory and back: as the policy says, and
`hybrid` is whichever brings this request back sooner, now. Without room for a copy it is
recomputed. It must not know who is evicted for whom, nor why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_core.spec.choices import Preemption
from goodput_engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.policy import SchedulerView, SchedulingPolicy
    from goodput_engine.scheduler.request import ScheduledRequest
    from goodput_engine.scheduler.stats import SchedulerStats

__all__ = ["Evictor"]


class Evictor:
    """Evicts the requests of one scheduler.

    Args:
        policy: says what becomes of a victim's blocks.
        floor: its requests.
        stats: its counters, and how long a prompt's token takes.
        view: what the policy may look at.
    """

    __slots__ = ("_floor", "_policy", "_stats", "_view")

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        floor: Floor,
        stats: SchedulerStats,
        view: SchedulerView,
    ) -> None:
        self._policy = policy
        self._floor = floor
        self._stats = stats
        self._view = view

    def evict(self, victim: ScheduledRequest) -> int:
        """Send a running request back to wait; returns the blocks that commits will free."""
        floor, stats = self._floor, self._stats
        copied = self.blocks_to_copy(victim)
        floor.withdraw(victim, keep_tokens=True)
        victim.ran_ns += self._view.now_ns - victim.admitted_ns
        victim.fruitless = victim.total_tokens == victim.admitted_tokens
        victim.state = RequestState.PREEMPTING
        victim.preemptions += 1
        stats.preemptions += 1
        if copied:
            victim.host_blocks = floor.host.allocate(copied)
            stats.swapped_tokens += victim.base_planned
        else:
            stats.recomputed_tokens += victim.base_planned
        record = floor.record_of(victim.last_plan)
        if record is not None:
            record.releases.append(victim)
        else:
            floor.vacate(victim)
            if not copied:
                return 0
        return floor.kv.exclusive(victim.blocks)

    def blocks_to_copy(self, victim: ScheduledRequest) -> int:
        """Blocks that would be copied to host memory; 0: it would be recomputed."""
        kv, host = self._floor.kv, self._floor.host
        blocks = kv.blocks_for(victim.computed_tokens)
        if not 0 < blocks <= host.free_blocks:
            return 0
        mode = self._policy.evict_mode(victim, self._view)
        if mode is Preemption.SWAP:
            return blocks
        if mode is Preemption.RECOMPUTE:
            return 0
        # Both wait for those who wait already; a copy also for the copies before it.
        ahead = self._floor.blocks_to_copy
        swap_ns = (ahead + 2 * blocks) * host.ns_per_block
        recompute_ns = victim.computed_tokens * self._stats.ns_per_prompt_token
        return blocks if swap_ns < recompute_ns else 0
