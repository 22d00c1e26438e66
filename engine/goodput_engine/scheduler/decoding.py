"""The decodes of one step: who takes part, who gets the last blocks, who yields for them."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from goodput_engine.scheduler.request import RequestState

if TYPE_CHECKING:
    from collections.abc import Callable

    from goodput_engine.scheduler.draft import Draft
    from goodput_engine.scheduler.evictor import Evictor
    from goodput_engine.scheduler.floor import Floor
    from goodput_engine.scheduler.offloading import Offloading
    from goodput_engine.scheduler.policy import SchedulerView, SchedulingPolicy
    from goodput_engine.scheduler.request import ScheduledRequest

__all__ = ["Decoding"]


class Decoding:
    """Drafts the decodes of one scheduler's plans.

    Args:
        policy: its preferences.
        floor: its requests.
        evictor: makes room.
        offloading: makes it ahead of time.
        view: what the policy may look at.
    """

    __slots__ = ("_evictor", "_floor", "_offloading", "_policy", "_view")

    def __init__(
        self,
        *,
        policy: SchedulingPolicy,
        floor: Floor,
        evictor: Evictor,
        offloading: Offloading,
        view: SchedulerView,
    ) -> None:
        self._policy = policy
        self._floor = floor
        self._evictor = evictor
        self._offloading = offloading
        self._view = view

    def draft(self, draft: Draft, only: Callable[[ScheduledRequest], bool] | None) -> None:
        """Let everybody decode whom the budget and the blocks allow.

        Args:
            draft: the plan so far.
            only: who may take part; None: everybody.
        """
        floor, cohort = self._floor, self._floor.cohort
        self._offloading.look_ahead()
        if only is not None:
            for request in [r for r in cohort.members.values() if not only(r)]:
                self._hold(request)
        excess = len(cohort.members) - draft.left
        if excess > 0:
            for request in heapq.nlargest(excess, cohort.members.values(), key=self._rank):
                self._hold(request)
        elif floor.ready and excess < 0:
            self._join_ready(draft, -excess, only)
        self._give_slots(draft)
        draft.decodes = len(cohort.members)
        draft.left -= draft.decodes

    def _give_slots(self, draft: Draft) -> None:
        """Each member gets a slot for its next token, or sits out."""
        floor, cohort = self._floor, self._floor.cohort
        epoch = cohort.epoch + 1
        due = cohort.take_due(epoch)
        if len(due) > floor.kv.free_blocks:
            due.sort(key=self._rank)
        for request in due:
            if request.cohort is None:
                continue  # evicted for one before it
            if cohort.needs_block(request) and not self._claim_block(request, draft):
                if request.cohort is not None:
                    self._hold(request)
                continue
            if request.last_epoch == epoch:
                draft.last.append(request)
            else:
                cohort.file(request)

    def _join_ready(
        self, draft: Draft, room: int, only: Callable[[ScheduledRequest], bool] | None
    ) -> None:
        floor = self._floor
        ready = list(floor.ready.values())
        if only is not None:
            ready = [r for r in ready if only(r)]
        if len(ready) > min(room, floor.kv.free_blocks):
            ready = heapq.nsmallest(room, ready, key=self._rank)
        block_size = floor.kv.block_size
        for request in ready:
            if request.state is not RequestState.READY:
                continue  # evicted for one before it
            full = request.base_planned == len(request.blocks) * block_size
            if full and not self._claim_block(request, draft):
                continue
            del floor.ready[request.rid]
            floor.cohort.join(request)

    def _hold(self, request: ScheduledRequest) -> None:
        """A member sits out with its blocks until there is room again."""
        self._floor.leave_cohort(request)
        self._floor.get_ready(request)

    def _claim_block(self, request: ScheduledRequest, draft: Draft) -> bool:
        """Append a block to a running request, evicting others for it if the policy says so."""
        floor = self._floor
        while (block := floor.kv.allocate_one()) is None:
            draft.starved = True
            if draft.promised is None:
                draft.promised = floor.promised_blocks()
            if draft.promised > 0:  # a commit to come frees one
                draft.promised -= 1
                return False
            victim = self._policy.victim(request, self._view)
            if victim is None:
                return False
            draft.promised += self._evictor.evict(victim)
            draft.displaced = True
            if victim is request:
                return False
        request.blocks.append(block)
        draft.new_blocks.append((request.rid, block))
        return True

    def _rank(self, request: ScheduledRequest) -> tuple[int, ...]:
        return self._policy.rank(request, self._view)
