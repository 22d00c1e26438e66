"""The first rung of the ladder in `pressure`: who yields leaves before the blocks run out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goodput_engine.scheduler.pressure import offload_steps

if TYPE_CHECKING:
    from goodput_engine.scheduler.evictor import Evictor
    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.policy import SchedulerView, SchedulingPolicy

__all__ = ["Offloading"]


class Offloading:
    """Offloads the requests of one scheduler ahead of time.

    Args:
        policy: says who yields.
        floor: its requests.
        evictor: sends them to host memory.
        view: what the policy may look at.
        depth: plans that wait beside the one that runs.
    """

    __slots__ = ("_depth", "_evictor", "_floor", "_policy", "_view")

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        floor: Floor,
        evictor: Evictor,
        view: SchedulerView,
        depth: int,
    ) -> None:
        self._policy = policy
        self._floor = floor
        self._evictor = evictor
        self._view = view
        self._depth = depth

    def look_ahead(self) -> None:
        """Offload who would yield for want of blocks, if now is the time to begin."""
        floor, kv, cohort = self._floor, self._floor.kv, self._floor.cohort
        if kv.free_blocks >= self.margin():
            return
        due = cohort.blocks_due(self._longest() + 1)
        left = kv.free_blocks + floor.promised_blocks()
        if len(due) <= left:
            return
        victim = self._policy.victim(due[left], self._view)
        if victim is None or not victim.displaceable:
            return
        blocks = self._evictor.blocks_to_copy(victim)
        if blocks and len(cohort.blocks_due(self._steps(blocks) + 1)) > left:
            self._evictor.evict(victim)

    def margin(self) -> int:
        """Free blocks with which nobody has to be offloaded yet, for sure."""
        if not self._floor.host.free_blocks:
            return 0
        return self._floor.cohort.most_blocks_due(self._longest() + 1)

    def _longest(self) -> int:
        """No copy takes more steps than one of all that there is room for."""
        return self._steps(min(self._floor.host.free_blocks, self._floor.kv.total_blocks))

    def _steps(self, blocks: int) -> int:
        return offload_steps(
            blocks=blocks, ns_per_block=self._floor.host.ns_per_block, depth=self._depth
        )
